"""Shared memory between the trainer and the CPU optimizer's process, and the contract of its slots.

All memory is anonymous (memfd), handed over by descriptor: nothing in /dev/shm, nothing to leak. A `Header`
(`header.py`) carries the counters of one worker. A `SegmentMemory` is the arenas of one segment: ring and slots, the
worker's state, the shadow, unless that is the ring (`Segment.in_place`).

Order: where windows of some segments end, the trainer sends all buckets of each of them, segment by segment. The n-th
slot sent has sequence number n, and its `ready` word becomes n last of all. The worker takes slots in that order and
then raises `done` to n. Which segment comes next is for the trainer to say: the one in which the due word becomes n.

Records come in two *turns*: a segment's k-th window (k = 0, 1, ...) takes turn k % 2, so that the trainer can write the
next window's while the worker reads. A turn holds one window record (what is the same for all buckets: sequence number
of the first, window, steps and the place of their first, scalars, presence, checksum; the device's log, a place for
each of the latest `max_steps` steps, taken in turn; and `sent`) and one slot record a bucket (`ready`, and the worker's
times). `sent` becomes the last slot's number behind that slot's `ready`: a lost slot is noticed by what comes after it.
A turn is free for the trainer, and so are its lanes of a ring that keeps steps, when `done` has reached the last number
that was sent with it; a bucket's part of the shadow, and of a ring with one lane, when it has reached the bucket's last
number. Two shadows go by turns too. A lane that is a shadow is free when, besides, its last result has been uploaded;
of two such lanes the one whose turn it is not keeps what is visible until then. `ring_layout.py` has the bytes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from zenflow import native
from zenflow.arena import Arena, require_memory
from zenflow.geometry import ITEM_BYTES, Segment
from zenflow.header import Header
from zenflow.ring_layout import LOG_END, LOG_STEP, Layout, bytes_of, sizes_of

EMPTY = np.empty(0, dtype=np.uint8)
EMPTY.setflags(write=False)


class TornSlotError(RuntimeError):
    """A slot whose parts do not belong together: torn, reordered or overwritten."""


@dataclass(frozen=True)
class Slot:
    """The verified content of a slot, the same for all buckets of its window; arrays cut to the window's steps."""

    hyper: np.ndarray  # float64 [n_steps, n_groups, 5]: HYPER_FIELDS
    counted: np.ndarray  # bool [n_steps, n_matrices]: the parameter was present and the step's gradient finite
    clip: np.ndarray  # float32 [n_steps]: the step's clipping factor
    inv_scale: np.ndarray  # float32 [n_steps]: 1 / its loss scale
    places: np.ndarray  # int64 [n_steps]: the step's among the lanes of a ring that keeps them
    predict: bool  # its result is shown late, as a prediction


@dataclass(frozen=True)
class SlotRecord:
    """Views of one slot's words: those of the device, then those of the worker.

    device_log: int32 `[log_words(max_steps)]`, the same memory for all buckets of a turn, written before the `ready` of
    the first; ready: int64 `[1]`; started_ns, finished_ns: uint64 `[1]`, CLOCK_MONOTONIC, valid once the slot is done.
    """

    device_log: np.ndarray
    ready: np.ndarray
    started_ns: np.ndarray
    finished_ns: np.ndarray


