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

from collections.abc import Iterator

from tests.ring_model.actors import items
from tests.ring_model.exchanges import Exchanges
from tests.ring_model.explore import PREDICTED, Program
from tests.ring_model.landing import Sent
from tests.ring_model.setup import ORDERS, Setup
from zenflow.window import StepPlan


def build(setup: Setup) -> Program:
    """The programs of all actors for one run: training, saves, selections, and a flush at the end."""
    return _Run(setup).build()


class _Run(Exchanges):
    """Goes through a run as the trainer's thread does, and notes what each actor has to do."""

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
        ops, counters = [self.host, *streams, self.worker], frozenset(self.counters)
        return Program(ops, self.cells, self.first, counters, self.done, self.slots)

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

    def _save(self) -> None:
        """`checkpoint.save`, after a step: the worker's state and shadow, the running window's gradients, weights."""
        self._wait_done(self.sent)
        if self._has("e: copies are finished before a state is read"):
            self._synchronize(self.copies, "zenflow.sending:Sender.finish_copies")
        turns = {bucket: self._turn(bucket) ^ 1 for bucket in self.buckets}  # of the last windows that were sent
        reads = self._all("master", self.latest)
        if self.setup.predicts or not self.setup.in_place:
            reads |= {self._shadow(turn, bucket): self.shown[turn, bucket] for bucket, turn in turns.items()}
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
