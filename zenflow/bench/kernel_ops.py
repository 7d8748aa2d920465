"""The registry of kernels that `zenflow-bench kernels` measures: one entry an op.

An entry says which layouts it has, what it must move, and how to build its contestants: ours, the torch reference that
the tests compare it with, and the well-known kernel for the same job where that is another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from zenflow_kernels.close_step import close_step, close_step_reference
from zenflow_kernels.control import FOLD_ADD, FOLD_OVERWRITE, StepControl
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.gather import gather_channels, gather_channels_reference
from zenflow_kernels.importance import COLUMN_RUN, ROW_RUN, channel_scores, channel_scores_reference
from zenflow_kernels.norm import partial_norms, partial_norms_reference
from zenflow_kernels.numerics import pack_hyper
from zenflow_kernels.running_scores import RunningScores
from zenflow_kernels.scatter import scatter_channels_, scatter_channels_reference_
from zenflow_kernels.step_reference import step_entry_reference, write_masters_reference
from zenflow_kernels.stochastic_rounding import round_stochastically, round_stochastically_reference
from zenflow_kernels.table import NORM_TILE, Entry, Table
from zenflow_kernels.topk import select_channels, select_channels_reference

from zenflow.bench.kernel_problem import Moved, Problem, exactly
from zenflow.bias import bias_table

LR, BETA1, BETA2, EPS, DECAY = 1e-5, 0.9, 0.999, 1e-8, 0.01
SCALES = (1.0, 0.5)  # inverse loss scale, clip factor
STATE = 24  # bytes: fp32 master and two moments, read and written
STOCHASTIC_STATE = 20  # the same with a master in bf16
DRAWS = {"seed": 1, "step": 2}  # what a step that rounds stochastically is given
ADVANCE = 1


@dataclass(frozen=True)
class Call:
    """Something to time. `captured`: as a CUDA graph, without the time that its launches take the host."""

    run: Callable[[], Any]
    captured: bool = True


@dataclass(frozen=True)
class Work:
    """An op's contestants on one problem's tensors; they write `outputs` in place, or return what they make."""

    ours: Call
    reference: Call
    known: Call | None = None
    outputs: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Op:
    """`layouts` it is measured in, `moved` its bytes, `build` its contestants; `known` names the well-known kernel.

    `compiles`: torch.compile takes seconds for the reference, not many minutes.
    """

    layouts: tuple[str, ...]
    moved: Callable[[Problem], Moved]
    build: Callable[[Problem], Work]
    known: str = ""
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float32)
    compiles: bool = True


CHANNELS = ("columns", "rows")


def step_moved(problem: Problem, *, fold: int | None, state_bytes: int = STATE) -> Moved:
    """Bytes of `fused_step`: selected state and weights, and the fold of the rest (None: no accumulator)."""
    state = exactly(state_bytes * problem.selected) + problem.write_scattered()
    if fold is None:
        return state + problem.read_scattered()
    moved = state + exactly(2 * problem.item * problem.numel)
    if fold == FOLD_ADD:
        # Whole rows are left out where they are selected, single columns are not worth a mask.
        added = problem.numel - (problem.selected if problem.layout == "rows" else 0)
        moved += exactly(problem.item * added)
    return moved


def _whole_moved(problem: Problem) -> Moved:
    return exactly((2 * problem.item + STATE) * problem.numel)


def _stochastic_moved(problem: Problem) -> Moved:
    if problem.layout == "whole":  # the master is the weight
        return exactly((STOCHASTIC_STATE + problem.item) * problem.numel)
    return step_moved(problem, fold=FOLD_ADD, state_bytes=STOCHASTIC_STATE)


def _norm_moved(problem: Problem) -> Moved:
    return exactly(problem.item * problem.numel + 8 * -(-problem.numel // NORM_TILE))


def _close_moved(problem: Problem) -> Moved:
    return exactly(8 * -(-problem.numel // NORM_TILE) + 32)


def _masters_moved(problem: Problem) -> Moved:
    return exactly(4 * problem.selected) + problem.write_scattered()


def _scores_moved(problem: Problem) -> Moved:
    must = problem.item * problem.numel + 4 * problem.channels
    run = COLUMN_RUN if problem.layout == "columns" else ROW_RUN
    return Moved(must, must + 8 * problem.channels * -(-problem.length // run))


def _running_moved(problem: Problem) -> Moved:
    return _scores_moved(problem) + exactly(4 * problem.channels)


def _select_moved(problem: Problem) -> Moved:
    return exactly(4 * problem.channels + 8 * problem.n)


def _gather_moved(problem: Problem) -> Moved:
    return problem.read_scattered() + exactly(problem.item * problem.selected)


def _scatter_moved(problem: Problem) -> Moved:
    return exactly(problem.item * problem.selected) + problem.write_scattered()


def _round_moved(problem: Problem) -> Moved:
    return exactly(6 * problem.numel)


@dataclass(frozen=True)
class Decided:
    """What a step finds on the device: its decision, the groups' hyperparameters and the corrections by t."""

    control: StepControl
    hyper: Tensor
    bias: Tensor


