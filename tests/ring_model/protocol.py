"""The ring's protocol as programs of five actors: who waits for what, copied from the engine line by line.

Segments of some buckets, whose windows end in different steps, with stamps for contents; the windows are those of the
engine's own clock. A `Stream` collects its operations as a CUDA stream does: `wait_stream`, `wait_event` and
`wait_word` hold back what is queued from then on. The copies go to two streams in turn, each behind all that is queued
on the other: one actor. `Setup.without` leaves out orders, which the checker must then miss.
The worker's process is one actor: a slot is read and passed over, then `done` rises; how it finds the next one is
`scan.py`'s matter.

The selected part of a bucket's weights has a cell of its own. `fused_step` writes it in every step; where an upload may
be on its way meanwhile that write is worth nothing, and `write_masters` repeats it after the upload, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tests.ring_model.actors import items
from tests.ring_model.exchanges import Exchanges
from tests.ring_model.explore import COPIES, LOST, Op, Program, Stamp
from tests.ring_model.setup import ORDERS, Setup
from zenflow.window import StepPlan, WindowClock

PREDICTED = 1  # in the stamp of what shows a prediction from a window's masters


class Sent(NamedTuple):
    """`uploading.Sent`; stamp: of what its shadow holds, a prediction being another thing than the window's masters."""

    bucket: int
    window: int
    seq: int
    due: int
    turn: int
    stamp: Stamp


def build(setup: Setup) -> Program:
    """The programs of all actors for one run: training, saves, selections, and a flush at the end."""
    return _Run(setup).build()


