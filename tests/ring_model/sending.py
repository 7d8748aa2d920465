"""Phases 3 and 4 in the ring's model: windows and gradients go to the worker, and what it does with a slot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.ring_model.actors import items
from tests.ring_model.explore import COPIES, GRADIENT, PREDICTED, Op, Slot, Stamp
from tests.ring_model.landing import Landing, Sent
from tests.ring_model.setup import Setup
from zenflow.window import WindowClock


class Sending(Landing):
    """`sending.Sender`. sent: slots so far; latest: the number of the last window that was sent, by segment; uses: how
    many were; leaving: gradients are on their way; logged: the window in the device's log.

    shown: what the shadows hold, by turn and bucket, once all that was sent has been processed. slots: as they were
    sent, for who stands in for a dead worker.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.clock = WindowClock(
            update_interval=setup.interval, select_interval=1 << 30, full_warm_up_rounds=0, visible_after=setup.delay
        )
        self.clock.cohorts = tuple(setup.cohorts)
        self.logged = self.sent = 0
        self.latest, self.uses = [0] * setup.segments, [0] * setup.segments
        self.shown: dict[tuple[int, int], Stamp] = {(turn, bucket): 0 for turn in (0, 1) for bucket in self.buckets}
        self.copied: tuple[int, int] = (COPIES, 0)
        self.last_seq = {(segment, turn): 0 for segment in range(setup.segments) for turn in (0, 1)}
        self.leaving = False
        self.slots: list[Slot] = []

    def _length(self, bucket: int) -> int:
        return self.clock.length(self.setup.cohorts[self._segment(bucket)])

    def _send_gradients(self, place: int) -> None:
        if self._has("c: the fold before the copy"):
            self.copies.wait_stream(self.compute)
        self.leaving = True
        for bucket in reversed(self._backward_order()):
            self.copies.push(
                ("gradient", self.step, bucket),
                "zenflow.sending:Sender.send_gradients",
                {self._gradient(bucket): self.step},
                {self._lane(self._turn(bucket), place, bucket): self.step},
            )

    def _turn(self, bucket: int) -> int:
        return self.uses[self._segment(bucket)] % 2

    def _send_windows(self, lengths: Mapping[int, int], end: int, prompt: bool) -> list[Sent]:
        """Phase 3, and the worker's part of it."""
        ending = [segment for segment, cohort in enumerate(self.setup.cohorts) if cohort in lengths]
        if not ending:
            return []
        self._free_records(ending)
        if self._has("c: the fold before the copy"):
            self.copies.wait_stream(self.compute)
        sent: list[Sent] = []
        for segment in ending:
            sent += self._send_segment(segment, lengths[self.setup.cohorts[segment]], end, prompt)
        self.copied = self.copies.event()
        return sent

    def _free_records(self, ending: Sequence[int]) -> None:
        last = [self.last_seq[segment, self.uses[segment] % 2] for segment in ending]
        if self._has("e: a turn's last window is done before its records are written"):
            every = self._has("e: that of every segment whose windows end")
            self._wait_done(max(last) if every else min(last))

    def _send_segment(self, segment: int, steps: int, end: int, prompt: bool) -> list[Sent]:
        turn, window, sent = self.uses[segment] % 2, self.logged, []
        stamp = (window, PREDICTED) if self.setup.predicts and not prompt else window
        self.latest[segment] = window
        for bucket in self._members(segment):
            self.sent += 1
            sent.append(Sent(bucket, window, self.sent, self.step + self.setup.delay, turn, stamp))
            if len(sent) == 1:
                self._write_records(segment, turn)
            if bucket in self.uploaded and self._has("c: the upload before ready"):
                self.copies.wait_event(self.uploaded[bucket])
            if self._has("f: the payload before ready"):
                self._send_sum(bucket, steps)
                self._raise_ready(sent[-1])
            else:
                self._raise_ready(sent[-1])
                self._send_sum(bucket, steps)
            self._process(sent[-1], steps, end)
        self.uses[segment] += 1
        self.last_seq[segment, turn] = self.sent
        return sent

    def _write_records(self, segment: int, turn: int) -> None:
        window = self.logged
        record, log = (self._cell(name, turn, segment) for name in ("host record", "log record"))
        self._host(("records", window, segment), "zenflow.ring:SegmentMemory._write_window", writes=((record, window),))
        read = {self._cell("device log"): self.step}
        self.copies.push(("log", window, segment), "zenflow.sending:Sender._send_segment", read, {log: window})

    def _send_sum(self, bucket: int, steps: int) -> None:
        if not self.setup.on_host:
            self.copies.push(
                ("copy", self.logged, bucket),
                "zenflow.sending:Sender._send_sum",
                {self._cell("accumulator", bucket): (self.step - steps + 1, steps)},
                {self._lane(self._turn(bucket), 0, bucket): (self.logged, GRADIENT)},
            )

    def _raise_ready(self, sent: Sent) -> None:
        ready = self._cell("ready", self._turn(sent.bucket), sent.bucket, counter=True)
        self.copies.push(("ready", sent.seq), "zenflow.sending:Sender._raise_ready", writes={ready: sent.seq})
        shadow, other = (self._shadow(turn, sent.bucket) for turn in (sent.turn, sent.turn ^ 1))
        put_back, kept = self.setup.in_place or self.setup.predicts, other if self.setup.predicts else None
        self.slots.append(Slot(sent.seq, len(self.host), ready, shadow if put_back else None, kept))

    def _process(self, sent: Sent, steps: int, end: int) -> None:
        """Phase 4: what the worker does with a slot. It takes only one whose `ready` is the number that is due."""
        bucket, window, seq, _, turn, stamp = sent
        segment = self._segment(bucket)
        ready = self._cell("ready", turn, bucket, counter=True)
        records = {self._cell(name, turn, segment): window for name in ("host record", "log record")}
        reads = {ready: seq} | records
        if self.setup.on_host:
            reads |= self._lanes(bucket, steps, end)
        else:
            reads[self._lane(turn, 0, bucket)] = (window, GRADIENT)
        self.shown[turn, bucket] = stamp
        written = {self._shadow(turn, bucket): stamp, self._cell("master", bucket): window}
        where, until = "zenflow.planning:SegmentWork.process", ((ready, seq),)
        work = Op(("process", seq), where, until=until, reads=items(reads), writes=items(written))
        finish = Op(("finish", seq), "zenflow.header:Header.finish", writes=((self.done, seq),))
        if self._has("f: the shadow before done"):
            self.worker += [work, finish]
        else:
            self.worker += [Op(("arrived", seq), "zenflow.worker:Worker._arrived", until=until), finish, work]

    def _lanes(self, bucket: int, steps: int, end: int) -> dict[int, int]:
        """The gradients of the latest `steps` steps, the last of them in the place before `end`."""
        turn, places = self._turn(bucket), [place % self.setup.interval for place in range(end - steps, end)]
        first = self.step - steps + 1
        return {self._lane(turn, place, bucket): step for step, place in enumerate(places, start=first)}