def decided(n_params: int, fold: int, device: torch.device) -> Decided:
    """A step that counts, in which every one of `n_params` parameters does `fold`."""
    control = StepControl.create(n_params, 1, device)
    control.fold.fill_(fold)
    control.advance.fill_(ADVANCE)
    control.inv_scale.fill_(SCALES[0])
    control.clip.fill_(SCALES[1])
    hyper = torch.tensor([pack_hyper(LR, BETA1, BETA2, EPS, DECAY)], device=device)
    bias = torch.from_numpy(bias_table(BETA1, BETA2, 64).copy()).view(1, -1, 2)
    return Decided(control, hyper, bias.to(device))


def entry_state(entry: Entry) -> tuple[Tensor, ...]:
    """What a step writes of an entry."""
    tensors = (entry.weight, entry.master, entry.exp_avg, entry.exp_avg_sq, entry.accumulator)
    return tuple(tensor for tensor in tensors if tensor is not None)


def _step_work(problem: Problem, *, fold: int, folds: bool = True, stochastic: bool = False) -> Work:
    entry, grad = problem.entry(folds=folds, stochastic=stochastic), problem.gradient()
    table, given = Table([entry], 0), decided(1, fold, problem.device)
    channel = torch.zeros(1, dtype=torch.int64) if problem.layout == "whole" else problem.index()
    channel = channel.to(problem.device)
    t = (entry.start + ADVANCE).long()
    factors, bias = given.hyper.tolist()[0], given.bias[0][t]

    def ours() -> None:
        table.bind([grad])
        fused_step(table, given.control, given.hyper, given.bias, **DRAWS)

    def reference() -> None:
        step_entry_reference(entry, channel, grad, SCALES, factors, bias, add=fold == FOLD_ADD, **DRAWS)

    known = Call(_fused_adamw(entry, grad)) if problem.layout == "whole" and not stochastic else None
    return Work(Call(ours), Call(reference), known, entry_state(entry))


def _fused_adamw(entry: Entry, grad: Tensor) -> Callable[[], None]:
    """torch's fused AdamW on the fp32 masters; for 16-bit weights with the two conversions that it leaves to others."""
    steps = [(entry.start[0] + ADVANCE).float()]

    def run() -> None:
        torch._fused_adamw_(
            [entry.master], [grad.float()], [entry.exp_avg], [entry.exp_avg_sq], [], steps,
            lr=LR, beta1=BETA1, beta2=BETA2, weight_decay=DECAY, eps=EPS, amsgrad=False, maximize=False,
        )  # fmt: skip
        if entry.weight.dtype != torch.float32:
            entry.weight.copy_(entry.master)

    return run


def _norm_table(problem: Problem) -> Table:
    """A table of one parameter without state: only its gradient is read."""
    weight = torch.empty(problem.rows, problem.cols, dtype=problem.dtype, device=problem.device)
    none = torch.zeros(problem.rows, 0, device=problem.device)
    start = torch.zeros(0, dtype=torch.int32, device=problem.device)
    slot = torch.full((problem.cols,), -1, dtype=torch.int32, device=problem.device)
    return Table([Entry(weight, "column", 0, none, none, none, start, slot, None)], 0)


def _norm_work(problem: Problem) -> Work:
    table, grad = _norm_table(problem), problem.gradient()
    partials = torch.empty(table.n_partials, dtype=torch.float64, device=problem.device)
    table.bind([grad])
    return Work(
        Call(lambda: partial_norms(table, partials)),
        Call(lambda: partial_norms_reference(table, partials)),
        Call(lambda: torch.linalg.vector_norm(grad, dtype=torch.float32)),
        (partials,),
    )


