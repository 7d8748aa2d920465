"""The host's part of a selection: channels that change owner, between the worker's state and blocks in the ring.

The trainer orders it while nothing else is on its way, when the ring is idle; the worker carries it out, because it has
most of the cores. A *block* is a part of the compact matrix of the channels that move (`[rows, n]` for columns, `[n,
cols]` for rows): it comes with the values of the channels that leave the GPU and goes with those that enter it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from zenflow.cpu_pass import round_to
from zenflow.native import ORDER, OUT_KINDS, Native
from zenflow.ring import SegmentMemory

NOWHERE = -1  # for `Order.block`: no value travels; for `Order.shown`: no shadow takes the weights
SERIAL_BELOW = 32768  # elements that move: fewer are not worth a thread


class Order(NamedTuple):
    """What happens to some channels of one matrix in one of the worker's arrays.

    enter, leave: int64 `[n]`, no channel twice, leave as long as enter or empty. The channels `leave` take the block's
    values (zeros if no value travels); then the block takes those of `enter`, which become zero if `clear`. A block
    holds `length` rows of columns, or columns of rows, from `first` on. shown: the turn of the shadow that takes the
    values of `leave`, rounded to weights, too.
    """

    matrix: int  # in Segment.matrices
    array: int  # master, exp_avg or exp_avg_sq
    block: int  # where it begins in the ring, in fp32 elements, or NOWHERE
    enter: np.ndarray
    leave: np.ndarray
    first: int
    length: int
    clear: bool
    shown: int = NOWHERE


def carry_out(memory: SegmentMemory, orders: Sequence[Order], threads: int, library: Native | None) -> None:
    """Do what `orders` say; they must not touch an element twice. AssertionError for a channel that does not exist."""
    rows = np.zeros(len(orders), dtype=ORDER)
    moved = 0
    for row, order in zip(rows, orders, strict=True):
        _check(memory, order)
        moved += order.enter.size * order.length
        if library is None:
            _carry_out_one(memory, order)
        else:
            _fill(row, memory, order)
    if library is not None and len(orders):
        library.exchange(rows.ctypes.data, len(orders), threads if moved >= SERIAL_BELOW else 1)


def _check(memory: SegmentMemory, order: Order) -> None:
    matrix, ring = memory.segment.matrices[order.matrix], memory.ring.nbytes // 4
    across = matrix.rows if matrix.channel_dim == "column" else matrix.cols
    assert 0 <= order.first <= order.first + order.length <= across, order
    assert order.leave.size in (0, order.enter.size), order
    for channels in (order.enter, order.leave):
        assert channels.dtype == np.int64 and channels.flags.c_contiguous, order
        assert not channels.size or 0 <= channels.min() <= channels.max() < matrix.channels, order
    if order.block != NOWHERE:
        assert 0 <= order.block <= ring - order.enter.size * order.length, order
    if order.shown != NOWHERE:
        assert order.array == 0 and order.block != NOWHERE and 0 <= order.shown < memory.segment.shadows, order


def _flat(memory: SegmentMemory, order: Order) -> np.ndarray:
    matrix = memory.segment.matrices[order.matrix]
    array = (memory.master, memory.exp_avg, memory.exp_avg_sq)[order.array]
    return array[matrix.offset : matrix.offset + matrix.numel]


def _fill(row: np.void, memory: SegmentMemory, order: Order) -> None:
    matrix = memory.segment.matrices[order.matrix]
    row["state"] = _flat(memory, order).ctypes.data
    row["block"] = 0 if order.block == NOWHERE else memory.ring.ctypes.data + 4 * order.block
    row["leave"], row["n_leave"] = order.leave.ctypes.data, order.leave.size
    row["enter"], row["n_enter"] = order.enter.ctypes.data, order.enter.size
    row["cols"], row["first"], row["length"] = matrix.cols, order.first, order.length
    row["by_column"], row["clear"] = matrix.channel_dim == "column", order.clear
    row["shown"] = 0 if order.shown == NOWHERE else _shown(memory, order).ctypes.data
    row["out_kind"] = OUT_KINDS[memory.segment.weight_dtype]


def _shown(memory: SegmentMemory, order: Order) -> np.ndarray:
    matrix = memory.segment.matrices[order.matrix]
    return memory.shadow_of(order.shown)[matrix.offset : matrix.offset + matrix.numel]


def _carry_out_one(memory: SegmentMemory, order: Order) -> None:
    """The same by NumPy."""
    matrix, part = memory.segment.matrices[order.matrix], slice(order.first, order.first + order.length)
    state = _flat(memory, order).reshape(matrix.rows, matrix.cols)
    by_column = matrix.channel_dim == "column"
    leave, enter = ((part, channels) if by_column else (channels, part) for channels in (order.leave, order.enter))
    if order.block == NOWHERE:
        state[leave] = 0
    else:
        shape = (order.length, order.enter.size) if by_column else (order.enter.size, order.length)
        last = order.block + order.enter.size * order.length
        block = memory.ring.view(np.float32)[order.block : last].reshape(shape)
        if order.leave.size:
            state[leave] = block
            if order.shown != NOWHERE:
                shown = _shown(memory, order).reshape(matrix.rows, matrix.cols)
                shown[leave] = _rounded(block, memory.segment.weight_dtype)
        block[:] = state[enter]
    if order.clear:
        state[enter] = 0


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values as weights of this dtype, as a shadow has them: fp32, or 16 bits of the others."""
    import torch

    rounded = torch.empty(values.shape, dtype=getattr(torch, dtype))
    round_to(rounded, torch.from_numpy(values))
    return (rounded if dtype == "float32" else rounded.view(torch.uint16)).numpy()
