"""Copy chosen channels of a matrix into a compact one.

    column   out[r, j] = x[r, index[j]]
    row      out[j, c] = x[index[j], c]

Bits are copied; nothing is computed. Offsets are int64, so matrices beyond 2**31 elements work.
"""

from __future__ import annotations

from torch import Tensor

from zenflow_kernels.channels import (
    channel_axis,
    check_channels,
    check_index,
    compact_shape,
    compact_tile,
    launch_compact,
)
from zenflow_kernels.dispatch import tl, triton, uses_triton


@triton.jit(do_not_specialize=["index_ptr", "rows", "cols", "n", "n_col_tiles"])
def _gather_kernel(
    x_ptr, index_ptr,
    out_ptr,
    rows, cols, n, n_col_tiles,
    ROW: tl.constexpr, MULTIPLE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    offs_x, offs_out, mask = compact_tile(index_ptr, rows, cols, n, n_col_tiles, ROW, MULTIPLE, TILE_R, TILE_C)
    tl.store(out_ptr + offs_out, tl.load(x_ptr + offs_x, mask=mask, other=0.0), mask=mask)


def gather_channels(x: Tensor, index: Tensor, channel_dim: str, *, validate: bool = True) -> Tensor:
    """The channels `index` (int64 `[n]`) of `x` (`[rows, cols]`, contiguous fp32, bf16 or fp16), in that order.

    `channel_dim` is "column" (gives `[rows, n]`) or "row" (gives `[n, cols]`). Raises ValueError for an index out of
    range; `validate=False` leaves out that check, which waits for the device.
    """
    check_channels(x, index, channel_dim)
    if validate:
        check_index(x, index, channel_dim, unique=False)
    if not uses_triton(x):
        return gather_channels_reference(x, index, channel_dim)
    out = x.new_empty(compact_shape(x, index.numel(), channel_dim))
    launch_compact("gather_channels", _gather_kernel, x, index, out, channel_dim)
    return out


def gather_channels_reference(x: Tensor, index: Tensor, channel_dim: str) -> Tensor:
    """The same copy by torch."""
    return x.index_select(channel_axis(channel_dim), index)
