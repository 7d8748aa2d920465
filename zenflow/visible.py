"""Phase 5 as the host sees it: results that are pending come into the weights, and selected channels are written over.

The compute stream sees what is visible; the host waits for nothing here but, where streams cannot, for the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from zenflow_kernels.fused_step import write_masters

from zenflow.outside import adopt_outside_changes
from zenflow.pipeline import Pipeline
from zenflow.uploading import Sent


def make_visible(pipeline: Pipeline) -> None:
    """Every result that was sent for is in the weights for all that the compute stream does from now on."""
    show(pipeline, pipeline.uploads.pending)


def show(pipeline: Pipeline, wanted: list[Sent]) -> None:
    """These results are, and the selected masters over them."""
    if wanted:
        pipeline.uploads.queue_rest(wanted)
        pipeline.uploads.land(wanted)
        write_selected(pipeline, wanted)


def write_selected(pipeline: Pipeline, landed: Sequence[Sent] | None = None) -> None:
    """Write the selected masters over what these uploads left in their channels; None: in all channels."""
    cohorts = {sent.storage.cohort for sent in landed or ()}
    cohort = cohorts.pop() if len(cohorts) == 1 else 0
    if pipeline.storages:
        for table in pipeline.tables:
            write_masters(table, pipeline.control, cohort=cohort)


def drop_gradients(pipeline: Pipeline) -> None:
    """The gradients since the last step are thrown away: weights that went into transit with them arrive first."""
    uploads = pipeline.uploads
    if uploads.begun:
        adopt_outside_changes(pipeline)
        show(pipeline, uploads.due(pipeline.clock.state.step + 1))
    if uploads.arrived:
        pipeline.prepare_backward()
