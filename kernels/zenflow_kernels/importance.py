"""How much of the gradient lies in each channel.

    square      score[i] = sum over channel i of f32(x)**2
    magnitude   score[i] = sum over channel i of |f32(x)|

Two stages in a fixed order, without atomics: every program sums a block of channels over a run of their elements, then
the runs of each channel are added, RUNS_AT_ONCE of them side by side. A launch takes many matrices, and its program
number leads through `matrix_ptr` to what it is told of its own. fp32 throughout; a channel whose sum overflows, or that
holds an inf or NaN, scores non-finite, which `select_channels` never prefers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from zenflow_kernels.channels import channel_axis, check_matrix, integers_on, row_multiple
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, triton_dtype, uses_triton

IMPORTANCES = ("square", "magnitude")
COLUMN_RUN, ROW_RUN = 512, 4096  # elements of a channel that one program sums
# Elements of a channel x channels, read at once; the second pair where the elements of a channel are neighbours.
COLUMN_BLOCK, ROW_BLOCK = (16, 256), (512, 4)
COLUMN_UNROLL, ROW_UNROLL = 1, 4  # blocks that are on their way together
WARPS = 4
SUM_BLOCK, RUNS_AT_ONCE = 256, 16  # channels whose runs one program adds, and how many runs it reads at once

# Columns of what the kernels are told of a matrix, one int64 each. PLACE: of its address in `address_ptr`.
N_FIELDS = tl.constexpr(10)
PLACE, LENGTH, CHANNELS, COLS, BLOCKS = (tl.constexpr(column) for column in range(5))
RUN_0, RUNS, SCORE_0, RUN_PROGRAM_0, SUM_PROGRAM_0 = (tl.constexpr(column) for column in range(5, 10))


@triton.jit
def matrix_field(fields_ptr, matrix, COLUMN: tl.constexpr):
    return tl.load(fields_ptr + matrix * N_FIELDS + COLUMN)


@triton.jit(do_not_specialize=["matrix_ptr", "address_ptr"])
def _runs_kernel(
    fields_ptr, matrix_ptr, address_ptr,
    runs_ptr,
    SQUARE: tl.constexpr, ROW: tl.constexpr, RUN: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
    UNROLL: tl.constexpr, DTYPE: tl.constexpr, MULTIPLE: tl.constexpr,
):  # fmt: skip
    matrix = tl.load(matrix_ptr + tl.program_id(0))
    program = tl.program_id(0) - matrix_field(fields_ptr, matrix, RUN_PROGRAM_0)
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
    for offset in tl.range(0, RUN, BLOCK_L, loop_unroll_factor=UNROLL):
        i = run * RUN + offset + tl.arange(0, BLOCK_L)
        mask = (i < length)[:, None] & (c < channels)[None, :]
        offs = i[:, None] + c[None, :] * cols if ROW else i[:, None] * cols + c[None, :]
        x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)  # [BLOCK_L, BLOCK_C]
        sums += x * x if SQUARE else tl.abs(x)
    runs_ptr += matrix_field(fields_ptr, matrix, RUN_0) + run * channels
    tl.store(runs_ptr + c, tl.sum(sums, axis=0), mask=c < channels)


@triton.jit
def add_runs(runs_ptr, fields_ptr, matrix_ptr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr):
    """This program's matrix, the places of its scores among all and their mask, and the scores; [BLOCK_C]."""
    matrix = tl.load(matrix_ptr + tl.program_id(0))
    c = (tl.program_id(0) - matrix_field(fields_ptr, matrix, SUM_PROGRAM_0)) * BLOCK_C + tl.arange(0, BLOCK_C)
    channels, runs = matrix_field(fields_ptr, matrix, CHANNELS), matrix_field(fields_ptr, matrix, RUNS).to(tl.int32)
    runs_ptr += matrix_field(fields_ptr, matrix, RUN_0)
    sums = tl.zeros([BLOCK_R, BLOCK_C], dtype=tl.float32)
    for offset in range(0, runs, BLOCK_R):
        r = offset + tl.arange(0, BLOCK_R)
        mask = (r < runs)[:, None] & (c < channels)[None, :]
        sums += tl.load(runs_ptr + r[:, None] * channels + c[None, :], mask=mask, other=0.0)  # [BLOCK_R, BLOCK_C]
    return matrix, matrix_field(fields_ptr, matrix, SCORE_0) + c, c < channels, tl.sum(sums, axis=0)


