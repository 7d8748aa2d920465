"""The gradient's norm, the finite check and the clip factor, without float atomics and without asking the host.

    sum  = sum over all parameters and elements of f64(g)**2        (raw gradient, before the loss scale is removed)
    inv  = 1 / grad_scale                                           (fp32; 1 without a scale)
    norm = sqrt(sum) * inv                                          (f64)
    clip = fp32(min(1, max_grad_norm / (norm + 1e-6)))              (1 without a limit, and when the step is skipped)

Squares are summed in float64, where no finite fp32, bf16 or fp16 gradient overflows, so `norm` is finite exactly when
the gradient is. Each parameter is cut into fixed tiles; a program sums one tile, and one program sums the tiles in
their order: the same bits in every run, whatever lies next to a parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, FOLD_OVERWRITE, StepControl
from zenflow_kernels.dispatch import on_device, uses_triton
from zenflow_kernels.table import Table

SERIAL = 16384  # elements: torch adds fewer than 32768 on one thread, so the order does not depend on the thread count


def partial_norms(table: Table, partials: Tensor) -> None:
    """Write the sum of squares of each norm tile of the bound gradients into `partials`, f64 `[table.n_partials]`.

    An absent gradient contributes 0; a sum is non-finite exactly when its tile holds an inf or a NaN.
    """
    if partials.dtype != torch.float64 or partials.numel() != table.n_partials or not partials.is_contiguous():
        raise ValueError(
            f"partials must be contiguous torch.float64 [{table.n_partials}], got {tuple(partials.shape)} of {partials.dtype}"
        )
    if table.n_partials == 0:
        return
    partial_norms_reference(table, partials)


def close_step(
    control: StepControl,
    partials: Tensor,
    present: Tensor,
    *,
    position: int,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Decide this step from the partial sums of all tables and write it into `control`.

    `partials` f64 `[n]`; `present` int32 `[P]`, 1 where the parameter has a gradient; `position` the step's place in
    its window (0 starts a new window: the counts begin again). `grad_scale` and `found_inf` are GradScaler's, one
    element each, read on the device. A step is finite if the norm is and `found_inf` is 0; then every present
    parameter folds (overwriting at its first counted step of the window) and its count and advance grow by 1.
    """
    if not 0 <= position < control.max_steps:
        raise ValueError(f"position must be in [0, {control.max_steps}), got {position}")
    if present.dtype != torch.int32 or present.shape != control.count.shape:
        raise ValueError(f"present must be torch.int32 {tuple(control.count.shape)}, got {tuple(present.shape)} of {present.dtype}")
    close_step_reference(
        control, partials, present, position=position, max_grad_norm=max_grad_norm, grad_scale=grad_scale, found_inf=found_inf
    )


def partial_norms_reference(table: Table, partials: Tensor) -> None:
    """The same sums by torch, in an order that does not depend on the number of threads."""
    tile, start = table.norm_tile, 0
    for number, entry in enumerate(table.entries):
        tiles = -(-entry.weight.numel() // tile)
        out, grad = partials[start : start + tiles], table.grad(number)
        start += tiles
        if grad is None:
            out.zero_()
            continue
        flat, whole_tiles = grad.view(-1), entry.weight.numel() // tile
        step = max(1, 2 * SERIAL * torch.get_num_threads() // tile)
        for first in range(0, whole_tiles, step):
            last = min(whole_tiles, first + step)
            out[first:last] = _tile_sums(flat[first * tile : last * tile].view(-1, tile))
        if whole_tiles < tiles:
            out[whole_tiles:] = _tile_sums(flat[whole_tiles * tile :].view(1, -1))


def _tile_sums(x: Tensor) -> Tensor:
    """f64 sums of squares of the rows of `x`; a row longer than SERIAL is halved until it is not."""
    squares = x.to(torch.float64)
    squares.mul_(squares)
    while squares.shape[1] > SERIAL and squares.shape[1] % 2 == 0:
        squares = squares.view(-1, squares.shape[1] // 2)
    return squares.sum(1).view(x.shape[0], -1).sum(1)


def close_step_reference(
    control: StepControl,
    partials: Tensor,
    present: Tensor,
    *,
    position: int,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """The same decision by torch operations, on any device."""
    one = torch.ones(1, dtype=torch.float32, device=partials.device)
    total = torch.stack([piece.sum() for piece in partials.split(SERIAL)]).sum().view(1)
    inv = one if grad_scale is None else one / grad_scale.view(1).float()
    norm = total.sqrt() * inv.double()
    finite = torch.isfinite(norm)
    if found_inf is not None:
        finite = finite & (found_inf.view(1) == 0)
    clip = one
    if max_grad_norm is not None:
        clip = torch.where(finite, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float(), one)
    control.finite.copy_(finite)
    control.clip.copy_(clip)
    control.inv_scale.copy_(inv)
    control.norm.copy_(norm)
    control.skipped.add_(~finite)
    log = control.window_log[2 + 4 * position : 6 + 4 * position]
    log[0:1].copy_(finite)
    log[1:2].copy_(control.clip.view(torch.int32))
    log[2:3].copy_(control.inv_scale.view(torch.int32))
    log[3] = 0
    if position == 0:
        control.count.zero_()
    counted = (present != 0) & finite
    first = torch.where(control.count == 0, FOLD_OVERWRITE, FOLD_ADD)
    control.fold.copy_(torch.where(counted, first, FOLD_NONE))
    control.count.add_(counted)
    control.advance.add_(counted)
