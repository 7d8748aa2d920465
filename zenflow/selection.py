"""Selection: which channels the GPU owns from now on; `migration.py` moves the state of those that change owner.

The first owners of a parameter cost the host nothing: the worker's master is the weight itself, its moments and t are
zero.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.importance import grouped_scores
from zenflow_kernels.topk import grouped_choices

from zenflow.client import WorkerClient
from zenflow.migration import Migration, Move, Traffic, upload_positions
from zenflow.param_record import ParamRecord
from zenflow.storage import SegmentStorage


def choose_channels(
    records: Sequence[ParamRecord], grads: Sequence[Tensor], importance: str, scores: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """New owners by each record's gradient, or by its `scores`, fp32 `[channels]`, where they are given.

    int64 indices, ascending, on the device; waits for nothing.
    """
    assert len({record.kind for record in records}) == 1, "channels are columns of all matrices, or rows of all"
    if scores is None:
        matrices = [grad.view(record.weight.shape) for record, grad in zip(records, grads, strict=True)]
        scores = grouped_scores(matrices, records[0].kind, importance)
    return grouped_choices(scores, [record.n_selected for record in records])


def give_owners(
    records: Sequence[ParamRecord], chosen: Sequence[Tensor], advance: Tensor, *, ahead: int, reset: bool,
    client: WorkerClient, pending: Collection[SegmentStorage],
) -> Traffic:  # fmt: skip
    """Hand the channels in `chosen`, one tensor a record, to the GPU and the others to the worker, which is idle.

    `advance`, by `record.index`, is the device's count of AdamW updates since `record.start` was written, `ahead` how
    many of them are still to be applied. `reset` zeroes the moments and t of every channel that changes owner, as the
    reference implementation does. `pending`: segments that have a result on its way. WorkerError if the worker ends
    meanwhile.
    """
    fetched = _fetch(chosen, [*(record.start for record in records), advance])
    selected, starts = ([next(fetched) for _ in records] for _ in range(2))
    advances = next(fetched)
    traffic = Traffic(selected=sum(map(len, selected)))
    moves: list[Move] = []
    for record, owners, on_device, start in zip(records, selected, chosen, starts, strict=True):
        updates = int(advances[record.index]) - ahead
        if record.untouched:
            _take_weights(record, owners, on_device, updates)
            traffic.entered += len(owners)
            continue
        move = Move.plan(record, owners, on_device, start, updates, reset)
        if move is not None:
            moves.append(move)
            traffic.entered += len(move.entering)
    upload_positions(moves)
    for storage in {move.record.storage: None for move in moves}:
        there = [move for move in moves if move.record.storage is storage]
        migration = Migration(storage, there, client, reset, traffic)
        if storage.segment.in_place and storage in pending:
            migration.run_and_put_back()
        else:
            migration.run()
    for move in moves:
        move.record.install_owners(move.selected, move.on_device, move.start)
    return traffic


def _fetch(wide: Sequence[Tensor], narrow: Sequence[Tensor]) -> Iterator[Tensor]:
    """int64 and int32 `[n]` tensors of the device, all as int64 on the host, by one copy and with one wait."""
    together = torch.cat([*wide, torch.cat(list(narrow)).to(torch.int64)]).cpu()
    return iter(together.split([tensor.numel() for tensor in (*wide, *narrow)]))


def _take_weights(record: ParamRecord, selected: Tensor, on_device: Tensor, updates: int) -> None:
    """The first owners' masters are their weights, on the device; moments and t are zero there and here."""
    record.master.copy_(gather_channels(record.weight, on_device, record.kind, validate=False))
    record.install_owners(selected, on_device, torch.full_like(record.start, -updates))
