"""How much of the gradient lies in each channel.

    square      score[i] = sum over channel i of f32(x)**2
    magnitude   score[i] = sum over channel i of |f32(x)|

Two stages in a fixed order, without atomics: every program sums a block of channels over a run of their elements, then
the runs of each channel are added in their order. A launch takes many matrices, and its program number leads through
`matrix_ptr` to what it is told of its own. fp32 throughout; a channel whose sum overflows, or that holds an inf or NaN,
scores non-finite, which `select_channels` never prefers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_kernels.channels import channel_axis, check_matrix, integers_on, row_multiple
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, triton_dtype, uses_triton

IMPORTANCES = ("square", "magnitude")
RUN = 512  # elements of a channel that one program sums
# Elements of a channel x channels, read at once; the second pair where the elements of a channel are neighbours.
COLUMN_BLOCK, ROW_BLOCK = (16, 256), (256, 16)
WARPS = 4
SUM_BLOCK = 256  # channels whose runs one program adds

# Columns of what the kernels are told of a matrix, one int64 each. PLACE: of its address in `address_ptr`.
N_FIELDS = tl.constexpr(9)
PLACE, LENGTH, CHANNELS, COLS, BLOCKS = (tl.constexpr(column) for column in range(5))
RUN_0, RUNS, SCORE_0, PROGRAM_0 = (tl.constexpr(column) for column in range(5, 9))


@triton.jit
def matrix_field(fields_ptr, matrix, COLUMN: tl.constexpr):
    return tl.load(fields_ptr + matrix * N_FIELDS + COLUMN)


@triton.jit(do_not_specialize=["matrix_ptr", "address_ptr"])
def _runs_kernel(
    fields_ptr, matrix_ptr, address_ptr,
    runs_ptr,
    SQUARE: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
    DTYPE: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    matrix = tl.load(matrix_ptr + tl.program_id(0))
    program = tl.program_id(0) - matrix_field(fields_ptr, matrix, PROGRAM_0)
    blocks = matrix_field(fields_ptr, matrix, BLOCKS)
    address = tl.load(address_ptr + matrix_field(fields_ptr, matrix, PLACE))
    length, channels = matrix_field(fields_ptr, matrix, LENGTH), matrix_field(fields_ptr, matrix, CHANNELS)
    length = tl.where(address == 0, 0, length)
    # Whole vectors in every row, from an aligned address on; 1 promises nothing.
    cols = tl.multiple_of(matrix_field(fields_ptr, matrix, COLS), MULTIPLE)
    x_ptr = address.to(tl.pointer_type(DTYPE))
    if MULTIPLE > 1:
        x_ptr = tl.multiple_of(x_ptr, 16)
    if ROW:
        length = tl.multiple_of(length, MULTIPLE)
    else:
        channels = tl.multiple_of(channels, MULTIPLE)
    run = program // blocks
    c = (program - run * blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    sums = tl.zeros([BLOCK_L, BLOCK_C], dtype=tl.float32)
    for offset in range(0, RUN, BLOCK_L):
        i = run * RUN + offset + tl.arange(0, BLOCK_L)
        mask = (i < length)[:, None] & (c < channels)[None, :]
        offs = i[:, None] + c[None, :] * cols if ROW else i[:, None] * cols + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_L, BLOCK_C]
        sums += x * x if SQUARE else tl.abs(x)
    runs_ptr += matrix_field(fields_ptr, matrix, RUN_0) + run * channels
    tl.store(runs_ptr + c, tl.sum(sums, axis=0), mask=c < channels)


@triton.jit
def add_runs(runs_ptr, fields_ptr, block_ptr, BLOCK_C: tl.constexpr):
    """This program's matrix, the places of its scores among all and their mask, and the scores; [BLOCK_C]."""
    matrix = tl.load(block_ptr + 2 * tl.program_id(0))
    c = tl.load(block_ptr + 2 * tl.program_id(0) + 1) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels = matrix_field(fields_ptr, matrix, CHANNELS)
    runs_ptr += matrix_field(fields_ptr, matrix, RUN_0)
    total = tl.zeros([BLOCK_C], dtype=tl.float32)
    for _ in range(0, matrix_field(fields_ptr, matrix, RUNS).to(tl.int32)):
        total += tl.load(runs_ptr + c, mask=c < channels, other=0.0)  # [BLOCK_C]
        runs_ptr += channels
    return matrix, matrix_field(fields_ptr, matrix, SCORE_0) + c, c < channels, total


@triton.jit(do_not_specialize=["block_ptr"])
def _add_runs_kernel(
    runs_ptr, fields_ptr, block_ptr,
    scores_ptr,
    BLOCK_C: tl.constexpr,
):  # fmt: skip
    _, place, mask, total = add_runs(runs_ptr, fields_ptr, block_ptr, BLOCK_C)
    tl.store(scores_ptr + place, total, mask=mask)


