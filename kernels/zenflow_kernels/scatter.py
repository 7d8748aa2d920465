"""Copy a compact matrix over chosen channels of a matrix, in place: the inverse of gather.

    column   x[r, index[j]] = values[r, j]
    row      x[index[j], c] = values[j, c]

Bits are copied. A repeated channel would have two writers, hence is rejected.
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
def _scatter_kernel(
    x_ptr, index_ptr,
    values_ptr,
    rows, cols, n, n_col_tiles,
    ROW: tl.constexpr, MULTIPLE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    offs_x, offs_values, mask = compact_tile(index_ptr, rows, cols, n, n_col_tiles, ROW, MULTIPLE, TILE_R, TILE_C)
    tl.store(x_ptr + offs_x, tl.load(values_ptr + offs_values, mask=mask, other=0.0), mask=mask)


def scatter_channels_(x: Tensor, index: Tensor, values: Tensor, channel_dim: str, *, validate: bool = True) -> Tensor:
    """Write `values` over the channels `index` (int64 `[n]`) of `x` (`[rows, cols]`, contiguous), and return `x`.

    `values` has x's dtype and is contiguous: `[rows, n]` for `channel_dim` "column", `[n, cols]` for "row". Raises
    ValueError for a wrong shape, dtype or layout, for an index out of range and for a repeated one; `validate=False`
    leaves out the last two checks, which wait for the device.
    """
    check_channels(x, index, channel_dim)
    shape = compact_shape(x, index.numel(), channel_dim)
    good = tuple(values.shape) == shape and values.dtype == x.dtype and values.device == x.device
    if not good or not values.is_contiguous():
        raise ValueError(
            f"values must be contiguous {shape} of {x.dtype} on {x.device}, got {tuple(values.shape)} with strides "
            f"{values.stride()} of {values.dtype} on {values.device}"
        )
    if validate:
        check_index(x, index, channel_dim, unique=True)
    if uses_triton(x):
        launch_compact("scatter_channels", _scatter_kernel, x, index, values, channel_dim)
        return x
    return scatter_channels_reference_(x, index, values, channel_dim)


def scatter_channels_reference_(x: Tensor, index: Tensor, values: Tensor, channel_dim: str) -> Tensor:
    """The same copy by torch."""
    return x.index_copy_(channel_axis(channel_dim), index, values)
