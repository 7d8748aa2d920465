"""What `fused_step` does with the deferred channels: their gradients go into the accumulator. Device code only."""

from __future__ import annotations

from zenflow_kernels import tiles
from zenflow_kernels.control import FOLD_ADD
from zenflow_kernels.dispatch import tl, triton
from zenflow_kernels.selected import scale_gradient

ADD = tl.constexpr(FOLD_ADD)


@triton.jit
def fold_tile(
    grad_ptr, slot_ptr, accumulator_ptr,
    row_0, col_0, height, width, cols, fold, inv_scale, clip,
    KIND: tl.constexpr, ACC_DTYPE: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold rows [row_0, row_0 + height) x columns [col_0, col_0 + width), writing 0 where a channel is selected.

    ONE_BLOCK: there are no more rows than BLOCK_R.
    """
    grad_ptr += row_0 * cols + col_0
    accumulator_ptr += row_0 * cols + col_0
    # Several rows only where a row is shorter than a tile, so 32 bits hold the offsets inside the tile.
    stride = tl.multiple_of(tl.where(height == 1, 0, cols).to(tl.int32), ROW_MULTIPLE)
    add = tl.full([BLOCK_R, BLOCK_C], fold, tl.int32) == ADD
    for c in range(0, width, BLOCK_C):
        offs_c = c + tl.arange(0, BLOCK_C)
        mask_c = offs_c < width
        if KIND == tiles.COLUMN:
            slot_c = tl.load(slot_ptr + col_0 + offs_c, mask=mask_c, other=-1)  # [BLOCK_C]
        for r in range(0, 1 if ONE_BLOCK else height, BLOCK_R):
            offs_r = r + tl.arange(0, BLOCK_R)
            mask = (offs_r < height)[:, None] & mask_c[None, :]
            offs = offs_r[:, None] * stride + offs_c[None, :]
            if KIND == tiles.COLUMN:
                deferred = (slot_c < 0)[None, :]
                mask_grad = mask  # one mask for neighbours, or loads are not vectorised
            else:
                deferred = (tl.load(slot_ptr + row_0 + offs_r, mask=offs_r < height, other=0) < 0)[:, None]
                mask_grad = mask & deferred
            grad = tl.load(grad_ptr + offs, mask=mask_grad, other=0.0)  # [BLOCK_R, BLOCK_C]
            sums = tl.load(accumulator_ptr + offs, mask=mask_grad & add, other=0.0)
            scaled = scale_gradient(grad, inv_scale, clip)
            folded = tl.where(add, sums.to(tl.float32) + scaled, scaled)
            tl.store(accumulator_ptr + offs, tl.where(deferred, folded, 0.0).to(ACC_DTYPE), mask=mask)
