"""One `step()`, and how its phases hang together.

Phase 1, backward: PyTorch leaves gradients in `.grad`; phase 5 goes on under the last pass before a result is due.
Phase 2, `step()`: norm and finite check over all parameters, then one pass over the gradient that updates the selected
channels and folds the others into the accumulator. Nothing here waits for the device, except the steps that select.
Phase 3, a window's end, for the cohorts for which it is one (`window.py`, `window_end.py`): each bucket's accumulator
goes to its ring slot on a copy stream, under the next step's compute; the slot's `ready` word follows it on the same
stream (`sending.py`).
Phase 4, the worker: one pass over memory a slot, in order; then `done`. The rounded weights go to a shadow, which is
the slot itself where they are as large as its gradient. Under `weight_prediction` a result that will be shown late is
written as a prediction (`cpu_pass.py`), of two shadows in turn to the one that does not hold what is visible; masters,
what is shown at once, and what `flush()` leaves are no predictions.
Phase 5, visible: the worker's shadow is copied straight into the weights on the upload stream, in this step (staleness
0) or, from backward on, in the one that comes `visible_after` steps later (staleness 1), the next window's last at
most; then the selected channels, which the shadow does not know, are written over it (`uploads.py`, `uploading.py`,
`visible.py`).

Orders that hold it together, per bucket: an upload waits for the last gradient and for `done`; `step()`'s own writes
come after it; a copy to the ring follows the fold, and the upload that empties the shadow which the worker, or the copy
itself, will write next; the next fold waits for that copy, because there is one accumulator.
"""

from __future__ import annotations

import time

from torch import Tensor
from zenflow_kernels.close_step import close_step
from zenflow_kernels.fused_step import fused_step
from zenflow_kernels.norm import partial_norms

from zenflow.checks import group_hyper, usable_gradient
from zenflow.outside import adopt_outside_changes
from zenflow.owners import select_first
from zenflow.param_record import tell_autograd
from zenflow.pipeline import Pipeline
from zenflow.trace import span
from zenflow.tracing import begin_gap
from zenflow.window_end import end_windows


def run_step(pipeline: Pipeline, groups: list[dict], grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """One optimizer step over the gradients that are in `.grad` now.

    groups: the optimizer's `param_groups`. grad_scale, found_inf: fp32 scalars of a `GradScaler`, on the device.
    ValueError names a gradient or a weight that cannot be used; WorkerError if the worker has failed.
    """
    began = time.perf_counter_ns()
    if pipeline.client is not None:
        pipeline.client.check()
    adopt_outside_changes(pipeline)
    pipeline.sender.check_gradients()
    pipeline.grads = [usable_gradient(record) for record in pipeline.records]
    hyper_row = [group_hyper(group) for group in groups]
    # From here on the step counts; what the caller could have got wrong has been refused.
    with pipeline.in_one_piece():
        step = _make_step(pipeline, hyper_row, grad_scale, found_inf)
        if pipeline.tracer is not None:
            pipeline.tracer.host_span("trainer", "step()", began, time.perf_counter_ns(), step=step)


def _make_step(
    pipeline: Pipeline, hyper_row: list[tuple[float, ...]], grad_scale: Tensor | None, found_inf: Tensor | None
) -> int:
    """The step over `pipeline.grads` with each group's scalars; its number."""
    config, sender, uploads = pipeline.config, pipeline.sender, pipeline.uploads
    uploads.remove_hooks()
    plan = pipeline.clock.begin_step()
    pipeline.gap.close()
    _begin_record(pipeline, plan.step)
    window = pipeline.clock.state.window
    with span(pipeline.tracer, "GPU compute", "optimizer step", pipeline.compute_stream, window=window):
        pipeline.highest_t += 1
        # A group that came in mid-window had no gradients in its earlier steps; its scalars there are never read.
        pipeline.hyper_log = [row + hyper_row[len(row) :] for row in pipeline.hyper_log] + [hyper_row]
        pipeline.present_log.append([grad is not None for grad in pipeline.grads])
        hyper, bias = pipeline.scalars.factors(hyper_row, pipeline.highest_t)
        sender.wait_for_copies()
        _reduce(pipeline, plan.position, grad_scale, found_inf)
        uploads.end_backward(pipeline.is_finite)
        select_first(pipeline, plan.step)
        pipeline.scores.add(pipeline.control, pipeline.clock)
        if config.accumulate_on == "host":
            sender.send_gradients(pipeline.records, pipeline.grads, plan.position % config.update_interval)
        for table in pipeline.tables:
            fused_step(table, pipeline.control, hyper, bias, seed=config.rounding_seed, step=plan.step)
        tell_autograd(record for record in pipeline.records if pipeline.grads[record.index] is not None)
        staleness = end_windows(pipeline, plan)
    pipeline.grads = []
    pipeline.telemetry.end_step(staleness)
    begin_gap(pipeline)
    pipeline.prepare_backward()
    return plan.step


def _begin_record(pipeline: Pipeline, step: int) -> None:
    client = pipeline.client
    slots = sum(len(storage.segment.buckets) for storage in pipeline.storages)
    waiting = 0 if client is None else max(0, pipeline.sender.sent - client.done)
    busy = 0.0 if client is None else client.busy_seconds
    occupancy = min(1.0, waiting / max(1, slots))
    if pipeline.tracer is not None:
        pipeline.tracer.counter("ring", {"occupancy": occupancy})
    pipeline.telemetry.begin_step(step, occupancy, busy)


def _reduce(pipeline: Pipeline, position: int, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
    """Norm, finite check and clip coefficient over all parameters, and the bookkeeping that follows from them."""
    first = 0
    for table in pipeline.tables:
        table.bind(pipeline.grads[table.first : table.first + len(table.entries)])
        partial_norms(table, pipeline.partials[first : first + table.n_partials])
        first += table.n_partials
    pipeline.logged = pipeline.clock.state.window
    present = pipeline.present_log[-1]
    partials = pipeline.norm_order.arrange(pipeline.partials, pipeline.tables, present)
    close_step(
        pipeline.control, partials, pipeline.scalars.present(present),
        window=pipeline.logged, position=position, max_grad_norm=pipeline.config.max_grad_norm,
        grad_scale=grad_scale, found_inf=found_inf,
    )  # fmt: skip
