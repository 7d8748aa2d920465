"""A parameter's optimizer state, merged over both owners of its channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from zenflow_kernels.scatter import scatter_channels_

from zenflow.param_record import ParamRecord


@dataclass(frozen=True)
class ChannelState:
    """One parameter's optimizer state, merged over both owners.

    `master`, `exp_avg`, `exp_avg_sq`: fp32 `[rows, cols]` on the CPU. `step`: AdamW updates received, int64
    `[channels]` (`[1]` if selected whole). `selected`: bool `[channels]`, True where the GPU owns the channel.
    """

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor
    selected: Tensor


def channel_state(record: ParamRecord, advance: int) -> ChannelState:
    """Of a record whose worker is idle; `advance` is the device's count of its AdamW updates."""
    step = full_step(record, advance)
    selected = torch.zeros(step.numel(), dtype=torch.bool, device="cpu")
    selected[record.selected if record.storage is not None else slice(None)] = True
    return ChannelState(*full_state(record), step, selected)


def full_state(record: ParamRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Master and moments of all channels, fp32 `[rows, cols]` on the host, each from its owner."""
    return tuple(_merged(record, number) for number in range(3))  # type: ignore[return-value]


def full_master(record: ParamRecord) -> Tensor:
    """The first of them alone."""
    return _merged(record, 0)


def _merged(record: ParamRecord, number: int) -> Tensor:
    compact = record.compact[number].to("cpu", torch.float32, copy=True)
    if record.kind == "whole":
        return compact
    merged = record.host[number].clone()
    if record.selected.numel():
        scatter_channels_(merged, record.selected, compact, record.kind, validate=False)
    return merged


def full_step(record: ParamRecord, advance: int) -> Tensor:
    """t of every channel, int64 `[channels]` on the host (`[1]` if selected whole)."""
    own = record.start.cpu().to(torch.int64) + advance
    if record.kind == "whole":
        return own
    step = record.host_step.to(torch.int64)
    if record.selected.numel():
        step[record.selected] = own
    return step