class SegmentMemory:
    """The arenas of one segment and the views of them that both processes use.

    ring: uint8 `[lanes * numel * itemsize of the ring]`; shadow: uint16 (bits of the weights) or float32, `[shadows *
    numel]`, the ring's own memory if `in_place`, None for fp32 weights whose shadow is the master; master, exp_avg,
    exp_avg_sq: float32 `[numel]`; channel_step: int32 `[n_channels]`, the AdamW updates a channel has received.
    windows: structured `[2]`, slots: structured `[2, n_buckets]`, see `Layout`, a row a turn. After `close()` all are
    empty.
    """

    def __init__(self, segment: Segment, arenas: Sequence[Arena]) -> None:
        self.segment = segment
        self.header: Header | None = None
        self.arenas = tuple(arenas)
        self.layout = Layout.of(segment)
        _, offsets = sizes_of(segment)
        front, state, numel, n_buckets = self.arenas[0], self.arenas[1], segment.numel, len(segment.buckets)
        self.windows = front.array(self.layout.window, 0, 2)
        self.slots = front.array(self.layout.slot, offsets["slots"], 2 * n_buckets).reshape(2, n_buckets)
        self.ring = front.array(np.uint8, offsets["ring"], segment.lanes * numel * ITEM_BYTES[segment.ring_dtype])
        self.master, self.exp_avg, self.exp_avg_sq = (
            state.array(np.float32, offsets[name], numel) for name in ("master", "exp_avg", "exp_avg_sq")
        )
        self.channel_step = state.array(np.int32, offsets["channel_step"], segment.n_channels)
        self.shadow: np.ndarray | None = None
        if segment.shadows:
            bits = np.float32 if segment.weight_dtype == "float32" else np.uint16
            own = None if segment.in_place else self.arenas[2].array(bits, 0, segment.shadows * numel)
            self.shadow = self.ring.view(bits) if own is None else own
        self._fields = {name: self.windows[name] for name in self.layout.window.names}
        self._host = front.array(np.uint8, 0, self.windows.nbytes).reshape(2, -1)[:, : self.layout.host_bytes]
        first = front.address + offsets["slots"]
        self._ready = [
            [first + self.layout.slot.itemsize * (turn * n_buckets + bucket) for bucket in range(n_buckets)]
            for turn in (0, 1)
        ]
        offset = self.layout.window.fields["sent"][1]
        self._sent = [front.address + self.layout.window.itemsize * turn + offset for turn in (0, 1)]
        self._uses = [0] * n_buckets  # windows that the trainer has written
        self._last_seq = [0, 0]  # of the window in each turn

    @classmethod
    def create(cls, segment: Segment, threads: int | None = None, cores: Sequence[int] = ()) -> SegmentMemory:
        """New, zeroed and populated memory; MemoryError with the bytes needed and available if the host lacks it.

        cores: logical CPUs whose NUMA node the pages shall come from, by default all that this process may use;
        threads: how many touch the pages, by default one on each of the cores.
        """
        threads = len(cores or os.sched_getaffinity(0)) if threads is None else threads
        sizes = sizes_of(segment)[0]
        require_memory(bytes_of(segment))
        arenas: list[Arena] = []
        try:
            for name, size in zip(("ring", "state", "shadow"), sizes, strict=False):
                arenas.append(Arena.create(f"zenflow-{name}", size))
                arenas[-1].populate(threads, cores)
        except BaseException:
            for arena in arenas:
                arena.close()
            raise
        return cls(segment, arenas)

    @classmethod
    def attach(cls, segment: Segment, fds: Sequence[int]) -> SegmentMemory:
        """The same memory in another process; takes over the descriptors."""
        return cls(segment, [Arena.attach(fd, size) for fd, size in zip(fds, sizes_of(segment)[0], strict=True)])

    def fds(self) -> list[int]:
        """The arenas' descriptors, in the order that `attach` takes."""
        return [arena.fd for arena in self.arenas]

    def shadow_of(self, turn: int) -> np.ndarray | None:
        """`[numel]` of `shadow`: where the worker writes the results of windows with the records of `turn`."""
        if self.shadow is None:
            return None
        first = turn % self.segment.shadows * self.segment.numel
        return self.shadow[first : first + self.segment.numel]

    def turn(self, bucket: int) -> int:
        """The records, 0 or 1, that the next `write_slot` of this bucket takes."""
        return self._uses[bucket] & 1

    def slot_record(self, turn: int, bucket: int) -> SlotRecord:
        """Views of a slot's words, to be made once and kept."""
        slot = self.slots[turn, bucket : bucket + 1]
        return SlotRecord(self._fields["device_log"][turn], slot["ready"], slot["started_ns"], slot["finished_ns"])

    def ready(self, bucket: int, turn: int) -> int:
        """The slot's `ready` word, read with acquire."""
        return native.load_acquire(self._ready[turn][bucket])

    def publish(self, bucket: int, turn: int, seq: int) -> None:
        """Set `ready` with release: for a trainer whose payload is written by the CPU."""
        native.store_release(self._ready[turn][bucket], seq)

    def sent_word(self, turn: int) -> np.ndarray:
        """A view of `sent`, int64 `[1]`, to be made once and kept."""
        return self._fields["sent"][turn : turn + 1]

    def sent(self, turn: int) -> int:
        """The last slot of the latest window of this turn that has been sent whole, read with acquire; 0: none."""
        return native.load_acquire(self._sent[turn])

    def end_window(self, turn: int, seq: int) -> None:
        """Set `sent` with release, behind the last `publish`: for a trainer whose payload is written by the CPU."""
        native.store_release(self._sent[turn], seq)

    def write_slot(
        self,
        bucket: int,
        seq: int,
        window: int,
        n_steps: int,
        hyper: ArrayLike,
        present: ArrayLike,
        urgent: bool = False,
        first: int = 0,
        predict: bool = False,
    ) -> int:
        """Write the host part of a slot: hyper `[n_steps, groups, 5]`, present `[n_steps, n_matrices]`. A group of the
        segment that hyper lacks came after these steps and was present in none.

        urgent: the trainer waits for this window's result. first: where its first step stands in the device's log, and
        among the lanes of a ring that keeps steps; after the last place comes the first. predict: see `Slot`.

        The turn that it took. Buckets come in order; the first writes it for all of them, the others only take part.
        AssertionError if the worker has not finished with that turn's last window, or a bucket is out of order.
        """
        turn = self.turn(bucket)
        if bucket == 0:
            self._write_window(turn, seq, window, n_steps, hyper, present, urgent, first, predict)
        else:
            assert self._uses[bucket] + 1 == self._uses[bucket - 1], f"bucket {bucket} before bucket {bucket - 1}"
            expected = self._last_seq[turn] - len(self._uses) + 1 + bucket
            assert seq == expected, f"bucket {bucket}: slot {seq} is out of order, expected {expected}"
        self._uses[bucket] += 1
        return turn

    def _write_window(
        self,
        turn: int,
        seq: int,
        window: int,
        n_steps: int,
        hyper: ArrayLike,
        present: ArrayLike,
        urgent: bool,
        first: int,
        predict: bool,
    ) -> None:
        assert self.header is not None, "attach the memory to a worker first"
        last = self._last_seq[turn]
        assert self.header.done >= last, f"segment {self.segment.index}: slot {last} is still in use"
        assert 1 <= n_steps <= self.segment.max_steps, f"{n_steps} steps in a window of {self.segment.max_steps}"
        fields = self._fields
        fields["seq"][turn], fields["window"][turn] = seq, window
        fields["segment"][turn], fields["n_steps"][turn] = self.segment.index, n_steps
        fields["urgent"][turn], fields["first"][turn], fields["predict"][turn] = urgent, first, predict
        known = np.asarray(hyper, dtype=np.float64)[:n_steps, : self.segment.n_groups]
        fields["hyper"][turn, :n_steps, : known.shape[1]] = known
        fields["present"][turn, :n_steps] = np.asarray(present)[:n_steps]
        fields["crc"][turn] = zlib.crc32(self._host[turn])
        self._last_seq[turn] = seq + len(self._uses) - 1

    def last_seq(self, turn: int) -> int:
        """The last number that the trainer has sent with this turn; 0 before the first."""
        return self._last_seq[turn]

    def window(self, turn: int) -> int:
        """The number of this turn's window."""
        return int(self._fields["window"][turn])

    def is_urgent(self, turn: int) -> bool:
        """Whether the trainer waits for the result of this turn's window."""
        return bool(self._fields["urgent"][turn])

    def read_slot(self, bucket: int, seq: int, turn: int) -> Slot:
        """The content of a slot whose `ready` is `seq`; TornSlotError, naming the slot, if its parts disagree."""
        record = {
            name: int(self._fields[name][turn]) for name in ("seq", "window", "segment", "n_steps", "first", "crc")
        }
        log, window, steps = self._fields["device_log"][turn], record["window"], record["n_steps"]
        first, last = (int(end.view(np.uint64)[0]) for end in (log[:LOG_END], log[-LOG_END:]))
        parts = {
            "seq": (record["seq"] + bucket, seq),
            "segment": (record["segment"], self.segment.index),
            "checksum": (record["crc"], zlib.crc32(self._host[turn])),
            "ready": (self.ready(bucket, turn), seq),
            "first window word": (first, window),
            "last window word": (last, window),
            "steps": (steps, min(max(steps, 1), self.segment.max_steps)),
            "first": (record["first"], record["first"] % self.segment.max_steps),
        }
        wrong = [f"{name} is {found}, expected {right}" for name, (found, right) in parts.items() if found != right]
        if wrong:
            place = f"segment {self.segment.index}, bucket {bucket}, window {window}"
            raise TornSlotError(f"slot {seq} ({place}) is torn or out of order: {', '.join(wrong)}")
        places = (record["first"] + np.arange(steps)) % self.segment.max_steps
        words = log[LOG_END:-LOG_END].reshape(-1, LOG_STEP)[places]
        return Slot(
            hyper=self._fields["hyper"][turn, :steps].copy(),
            counted=(self._fields["present"][turn, :steps] != 0) & (words[:, :1] != 0),
            clip=words[:, 1].copy().view(np.float32),
            inv_scale=words[:, 2].copy().view(np.float32),
            places=places,
            predict=bool(self._fields["predict"][turn]),
        )

    def close(self) -> None:
        """Release memory and descriptors, once. Live views read zeros from now on, if this process made the memory."""
        self.ring = self._host = EMPTY
        self.shadow = None if self.shadow is None else EMPTY.view(self.shadow.dtype)
        self.master = self.exp_avg = self.exp_avg_sq = EMPTY.view(np.float32)
        self.channel_step = EMPTY.view(np.int32)
        self.windows, self.slots = np.empty(0, dtype=self.layout.window), np.empty((2, 0), dtype=self.layout.slot)
        self._fields, self._ready, self._sent, self._uses = {}, [[], []], [], []
        for arena in self.arenas:
            arena.close()
