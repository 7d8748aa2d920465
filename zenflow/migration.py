"""The migration of state at a selection: channels that change owner take master, both moments and t with them.

Bit for bit, and only while the worker is idle and no partial sum or pending result of the matrix exists. No weight,
master, moment or t changes its value; but under `selected_masters: stochastic` a master that comes to the device
becomes the weight, which is the master rounded to the nearest, and a weight that goes to the worker is its master.

State travels through the ring, which is pinned and idle, in *parts* of many blocks. Half of it holds the part that the
worker has in hand (`exchange.py`): it takes the values that have come from the device and puts those that go there in
their place. Meanwhile the device copies into and out of the other half. Where predictions may be visible, the weights
of the channels that the worker gets, their rounded masters, also go into the shadow of what is visible. Where a lane of
the ring is a shadow, the parts use the one for the next gradient, in which nothing is that is still needed, except
while a result of the segment is on its way, which a parameter's first owners do not wait for: then its content is put
back afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.numerics import chunks
from zenflow_kernels.scatter import scatter_channels_

from zenflow.client import WorkerClient
from zenflow.exchange import NOWHERE, Order
from zenflow.param_record import ParamRecord
from zenflow.predictions import visible_turn
from zenflow.storage import SegmentStorage

PART_BYTES = 32 << 20  # of values in a part, at most: a few milliseconds of the worker's time


@dataclass
class Traffic:
    """Bytes that a selection moved, how many channels are selected, and how many of them were not before."""

    to_host: int = 0
    to_device: int = 0
    selected: int = 0
    entered: int = 0


@dataclass(eq=False)
class Move:
    """The channels of one record that change owner. Those that leave are as many as enter, or none."""

    record: ParamRecord
    selected: Tensor  # the new owners, on the host
    on_device: Tensor
    leaving: np.ndarray  # channels, int64
    entering: np.ndarray
    positions: list[np.ndarray]  # see `upload_positions`
    leave_at: Tensor = field(init=False)  # int64 on the device: positions of `leaving` in the old compact state
    source: Tensor = field(init=False)  # old position of each new one, anything for those that enter
    enter_at: Tensor = field(init=False)  # positions of `entering` in the new compact state
    start: Tensor = field(init=False)

    @classmethod
    def plan(
        cls, record: ParamRecord, selected: Tensor, on_device: Tensor, start: Tensor, updates: int, reset: bool
    ) -> Move | None:
        """Compare old owners with new ones and pass t on, on the host; None if nothing changes."""
        old, new = record.selected.numpy(), selected.numpy()
        was, will = np.zeros((2, record.slot.numel()), dtype=bool)
        was[old], will[new] = True, True
        stays, kept = will[old], was[new]
        if record.owned and kept.all():
            return None
        leaving, entering = old[~stays], new[~kept]
        assert len(leaving) in (0, len(entering)), (record.name, len(leaving), len(entering))
        source, t = np.zeros((2, len(new)), dtype=np.int64)
        source[kept] = np.flatnonzero(stays)
        old_t, host_t = start.numpy()[: len(old)] + updates, record.host_step.numpy()
        t[kept] = old_t[stays]
        t[~kept] = 0 if reset else host_t[entering]
        host_t[leaving] = 0 if reset else old_t[~stays]
        positions = [np.flatnonzero(~stays), source, np.flatnonzero(~kept), t - updates]
        return cls(record, selected, on_device, leaving, entering, positions)

    @property
    def compact_shape(self) -> tuple[int, int]:
        """Of what travels in one direction."""
        rows, cols = self.record.weight.shape
        return (rows, len(self.entering)) if self.record.kind == "column" else (len(self.entering), cols)


def upload_positions(moves: Sequence[Move]) -> None:
    """All of what the device has to know about the moves, by one copy."""
    if not moves:
        return
    device = moves[0].record.weight.device
    arrays = [array for move in moves for array in move.positions]
    together = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    parts = iter(together.split([len(array) for array in arrays]))
    for move in moves:
        move.leave_at, move.source, move.enter_at, move.start = (next(parts) for _ in move.positions)


@dataclass(eq=False)
class _Job:
    """One state tensor of a move; `values`: what has left, then what enters, `[rows, n]` or `[n, cols]`."""

    move: Move
    array: int
    travels: bool
    values: Tensor | None = None

    def leave(self) -> None:
        """Take the leaving channels out of the compact state and bring the others to their new positions."""
        move, record = self.move, self.move.record
        compact = record.compact[self.array]
        if len(move.leaving) and self.travels:
            self.values = gather_channels(compact, move.leave_at, record.kind, validate=False).float()
        else:
            self.values = compact.new_zeros(move.compact_shape, dtype=torch.float32)
        compact.copy_(gather_channels(compact, move.source, record.kind, validate=False))

    def enter(self) -> None:
        """Put the entering channels into the compact state."""
        move, record = self.move, self.move.record
        compact = record.compact[self.array]
        scatter_channels_(compact, move.enter_at, self.values.to(compact.dtype), record.kind, validate=False)
        self.values = None


@dataclass(eq=False)
class _Block:
    """A range of a job's compact matrix, contiguous there and in the ring."""

    job: _Job
    rows: slice
    cols: slice
    first: bool
    last: bool
    place: int = 0  # in its half of the ring, in fp32 elements

    @property
    def numel(self) -> int:
        return (self.rows.stop - self.rows.start) * (self.cols.stop - self.cols.start)

    def order(self, begin: int) -> Order:
        """What the worker has to do, with the half of the ring that begins at `begin`."""
        move, by_column = self.job.move, self.job.move.record.kind == "column"
        channels, across = (self.cols, self.rows) if by_column else (self.rows, self.cols)
        whole = channels.stop - channels.start == len(move.entering)  # then pickle sends them once a matrix
        enter, leave = (array if whole else array[channels] for array in (move.entering, move.leaving))
        return Order(
            matrix=move.record.storage.indices.index(move.record.index), array=self.job.array,
            block=begin + self.place if self.job.travels else NOWHERE, enter=enter, leave=leave,
            first=across.start, length=across.stop - across.start, clear=self.job.array > 0,
            shown=self._shown() if self.job.array == 0 else NOWHERE,
        )  # fmt: skip

    def _shown(self) -> int:
        """The shadow that holds what is visible of the channels that the worker gets, which are in it no longer."""
        move = self.job.move
        if not len(move.leaving) or not move.record.storage.segment.predicted:
            return NOWHERE
        return visible_turn(move.record.storage, pending=False)


