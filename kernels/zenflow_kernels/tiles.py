"""How a program finds its part of a table: an entry's fields, a tile, a tile's share of the compact state.

Shares divide the compact state among the tiles of an entry: of columns a tile has the selected elements of its own
rows, whose gradients the program that folds them has just read; of rows, wherever they lie, as many selected ones as
every other tile, give or take one. Device code only; `table.py` writes what it reads.
"""

from __future__ import annotations

from zenflow_kernels.dispatch import tl, triton

KINDS = {"column": 0, "row": 1, "whole": 2}

# Columns of the table on the device, one int64 each; addresses first.
N_FIELDS = tl.constexpr(21)
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = (tl.constexpr(column) for column in range(4))
START, SLOT, CHANNEL, STEP_SIZE, DENOM_SCALE, ACCUMULATOR = (tl.constexpr(column) for column in range(4, 10))
ROWS, COLS, SELECTED, GROUP = (tl.constexpr(column) for column in range(10, 14))
TILE_ROWS, PARTS, CHANNELS = (tl.constexpr(column) for column in range(14, 17))
STEP_TILE_0, NORM_TILE_0, CHANNEL_TILE_0, STREAM = (tl.constexpr(column) for column in range(17, 21))

COLUMN, ROW, WHOLE = (tl.constexpr(kind) for kind in KINDS.values())


@triton.jit
def field(fields_ptr, entry, COLUMN_NUMBER: tl.constexpr, MULTIPLE: tl.constexpr = 1):
    """int64 scalar: one column of an entry's row, promised to be a multiple of MULTIPLE."""
    value = tl.load(fields_ptr + entry.to(tl.int64) * N_FIELDS + COLUMN_NUMBER)
    if MULTIPLE > 1:
        value = tl.multiple_of(value, MULTIPLE)
    return value


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """A pointer from an address in the table, aligned to ALIGN_BYTES if that is promised."""
    ptr = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        ptr = tl.multiple_of(ptr, 16)
    return ptr


@triton.jit
def tile_extent(fields_ptr, entry, tile, TILE: tl.constexpr, ROW_MULTIPLE: tl.constexpr):
    """Block of rows, part of a row, first row, first column, height and width of a tile."""
    cols = field(fields_ptr, entry, COLS)
    tile_rows = field(fields_ptr, entry, TILE_ROWS)
    parts = field(fields_ptr, entry, PARTS)
    tile = tile - field(fields_ptr, entry, STEP_TILE_0)
    block = tile // parts
    part = tile - block * parts
    row_0 = block * tile_rows
    col_0 = part * TILE
    height = tl.minimum(tile_rows, field(fields_ptr, entry, ROWS) - row_0).to(tl.int32)
    width = tl.minimum(cols - col_0, TILE).to(tl.int32)
    return block, part, row_0, col_0, height, tl.multiple_of(width, ROW_MULTIPLE)


@triton.jit
def share_extent(fields_ptr, entry, block, part, row_0, col_0, height, width, KIND: tl.constexpr):
    """A tile's share of the compact state, always one contiguous range.

    Its first element, the first channel's position, the first element of the weight that its rows (column), columns
    (row) or elements (whole) count from, its number of elements, and of elements in one of its rows.
    """
    cols = field(fields_ptr, entry, COLS)
    selected = field(fields_ptr, entry, SELECTED)
    if KIND == COLUMN:
        parts = field(fields_ptr, entry, PARTS)
        position_0 = part * selected // parts
        width = ((part + 1) * selected // parts - position_0).to(tl.int32)
        state_0, dense_0 = row_0 * selected + position_0, row_0 * cols
    elif KIND == ROW:
        blocks = tl.cdiv(field(fields_ptr, entry, ROWS), field(fields_ptr, entry, TILE_ROWS))
        position_0 = block * selected // blocks
        height = ((block + 1) * selected // blocks - position_0).to(tl.int32)
        state_0, dense_0 = position_0 * cols + col_0, col_0
    else:
        position_0, state_0, dense_0 = row_0, col_0, col_0
    return state_0, position_0, dense_0, height * width, width


@triton.jit
def locate(offs, position_0, size, width, cols, channel_ptr, KIND: tl.constexpr):
    """Of the elements `offs` of a share: place in the weight counted from its `dense_0`, channel's position, mask."""
    mask = offs < size
    if KIND == WHOLE:
        dense, position = offs, offs * 0  # [BLOCK]
    else:
        r = offs // width
        c = offs - r * width
        position = position_0.to(tl.int32) + (c if KIND == COLUMN else r)
        channel = tl.load(channel_ptr + position, mask=mask, other=-1)
        mask = mask & (channel >= 0)
        # A share has several rows only where a row is shorter than a tile, so 32 bits hold r * cols.
        dense = r * cols.to(tl.int32) + channel if KIND == COLUMN else channel.to(tl.int64) * cols + c
    return dense, position, mask
