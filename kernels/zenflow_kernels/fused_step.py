"""One pass over the gradient: AdamW for the selected channels, the deferred accumulator for the rest.

For every parameter whose `fold` is not FOLD_NONE, with `g = (f32(grad) * inv_scale) * clip` (two roundings):

    selected   m, v, p = the order of `numerics.adamw_` with t = start + advance;  weight = round(p)
    deferred   accumulator = round(g) if fold is FOLD_OVERWRITE else round(f32(accumulator) + g)

and the accumulator of selected channels is 0. With FOLD_NONE only `weight = round(p)` of the selected channels is
written. `round` is to the nearest, ties to even, in the tensor's own dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, StepControl
from zenflow_kernels.dispatch import on_device, uses_triton
from zenflow_kernels.numerics import CHUNK_PER_THREAD, HYPER, adamw_, chunks
from zenflow_kernels.table import Entry, Table


def fused_step(table: Table, control: StepControl, hyper: Tensor, bias: Tensor) -> None:
    """Update the selected channels of every entry and fold the gradients of the others.

    `hyper` fp32 `[groups, 8]` in the order of `numerics.HYPER`; `bias` fp32 `[groups, length, 2]`, the table of
    `1 / (1 - beta1**t)` and `1 / sqrt(1 - beta2**t)` by t, whose last row stands for every larger t. The gradients are
    those of the last `table.bind`, the decision that of the last `close_step`.
    """
    _check_factors(table, hyper, bias)
    fused_step_reference(table, control, hyper, bias)


def write_masters(table: Table) -> None:
    """Write the rounded masters over the weights of the selected channels, and touch nothing else."""
    write_masters_reference(table)


def _check_factors(table: Table, hyper: Tensor, bias: Tensor) -> None:
    for name, tensor, tail in (("hyper", hyper, (len(HYPER),)), ("bias", bias, (bias.shape[-2], 2))):
        good = tensor.dtype == torch.float32 and tensor.device == table.device and tensor.is_contiguous()
        if not good or tuple(tensor.shape[1:]) != tail:
            raise ValueError(
                f"{name} must be contiguous torch.float32 [groups, {', '.join(map(str, tail))}] on {table.device}, "
                f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def fused_step_reference(table: Table, control: StepControl, hyper: Tensor, bias: Tensor) -> None:
    """The same step by torch; reads `control` on the host, so it waits where that is on a GPU."""
    folds, advances = control.fold.tolist(), control.advance.tolist()
    inv_scale, clip, factors = control.inv_scale.item(), control.clip.item(), hyper.tolist()
    for number, entry in enumerate(table.entries):
        fold, advance = folds[table.first + number], advances[table.first + number]
        channel = _channels(entry)
        if fold != FOLD_NONE and entry.weight.numel():
            grad = table.grad(number)
            assert grad is not None, f"entry {number} folds without a gradient"
            if channel.numel():
                t = (entry.start.long() + advance).clamp(max=bias.shape[1] - 1)
                _update(entry, channel, grad, (inv_scale, clip), factors[entry.group], bias[entry.group][t])
            if entry.accumulator is not None:
                _fold(entry.accumulator, grad, (inv_scale, clip), add=fold == FOLD_ADD)
                entry.accumulator.index_fill_(entry.axis, channel, 0)
        _write(entry, channel)


def write_masters_reference(table: Table) -> None:
    """`write_masters` by torch."""
    for entry in table.entries:
        _write(entry, _channels(entry))


def _channels(entry: Entry) -> Tensor:
    """int64: the channel at each position of the compact state; empty before the first selection."""
    if entry.slot is None:
        return entry.start.new_zeros(1, dtype=torch.int64)
    chosen = torch.nonzero(entry.slot >= 0).view(-1)
    assert chosen.numel() in (0, entry.selected), f"{chosen.numel()} channels have a slot, the state holds {entry.selected}"
    channel = torch.empty_like(chosen)
    channel[entry.slot[chosen].long()] = chosen
    return channel


def _scaled(grad: Tensor, scales: tuple[float, float]) -> Tensor:
    """fp32 `(grad * inv_scale) * clip`; a factor of 1 changes no bit and is left out."""
    scaled = grad.float()
    for scale in scales:
        if scale != 1:
            scaled = scaled * scale
    return scaled


def _update(
    entry: Entry, channel: Tensor, grad: Tensor, scales: tuple[float, float], factors: list[float], bias: Tensor
) -> None:
    chosen = grad if entry.kind == "whole" else grad.index_select(entry.axis, channel)
    hyper = dict(zip(HYPER, factors, strict=True))
    lr = hyper.pop("lr")
    del hyper["unused"]
    shape = {"column": (1, -1), "row": (-1, 1), "whole": (1, 1)}[entry.kind]
    first, second = bias[:, 0].view(shape), bias[:, 1].view(shape)
    state = (entry.master, entry.exp_avg, entry.exp_avg_sq, _scaled(chosen, scales))
    adamw_(*state, step_size=first * lr, denom_scale=second, **hyper)


def _fold(accumulator: Tensor, grad: Tensor, scales: tuple[float, float], *, add: bool) -> None:
    for piece in chunks(*grad.shape, CHUNK_PER_THREAD * torch.get_num_threads()):
        scaled = _scaled(grad[piece], scales)
        accumulator[piece].copy_(accumulator[piece].float().add_(scaled) if add else scaled)


def _write(entry: Entry, channel: Tensor) -> None:
    if entry.kind == "whole":
        entry.weight.copy_(entry.master)
    elif channel.numel():
        entry.weight.index_copy_(entry.axis, channel, entry.master.to(entry.weight.dtype))