class _Run(Exchanges):
    """Goes through a run as the trainer's thread does, and notes what each actor has to do."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.clock = WindowClock(
            update_interval=setup.interval, select_interval=1 << 30, full_warm_up_rounds=0, visible_after=setup.delay
        )
        self.clock.cohorts = tuple(setup.cohorts)
        self.logged = 0
        self.pending: list[Sent] = []
        self.queued: set[Sent] = set()
        self.poisoned: set[int] = set()  # buckets that are being tried
        self.passed: set[int] = set()
        self.uploaded: dict[int, tuple[int, int]] = {}
        self.copied: tuple[int, int] = (COPIES, 0)
        self.last_seq = {(segment, turn): 0 for segment in range(setup.segments) for turn in (0, 1)}
        self.leaving = False  # gradients are on their way
        self.visible: list[Stamp] = [0] * setup.segments  # what the deferred weights show: a window's result
        self.owned = 0  # the step whose selected masters the weights show

    def build(self) -> Program:
        setup = self.setup
        for self.step in range(1, setup.windows * setup.interval + 1):
            self._backward()
            if self.step in setup.dropping:
                self._drop_gradients()
                self._backward()
            self._step()
            if self.step in setup.saving:
                self._save()
            if self.step in setup.flushing:
                self._flush()
        self._flush()
        streams = [self.compute.ops, self.copies.ops, self.uploads.ops]
        return Program([self.host, *streams, self.worker], self.cells, self.first, frozenset(self.counters), self.done)

    def _due(self) -> list[Sent]:
        """`Uploads.due`."""
        return [sent for sent in self.pending if sent.due <= self.step]

    def _backward(self) -> None:
        """Phase 1, and phase 5 under it."""
        weights = self._all("weights", self.visible) | self._each("selected weights", self.owned)
        if self.setup.zeroed:
            if self.leaving and self._has("e: gradients are copied before they are zeroed"):
                self.compute.wait_stream(self.copies)
            self.leaving = False
            self.compute.push(("zero", self.step), "zenflow.optimizer:ZenFlow.zero_grad", writes=self._gradients(0))
        self.compute.push(("forward", self.step), "", reads=weights)
        for bucket in self._backward_order():
            used = {
                self._cell("weights", bucket): self.visible[self._segment(bucket)],
                self._cell("selected weights", bucket): self.owned,
            }
            self.compute.push(("backward", self.step, bucket), "", used, {self._gradient(bucket): self.step})
            for sent in self._due() if self.setup.upload == "backward" else ():
                if sent.bucket == bucket:
                    self._take_over(sent)

    def _drop_gradients(self) -> None:
        """`visible.drop_gradients`: weights that went into transit arrive first."""
        if self.setup.upload == "backward":
            self._show(self._due())

    def _take_over(self, sent: Sent) -> None:
        bucket = sent.bucket
        if self.setup.checked and bucket not in self.passed:
            self.poisoned.add(bucket)
            where = "zenflow.upload_check:UploadCheck.poison"
            places = [self._cell(name, bucket) for name in ("weights", "selected weights")]
            self.compute.push(("poison", self.step, bucket), where, writes=dict.fromkeys(places, LOST))
            return
        if not self.setup.stream_words:
            return  # only where the worker happens to have finished: the upload in step() covers less time
        if self._has("a: the last gradient before the upload"):
            self.uploads.wait_event(self.compute.event())
        self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        bucket, window, seq, _, turn, stamp = sent
        if self._has("a: done before the upload"):
            if self.setup.stream_words:
                self.uploads.wait_word(self.done, seq)
            else:
                self._wait_done(seq)
        self.uploads.push(
            ("upload", bucket, window),
            "zenflow.uploading:Uploader.copy",
            reads={self._shadow(turn, bucket): stamp},
            writes={self._cell("weights", bucket): stamp, self._cell("selected weights", bucket): LOST},
        )
        self.uploaded[bucket] = self.uploads.event()
        self.queued.add(sent)

    def _step(self) -> None:
        """Phase 2, `step.run_step`."""
        self._host(("check",), "zenflow.client:WorkerClient.check", asks="check")
        self.clock.state.selection_due |= self.step in self.setup.selecting
        plan = self.clock.begin_step()
        self.logged = self.clock.state.window
        if self._has("d: the copy before the next fold"):
            self.compute.wait_event(self.copied)
        grads = self._gradients(self.step)
        log = {self._cell("device log"): self.step}
        self.compute.push(("close", self.step), "zenflow.step:_reduce", grads, log)
        if self.poisoned:
            self._synchronize(self.compute, "zenflow.upload_check:UploadCheck.end_backward")
            self.passed |= self.poisoned
        if self.setup.on_host:
            self._send_gradients(plan.position % self.setup.interval)
        moving = {sent.bucket for sent in self._due()}
        shown = {self._cell("selected weights", bucket): self.step for bucket in self.buckets if bucket not in moving}
        before, folded = self._fold()
        where = "zenflow_kernels.fused_step:fused_step"
        self.compute.push(("update", self.step), where, grads | before, folded | shown)
        self.owned = self.step
        self._end_window(plan)

    def _fold(self) -> tuple[dict, dict]:
        """What the accumulators hold before and after this step: their windows' first steps, and how many steps."""
        before, folded = {}, {}
        for bucket in self.buckets if not self.setup.on_host else ():
            cell, length = self._cell("accumulator", bucket), self._length(bucket)
            if length:
                before[cell] = (self.step - length, length)
            folded[cell] = (self.step - length, length + 1)
        return before, folded

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

    def _end_window(self, plan: StepPlan) -> None:
        """`window_end.end_windows`."""
        selects = plan.selects
        if selects:
            self._synchronize(self.compute, "zenflow.pipeline:Pipeline.is_finite")
        ends, prompt = self.clock.cohorts if selects else plan.ends, plan.synchronous or selects
        due = self._due()
        if self._has("cohorts: a result arrives before the next one takes its place"):
            replaced = [sent for sent in self.pending if self.setup.cohorts[self._segment(sent.bucket)] in ends]
            due = [sent for sent in self.pending if sent in due or sent in replaced]
        self._queue_rest(due)
        lengths = {cohort: self.clock.length(cohort) + 1 for cohort in ends}
        sent = self._send_windows(lengths, plan.position + 1, prompt)
        self._land(due)
        self.pending += sent
        if prompt:
            self._queue_rest(sent)
            self._land(sent)
        if due or prompt:
            self._write_masters()
        if selects:
            self._select()
            self.clock.selection_ran()
        self.clock.finish_step(ends)

    def _queue_rest(self, wanted: Sequence[Sent]) -> None:
        left = [sent for sent in wanted if sent not in self.queued]
        if left and self._has("a: backward before the uploads in step()"):
            self.uploads.wait_stream(self.compute)
        for sent in left:
            self._upload(sent)

    def _land(self, queued: Sequence[Sent]) -> None:
        if not queued:
            return
        if self._has("b: uploads before the selected masters"):
            self.compute.wait_stream(self.uploads)
        for sent in queued:
            self.visible[self._segment(sent.bucket)] = sent.stamp
        self.pending = [sent for sent in self.pending if sent not in queued]
        self.queued, self.poisoned = set(), set()

    def _write_masters(self) -> None:
        where = "zenflow.visible:write_selected"
        self.compute.push(("masters", self.step), where, writes=self._each("selected weights", self.owned))

    def _show(self, wanted: Sequence[Sent]) -> None:
        if wanted:
            self._queue_rest(wanted)
            self._land(wanted)
            self._write_masters()

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
                {self._lane(self._turn(bucket), 0, bucket): self.logged},
            )

    def _raise_ready(self, sent: Sent) -> None:
        ready = self._cell("ready", self._turn(sent.bucket), sent.bucket, counter=True)
        self.copies.push(("ready", sent.seq), "zenflow.sending:Sender._raise_ready", writes={ready: sent.seq})

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
            reads[self._lane(turn, 0, bucket)] = window
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

    # What reads results

    def _save(self) -> None:
        """`checkpoint.save`, after a step: the worker's state and shadow, the running window's gradients, weights."""
        self._wait_done(self.sent)
        if self._has("e: copies are finished before a state is read"):
            self._synchronize(self.copies, "zenflow.sending:Sender.finish_copies")
        turns = {bucket: self._turn(bucket) ^ 1 for bucket in self.buckets}  # of the last windows that were sent
        reads = {self._shadow(turn, bucket): self.shown[turn, bucket] for bucket, turn in turns.items()}
        reads |= self._all("master", self.latest)
        for bucket in self.buckets if self.setup.on_host else ():
            reads |= self._lanes(bucket, self._length(bucket), self.clock.state.position)
        self._host(("save", self.step), "zenflow.optimizer:ZenFlow.state_dict", reads=items(reads))
        self._look("zenflow.optimizer:ZenFlow.state_dict")

    def _flush(self) -> None:
        """`window_end.flush_pipeline`, and a user who looks at the weights after it."""
        self._host(("check",), "zenflow.client:WorkerClient.check", asks="check")
        self._show(self.pending)
        running = {cohort: self.clock.length(cohort) for cohort in self.clock.running}
        self.pending = self._send_windows(running, self.clock.state.position, prompt=True)
        self.clock.restart()
        self._wait_done(self.sent)
        self._replace_predictions()
        self._show(self.pending)
        self._write_masters()
        assert (self.visible, self.owned) == (self.latest, self.step)
        self._look("zenflow.window_end:flush_pipeline")

    def _replace_predictions(self) -> None:
        """`predictions.replace_predictions`: masters of segments that have no result on their way."""
        where, waiting = "zenflow.predictions:replace_predictions", {sent.bucket for sent in self.pending}
        for bucket in self.buckets:
            latest = self.latest[self._segment(bucket)]
            if bucket in waiting or self.visible[self._segment(bucket)] != (latest, PREDICTED):
                continue
            turn = self._turn(bucket) ^ 1
            if self._has("predictions: the last upload before masters take its shadow"):
                self._host(("arrived", self.step, 0), where, after=(self.uploaded[bucket],))
            read, written = ((self._cell("master", bucket), latest),), ((self._shadow(turn, bucket), latest),)
            self._host(("rewrite", self.step, bucket), where, reads=read, writes=written)
            self.shown[turn, bucket] = latest
            self.pending.append(Sent(bucket, 0, self.sent, self.step, turn, latest))

    def _look(self, where: str) -> None:
        """All weights are what they should be now, for a host that has waited for the compute stream.

        And so is the shadow that keeps what is visible of predictions: `predictions.visible_shadow`.
        """
        self._synchronize(self.compute, where)
        reads = self._all("weights", self.visible) | self._each("selected weights", self.owned)
        waiting = {sent.bucket for sent in self.pending}
        for bucket in self.buckets if self.setup.predicts else ():
            turn = self._turn(bucket) ^ (bucket not in waiting)
            reads[self._shadow(turn, bucket)] = self.visible[self._segment(bucket)]
        self._host(("look", self.step), where, reads=items(reads))


def places(program: Program) -> Iterator[str]:
    """Every function of the engine that some operation stands for."""
    return iter({op.where for ops in program.ops for op in ops if op.where} | set(ORDERS.values()))
