"""The end of a pipeline: the worker stops, and what it held on the host is given back."""

from __future__ import annotations

from contextlib import ExitStack, suppress

from zenflow.client import WorkerError
from zenflow.pipeline import Pipeline
from zenflow.tracing import stop_trace
from zenflow.visible import make_visible, write_selected


def close_pipeline(pipeline: Pipeline) -> None:
    """Stop the worker and give back every byte of host memory; the parameters stay, whole, what they are."""
    try:
        if pipeline.uploads.in_transit:
            _end_transit(pipeline)
        with suppress(WorkerError):
            stop_trace(pipeline)
    finally:
        _free(pipeline)


def _end_transit(pipeline: Pipeline) -> None:
    try:
        pipeline.client.check()  # a stream that waits for a dead worker is let go, and copies no result
        make_visible(pipeline)
    except WorkerError:
        pipeline.uploads.rescue()
        pipeline.uploads.land(pipeline.uploads.pending)
        write_selected(pipeline)


def _free(pipeline: Pipeline) -> None:
    with ExitStack() as rest:  # the last first, and all of it, also where a signal's handler raises meanwhile
        if pipeline.cores is not None:
            rest.callback(pipeline.cores.restore_trainer)
        for storage in pipeline.storages:
            rest.callback(storage.close)
        if pipeline.client is not None:
            rest.callback(pipeline.client.close)
            rest.callback(pipeline.uploader.close)
            rest.callback(pipeline.uploads.remove_hooks)
