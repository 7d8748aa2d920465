"""How a program finds its part of a table: an entry's fields, a tile, a tile's share of the compact state.

Shares divide the compact state among the tiles of an entry, so that the program that has just read a block of the
gradient's rows also updates the selected elements of these rows. Device code only; `table.py` writes what it reads.
"""

from __future__ import annotations

from zenflow_kernels.dispatch import tl, triton

KINDS = {"column": 0, "row": 1, "whole": 2}

# Columns of the table on the device, one int64 each; addresses first.
N_FIELDS = tl.constexpr(18)
WEIGHT, MASTER, EXP_AVG, EXP_AVG_SQ = (tl.constexpr(column) for column in range(4))
START, SLOT, CHANNEL, ACCUMULATOR = (tl.constexpr(column) for column in range(4, 8))
ROWS, COLS, SELECTED, GROUP = (tl.constexpr(column) for column in range(8, 12))
TILE_ROWS, PARTS, CHANNELS = (tl.constexpr(column) for column in range(12, 15))
STEP_TILE_0, NORM_TILE_0, CHANNEL_TILE_0 = (tl.constexpr(column) for column in range(15, 18))

COLUMN, ROW, WHOLE = (tl.constexpr(kind) for kind in KINDS.values())


@triton.jit
def field(fields_ptr, entry, COLUMN_NUMBER: tl.constexpr):
    """int64 scalar: one column of an entry's row."""
    return tl.load(fields_ptr + entry.to(tl.int64) * N_FIELDS + COLUMN_NUMBER)


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
def compact_extent(fields_ptr, entry, block, part, row_0, col_0, height, width, KIND: tl.constexpr):
    """First row, first column, height and width of a tile's share of the compact state."""
    selected = field(fields_ptr, entry, SELECTED)
    if KIND == COLUMN:
        parts = field(fields_ptr, entry, PARTS)
        col_0 = part * selected // parts
        width = ((part + 1) * selected // parts - col_0).to(tl.int32)
    if KIND == ROW:
        blocks = tl.cdiv(field(fields_ptr, entry, ROWS), field(fields_ptr, entry, TILE_ROWS))
        row_0 = block * selected // blocks
        height = ((block + 1) * selected // blocks - row_0).to(tl.int32)
    return row_0, col_0, height, width


@triton.jit
def locate(offs, row_0, col_0, height, width, cols, selected, channel_ptr, KIND: tl.constexpr):
    """Of the elements `offs` of a share: offset in the state and in the weight, position of the channel, mask."""
    mask = offs < height * width
    if KIND == WHOLE:
        state = col_0 + offs  # [BLOCK] int64
        return state, state, offs * 0, mask
    r = offs // width
    row, col = row_0 + r, col_0 + (offs - r * width)  # [BLOCK] int64
    if KIND == COLUMN:
        channel = tl.load(channel_ptr + col, mask=mask, other=-1)
        return row * selected + col, row * cols + channel, col, mask & (channel >= 0)
    channel = tl.load(channel_ptr + row, mask=mask, other=-1)
    return row * cols + col, channel.to(tl.int64) * cols + col, row, mask & (channel >= 0)


@triton.jit
def channels_kernel(
    fields_ptr, tile_entry_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Invert `slot` into the channel of each position of the compact state."""
    tile = tl.program_id(0)
    entry = tl.load(tile_entry_ptr + tile)
    slot_ptr = pointer(field(fields_ptr, entry, SLOT), tl.int32, False)
    channel_ptr = pointer(field(fields_ptr, entry, CHANNEL), tl.int32, False)
    channels = (tile - field(fields_ptr, entry, CHANNEL_TILE_0)) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + channels, mask=channels < field(fields_ptr, entry, CHANNELS), other=-1)  # [BLOCK]
    tl.store(channel_ptr + slot, channels.to(tl.int32), mask=slot >= 0)
