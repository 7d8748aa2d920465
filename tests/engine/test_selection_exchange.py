"""The host's part of a selection against plain indexing: every byte of the segment's memory, whatever is moved."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from zenflow import native
from zenflow.exchange import NOWHERE, Order, carry_out
from zenflow.geometry import ITEM_BYTES, Matrix, Segment, lay_out
from zenflow.ring import SegmentMemory

SHAPES = [(1, 1), (7, 13), (1, 311), (311, 1), (257, 401)]
LONE = 6  # matrices of this size stand before and behind: who writes too far hits them


@pytest.fixture(params=["compiled", "numpy"])
def library(request: pytest.FixtureRequest) -> native.Native | None:
    if request.param == "numpy":
        return None
    built = native.load()
    if built is None:
        pytest.skip("no C compiler, or ZENFLOW_NATIVE=0")
    return built


def segment_of(
    shape: tuple[int, int], channel_dim: str, ring: str = "bfloat16", weights: str = "bfloat16", predicted: bool = False
) -> Segment:
    shapes = [(LONE, LONE, 0), (*shape, 0), (LONE, LONE, 0)]
    return lay_out(
        0, shapes, channel_dim=channel_dim, weight_dtype=weights, ring_dtype=ring, max_steps=4, n_groups=1,
        bucket_bytes=1 << 20, predicted=predicted,
    )  # fmt: skip


class World:
    """A segment's memory full of random bits, NaN with payloads among them, and what it must become."""

    def __init__(self, segment: Segment, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.memory = SegmentMemory.create(segment, threads=1)
        for array in self.arrays():
            array[:] = self.random.integers(0, 1 << 32, array.size, dtype=np.uint32)
        self.expected = [array.copy() for array in self.arrays()]
        if segment.in_place:  # the ring and the shadows are the same memory
            self.expected[5] = self.expected[3]

    @property
    def matrix(self) -> Matrix:
        return self.memory.segment.matrices[1]

    def arrays(self) -> list[np.ndarray]:
        """As uint32: master, moments, ring, and everything else that both processes map."""
        memory = self.memory
        return [
            *(x.view(np.uint32) for x in (memory.master, memory.exp_avg, memory.exp_avg_sq, memory.ring)),
            memory.channel_step.view(np.uint32), memory.shadow.view(np.uint32),
        ]  # fmt: skip

    def order(self, array: int, block: int, enter: np.ndarray, leave: np.ndarray, *, clear: bool, part=None) -> Order:
        """An order for the matrix in the middle, and what it means, element by element in the expected bits."""
        matrix, by_column = self.matrix, self.matrix.channel_dim == "column"
        first, length = part or (0, matrix.rows if by_column else matrix.cols)
        state = self.expected[array][matrix.offset : matrix.offset + matrix.numel].reshape(matrix.rows, matrix.cols)
        state = state.T if by_column else state
        size = len(enter) * length
        staged = None if block == NOWHERE else self.expected[3][block : block + size]
        for i in range(length):
            place = [i * len(enter) + j if by_column else j * length + i for j in range(len(enter))]
            for j, channel in enumerate(leave):
                state[channel, first + i] = 0 if staged is None else staged[place[j]]
            for j, channel in enumerate(enter):
                if staged is not None:
                    staged[place[j]] = state[channel, first + i]
                if clear:
                    state[channel, first + i] = 0
        return Order(1, array, block, enter, leave, first, length, clear)

    def expect_shown(self, turn: int, leave: np.ndarray, masters: np.ndarray) -> None:
        """The shadow of a turn takes what leaves, bits of fp32 in the block's order, in the weights' dtype."""
        matrix, segment = self.matrix, self.memory.segment
        dtype, item = getattr(torch, segment.weight_dtype), ITEM_BYTES[segment.weight_dtype]
        rounded = torch.from_numpy(masters.view(np.float32)).to(dtype, copy=True)
        rounded[rounded.isnan()] = float("nan")
        by_column = matrix.channel_dim == "column"
        values = rounded.view(matrix.rows, -1) if by_column else rounded.view(-1, matrix.cols)
        flat = torch.from_numpy(self.expected[5].view(np.uint8))[item * turn * segment.numel :].view(dtype)
        shown = flat[matrix.offset : matrix.offset + matrix.numel].view(matrix.rows, matrix.cols)
        (shown.T if by_column else shown)[leave] = values.T if by_column else values

    def check(self) -> None:
        for number, (found, expected) in enumerate(zip(self.arrays(), self.expected, strict=True)):
            np.testing.assert_array_equal(found, expected, f"array {number}")


@pytest.fixture
def world() -> Iterator:
    made: list[World] = []

    def make(*args) -> World:
        made.append(World(*args))
        return made[-1]

    yield make
    for each in made:
        each.memory.close()


def pick(world: World, share: str) -> tuple[np.ndarray, np.ndarray]:
    """Channels that enter and leave, in no order, disjoint."""
    channels = world.matrix.channels
    n = {"none": 0, "one": 1, "some": -(-channels // 5), "all": channels // 2}[share]
    n = min(n, channels // 2) if channels > 1 else n
    shuffled = world.random.permutation(channels)
    return shuffled[:n].copy(), shuffled[n : 2 * n].copy() if channels > 1 else shuffled[:0].copy()


@pytest.mark.parametrize("share", ["none", "one", "some", "all"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_swap_moves_bits_and_nothing_else(threads, channel_dim, shape, share, library, world):
    here = world(segment_of(shape, channel_dim, "float32"))
    enter, leave = pick(here, share)
    size = len(enter) * here.matrix.numel // here.matrix.channels
    orders = []
    for array in range(2):
        block = 3 + array * (size + 5)  # odd places; what lies between the blocks stays
        if block + size > here.expected[3].size:
            continue
        orders.append(here.order(array, block, enter, leave, clear=array > 0))
    assert orders
    carry_out(here.memory, orders, threads, library)
    here.check()


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("in_place", [True, False], ids=["in the ring", "of their own"])
@pytest.mark.parametrize("weights", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_the_shadow_of_what_is_visible_takes_the_rounded_masters_that_leave(
    channel_dim, weights, in_place, turn, library, world
):
    """All else stays what it is: the other shadow, the other channels of this one, the other matrices."""
    ring = "float32" if in_place == (weights == "float32") else "bfloat16"
    here = world(segment_of((29, 31), channel_dim, ring, weights, predicted=True))
    assert here.memory.segment.in_place == in_place
    enter, leave = pick(here, "some")
    block = (turn ^ 1) * here.expected[3].size // 2 if in_place else 3
    masters = here.expected[3][block:].copy()
    order = here.order(0, block, enter, leave, clear=False)
    here.expect_shown(turn, leave, masters[: order.length * len(enter)])
    carry_out(here.memory, [order._replace(shown=turn)], 2, library)
    here.check()


@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_channels_enter_at_a_first_selection(shape, channel_dim, library, world):
    here = world(segment_of(shape, channel_dim, "float32"))
    everyone, nobody = np.arange(here.matrix.channels), np.arange(0)
    carry_out(here.memory, [here.order(2, 1, everyone, nobody, clear=True)], 2, library)
    here.check()


@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_reset_zeroes_what_enters_and_what_leaves(shape, channel_dim, library, world):
    here = world(segment_of(shape, channel_dim))
    enter, leave = pick(here, "some")
    carry_out(here.memory, [here.order(1, NOWHERE, enter, leave, clear=True)], 2, library)
    here.check()


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_parts_of_a_matrix_in_one_call(channel_dim, library, world):
    """Cut along the channels and across them, as a small ring asks for."""
    here = world(segment_of((29, 31), channel_dim, "float32"))
    enter, leave = pick(here, "all")
    half, across = len(enter) // 2, here.matrix.numel // here.matrix.channels
    orders, block = [], 0
    for some in (slice(0, half), slice(half, None)):
        for first in range(0, across, 10):
            length = min(10, across - first)
            part = enter[some].copy(), leave[some].copy()
            orders.append(here.order(0, block, *part, clear=False, part=(first, length)))
            block += len(part[0]) * length
    carry_out(here.memory, orders, 2, library)
    here.check()


@pytest.mark.parametrize(
    "wrong",
    [
        {"enter": np.array([13])},
        {"leave": np.array([-1])},
        {"length": 8},
        {"first": 1},
        {"block": 1 << 20},
        {"leave": np.array([2, 3])},
        {"shown": 1},
        {"shown": 0, "array": 1},
        {"shown": 0, "block": NOWHERE},
    ],
    ids=str,
)
def test_an_order_for_what_is_not_there_is_refused_before_anything_moves(wrong, library, world):
    here = world(segment_of((7, 13), "column"))
    good = Order(1, 0, 0, np.array([4]), np.array([5]), 0, 7, False)
    with pytest.raises(AssertionError):
        carry_out(here.memory, [good._replace(**wrong)], 1, library)
    here.check()


def test_no_orders_are_fine(library, world):
    here = world(segment_of((7, 13), "column"))
    carry_out(here.memory, [], 2, library)
    here.check()
