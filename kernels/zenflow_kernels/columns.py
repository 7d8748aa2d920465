"""What `fused_step` does with columns: a few rows folded, then updated, in turn; or updated alone. Device code only.

Where there is an accumulator a program folds some rows and then updates their selected elements, whose gradients its
cache still holds, so the tile may be larger than a program's share of the cache. An update takes whole blocks: what is
left waits for the next rows. Without an accumulator no row waits for another: several programs share a tile's blocks.

A sector that is written in part is read first in any case, and most weights that are rounded to 16 bits do not change
in a step: these are read under the update's other loads, and only those whose bits change are written. In fp32 nearly
all weights change: all are written, and none is read.
"""

from __future__ import annotations

from zenflow_kernels import tiles
from zenflow_kernels.dispatch import tl, triton
from zenflow_kernels.fold import fold_tile
from zenflow_kernels.selected import (
    adamw,
    channel_pointers,
    chosen_size,
    load_hyper,
    load_places,
    state_pointers,
    store_places,
)


@triton.jit
def step_columns(
    fields_ptr, entry, grad_ptr, part,
    row_0, col_0, height, width, state_0, position_0, dense_0, size, share_width,
    fold, inv_scale, clip, hyper_ptr, key,
    WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr, FOLDS: tl.constexpr,
    EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fold BLOCK_R rows, then AdamW in the blocks of the share that end in them, until the tile is done.

    Without FOLDS: AdamW in every PARTSth block of the share.
    """
    cols = tiles.field(fields_ptr, entry, tiles.COLS, ROW_MULTIPLE)
    channels = channel_pointers(fields_ptr, entry, position_0)
    state = state_pointers(fields_ptr, entry, dense_0, state_0, WEIGHT_DTYPE, MASTER_DTYPE, False)
    hyper = load_hyper(hyper_ptr, tiles.field(fields_ptr, entry, tiles.GROUP))
    grad_share_ptr = grad_ptr + dense_0
    channel_ptr, _, _ = channels
    size = chosen_size(channel_ptr, size)
    if FOLDS:
        slot_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.SLOT), tl.int32, False)
        accumulator_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.ACCUMULATOR), ACC_DTYPE, EVEN)
        begin = size * 0
        for r_0 in range(0, height, BLOCK_R):
            r_end = tl.minimum(r_0 + BLOCK_R, height)
            fold_tile(
                grad_ptr, slot_ptr, accumulator_ptr,
                row_0 + r_0, col_0, r_end - r_0, width, cols, fold, inv_scale, clip,
                tiles.COLUMN, ACC_DTYPE, ROW_MULTIPLE, BLOCK_R, BLOCK_C, True,
            )  # fmt: skip
            end = tl.where(r_end == height, size, tl.minimum(r_end * share_width // BLOCK * BLOCK, size))
            _update_blocks(
                begin, end, share_width, cols, dense_0, channels, grad_share_ptr, state,
                inv_scale, clip, hyper, key,
                1, BLOCK,
            )  # fmt: skip
            begin = end
    else:
        _update_blocks(
            part * BLOCK, size, share_width, cols, dense_0, channels, grad_share_ptr, state,
            inv_scale, clip, hyper, key,
            PARTS, BLOCK,
        )  # fmt: skip


@triton.jit
def _update_blocks(
    begin, end, share_width, cols, dense_0, channels, grad_ptr, state,
    inv_scale, clip, hyper, key,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW in every PARTSth block of a share's elements from `begin` up to `end`."""
    channel_ptr, size_ptr, scale_ptr = channels
    weight_ptr, _, _, _ = state
    CHANGED_ALONE: tl.constexpr = weight_ptr.dtype.element_ty != tl.float32
    for offset in range(begin, end, PARTS * BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        mask = offs < end
        r = offs // share_width
        c = offs - r * share_width
        # A share has several rows only where a row is shorter than a tile, so 32 bits hold r * cols.
        dense = r * cols.to(tl.int32) + tl.load(channel_ptr + c, mask=mask, other=0)  # [BLOCK]
        step_size = tl.load(size_ptr + c, mask=mask, other=1.0)
        denom_scale = tl.load(scale_ptr + c, mask=mask, other=1.0)
        old = tl.load(weight_ptr + dense, mask=mask, other=0.0) if CHANGED_ALONE else None
        g, p, m, v = load_places(dense, offs, mask, grad_ptr, state, inv_scale, clip)
        m, v, p = adamw(m, v, p, g, step_size, denom_scale, hyper)
        store_places(dense, offs, mask, m, v, p, old, state, dense_0, key)


@triton.jit
def write_columns(
    fields_ptr, entry, part, height, state_0, position_0, dense_0, size, share_width,
    WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight = round(master) in every PARTSth block of a share: BLOCK_C selected columns of BLOCK // BLOCK_C rows."""
    cols = tiles.field(fields_ptr, entry, tiles.COLS).to(tl.int32)
    channel_ptr, _, _ = channel_pointers(fields_ptr, entry, position_0)
    weight_ptr, master_ptr, _, _ = state_pointers(
        fields_ptr, entry, dense_0, state_0, WEIGHT_DTYPE, MASTER_DTYPE, False
    )
    places = tl.arange(0, BLOCK)
    row_blocks = tl.cdiv(share_width, BLOCK_C)
    height = tl.where(chosen_size(channel_ptr, size) > 0, height, 0)
    for block in range(part, tl.cdiv(height, BLOCK // BLOCK_C) * row_blocks, PARTS):
        group = block // row_blocks
        r = group * (BLOCK // BLOCK_C) + places // BLOCK_C
        c = (block - group * row_blocks) * BLOCK_C + places % BLOCK_C
        mask = (r < height) & (c < share_width)
        channel = tl.load(channel_ptr + c, mask=mask, other=0)  # [BLOCK]
        p = tl.load(master_ptr + r * share_width + c, mask=mask, other=0.0)
        tl.store(weight_ptr + r * cols + channel, p.to(WEIGHT_DTYPE), mask=mask)