@triton.jit(do_not_specialize=["matrix_ptr"])
def _add_runs_kernel(
    runs_ptr, fields_ptr, matrix_ptr,
    scores_ptr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    _, place, mask, total = add_runs(runs_ptr, fields_ptr, matrix_ptr, BLOCK_R, BLOCK_C)
    tl.store(scores_ptr + place, total, mask=mask)


def channel_scores(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """fp32 `[channels]`: the score of each column or row (`channel_dim`) of `x`, `[rows, cols]` of fp32, bf16 or fp16.

    `x` is contiguous; `importance` is "square" or "magnitude". Raises ValueError for anything else.
    """
    return grouped_scores([x], channel_dim, importance)[0]


def grouped_scores(xs: Sequence[Tensor], channel_dim: str, importance: str) -> list[Tensor]:
    """`channel_scores` of each of `xs`, all on one device; a matrix's scores do not depend on the others.

    Two launches for each dtype and alignment of the rows, two copies to the device and no waiting for them. What is
    told of matrices of these shapes is kept on the host for the next time. Raises ValueError as `channel_scores`.
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
    axis, device = channel_axis(channel_dim), xs[0].device
    shapes = tuple(tuple(x.shape) for x in xs)
    plan = _kept_plan(shapes, channel_dim, _run_block(channel_dim), pinned=device.type == "cuda")
    told, address = plan.on(device), integers_on(device, [x.data_ptr() for x in xs])
    runs, scores = (xs[0].new_empty(size, dtype=torch.float32) for size in (plan.n_runs, plan.n_scores))
    launch_runs(told, address, runs, channel_dim, importance, xs[0].dtype, multiple)
    _add_runs_kernel[(told.sum_matrix.numel(),)](
        runs, told.fields, told.sum_matrix,
        scores,
        BLOCK_R=RUNS_AT_ONCE, BLOCK_C=SUM_BLOCK,
        **EXACT,
    )  # fmt: skip
    return list(scores.split([x.shape[axis] for x in xs]))


@dataclass(frozen=True)
class Told:
    """What is on the device: int64, N_FIELDS a matrix; int32, the matrix of each program of the two kernels."""

    fields: Tensor
    run_matrix: Tensor
    sum_matrix: Tensor


@dataclass(frozen=True)
class RunPlan:
    """What the kernels are told of some matrices, none of them empty, whose scores lie one behind the other."""

    words: Tensor  # int32, on the host: `Told`, one part behind the other
    lengths: tuple[int, int, int]
    n_runs: int  # sums of runs in all
    n_scores: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, int]], places: Sequence[int], channel_dim: str, *, pinned: bool) -> RunPlan:
        """`[rows, cols]` of each, and the place of its address among those that `launch_runs` is given."""
        axis, (run, _, block_c) = channel_axis(channel_dim), _run_block(channel_dim)
        rows, run_programs, sum_programs = [], [0], [0]
        run_0 = score_0 = 0
        for shape, place in zip(shapes, places, strict=True):
            length, channels = shape[1 - axis], shape[axis]
            n_runs, blocks = -(-length // run), -(-channels // block_c)
            rows += [place, length, channels, shape[1], blocks, run_0, n_runs, score_0]
            rows += [run_programs[-1], sum_programs[-1]]
            run_programs.append(run_programs[-1] + n_runs * blocks)
            sum_programs.append(sum_programs[-1] - (-channels // SUM_BLOCK))
            run_0, score_0 = run_0 + n_runs * channels, score_0 + channels
        fields = torch.tensor(rows, dtype=torch.int64).view(torch.int32)
        parts = [fields, *(_repeated(firsts) for firsts in (run_programs, sum_programs))]
        words = torch.cat(parts)
        lengths = tuple(part.numel() for part in parts)
        return cls(words.pin_memory() if pinned else words, lengths, run_0, score_0)

    def on(self, device: torch.device) -> Told:
        """A copy for the device, without waiting for it."""
        fields, run_matrix, sum_matrix = self.words.to(device, non_blocking=True).split(self.lengths)
        return Told(fields.view(torch.int64), run_matrix, sum_matrix)


def _repeated(firsts: list[int]) -> Tensor:
    """int32: the number of each matrix, as often as it has programs."""
    counts = torch.tensor(firsts, dtype=torch.int64).diff()
    return torch.repeat_interleave(torch.arange(counts.numel(), dtype=torch.int32), counts)


@lru_cache(maxsize=8)
def _kept_plan(
    shapes: tuple[tuple[int, int], ...], channel_dim: str, block: tuple[int, int, int], *, pinned: bool
) -> RunPlan:
    assert block == _run_block(channel_dim)  # given because a search changes it
    return RunPlan.of(shapes, range(len(shapes)), channel_dim, pinned=pinned)


def _run_block(channel_dim: str) -> tuple[int, int, int]:
    """Elements of a run, and of a block along the channels and across them."""
    return (COLUMN_RUN, *COLUMN_BLOCK) if channel_dim == "column" else (ROW_RUN, *ROW_BLOCK)


def launch_runs(
    told: Told, address: Tensor, runs: Tensor,
    channel_dim: str, importance: str, dtype: torch.dtype, multiple: int,
) -> None:  # fmt: skip
    """Sum the runs of the matrices of a `RunPlan`, of one `dtype`, into `runs`, fp32 `[n_runs]`, in one launch.

    `address`: int64 on the device; 0 is a matrix of zeros. `multiple`: as `row_multiple` says.
    """
    run, block_l, block_c = _run_block(channel_dim)
    _runs_kernel[(told.run_matrix.numel(),)](
        told.fields, told.run_matrix, address,
        runs,
        SQUARE=importance == "square", ROW=channel_dim == "row", RUN=run, BLOCK_L=block_l, BLOCK_C=block_c,
        UNROLL=COLUMN_UNROLL if channel_dim == "column" else ROW_UNROLL, DTYPE=triton_dtype(dtype), MULTIPLE=multiple,
        num_warps=WARPS, **EXACT,
    )  # fmt: skip


def channel_scores_reference(x: Tensor, channel_dim: str, importance: str) -> Tensor:
    """The same scores by torch: runs, then their sum; the order inside a run, and that of the runs, is torch's."""
    values = x.float()
    values = values * values if importance == "square" else values.abs()
    along, (run_length, *_) = 1 - channel_axis(channel_dim), _run_block(channel_dim)
    return torch.stack([run.sum(along) for run in values.split(run_length, along)]).sum(0)
