"""What the ops on channels share: checks of a matrix and of an index, and the tiles of a compact matrix.

The compact matrix of the channels `index`, int64 `[n]`, of a matrix `[rows, cols]`:

    column   compact[r, j] is x[r, index[j]]      [rows, n]
    row      compact[j, c] is x[index[j], c]      [n, cols]
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels import cards
from zenflow_kernels.dispatch import FLOAT_DTYPES, on_device, tl, triton

TILE_ROWS, TILE_COLS = 1, 512  # of the compact matrix
WARPS = 1


@triton.jit
def compact_tile(
    index_ptr, rows, cols, n, n_col_tiles,
    ROW: tl.constexpr, MULTIPLE: tl.constexpr, TILE_R: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Offsets in the matrix and in the compact one, and the mask, of this program's tile; [TILE_R, TILE_C] int64.

    Every row is made of vectors of MULTIPLE elements; 1 promises nothing.
    """
    program = tl.program_id(0)
    row_tile = program // n_col_tiles
    r = row_tile.to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    c = (program - row_tile * n_col_tiles).to(tl.int64) * TILE_C + tl.arange(0, TILE_C)
    if ROW:
        cols = tl.multiple_of(cols.to(tl.int64), MULTIPLE)  # an argument itself takes no promise
        mask = (r < n)[:, None] & (c < cols)[None, :]
        channel = tl.load(index_ptr + r, mask=r < n, other=0)  # [TILE_R]
        return channel[:, None] * cols + c[None, :], r[:, None] * cols + c[None, :], mask
    mask = (r < rows)[:, None] & (c < n)[None, :]
    channel = tl.load(index_ptr + c, mask=c < n, other=0)  # [TILE_C]
    return r[:, None] * cols + channel[None, :], r[:, None] * n + c[None, :], mask


def launch_compact(
    op: str, kernel: triton.JITFunction, x: Tensor, index: Tensor, compact: Tensor, channel_dim: str
) -> None:
    """Run `kernel`, which is `op`'s, over the tiles of the compact matrix; nothing where that is empty."""
    if compact.numel() == 0:
        return
    own = {"TILE_ROWS": TILE_ROWS, "TILE_COLS": TILE_COLS, "WARPS": WARPS}
    chosen = cards.constants(op, cards.launch_class(channel_dim, x.dtype), x.device, **own)
    tile_rows, tile_cols = chosen["TILE_ROWS"], chosen["TILE_COLS"]
    col_tiles = -(-compact.shape[1] // tile_cols)
    with on_device(x):
        kernel[(-(-compact.shape[0] // tile_rows) * col_tiles,)](
            x, index,
            compact,
            x.shape[0], x.shape[1], index.numel(), col_tiles,
            ROW=channel_dim == "row", MULTIPLE=row_multiple(x, compact) if channel_dim == "row" else 1,
            TILE_R=tile_rows, TILE_C=tile_cols,
            num_warps=chosen["WARPS"],
        )  # fmt: skip


def row_multiple(*matrices: Tensor) -> int:
    """Elements in a vector of 16 bytes if every row of these matrices, equally long, is made of them, else 1."""
    vector = 16 // matrices[0].element_size()
    even = all(x.data_ptr() % 16 == 0 and x.shape[1] % vector == 0 for x in matrices)
    return vector if even else 1


def integers_on(device: torch.device, values: list[int]) -> Tensor:
    """int64 `[n]` on the device, without waiting for it."""
    staged = torch.tensor(values, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
    return staged.to(device, non_blocking=True)


def channel_axis(channel_dim: str) -> int:
    """The dimension along which channels are numbered; ValueError unless `channel_dim` is "column" or "row"."""
    if channel_dim not in ("column", "row"):
        raise ValueError(f'channel_dim must be "column" or "row", got {channel_dim!r}')
    return 1 if channel_dim == "column" else 0


def compact_shape(x: Tensor, n: int, channel_dim: str) -> tuple[int, int]:
    """Shape of the compact matrix of `n` channels of `x`."""
    return (x.shape[0], n) if channel_dim == "column" else (n, x.shape[1])


def check_matrix(name: str, x: Tensor) -> None:
    """ValueError unless `x` is a contiguous matrix of fp32, bf16 or fp16."""
    if x.dim() != 2 or x.dtype not in FLOAT_DTYPES or not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [rows, cols] of {FLOAT_DTYPES}, got {tuple(x.shape)} with strides {x.stride()} "
            f"of {x.dtype}"
        )


def check_channels(x: Tensor, index: Tensor, channel_dim: str) -> None:
    """ValueError unless the arguments are of the kinds that gather and scatter take; values are not read."""
    channel_axis(channel_dim)
    check_matrix("x", x)
    if index.dtype != torch.int64 or index.dim() != 1 or index.device != x.device or not index.is_contiguous():
        raise ValueError(
            f"index must be contiguous torch.int64 [n] on {x.device}, got {tuple(index.shape)} of {index.dtype} on "
            f"{index.device}"
        )


def check_index(x: Tensor, index: Tensor, channel_dim: str, *, unique: bool) -> None:
    """ValueError for an index outside the matrix, and for a repeated one if `unique`; this waits for the device."""
    if index.numel() == 0:
        return
    channels = x.shape[channel_axis(channel_dim)]
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < 0 or high >= channels:
        raise ValueError(f"index must be in [0, {channels}), got values from {low} to {high}")
    if unique:
        ordered = index.sort().values
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if repeated.numel():
            raise ValueError(f"index must not repeat a channel, got {int(repeated[0])} more than once")
