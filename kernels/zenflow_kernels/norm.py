"""Sums of squares of the gradient, without atomics: the first stage of its norm.

    partials[tile] = sum over the tile's elements of f64(g)**2        (raw gradient, the loss scale still in it)

Summed in float64, where no finite fp32, bf16 or fp16 gradient overflows, so a sum is finite exactly when its elements
are. Each parameter is cut into fixed tiles and a program sums one of them: the same bits in every run, whatever lies
next to a parameter. `close_step` is the second stage.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels import tiles
from zenflow_kernels.dispatch import EXACT, on_device, register_limit, tl, triton, triton_dtype, uses_triton
from zenflow_kernels.table import Table

NORM_BLOCK = 4096  # elements a program reads at once
WARPS = 8
REGISTERS = 64  # of a thread, at most: four programs share 65,536
SERIAL = 16384  # elements: torch adds fewer than 32768 on one thread, so the order does not depend on the thread count
GPU_CHUNK = 1 << 26  # elements that the reference squares at once on a GPU: 512 MB


@triton.jit
def _partial_norms_kernel(
    fields_ptr, grad_ptrs, tile_entry_ptr,
    partials_ptr,
    TILE: tl.constexpr, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    entry = tl.load(tile_entry_ptr + tile)
    address = tl.load(grad_ptrs + entry)
    begin = (tile - tiles.field(fields_ptr, entry, tiles.NORM_TILE_0)) * TILE
    left = tiles.field(fields_ptr, entry, tiles.ROWS) * tiles.field(fields_ptr, entry, tiles.COLS) - begin
    left = tl.where(address == 0, 0, left)
    grad_ptr = tiles.pointer(address, DTYPE, ALIGNED) + begin
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    if left >= TILE:
        # A full tile goes without a mask, which would forbid vector loads.
        for offset in range(0, TILE, BLOCK):
            x = tl.load(grad_ptr + offset + tl.arange(0, BLOCK)).to(tl.float64)  # [BLOCK]
            sums += x * x
    else:
        for offset in range(0, left.to(tl.int32), BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            x = tl.load(grad_ptr + offs, mask=offs < left, other=0.0).to(tl.float64)  # [BLOCK]
            sums += x * x
    tl.store(partials_ptr + tile, tl.sum(sums, axis=0))


def partial_norms(table: Table, partials: Tensor) -> None:
    """Write the sum of squares of each norm tile of the bound gradients into `partials`, f64 `[table.n_partials]`.

    An absent gradient contributes 0; a sum is non-finite exactly when its tile holds an inf or a NaN.
    """
    if partials.dtype != torch.float64 or partials.numel() != table.n_partials or not partials.is_contiguous():
        raise ValueError(
            f"partials must be contiguous torch.float64 [{table.n_partials}], got {tuple(partials.shape)} of "
            f"{partials.dtype}"
        )
    if table.n_partials == 0:
        return
    if not uses_triton(partials):
        return partial_norms_reference(table, partials)
    with on_device(partials):
        _partial_norms_kernel[(table.n_partials,)](
            table.fields, table.grad_ptrs, table.norm_tile_entry,
            partials,
            TILE=table.norm_tile, BLOCK=min(NORM_BLOCK, table.norm_tile),
            DTYPE=triton_dtype(table.weight_dtype), ALIGNED=table.grads_aligned,
            num_warps=WARPS, **register_limit(REGISTERS), **EXACT,
        )  # fmt: skip


def partial_norms_reference(table: Table, partials: Tensor) -> None:
    """The same sums by torch, in an order that does not depend on the number of threads."""
    tile, start = table.norm_tile, 0
    for number, entry in enumerate(table.entries):
        n_tiles = -(-entry.weight.numel() // tile)
        out, grad = partials[start : start + n_tiles], table.grad(number)
        start += n_tiles
        if grad is None:
            out.zero_()
            continue
        flat, whole_tiles = grad.view(-1), entry.weight.numel() // tile
        limit = 2 * SERIAL * torch.get_num_threads() if flat.device.type == "cpu" else GPU_CHUNK
        step = max(1, limit // tile)
        for first in range(0, whole_tiles, step):
            last = min(whole_tiles, first + step)
            out[first:last] = _tile_sums(flat[first * tile : last * tile].view(-1, tile))
        if whole_tiles < n_tiles:
            out[whole_tiles:] = _tile_sums(flat[whole_tiles * tile :].view(1, -1))


def _tile_sums(x: Tensor) -> Tensor:
    """f64 sums of squares of the rows of `x`; a row longer than SERIAL is halved until it is not."""
    squares = x.to(torch.float64)
    squares.mul_(squares)
    while squares.shape[1] > SERIAL and squares.shape[1] % 2 == 0:
        squares = squares.view(-1, squares.shape[1] // 2)
    return squares.sum(1).view(x.shape[0], -1).sum(1)
