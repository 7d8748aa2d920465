"""Copy chosen channels of a matrix into a compact one.

    column   out[r, j] = x[r, index[j]]
    row      out[j, c] = x[index[j], c]

Bits are copied; nothing is computed. Offsets are int64, so matrices beyond 2**31 elements work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.dispatch import FLOAT_DTYPES, on_device, tl, triton, uses_triton

TILE_ROWS, TILE_COLS = 8, 256  # of the compact matrix


@triton.jit
def compact_tile(
    index_ptr, rows, cols, n, n_col_tiles,
    ROW: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Offsets in the matrix and in the compact one, and the mask, of this program's tile; [TILE_R, TILE_C] int64."""
    program = tl.program_id(0)
    row_tile = program // n_col_tiles
    r = row_tile.to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    c = (program - row_tile * n_col_tiles).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    if ROW:
        mask = (r < n)[:, None] & (c < cols)[None, :]
        channel = tl.load(index_ptr + r, mask=r < n, other=0)  # [TILE_R]
        return channel[:, None] * cols + c[None, :], r[:, None] * cols + c[None, :], mask
    mask = (r < rows)[:, None] & (c < n)[None, :]
    channel = tl.load(index_ptr + c, mask=c < n, other=0)  # [TILE_C]
    return r[:, None] * cols + channel[None, :], r[:, None] * n + c[None, :], mask


@triton.jit(do_not_specialize=["rows", "n_col_tiles"])
def _gather_kernel(
    x_ptr, index_ptr,
    out_ptr,
    rows, cols, n, n_col_tiles,
    ROW: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    offs_x, offs_out, mask = compact_tile(index_ptr, rows, cols, n, n_col_tiles, ROW, TILE_R, TILE_C)
    tl.store(out_ptr + offs_out, tl.load(x_ptr + offs_x, mask=mask, other=0.0), mask=mask)


def gather_channels(x: Tensor, index: Tensor, dim: str, *, validate: bool = True) -> Tensor:
    """The channels `index` (int64 `[n]`) of `x` (`[rows, cols]`, contiguous fp32, bf16 or fp16), in that order.

    `dim` is "column" (gives `[rows, n]`) or "row" (gives `[n, cols]`). Raises ValueError for an index out of range;
    `validate=False` leaves out that check, which waits for the device.
    """
    check_channels(x, index, dim)
    if validate:
        check_index(x, index, dim, unique=False)
    n = index.numel()
    if not uses_triton(x):
        return gather_channels_reference(x, index, dim)
    out = x.new_empty((x.shape[0], n) if dim == "column" else (n, x.shape[1]))
    launch_compact(_gather_kernel, x, index, out, dim)
    return out


def gather_channels_reference(x: Tensor, index: Tensor, dim: str) -> Tensor:
    """The same copy by torch."""
    return x.index_select(1 if dim == "column" else 0, index)


def check_channels(x: Tensor, index: Tensor, dim: str) -> None:
    """ValueError unless `x`, `index` and `dim` are of the kinds that gather and scatter take."""
    if dim not in ("column", "row"):
        raise ValueError(f'dim must be "column" or "row", got {dim!r}')
    if x.dim() != 2 or x.dtype not in FLOAT_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"x must be contiguous [rows, cols] of {FLOAT_DTYPES}, got {tuple(x.shape)} with strides {x.stride()} of "
            f"{x.dtype}"
        )
    if index.dtype != torch.int64 or index.dim() != 1 or index.device != x.device or not index.is_contiguous():
        raise ValueError(
            f"index must be contiguous torch.int64 [n] on {x.device}, got {tuple(index.shape)} of {index.dtype} on "
            f"{index.device}"
        )


def check_index(x: Tensor, index: Tensor, dim: str, *, unique: bool) -> None:
    """ValueError for an index outside the matrix, and for a repeated one if they must be unique."""
    if index.numel() == 0:
        return
    channels = x.shape[1 if dim == "column" else 0]
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= channels:
        raise ValueError(f"index must be in [0, {channels}), got values from {low} to {high}")
    if unique:
        ordered = index.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.numel():
            raise ValueError(f"index must not repeat a channel, got {int(repeated[0])} more than once")


def launch_compact(kernel, x: Tensor, index: Tensor, compact: Tensor, dim: str) -> None:
    """Run `kernel` over the tiles of the compact matrix."""
    if compact.numel() == 0:
        return
    col_tiles = -(-compact.shape[1] // TILE_COLS)
    with on_device(x):
        kernel[(-(-compact.shape[0] // TILE_ROWS) * col_tiles,)](
            x, index,
            compact,
            x.shape[0], x.shape[1], index.numel(), col_tiles,
            ROW=dim == "row", TILE_R=TILE_ROWS, TILE_C=TILE_COLS,
        )  # fmt: skip