class Migration:
    """Moves state between device and worker, for the matrices of one segment."""

    def __init__(
        self, storage: SegmentStorage, moves: Sequence[Move], client: WorkerClient, reset: bool, traffic: Traffic
    ) -> None:
        self.client, self.traffic, self.segment = client, traffic, storage.segment.index
        self.ring = storage.ring.view(torch.float32)
        self.begin, self.half = _idle_half(storage)
        jobs = [_Job(move, array, travels=not (reset and array)) for move in moves for array in range(3)]
        self.parts = _pack(jobs, self.half)
        self.device = moves[0].record.weight.device
        cuda = self.ring.numel() and self.device.type == "cuda"
        self.arrived = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def run(self) -> None:
        """Part by part; returns when the worker is idle again and the device's last copies are queued."""
        self._leave(0)
        self._order(0, self._orders(0))
        for number in range(len(self.parts)):
            following = number + 1 < len(self.parts)
            if following:
                self._leave(number + 1)
                orders = self._orders(number + 1)
            self.client.end_exchange(self.segment)
            if following:
                self._order(number + 1, orders)
            self._enter(number)

    def run_and_put_back(self) -> None:
        """The same, and the ring is what it was; waits for the device."""
        region = self.ring[self.begin : self.begin + 2 * self.half]
        kept = region.clone()
        self.run()
        if self.arrived:
            torch.cuda.current_stream(self.device).synchronize()
        region.copy_(kept)

    def _orders(self, number: int) -> list[Order]:
        return [block.order(self._begin(number)) for block in self.parts[number]]

    def _order(self, number: int, orders: list[Order]) -> None:
        """Set the worker to a part, once what leaves the device with it has arrived."""
        if self.arrived:
            self.arrived[number % 2].synchronize()
        self.client.begin_exchange(self.segment, orders)

    def _begin(self, number: int) -> int:
        return self.begin + number % 2 * self.half

    def _staged(self, number: int, block: _Block, values: Tensor) -> Tensor:
        begin = self._begin(number) + block.place
        return self.ring[begin : begin + block.numel].view(values.shape)

    def _leave(self, number: int) -> None:
        """Queue the copies of a part to the host, behind those that empty its half of the ring."""
        for block in self.parts[number]:
            if block.first:
                block.job.leave()
            if block.job.travels and len(block.job.move.leaving):
                values = block.job.values[block.rows, block.cols]
                self._staged(number, block, values).copy_(values, non_blocking=True)
                self.traffic.to_host += values.nbytes
        if self.arrived:
            self.arrived[number % 2].record(torch.cuda.current_stream(self.device))

    def _enter(self, number: int) -> None:
        for block in self.parts[number]:
            if block.job.travels:
                values = block.job.values[block.rows, block.cols]
                values.copy_(self._staged(number, block, values), non_blocking=True)
                self.traffic.to_device += values.nbytes
            if block.last:
                block.job.enter()


def _idle_half(storage: SegmentStorage) -> tuple[int, int]:
    """Where the ring may be used, in fp32 elements, and half of how many there are.

    A ring with a lane a step may hold the running window's gradients; the lanes of the window before are free. One with
    a lane a turn has what is visible in the lane of the window before; that of the next is free.
    """
    segment = storage.segment
    turn, lanes = storage.memory.turn(0), 1
    if segment.keeps_steps:
        turn, lanes = turn ^ 1, segment.max_steps
    lane = storage.ring.view(torch.float32).numel() // segment.lanes
    return segment.lane(turn, 0) * lane, min(lanes * lane // 2, PART_BYTES // 4)


def _pack(jobs: Sequence[_Job], capacity: int) -> list[list[_Block]]:
    """Blocks in the order of their jobs, as many a part as `capacity` elements hold.

    Those that do not travel count too: the worker shows no sign of life within a part.
    """
    parts: list[list[_Block]] = [[]]
    room = capacity
    for job in jobs:
        for block in _blocks(job, capacity):
            if block.numel > room:
                parts.append([])
                room = capacity
            block.place = capacity - room
            room -= block.numel
            parts[-1].append(block)
    return parts


def _blocks(job: _Job, capacity: int) -> Iterator[_Block]:
    rows, cols = job.move.compact_shape
    cuts = list(chunks(rows, cols, capacity))
    for number, (across, along) in enumerate(cuts):
        row, col = slice(across.start, min(across.stop, rows)), slice(along.start, min(along.stop, cols))
        yield _Block(job, row, col, first=number == 0, last=number == len(cuts) - 1)
