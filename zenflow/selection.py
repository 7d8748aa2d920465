"""Selection: which channels the GPU owns from now on, and the migration of their state.

A channel that changes owner takes master, both moments and t with it, bit for bit. It happens only while the worker is
idle and no partial sum or pending result of the matrix exists, so the ring, which is pinned and idle then, carries the
state between device and host. No weight, master, moment or t changes its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.importance import channel_scores
from zenflow_kernels.scatter import scatter_channels_
from zenflow_kernels.topk import select_channels

from zenflow.storage import ParamRecord


@dataclass
class Traffic:
    """Bytes that a selection moved, and how many channels changed owner."""

    to_host: int = 0
    to_device: int = 0
    moved: int = 0


def choose_channels(records: list[ParamRecord], grads: list[Tensor], importance: str) -> list[Tensor]:
    """New owners by each record's gradient: int64 indices, ascending, on the host.

    All scores and choices are queued before the first result is awaited.
    """
    chosen = []
    for record, grad in zip(records, grads, strict=True):
        scores = channel_scores(grad.view(record.weight.shape), record.kind, importance)
        chosen.append(select_channels(scores, record.n_selected))
    return [index.cpu() for index in chosen]


def migrate(record: ParamRecord, selected: Tensor, advance: int, on_reselect: str) -> Traffic:
    """Hand the channels in `selected` to the GPU and the others to the worker.

    `advance` is the device's count of AdamW updates since `record.start` was written. `on_reselect="reset"` zeroes the
    moments and t of every channel that changes owner, as the reference implementation does; `"migrate"` keeps them.
    """
    old = record.selected
    stays_old, stays_new = torch.isin(old, selected), torch.isin(selected, old)
    leaving, entering = old[~stays_old], selected[~stays_new]
    traffic = Traffic(moved=leaving.numel() + entering.numel())
    if record.owned and traffic.moved == 0:
        return traffic
    exchange = _Exchange(record, on_reselect == "reset")
    step = record.start.cpu().to(torch.int64) + advance
    at_old, at_new = (torch.arange(owners.numel(), device="cpu") for owners in (old, selected))
    exchange.leave(leaving, at_old[~stays_old], step, traffic)
    exchange.rebuild(entering, at_new[~stays_new], at_old[stays_old], at_new[stays_new], traffic)
    new_step = torch.empty(selected.numel(), dtype=torch.int64, device="cpu")
    new_step[stays_new] = step[: old.numel()][stays_old]
    new_step[~stays_new] = 0 if exchange.reset else record.host_step[entering].to(torch.int64)
    record.start.copy_((new_step - advance).to(torch.int32))
    record.slot.fill_(-1)
    record.slot[selected.to(record.slot.device)] = torch.arange(
        selected.numel(), dtype=torch.int32, device=record.slot.device
    )
    record.selected, record.owned = selected, True
    return traffic


class _Exchange:
    """Moves channels of one matrix between its compact state and the worker's arena."""

    def __init__(self, record: ParamRecord, reset: bool) -> None:
        self.record = record
        self.reset = reset
        self.by_row = record.kind == "row"
        self.dim = 0 if self.by_row else 1
        self.cuda = record.weight.is_cuda
        ring = record.storage.ring
        # Whole fp32 numbers of the ring: it has an even number of elements, being aligned.
        self.staging = ring.view(torch.float32)

    def leave(self, channels: Tensor, position: Tensor, step: Tensor, traffic: Traffic) -> None:
        """Compact state at `position` goes to the worker as its `channels`; `step` holds t by old position."""
        if not channels.numel():
            return
        record = self.record
        for number, (compact, host) in enumerate(zip(record.compact, record.host, strict=True)):
            if self.reset and number:
                host.index_fill_(self.dim, channels, 0)
                continue
            values = gather_channels(compact, position.to(compact.device), record.kind, validate=False)
            traffic.to_host += values.nbytes
            for part, arrived in self._to_host(values):
                target = host if self.by_row else host[part]
                index = channels[part] if self.by_row else channels
                target.index_copy_(self.dim, index, arrived)
        record.host_step[channels] = 0 if self.reset else step[position].to(torch.int32)

    def rebuild(self, entering: Tensor, enter_at: Tensor, stay_from: Tensor, stay_at: Tensor, traffic: Traffic) -> None:
        """New compact state from channels that stay and channels that the worker hands over.

        The worker's moments of these become zero: what it goes on computing there is scratch, and zeros stay zeros.
        """
        record, device = self.record, self.record.weight.device
        for number, (compact, host) in enumerate(zip(record.compact, record.host, strict=True)):
            fresh = torch.zeros_like(compact)
            if stay_at.numel():
                kept = gather_channels(compact, stay_from.to(device), record.kind, validate=False)
                scatter_channels_(fresh, stay_at.to(device), kept, record.kind, validate=False)
            if entering.numel() and not (self.reset and number):
                values = self._to_device(host, entering)
                traffic.to_device += values.nbytes
                scatter_channels_(fresh, enter_at.to(device), values, record.kind, validate=False)
            compact.copy_(fresh)
            if number and entering.numel():
                host.index_fill_(self.dim, entering, 0)

    def _rows_at_once(self, width: int) -> int:
        return max(1, self.staging.numel() // max(1, width))

    def _to_host(self, values: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield `(row range, rows of values on the host)`; a row range is reused once the next one is asked for."""
        if not self.cuda or self.staging.numel() < values.shape[1]:
            yield slice(0, values.shape[0]), values.cpu()
            return
        rows = self._rows_at_once(values.shape[1])
        for first in range(0, values.shape[0], rows):
            block = values[first : first + rows]
            arrived = self.staging[: block.numel()].view(block.shape)
            arrived.copy_(block, non_blocking=True)
            torch.cuda.current_stream(values.device).synchronize()
            yield slice(first, first + block.shape[0]), arrived

    def _to_device(self, host: Tensor, channels: Tensor) -> Tensor:
        """The worker's `channels`, fp32, compact, on the device."""
        if not self.cuda:
            return host.index_select(self.dim, channels)
        shape = (channels.numel(), host.shape[1]) if self.by_row else (host.shape[0], channels.numel())
        values = torch.empty(shape, dtype=torch.float32, device=self.record.weight.device)
        if self.staging.numel() < shape[1]:
            return values.copy_(host.index_select(self.dim, channels))
        rows = self._rows_at_once(shape[1])
        for first in range(0, shape[0], rows):
            part = slice(first, min(first + rows, shape[0]))
            staged = self.staging[: (part.stop - part.start) * shape[1]].view(-1, shape[1])
            if self.by_row:
                torch.index_select(host, 0, channels[part], out=staged)
            else:
                torch.index_select(host[part], 1, channels, out=staged)
            values[part].copy_(staged, non_blocking=True)
            torch.cuda.current_stream(values.device).synchronize()
        return values