def _close_work(problem: Problem) -> Work:
    generator = torch.Generator().manual_seed(1)
    count = -(-problem.numel // NORM_TILE)
    partials = torch.rand(count, dtype=torch.float64, generator=generator).to(problem.device)
    present = torch.ones(1, dtype=torch.int32, device=problem.device)
    control = StepControl.create(1, 1, problem.device)
    given = {"window": 0, "position": 0, "max_grad_norm": 1.0, "grad_scale": None, "found_inf": None}
    return Work(
        Call(lambda: close_step(control, partials, present, **given)),
        # It sends the window's number from the host in every call.
        Call(lambda: close_step_reference(control, partials, present, **given), captured=False),
        outputs=(control.norm, control.clip, control.finite),
    )


def _masters_work(problem: Problem) -> Work:
    entry = problem.entry(folds=False)
    table, index, axis = Table([entry], 0), problem.index().to(problem.device), entry.axis
    control = StepControl.create(1, 1, problem.device)
    return Work(
        Call(lambda: write_masters(table, control)),
        # It asks the device which channels there are.
        Call(lambda: write_masters_reference(table, control), captured=False),
        Call(lambda: entry.weight.index_copy_(axis, index, entry.master.to(entry.weight.dtype))),
        (entry.weight,),
    )


def _scores_work(problem: Problem) -> Work:
    grad, along = problem.gradient(), 0 if problem.layout == "columns" else 1
    # Ours sends the addresses of the matrices from the host in every call.
    return Work(
        Call(lambda: channel_scores(grad, problem.kind, "square"), captured=False),
        Call(lambda: channel_scores_reference(grad, problem.kind, "square")),
        Call(lambda: torch.linalg.vector_norm(grad, dim=along, dtype=torch.float32)),
    )


def _running_work(problem: Problem) -> Work:
    table, control = Table([problem.entry(folds=False)], 0), decided(1, FOLD_ADD, problem.device).control
    running, grad = RunningScores(table, "square", 0.1), problem.gradient()

    def bound(add: Callable[[StepControl], None]) -> Call:
        def run() -> None:
            table.bind([grad])
            add(control)

        return Call(run)

    return Work(bound(running.add), bound(running.add_reference), outputs=tuple(running.scores))


def _select_work(problem: Problem) -> Work:
    scores = problem.normal(problem.channels, seed=7, dtype=torch.float32).square_()
    return Work(
        Call(lambda: select_channels(scores, problem.n), captured=False),
        Call(lambda: select_channels_reference(scores, problem.n), captured=False),
        Call(lambda: torch.topk(scores, problem.n, sorted=False).indices, captured=False),
    )


def _gather_work(problem: Problem) -> Work:
    x, index = problem.gradient(), problem.index().to(problem.device)
    return Work(
        Call(lambda: gather_channels(x, index, problem.kind, validate=False)),
        Call(lambda: gather_channels_reference(x, index, problem.kind)),
    )


def _scatter_work(problem: Problem) -> Work:
    x, index = problem.gradient(), problem.index().to(problem.device)
    shape = (problem.rows, problem.n) if problem.layout == "columns" else (problem.n, problem.cols)
    values = problem.normal(*shape, seed=8)
    return Work(
        Call(lambda: scatter_channels_(x, index, values, problem.kind, validate=False)),
        Call(lambda: scatter_channels_reference_(x, index, values, problem.kind)),
        outputs=(x,),
    )


def _round_work(problem: Problem) -> Work:
    x = problem.normal(problem.rows, problem.cols, seed=9, dtype=torch.float32)
    return Work(
        Call(lambda: round_stochastically(x, seed=1, step=2)),
        Call(lambda: round_stochastically_reference(x, seed=1, step=2)),
        Call(lambda: x.to(torch.bfloat16)),
    )


OPS = {
    "partial_norms": Op(("whole",), _norm_moved, _norm_work, "torch.linalg.vector_norm"),
    "close_step": Op(("whole",), _close_moved, _close_work, dtypes=(torch.bfloat16,)),
    "fused_step": Op(CHANNELS, lambda p: step_moved(p, fold=FOLD_ADD), lambda p: _step_work(p, fold=FOLD_ADD)),
    "fused_step_first": Op(
        CHANNELS, lambda p: step_moved(p, fold=FOLD_OVERWRITE), lambda p: _step_work(p, fold=FOLD_OVERWRITE)
    ),
    "fused_step_alone": Op(
        CHANNELS, lambda p: step_moved(p, fold=None), lambda p: _step_work(p, fold=FOLD_ADD, folds=False)
    ),
    "fused_step_whole": Op(
        ("whole",), _whole_moved, lambda p: _step_work(p, fold=FOLD_ADD), "torch fused AdamW on fp32 masters"
    ),
    "fused_step_stochastic": Op(
        (*CHANNELS, "whole"),
        _stochastic_moved,
        lambda p: _step_work(replace(p, dtype=torch.bfloat16), fold=FOLD_ADD, stochastic=True),
        dtypes=(torch.bfloat16,),
        compiles=False,
    ),
    "write_masters": Op(CHANNELS, _masters_moved, _masters_work, "torch.index_copy_"),
    "channel_scores": Op(CHANNELS, _scores_moved, _scores_work, "torch.linalg.vector_norm"),
    "running_scores": Op(CHANNELS, _running_moved, _running_work),
    "select_channels": Op(("columns",), _select_moved, _select_work, "torch.topk", (torch.bfloat16,)),
    "gather_channels": Op(CHANNELS, _gather_moved, _gather_work),
    "scatter_channels": Op(CHANNELS, _scatter_moved, _scatter_work),
    "stochastic_rounding": Op(
        ("whole",), _round_moved, _round_work, "rounding to nearest", (torch.bfloat16,), compiles=False
    ),
}
REFERENCE_NAMES = {"gather_channels": "torch.index_select", "scatter_channels": "torch.index_copy_"}
