"""What `fused_step` does with a tile of a matrix whose columns are stepped by rows. Device code only.

A program folds a few rows and then updates their selected elements, whose gradients its cache still holds, so the tile
may be larger than a program's share of the cache. An update takes whole blocks: what is left waits for the next rows.
"""

from __future__ import annotations

from zenflow_kernels import tiles
from zenflow_kernels.dispatch import tl, triton
from zenflow_kernels.fold import fold_tile
from zenflow_kernels.selected import adamw, load_hyper, scale_gradient


@triton.jit
def step_columns(
    fields_ptr, entry, grad_ptr,
    row_0, col_0, height, width, state_0, position_0, dense_0, size, share_width,
    fold, inv_scale, clip, hyper_ptr,
    WEIGHT_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr, EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold BLOCK_R rows, then AdamW in the blocks of the share that end in them, until the tile is done."""
    cols = tiles.field(fields_ptr, entry, tiles.COLS, ROW_MULTIPLE)
    slot_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.SLOT), tl.int32, False)
    accumulator_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.ACCUMULATOR), ACC_DTYPE, EVEN)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False) + position_0
    size_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.STEP_SIZE), tl.float32, False) + position_0
    scale_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.DENOM_SCALE), tl.float32, False) + position_0
    weight_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.WEIGHT), WEIGHT_DTYPE, False) + dense_0
    master_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.MASTER), tl.float32, False) + state_0
    exp_avg_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG), tl.float32, False) + state_0
    exp_avg_sq_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG_SQ), tl.float32, False) + state_0
    hyper = load_hyper(hyper_ptr, tiles.field(fields_ptr, entry, tiles.GROUP))
    grad_share_ptr = grad_ptr + dense_0
    # Before the first selection there is no channel at any position, afterwards one at each.
    size = tl.where(tl.load(channel_ptr, mask=size > 0, other=-1) >= 0, size, 0)
    begin = size * 0
    for r_0 in range(0, height, BLOCK_R):
        r_end = tl.minimum(r_0 + BLOCK_R, height)
        fold_tile(
            grad_ptr, slot_ptr, accumulator_ptr,
            row_0 + r_0, col_0, r_end - r_0, width, cols, fold, inv_scale, clip,
            tiles.COLUMN, ACC_DTYPE, ROW_MULTIPLE, BLOCK_R, BLOCK_C, True,
        )  # fmt: skip
        end = tl.where(r_end == height, size, tl.minimum(r_end * share_width // BLOCK * BLOCK, size))
        for offset in range(begin, end, BLOCK):
            offs = offset + tl.arange(0, BLOCK)
            mask = offs < end
            r = offs // share_width
            c = offs - r * share_width
            # A share has several rows only where a row is shorter than a tile, so 32 bits hold r * cols.
            dense = r * cols.to(tl.int32) + tl.load(channel_ptr + c, mask=mask, other=0)  # [BLOCK]
            g = scale_gradient(tl.load(grad_share_ptr + dense, mask=mask, other=0.0), inv_scale, clip)
            old = tl.load(weight_ptr + dense, mask=mask, other=0.0)
            p = tl.load(master_ptr + offs, mask=mask, other=0.0)
            m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
            v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
            step_size = tl.load(size_ptr + c, mask=mask, other=1.0)
            denom_scale = tl.load(scale_ptr + c, mask=mask, other=1.0)
            m, v, p = adamw(m, v, p, g, step_size, denom_scale, hyper)
            tl.store(exp_avg_ptr + offs, m, mask=mask)
            tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
            tl.store(master_ptr + offs, p, mask=mask)
            # A sector that is written in part is read first in any case, and most rounded weights do not change in a
            # step: so they are read here, and only those whose bits change are written.
            new = p.to(WEIGHT_DTYPE)
            changed = new.to(tl.int16, bitcast=True) != old.to(tl.int16, bitcast=True)
            tl.store(weight_ptr + dense, new, mask=mask & changed)
        begin = end
