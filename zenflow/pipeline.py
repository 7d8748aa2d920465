"""The pipeline, as phases of one `step()`.

Phase 1, backward: PyTorch leaves gradients in `.grad`; phase 5 goes on under the last pass before a result is due.
Phase 2, `step()`: norm and finite check over all parameters, then one pass over the gradient that updates the selected
channels and folds the others into the accumulator. Nothing here waits for the device, except the steps that select.
Phase 3, a window's end, for the cohorts for which it is one (`window.py`): each bucket's accumulator goes to its ring
slot on the copy stream, under the next step's compute; the slot's `ready` word follows it on the same stream
(`sending.py`).
Phase 4, the worker: one pass over memory a slot, in order; then `done`. Under `weight_prediction` a result that will be
shown late is written as a prediction (`cpu_pass.py`), of two shadows in turn to the one that does not hold what is
visible; masters, what is shown at once, and what `flush()` leaves are no predictions.
Phase 5, visible: the worker's shadow is copied straight into the weights on the upload stream, in this step (staleness
0) or, from backward on, in the one that comes `visible_after` steps later (staleness 1), the next window's last at
most; then the selected channels, which the shadow does not know, are written over it (`uploads.py`).

Orders that hold it together, per bucket: an upload waits for the last gradient and for `done`; `step()`'s own writes
come after it; a copy to the ring follows the fold, and the upload that empties the shadow which the worker will write
next; the next fold waits for that copy, because there is one accumulator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

import numpy as np
import torch
from torch import Tensor
from zenflow_kernels.close_step import close_step
from zenflow_kernels.control import StepControl
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.norm import partial_norms
from zenflow_kernels.table import Table

from zenflow.checks import group_hyper, usable_gradient
from zenflow.client import WorkerClient, WorkerError
from zenflow.config import ZenFlowConfig
from zenflow.cores import CorePlan
from zenflow.norm_order import NormOrder
from zenflow.outside import adopt_outside_changes
from zenflow.predictions import replace_predictions
from zenflow.scalars import StepScalars
from zenflow.selection import choose_channels, give_owners
from zenflow.sending import Sender, Windows, trace_worker
from zenflow.storage import ParamRecord, SegmentStorage, tell_autograd
from zenflow.telemetry import Telemetry
from zenflow.trace import Tracer, span
from zenflow.uploads import Sent, Uploads
from zenflow.window import StepPlan, WindowClock

logger = logging.getLogger("zenflow")


class Pipeline:
    """All state of one optimizer: records, tables, storages, the worker, and the clock that drives them."""

    def __init__(self, config: ZenFlowConfig, device: torch.device, telemetry: Telemetry | None = None) -> None:
        """telemetry: of the pipeline that this one replaces, if it does."""
        self.config = config
        self.device = device
        self.clock = WindowClock(
            update_interval=config.update_interval,
            select_interval=config.select_interval_steps,
            full_warm_up_rounds=config.full_warm_up_rounds,
            visible_after=config.visible_after_steps,
        )
        self.records: list[ParamRecord] = []
        self.tables: list[Table] = []
        self.storages: list[SegmentStorage] = []
        self.control = StepControl.create(0, config.update_interval, device)
        self.partials = torch.zeros(0, dtype=torch.float64, device=device)
        self.norm_order = NormOrder()
        self.scalars = StepScalars(device)
        self.client: WorkerClient | None = None
        self.cores: CorePlan | None = None
        self.unbound_threads: int | None = None  # torch's threads before the trainer was bound to its cores
        self.telemetry = Telemetry(device) if telemetry is None else telemetry
        self.tracer: Tracer | None = None
        self._gap = ExitStack()  # the span between two steps, while tracing
        self.sender = Sender(device, self.telemetry)
        self.uploads = Uploads(config, device, self.records, self.telemetry)
        self.loaded_hyper: dict[int, np.ndarray] = {}  # of results that came with a loaded state, see `pending_hyper`
        # One row a step of the longest running window; in the first, one tuple a group.
        self.hyper_log: list[list[tuple[float, ...]]] = []
        self.present_log: list[list[bool]] = []
        self.logged = 0  # the window number in the device's log
        self.stepping = False  # a step has begun to count and has not ended: afterwards, it was broken off
        self.highest_t = 0  # no channel's t is above it
        self.counters = dict.fromkeys(("windows", "selections"), 0)
        self.grads: list[Tensor | None] = []  # of the step that runs, one a record

    # Phase 2

    def step(self, groups: list[dict], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """One optimizer step over the gradients that are in `.grad` now."""
        began = time.perf_counter_ns()
        if self.client is not None:
            self.client.check()
        adopt_outside_changes(self)
        self.sender.check_gradients()
        self.grads = [usable_gradient(record) for record in self.records]
        hyper_row = [group_hyper(group) for group in groups]
        # From here on the step counts; what the caller could have got wrong has been refused.
        self.stepping = True
        self.uploads.ignore_gradients()
        plan = self.clock.begin_step()
        self._gap.close()
        self._begin_record(plan.step)
        with span(self.tracer, "GPU compute", "optimizer step", self._compute(), window=self.clock.state.window):
            self.highest_t += 1
            # A group that came in mid-window had no gradients in its earlier steps; its scalars there are never read.
            self.hyper_log = [row + hyper_row[len(row) :] for row in self.hyper_log] + [hyper_row]
            self.present_log.append([grad is not None for grad in self.grads])
            hyper, bias = self.scalars.factors(hyper_row, self.highest_t)
            self.sender.wait_for_copies()
            self._reduce(plan.position, grad_scale, found_inf)
            self.uploads.end_backward(self._is_finite)
            self._select_first(plan.step)
            if self.config.accumulate_on == "host":
                self.sender.send_gradients(self.records, self.grads, plan.position % self.config.update_interval)
            for table in self.tables:
                fused_step(table, self.control, hyper, bias, seed=self.config.rounding_seed, step=plan.step)
            tell_autograd(record for record in self.records if self.grads[record.index] is not None)
            staleness = self._end_window(plan)
        self.grads = []
        self.telemetry.end_step(staleness)
        self._trace_gap()
        self.prepare_backward()
        if self.tracer is not None:
            self.tracer.host_span("trainer", "step()", began, time.perf_counter_ns(), step=plan.step)
        self.stepping = False

    def prepare_backward(self) -> None:
        """Tell the uploads which backward passes come next."""
        self.uploads.prepare(self.clock.state.step + 1)

    def drop_gradients(self) -> None:
        """The gradients since the last step are thrown away: weights that went into transit with them arrive first."""
        if self.uploads.begun:
            adopt_outside_changes(self)
            self._show(self.uploads.due(self.clock.state.step + 1))
        if self.uploads.arrived:
            self.prepare_backward()

    def _begin_record(self, step: int) -> None:
        slots = sum(len(storage.segment.buckets) for storage in self.storages)
        waiting = 0 if self.client is None else max(0, self.sender.sent - self.client.done)
        busy = 0.0 if self.client is None else self.client.busy_seconds
        occupancy = min(1.0, waiting / max(1, slots))
        if self.tracer is not None:
            self.tracer.counter("ring", {"occupancy": occupancy})
        self.telemetry.begin_step(step, occupancy, busy)

    def _compute(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def _is_finite(self) -> bool:
        """Ask the device about this step; waits for it."""
        return bool(self.control.finite.item())

    def _reduce(self, position: int, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Norm, finite check and clip coefficient over all parameters, and the bookkeeping that follows from them."""
        first = 0
        for table in self.tables:
            table.bind(self.grads[table.first : table.first + len(table.entries)])
            partial_norms(table, self.partials[first : first + table.n_partials])
            first += table.n_partials
        self.logged = self.clock.state.window
        partials = self.norm_order.arrange(self.partials, self.tables, self.present_log[-1])
        close_step(
            self.control, partials, self.scalars.present(self.present_log[-1]),
            window=self.logged, position=position, max_grad_norm=self.config.max_grad_norm,
            grad_scale=grad_scale, found_inf=found_inf,
        )  # fmt: skip

    # Phases 3 to 5

    def _end_window(self, plan: StepPlan) -> int | None:
        """Send the windows that end and show the results that are due, which may both be none.

        The staleness of what became visible, None if nothing did.
        """
        candidates = self._candidates() if plan.selects else []
        # The one question that the host asks the device, and only at a window end at which a selection is due.
        selecting = bool(candidates) and self._is_finite()
        ends, prompt = self.clock.cohorts if selecting else plan.ends, plan.synchronous or selecting
        # What is due, and what is in the place of a result that the worker will write now.
        due = [sent for sent in self.uploads.pending if sent.due <= plan.step or sent.storage.cohort in ends]
        self.uploads.queue_rest(due)
        sent: list[Sent] = []
        if ends:
            lengths = {cohort: self.clock.length(cohort) + 1 for cohort in ends}
            sent = self._send_window(lengths, plan.position + 1, prompt=prompt)
        if due:
            self._land(due)
        self.uploads.pending += sent
        if prompt:
            self.uploads.queue_rest(sent)
            self._land(sent)
        if due or prompt:
            self.write_selected([*due, *sent] if prompt else due)
        if selecting:
            with self.telemetry.selection():
                self._select(candidates, plan.step)
            self.clock.selection_ran()
        self.clock.finish_step(ends)
        self._trim_logs()
        if sent and prompt:
            return 0
        return 1 if due else None

    def _send_window(self, lengths: dict[int, int], end: int, prompt: bool) -> list[Sent]:
        """Send the windows of some cohorts, `lengths` steps each; `end`: the clock's position after their last.

        prompt: somebody waits for their results, which become visible at once.
        """
        clock = self.clock
        windows = Windows(
            self.logged, lengths, end, np.array(self.hyper_log), np.array(self.present_log),
            due=clock.state.step + clock.visible_after, urgent=prompt or clock.hurried,
            predict=self.config.predicts and not prompt,
        )  # fmt: skip
        sent = self.sender.send_windows(self.storages, windows, self.control.window_log)
        self.counters["windows"] += 1
        return sent

    def running_steps(self, cohort: int) -> int:
        """Steps so far in a cohort's running window, as many as the logs have."""
        return min(self.clock.length(cohort), len(self.hyper_log))

    def _trim_logs(self) -> None:
        """Forget the steps that are in no running window."""
        longest = min(self.clock.longest, len(self.hyper_log))
        first = len(self.hyper_log) - longest
        self.hyper_log, self.present_log = self.hyper_log[first:], self.present_log[first:]

    def _land(self, queued: list[Sent]) -> None:
        self.uploads.land(queued)
        if self.loaded_hyper:
            pending = self.pending_storages()
            self.loaded_hyper = {
                index: hyper for index, hyper in self.loaded_hyper.items() if self.records[index].storage in pending
            }

    def _show(self, wanted: list[Sent]) -> None:
        if wanted:
            self.uploads.queue_rest(wanted)
            self._land(wanted)
            self.write_selected(wanted)

    def make_visible(self) -> None:
        """Every result that was sent for is in the weights for all that the compute stream does from now on."""
        self._show(self.uploads.pending)

    def pending_storages(self) -> set[SegmentStorage]:
        """Segments for which a result has been sent for and is not visible yet."""
        return {item.storage for item in self.uploads.pending}

    @property
    def host_bytes(self) -> int:
        """Shared memory of all segments and the worker's header."""
        return sum(storage.host_bytes for storage in self.storages) + (
            self.client.header.arena.nbytes if self.client else 0
        )

    def write_selected(self, landed: Sequence[Sent] | None = None) -> None:
        """Write the selected masters over what these uploads left in their channels; None: in all channels."""
        cohorts = {sent.storage.cohort for sent in landed or ()}
        cohort = cohorts.pop() if len(cohorts) == 1 else 0
        if self.storages:
            for table in self.tables:
                write_masters(table, self.control, cohort=cohort)

    def wait_for_worker(self) -> None:
        """Until the worker has finished all that was sent; nothing becomes visible."""
        if self.client is not None and self.sender.sent:
            self.sender.wait_done(self.sender.sent)

    def flush(self) -> None:
        """End all running windows now and make every result visible; returns when the worker has finished them.

        WorkerError if it never will: whoever asks for final weights must not get others.
        """
        if self.client is not None:
            self.client.check()
        adopt_outside_changes(self)
        self.sender.check_gradients()
        self.make_visible()
        running = {cohort: self.clock.length(cohort) for cohort in self.clock.running}
        if running:
            self.stepping = True  # a window that is sent in part is as bad as a step that is
            self.uploads.pending = self._send_window(running, self.clock.state.position, prompt=True)
            self.stepping = False
        self.clock.restart()
        self._trim_logs()
        self.wait_for_worker()
        replace_predictions(self)
        self.make_visible()
        self.write_selected()
        self.prepare_backward()

    def finished(self, storage: SegmentStorage, turn: int, predicted: bool = False) -> list[Sent]:
        """A segment's shadow as a result for which the worker has nothing to do, due when its last window's is."""
        last, due = self.sender.sent, self.clock.due(storage.cohort)
        return [Sent(storage, bucket, last, turn, 0, due, predicted) for bucket in storage.segment.buckets]

    # Selection

    def _select_first(self, step: int) -> None:
        """Parameters that have no owners yet get them by their first finite gradient, before it is applied."""
        fresh = [record for record in self.records if not record.owned and self.grads[record.index] is not None]
        if fresh and self._is_finite():
            with self.telemetry.selection():
                if self.uploads.in_transit:
                    self._show(self.uploads.due(step))
                # This step is in `advance` already, and has yet to be applied.
                self._select(fresh, step, ahead=1)

    def _candidates(self) -> list[ParamRecord]:
        """Parameters whose owners a selection may change now: some channels selected, some deferred, and a gradient."""
        return [
            record
            for record in self.records
            if record.storage is not None and record.n_selected and self.grads[record.index] is not None
        ]

    def _select(self, records: list[ParamRecord], step: int, ahead: int = 0) -> None:
        chosen = choose_channels(records, [self.grads[record.index] for record in records], self.config.importance)
        self.wait_for_worker()
        traffic = give_owners(
            records, chosen, self.control.advance,
            ahead=ahead, reset=self.config.on_reselect == "reset", client=self.client,
        )  # fmt: skip
        self.telemetry.add(bytes_to_host=traffic.to_host, bytes_to_device=traffic.to_device)
        self.counters["selections"] += 1
        logger.info(
            "selection at step %d: %d channels of %d parameters selected, %d changed owner",
            step, traffic.selected, len(records), traffic.moved,
        )  # fmt: skip

    def start_trace(self) -> Tracer:
        """Record, from now on, what runs where."""
        if self.tracer is not None:
            raise RuntimeError("a trace is being recorded already")
        tracer = Tracer(self.device)
        self.tracer = self.sender.tracer = self.uploads.tracer = tracer
        self._trace_gap()
        return tracer

    def _trace_gap(self) -> None:
        """What runs on the compute stream between two steps: forward and backward."""
        window = self.clock.state.window
        self._gap.enter_context(span(self.tracer, "GPU compute", "forward + backward", self._compute(), window=window))

    def stop_trace(self) -> None:
        """Record no more; the worker's slots that the trace began with or after are added to it."""
        tracer, self.tracer = self.tracer, None
        self.sender.tracer = self.uploads.tracer = None
        if tracer is None:
            return  # close() has ended it
        self._gap.close()
        self.wait_for_worker()
        for storage in self.storages:
            for turn in (0, 1):
                trace_worker(tracer, storage, turn)

    def close(self) -> None:
        """Stop the worker and give back every byte of host memory; the parameters stay, whole, what they are."""
        try:
            if self.uploads.in_transit:
                self._end_transit()
            with suppress(WorkerError):
                self.stop_trace()
        finally:
            self._free()

    def _end_transit(self) -> None:
        try:
            self.client.check()  # a stream that waits for a dead worker is let go, and copies what is half written
            self.make_visible()
        except WorkerError:
            self.uploads.rescue()
            self._land(self.uploads.pending)
            self.write_selected()

    def _free(self) -> None:
        if self.client is not None:
            self.uploads.close()
            self.client.close()
        for storage in self.storages:
            storage.close()
        if self.cores is not None:
            self.cores.restore_trainer()
        if self.unbound_threads is not None:
            torch.set_num_threads(self.unbound_threads)
