"""The end of windows, in a `step()` or in `flush()`: they are sent to the worker, and what is due becomes visible.

Phase 3, the start of phase 4, and phase 5 as far as backward has not done it; then the selection, if one is due.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from zenflow.outside import adopt_outside_changes
from zenflow.owners import candidates, select
from zenflow.pipeline import Pipeline
from zenflow.predictions import replace_predictions
from zenflow.sending import Windows
from zenflow.uploading import Sent
from zenflow.visible import make_visible, write_selected
from zenflow.window import StepPlan


def end_windows(pipeline: Pipeline, plan: StepPlan) -> int | None:
    """Send the windows that end in this step and show the results that are due, which may both be none.

    The staleness of what became visible, None if nothing did.
    """
    clock, uploads = pipeline.clock, pipeline.uploads
    records = candidates(pipeline) if plan.selects else []
    # The one question that the host asks the device, and only at a window end at which a selection is due.
    selecting = bool(records) and pipeline.is_finite()
    ends, prompt = clock.cohorts if selecting else plan.ends, plan.synchronous or selecting
    # What is due, and what is in the place of a result that the worker will write now.
    due = [sent for sent in uploads.pending if sent.due <= plan.step or sent.storage.cohort in ends]
    uploads.queue_rest(due)
    sent: list[Sent] = []
    if ends:
        lengths = {cohort: clock.length(cohort) + 1 for cohort in ends}
        sent = _send(pipeline, lengths, plan.position + 1, prompt=prompt)
    if due:
        uploads.land(due)
    uploads.pending += sent
    if prompt:
        uploads.queue_rest(sent)
        uploads.land(sent)
    if due or prompt:
        write_selected(pipeline, [*due, *sent] if prompt else due)
    if selecting:
        with pipeline.telemetry.selection():
            select(pipeline, records, plan.step)
        clock.selection_ran()
    clock.finish_step(ends)
    _trim_logs(pipeline)
    if sent and prompt:
        return 0
    return 1 if due else None


def flush_pipeline(pipeline: Pipeline) -> None:
    """End all running windows now and make every result visible; returns when the worker has finished them.

    WorkerError if it never will: whoever asks for final weights must not get others.
    """
    if pipeline.client is not None:
        pipeline.client.check()
    adopt_outside_changes(pipeline)
    pipeline.sender.check_gradients()
    make_visible(pipeline)
    clock = pipeline.clock
    running = {cohort: clock.length(cohort) for cohort in clock.running}
    if running:
        with pipeline.in_one_piece():
            pipeline.uploads.pending = _send(pipeline, running, clock.state.position, prompt=True)
    clock.restart()
    _trim_logs(pipeline)
    pipeline.wait_for_worker()
    replace_predictions(pipeline)
    make_visible(pipeline)
    write_selected(pipeline)
    pipeline.prepare_backward()


def _send(pipeline: Pipeline, lengths: Mapping[int, int], end: int, prompt: bool) -> list[Sent]:
    """Send the windows of some cohorts, `lengths` steps each; `end`: the clock's position after their last.

    prompt: somebody waits for their results, which become visible at once.
    """
    clock = pipeline.clock
    windows = Windows(
        pipeline.logged, lengths, end, np.array(pipeline.hyper_log), np.array(pipeline.present_log),
        due=clock.state.step + clock.visible_after, urgent=prompt or clock.hurried,
        predict=pipeline.config.predicts and not prompt,
    )  # fmt: skip
    sent = pipeline.sender.send_windows(pipeline.storages, windows, pipeline.control.window_log)
    pipeline.counters["windows"] += 1
    return sent


def _trim_logs(pipeline: Pipeline) -> None:
    """Forget the steps that are in no running window."""
    longest = min(pipeline.clock.longest, len(pipeline.hyper_log))
    first = len(pipeline.hyper_log) - longest
    pipeline.hyper_log, pipeline.present_log = pipeline.hyper_log[first:], pipeline.present_log[first:]
