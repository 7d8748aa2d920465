"""Geometry, records and turns of the ring, for drawn shapes and orders of events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from zenflow.geometry import ALIGN_BYTES, ITEM_BYTES, Segment, lay_out
from zenflow.header import Header
from zenflow.ring import SegmentMemory, TornSlotError
from zenflow.ring_layout import LOG_END, LOG_STEP, Layout

DTYPES = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def segments(draw: st.DrawFn, most: int = 40, buckets: int = 200) -> Segment:
    steps = draw(st.integers(1, 5))
    shapes = st.tuples(st.integers(1, most), st.integers(1, most), st.integers(0, 2))
    return lay_out(
        draw(st.integers(0, 3)),
        draw(st.lists(shapes, min_size=1, max_size=6)),
        channel_dim=draw(st.sampled_from(["column", "row"])),
        weight_dtype=draw(DTYPES),
        ring_dtype=draw(DTYPES),
        max_steps=steps,
        n_groups=3,
        bucket_bytes=draw(st.integers(most * most * 24 // buckets, 4 * most * most)),
        keeps_steps=draw(st.booleans()),
        predicted=draw(st.booleans()),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(segment=segments())
def test_every_row_lies_in_one_piece_of_one_bucket(segment: Segment) -> None:
    owner = np.zeros(segment.numel, dtype=int)
    rows = [np.zeros(matrix.rows, dtype=int) for matrix in segment.matrices]
    pieces = [piece for bucket in segment.buckets for piece in bucket.pieces]
    for piece in pieces:
        matrix = segment.matrices[piece.matrix]
        assert piece.offset == matrix.offset + piece.row_start * matrix.cols
        assert piece.last == (piece.row_stop == matrix.rows)
        rows[piece.matrix][piece.row_start : piece.row_stop] += 1
        owner[piece.offset : piece.offset + (piece.row_stop - piece.row_start) * matrix.cols] += 1
    assert all((count == 1).all() for count in rows) and owner.max() == 1
    assert pieces == sorted(pieces, key=lambda piece: piece.offset), "they travel in the order in which they lie"
    covered = np.zeros(segment.numel, dtype=int)
    for number, bucket in enumerate(segment.buckets):
        assert bucket.index == number
        covered[bucket.start : bucket.stop] += 1
    assert covered.max() == 1 and (covered >= owner).all()
    item = ITEM_BYTES[segment.weight_dtype]
    assert all(matrix.offset * item % ALIGN_BYTES == 0 for matrix in segment.matrices)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(segment=segments())
def test_channels_and_lanes_have_places_of_their_own(segment: Segment) -> None:
    steps = [range(matrix.step_offset, matrix.step_offset + matrix.channels) for matrix in segment.matrices]
    assert sorted(place for places in steps for place in places) == list(range(segment.n_channels))
    lanes = [segment.lane(turn, step) for turn in (0, 1) for step in range(segment.max_steps)]
    assert sorted(set(lanes)) == list(range(segment.lanes))
    assert len(set(lanes)) == (len(lanes) if segment.keeps_steps else segment.shadows if segment.in_place else 1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(segment=segments())
def test_fields_of_a_record_do_not_overlap(segment: Segment) -> None:
    layout = Layout.of(segment)
    for record in (layout.window, layout.slot):
        spans = sorted((offset, offset + dtype.itemsize) for dtype, offset in record.fields.values())
        assert all(stop <= start for (_, stop), (start, _) in zip(spans, spans[1:], strict=False))
        assert spans[-1][1] <= record.itemsize and record.itemsize % 64 == 0
        assert all(offset % dtype.base.itemsize == 0 for dtype, offset in record.fields.values())
    covered = [name for name, (_, offset) in layout.window.fields.items() if offset < layout.host_bytes]
    assert set(layout.window.names) - set(covered) == {"crc", "device_log", "sent"}


class Turns(RuleBasedStateMachine):
    """A trainer that may run ahead and a worker that may lag, in one process, and a flipped bit now and then."""

    @initialize(segment=segments(most=12, buckets=8))
    def build(self, segment: Segment) -> None:
        self.segment, self.memory, self.header = segment, SegmentMemory.create(segment), Header.create()
        self.memory.header = self.header
        self.buckets = len(segment.buckets)
        self.written: list[dict[str, Any]] = []  # windows
        self.begun = 0  # slots of the last window that the trainer has written
        self.read = 0  # slots that the worker has finished

    def teardown(self) -> None:
        if hasattr(self, "memory"):
            self.memory.close()
            self.header.close()

    @property
    def sent(self) -> int:
        return max(0, self.buckets * (len(self.written) - 1) + self.begun)

    def write(self, bucket: int, seq: int, window: dict[str, Any]) -> int:
        words = len(window["hyper"]), window["hyper"], window["present"]
        return self.memory.write_slot(bucket, seq, window["number"], *words, first=window["first"])

    def is_free(self) -> bool:
        """Whether the turn of the next window may be written: the window before the last has been read."""
        return self.read >= self.buckets * (len(self.written) - 1)

    @precondition(lambda self: self.begun in (0, self.buckets))
    @rule(data=st.data())
    def begin_window(self, data: st.DataObject) -> None:
        steps = data.draw(st.integers(1, self.segment.max_steps))
        numbers = np.random.default_rng(data.draw(st.integers(0, 99)))
        window = {
            "number": len(self.written) + data.draw(st.integers(1, 3)) * 100,
            "hyper": numbers.random((steps, 3, 5)),
            "present": numbers.random((steps, len(self.segment.matrices))) < 0.5,
            "first": data.draw(st.integers(0, self.segment.max_steps - 1)),
            "log": numbers.integers(0, 2, (self.segment.max_steps, LOG_STEP)).astype(np.int32),
        }
        first = self.buckets * len(self.written) + 1
        if not self.is_free():
            with pytest.raises(AssertionError, match="is still in use"):
                self.write(0, first, window)
            return
        turn = self.write(0, first, window)
        assert turn == len(self.written) % 2
        log = self.memory.slot_record(turn, 0).device_log
        log[:LOG_END].view(np.uint64)[0] = log[-LOG_END:].view(np.uint64)[0] = window["number"]
        log[LOG_END:-LOG_END] = window["log"].ravel()
        self.memory.publish(0, turn, first)
        self.written.append(window)
        self.begun = 1

    @precondition(lambda self: 0 < self.begun < self.buckets)
    @rule()
    def send_bucket(self) -> None:
        turn = self.write(self.begun, self.sent + 1, self.written[-1])
        assert turn == (len(self.written) - 1) % 2
        self.memory.publish(self.begun, turn, self.sent + 1)
        self.begun += 1

    @precondition(lambda self: 0 < self.begun < self.buckets)
    @rule(skipped=st.integers(-2, 2).filter(bool))
    def send_out_of_order(self, skipped: int) -> None:
        with pytest.raises(AssertionError, match="before bucket|out of order"):
            self.write(self.begun, self.sent + 1 + skipped, self.written[-1])

    @precondition(lambda self: self.read < self.sent)
    @rule(data=st.data())
    def read_slot(self, data: st.DataObject) -> None:
        number, bucket = divmod(self.read, self.buckets)
        turn, window, seq = number % 2, self.written[number], self.read + 1
        if data.draw(st.booleans(), "a bit flips"):
            self.flip_a_bit(turn, bucket, seq, data)
        slot = self.memory.read_slot(bucket, seq, turn)
        np.testing.assert_array_equal(slot.hyper, window["hyper"])
        places = [(window["first"] + step) % self.segment.max_steps for step in range(len(window["hyper"]))]
        log = window["log"][places]
        assert slot.places.tolist() == places
        np.testing.assert_array_equal(slot.counted, window["present"] & (log[:, :1] != 0))
        np.testing.assert_array_equal(slot.clip.view(np.int32), log[:, 1])
        np.testing.assert_array_equal(slot.inv_scale.view(np.int32), log[:, 2])
        self.read += 1
        self.header.finish(self.read, 0)

    def flip_a_bit(self, turn: int, bucket: int, seq: int, data: st.DataObject) -> None:
        """In what the host has written, its checksum, the stamps at both ends of the log, or `ready`: always found."""
        record = self.memory.windows[turn : turn + 1].view(np.uint8)
        crc, log = (self.memory.layout.window.fields[name] for name in ("crc", "device_log"))
        stamps = [*range(log[1], log[1] + 8), *range(log[1] + log[0].itemsize - 8, log[1] + log[0].itemsize)]
        places = [*range(crc[1] + 8), *stamps]
        ready = self.memory.slot_record(turn, bucket).ready.view(np.uint8)
        place, bit = data.draw(st.integers(0, len(places) + 7)), np.uint8(1 << data.draw(st.integers(0, 7)))
        memory, index = (record, places[place]) if place < len(places) else (ready, place - len(places))
        memory[index] ^= bit
        with pytest.raises(TornSlotError, match=f"slot {seq} .*bucket {bucket}.* is torn or out of order"):
            self.memory.read_slot(bucket, seq, turn)
        memory[index] ^= bit

    @invariant()
    def never_more_than_two_windows_ahead(self) -> None:
        if hasattr(self, "memory"):
            assert self.sent - self.read <= 2 * self.buckets


TestTurns = Turns.TestCase
TestTurns.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
