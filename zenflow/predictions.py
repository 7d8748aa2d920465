"""What is visible where results are shown as predictions (`weight_prediction`), and how masters take their place.

A weight is then neither the rounded master nor to be reckoned from it. So the worker writes to two shadows, one for
each turn of the windows' records: one holds what is visible, also while a result is on its way in the other. Where they
are lanes of the ring (`Segment.in_place`), the other has the window's gradient before. Whatever else changes weights
tells the shadows: changes from outside, a load, and `flush()`, after which masters are visible. A selection tells the
one with what is visible, of the channels that the worker gets: the next window writes the other whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.scatter import scatter_channels_

from zenflow.param_record import ParamRecord, bits
from zenflow.pipeline import Pipeline
from zenflow.storage import SegmentStorage


def visible_shadow(record: ParamRecord, *, pending: bool) -> Tensor:
    """What is visible of a parameter, `[rows, cols]` on the host, deferred channels alone; pending: something comes."""
    return record.host_shadow(visible_turn(record.storage, pending=pending))


def coming_shadow(record: ParamRecord) -> Tensor:
    """What is on its way, where something is."""
    return record.host_shadow(coming_turn(record.storage))


def coming_turn(storage: SegmentStorage) -> int:
    """The turn of a segment's window whose result is on its way."""
    return visible_turn(storage, pending=True) ^ 1


def visible_turn(storage: SegmentStorage, *, pending: bool) -> int:
    """The turn of the shadow with what is visible; pending: a result is on its way, in the other.

    The worker never has what is visible in hand: the next window takes its turn once the result is visible.
    """
    return storage.memory.turn(0) ^ (not pending)


def replace_predictions(pipeline: Pipeline) -> None:
    """The masters of segments that show a prediction, with no result on its way, are on their way now.

    The worker is idle. Waits for the uploads that have brought what is visible.
    """
    pending = pipeline.uploads.pending_storages()
    for storage in pipeline.storages:
        if storage.shows_prediction and storage not in pending:
            turn = visible_turn(storage, pending=False)
            for event in storage.uploaded:
                event.synchronize()
            storage.show_masters(turn)
            pipeline.uploads.pending += pipeline.finished(storage, turn)


def saved_predictions(record: ParamRecord, master: Tensor, *, pending: bool) -> dict[str, Tensor]:
    """Of a state's `weight` (what is visible) and `pending_weight` (what is on its way) those that differ in any bit
    from the rounded `master`, which has the parameter's shape, as they have; on the host."""
    weight = record.weight.to("cpu", copy=True)
    found = {"weight": weight}
    if pending:
        own = gather_channels(weight, record.selected, record.kind, validate=False)
        coming = coming_shadow(record).clone()
        found["pending_weight"] = scatter_channels_(coming, record.selected, own, record.kind, validate=False)
    rounded = bits(master.to(weight.dtype))
    shaped = {name: shown.view(master.shape) for name, shown in found.items()}
    return {name: shown for name, shown in shaped.items() if not torch.equal(bits(shown), rounded)}
