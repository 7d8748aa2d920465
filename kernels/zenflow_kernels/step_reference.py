"""`fused_step` and `write_masters` by torch: what CPU tensors take, and the kernels are compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, StepControl
from zenflow_kernels.numerics import CHUNK_PER_THREAD, HYPER, adamw_, chunks
from zenflow_kernels.stochastic_rounding import round_at_reference
from zenflow_kernels.table import Entry, Table


def fused_step_reference(
    table: Table, control: StepControl, hyper: Tensor, bias: Tensor, *, seed: int = 0, step: int = 0
) -> None:
    """`fused_step` by torch; reads `control` on the host, so it waits where that is on a GPU."""
    folds, advances = control.fold.tolist(), control.advance.tolist()
    inv_scale, clip, factors = control.inv_scale.item(), control.clip.item(), hyper.tolist()
    for number, entry in enumerate(table.entries):
        fold, advance = folds[table.first + number], advances[table.first + number]
        channel = _channels(entry)
        if fold == FOLD_NONE or not entry.weight.numel():
            _write(entry, channel)
            continue
        grad = table.grad(number)
        assert grad is not None, f"entry {number} folds without a gradient"
        t = (entry.start[: channel.numel()].long() + advance).clamp(max=bias.shape[1] - 1)
        step_entry_reference(
            entry, channel, grad, (inv_scale, clip), factors[entry.group], bias[entry.group][t], add=fold == FOLD_ADD,
            seed=seed, step=step,
        )  # fmt: skip


def step_entry_reference(
    entry: Entry,
    channel: Tensor,
    grad: Tensor,
    scales: tuple[float, float],
    factors: list[float],
    bias: Tensor,
    *,
    add: bool,
    **key: int,
) -> None:
    """One entry's step by torch, its decision known on the host.

    `channel` int64 `[n]` is the channel at each position of the compact state (`[1]` for a whole parameter, `[0]`
    before the first selection), `grad` `[rows, cols]`, `scales` the inverse loss scale and the clip factor, `factors`
    the group's row of the hyperparameter table, `bias` fp32 `[n, 2]` the two corrections of each channel. `add`: the
    accumulator is added to, else overwritten. `key`: `seed` and `step`, where its master is bf16.
    """
    if channel.numel():
        master = entry.master.float()  # itself if it is fp32
        _update(entry, master, channel, grad, scales, factors, bias)
        if entry.master.dtype == torch.bfloat16:
            places = _places(entry, channel)
            entry.master.copy_(round_at_reference(master, places, stream=entry.stream, **key))
    if entry.accumulator is not None:
        _fold(entry.accumulator, grad, scales, add=add)
        entry.accumulator.index_fill_(entry.axis, channel, 0)
    _write(entry, channel)


def write_masters_reference(table: Table, control: StepControl, *, cohort: int = 0) -> None:
    """`write_masters` by torch."""
    cohorts = control.cohort[table.first :].tolist()
    for entry, its_cohort in zip(table.entries, cohorts, strict=False):
        if cohort in (0, its_cohort):
            _write(entry, _channels(entry))


def _channels(entry: Entry) -> Tensor:
    """int64: the channel at each position of the compact state; empty before the first selection."""
    if entry.slot is None:
        return entry.start.new_zeros(1, dtype=torch.int64)
    chosen = torch.nonzero(entry.slot >= 0).view(-1)
    assert chosen.numel() in (0, entry.selected), f"{chosen.numel()} slots for {entry.selected} selected channels"
    channel = torch.empty_like(chosen)
    channel[entry.slot[chosen].long()] = chosen
    return channel


def _places(entry: Entry, channel: Tensor) -> Tensor:
    """int64 of the compact state's shape: the number of each of its elements in the weight."""
    rows, cols = entry.shape
    r, c = (torch.arange(size, device=channel.device) for size in (rows, cols))
    r, c = (channel if entry.kind == "row" else r), (channel if entry.kind == "column" else c)
    return r[:, None] * cols + c[None, :]


def _scaled(grad: Tensor, scales: tuple[float, float]) -> Tensor:
    """fp32 `(grad * inv_scale) * clip`; a factor of 1 changes no bit and is left out."""
    scaled = grad.float()
    for scale in scales:
        if scale != 1:
            scaled = scaled * scale
    return scaled


def _update(
    entry: Entry, master: Tensor, channel: Tensor, grad: Tensor,
    scales: tuple[float, float], factors: list[float], bias: Tensor,
) -> None:  # fmt: skip
    chosen = grad if entry.kind == "whole" else grad.index_select(entry.axis, channel)
    hyper = dict(zip(HYPER, factors[: len(HYPER)], strict=True))
    lr = hyper.pop("lr")
    shape = {"column": (1, -1), "row": (-1, 1), "whole": (1, 1)}[entry.kind]
    first, second = bias[:, 0].view(shape), bias[:, 1].view(shape)
    state = (master, entry.exp_avg, entry.exp_avg_sq, _scaled(chosen, scales))
    adamw_(*state, step_size=first * lr, denom_scale=second, **hyper)


def _fold(accumulator: Tensor, grad: Tensor, scales: tuple[float, float], *, add: bool) -> None:
    limit = CHUNK_PER_THREAD * torch.get_num_threads() if grad.device.type == "cpu" else max(1, grad.numel())
    for piece in chunks(*grad.shape, limit):
        scaled = _scaled(grad[piece], scales)
        accumulator[piece].copy_(accumulator[piece].float().add_(scaled) if add else scaled)


def _write(entry: Entry, channel: Tensor) -> None:
    if entry.kind == "whole":
        entry.weight.copy_(entry.master)
    elif channel.numel():
        entry.weight.index_copy_(entry.axis, channel, entry.master.to(entry.weight.dtype))
