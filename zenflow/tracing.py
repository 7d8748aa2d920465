"""A trace of a pipeline's steps: from when to when it is recorded, and what is in it between two steps."""

from __future__ import annotations

from zenflow.pipeline import Pipeline
from zenflow.sending import trace_worker
from zenflow.trace import Tracer, span


def start_trace(pipeline: Pipeline) -> Tracer:
    """Record, from now on, what runs where. RuntimeError if that is being done already."""
    if pipeline.tracer is not None:
        raise RuntimeError("a trace is being recorded already")
    tracer = Tracer(pipeline.device)
    _give(pipeline, tracer)
    begin_gap(pipeline)
    return tracer


def begin_gap(pipeline: Pipeline) -> None:
    """What runs on the compute stream between two steps begins: forward and backward."""
    window = pipeline.clock.state.window
    pipeline.gap.enter_context(
        span(pipeline.tracer, "GPU compute", "forward + backward", pipeline.compute_stream, window=window)
    )


def stop_trace(pipeline: Pipeline) -> None:
    """Record no more; the worker's slots that the trace began with or after are added to it."""
    tracer = pipeline.tracer
    _give(pipeline, None)
    if tracer is None:
        return  # closing has ended it
    pipeline.gap.close()
    pipeline.wait_for_worker()
    for storage in pipeline.storages:
        for turn in (0, 1):
            trace_worker(tracer, storage, turn)


def _give(pipeline: Pipeline, tracer: Tracer | None) -> None:
    pipeline.tracer = pipeline.sender.tracer = pipeline.uploader.tracer = tracer
