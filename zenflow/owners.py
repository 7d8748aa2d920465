"""When selections run, and over which parameters; `selection.py` has what one does."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zenflow.param_record import ParamRecord
from zenflow.pipeline import Pipeline
from zenflow.selection import choose_channels, give_owners
from zenflow.visible import show

logger = logging.getLogger("zenflow")


def select_first(pipeline: Pipeline, step: int) -> None:
    """Parameters that have no owners yet get them by their first finite gradient, before it is applied."""
    grads = pipeline.grads
    fresh = [record for record in pipeline.records if not record.owned and grads[record.index] is not None]
    if fresh and pipeline.is_finite():
        with pipeline.telemetry.selection():
            if pipeline.uploads.in_transit:
                show(pipeline, pipeline.uploads.due(step))
            # This step is in `advance` already, and has yet to be applied.
            select(pipeline, fresh, step, ahead=1)


def candidates(pipeline: Pipeline) -> list[ParamRecord]:
    """Parameters whose owners a selection may change now: some channels selected, some deferred, and a gradient."""
    return [
        record
        for record in pipeline.records
        if record.storage is not None and record.n_selected and pipeline.grads[record.index] is not None
    ]


def select(pipeline: Pipeline, records: Sequence[ParamRecord], step: int, ahead: int = 0) -> None:
    """Give these parameters new owners by this step's gradients, or `scores.py`; waits for the worker.

    ahead: how many of their AdamW updates that the device has counted are still to be applied. WorkerError if the
    worker ends meanwhile.
    """
    config = pipeline.config
    grads = [pipeline.grads[record.index] for record in records]
    scores = None if ahead else pipeline.scores.of_all(records)
    chosen = choose_channels(records, grads, config.importance, scores)
    pipeline.wait_for_worker()
    traffic = give_owners(
        records, chosen, pipeline.control.advance,
        ahead=ahead, reset=config.on_reselect == "reset", client=pipeline.client,
        pending=pipeline.uploads.pending_storages(),
    )  # fmt: skip
    pipeline.telemetry.add(bytes_to_host=traffic.to_host, bytes_to_device=traffic.to_device)
    pipeline.counters["selections"] += 1
    logger.info(
        "selection at step %d: %d channels of %d parameters selected, %d of them new",
        step, traffic.selected, len(records), traffic.entered,
    )  # fmt: skip