def channel_scores(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """fp32 `[channels]`: the score of each column or row (`channel_dim`) of `x`, `[rows, cols]` of fp32, bf16 or fp16.

    `x` is contiguous; `importance` is "square" or "magnitude". Raises ValueError for anything else.
    """
    return grouped_scores([x], channel_dim, importance)[0]


def grouped_scores(xs: Sequence[Tensor], channel_dim: str, importance: str) -> list[Tensor]:
    """`channel_scores` of each of `xs`, all on one device; a matrix's scores do not depend on the others.

    Two launches for each dtype and alignment of the rows, one copy to the device and no waiting for it. Raises
    ValueError as `channel_scores`.
    """
    channel_axis(channel_dim)
    if importance not in IMPORTANCES:
        raise ValueError(f"importance must be one of {IMPORTANCES}, got {importance!r}")
    for x in xs:
        check_matrix("x", x)
    found: dict[int, Tensor] = {}
    groups: dict[tuple[torch.dtype, int], list[int]] = {}
    for number, x in enumerate(xs):
        if not x.numel():
            found[number] = x.new_zeros(x.shape[channel_axis(channel_dim)], dtype=torch.float32)
        elif uses_triton(x):
            groups.setdefault((x.dtype, row_multiple(x)), []).append(number)
        else:
            found[number] = channel_scores_reference(x, channel_dim, importance)
    for (_, multiple), numbers in groups.items():
        together = [xs[number] for number in numbers]
        with on_device(together[0]):
            scores = _launch_scores(together, channel_dim, importance, multiple)
        found.update(zip(numbers, scores, strict=True))
    return [found[number] for number in range(len(xs))]


def _launch_scores(xs: Sequence[Tensor], channel_dim: str, importance: str, multiple: int) -> list[Tensor]:
    axis = channel_axis(channel_dim)
    plan = RunPlan.of([x.shape for x in xs], range(len(xs)), channel_dim)
    parts = plan.rows, plan.matrices, plan.blocks, [x.data_ptr() for x in xs]
    told = integers_on(xs[0].device, [value for part in parts for value in part])
    fields, matrix, block, address = told.split([len(part) for part in parts])
    runs, scores = (xs[0].new_empty(size, dtype=torch.float32) for size in (plan.n_runs, plan.n_scores))
    launch_runs(fields, matrix, address, runs, channel_dim, importance, xs[0].dtype, multiple)
    _add_runs_kernel[(len(plan.blocks) // 2,)](
        runs, fields, block,
        scores,
        BLOCK_C=SUM_BLOCK,
        **EXACT,
    )  # fmt: skip
    return list(scores.split([x.shape[axis] for x in xs]))


@dataclass(frozen=True)
class RunPlan:
    """What the kernels are told of some matrices, none of them empty, whose scores lie one behind the other."""

    rows: list[int]  # N_FIELDS a matrix
    matrices: list[int]  # of each program that sums runs
    blocks: list[int]  # matrix and number among its blocks, of each program that adds them
    n_runs: int  # sums of runs in all
    n_scores: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int]], places: Sequence[int], channel_dim: str) -> RunPlan:
        """`[rows, cols]` of each, and the place of its address among those that `launch_runs` is given."""
        axis, (_, block_c) = channel_axis(channel_dim), _blocks(channel_dim)
        rows, matrices, blocks = [], [], []
        run_0 = score_0 = 0
        for number, (shape, place) in enumerate(zip(shapes, places, strict=True)):
            length, channels = shape[1 - axis], shape[axis]
            n_runs, channel_blocks = -(-length // RUN), -(-channels // block_c)
            rows += [place, length, channels, shape[1], channel_blocks, run_0, n_runs, score_0, len(matrices)]
            matrices += [number] * (n_runs * channel_blocks)
            for block in range(-(-channels // SUM_BLOCK)):
                blocks += [number, block]
            run_0, score_0 = run_0 + n_runs * channels, score_0 + channels
        return cls(rows, matrices, blocks, run_0, score_0)


def _blocks(channel_dim: str) -> tuple[int, int]:
    return COLUMN_BLOCK if channel_dim == "column" else ROW_BLOCK


def launch_runs(
    fields: Tensor, matrix: Tensor, address: Tensor, runs: Tensor,
    channel_dim: str, importance: str, dtype: torch.dtype, multiple: int,
) -> None:  # fmt: skip
    """Sum the runs of the matrices of a `RunPlan`, of one `dtype`, into `runs`, fp32 `[n_runs]`, in one launch.

    `fields`, `matrix`, `address`: int64 on the device; an address of 0 is a matrix of zeros. `multiple`: as
    `row_multiple` says.
    """
    block_l, block_c = _blocks(channel_dim)
    _runs_kernel[(matrix.numel(),)](
        fields, matrix, address,
        runs,
        SQUARE=importance == "square", ROW=channel_dim == "row", RUN=RUN, BLOCK_L=block_l, BLOCK_C=block_c,
        DTYPE=triton_dtype(dtype), MULTIPLE=multiple,
        num_warps=WARPS, **EXACT,
    )  # fmt: skip


def channel_scores_reference(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """The same scores by torch: runs of `RUN` elements, then their sum; the order inside a run is torch's."""
    values = x.float()
    values = values * values if importance == "square" else values.abs()
    along = 1 - channel_axis(channel_dim)
    return torch.stack([run.sum(along) for run in values.split(RUN, along)]).sum(0)
