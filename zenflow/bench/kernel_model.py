"""The kernels on all parameters of a model at once: hundreds of matrices and vectors, one launch a class.

The shapes are Qwen2.5's (`shapes.SHAPES`), written down without building the model, and one parameter of one element.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from zenflow_kernels.close_step import close_step
from zenflow_kernels.control import FOLD_ADD, FOLD_OVERWRITE
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.importance import grouped_scores
from zenflow_kernels.norm import partial_norms
from zenflow_kernels.table import NORM_TILE, Table
from zenflow_kernels.topk import grouped_choices

from zenflow.bench.kernel_ops import OPS, Call, Decided, decided, step_moved
from zenflow.bench.kernel_problem import Moved, Problem, exactly
from zenflow.bench.shapes import SHAPES, vocabulary
from zenflow.config import ZenFlowConfig

MIN_DEFERRED = ZenFlowConfig().min_deferred_numel


def parameter_shapes(shape: str) -> list[tuple[int, ...]]:
    """The shapes of a model's parameters in its order, embeddings tied, and a last one of a single element."""
    hidden, layers, intermediate, heads, key_value_heads = SHAPES[shape]
    narrow = hidden // heads * key_value_heads
    attention = [
        (hidden, hidden),
        (hidden,),
        (narrow, hidden),
        (narrow,),
        (narrow, hidden),
        (narrow,),
        (hidden, hidden),
    ]
    gated = [(intermediate, hidden), (intermediate, hidden), (hidden, intermediate)]
    layer = [*attention, *gated, (hidden,), (hidden,)]
    return [(vocabulary(shape), hidden), *layer * layers, (hidden,), (1,)]


def parameter_problems(
    shape: str, dtype: torch.dtype, layout: str, ratio: float, device: torch.device
) -> list[Problem]:
    """A problem a parameter: the engine selects vectors and small matrices whole."""
    problems = []
    for size in parameter_shapes(shape):
        rows, cols = size if len(size) == 2 else (1, *size)
        whole = len(size) < 2 or math.prod(size) < MIN_DEFERRED
        problems.append(Problem(rows, cols, dtype, "whole" if whole else layout, ratio, device))
    return problems


@dataclass(frozen=True)
class ModelOp:
    """One op on the whole model: what to time, and what it moves."""

    name: str
    call: Call
    moved: Moved


def model_ops(problems: list[Problem]) -> list[ModelOp]:
    """Every op of a step and of a selection on these parameters, which lie on one device."""
    device = problems[0].device
    entries = [problem.entry(folds=True) for problem in problems]
    grads = [problem.gradient() for problem in problems]
    table, count = Table(entries, 0), len(entries)
    adding, first = decided(count, FOLD_ADD, device), decided(count, FOLD_OVERWRITE, device)
    partials = torch.empty(table.n_partials, dtype=torch.float64, device=device)
    present = torch.ones(count, dtype=torch.int32, device=device)
    table.bind(grads)
    deferred = [number for number, problem in enumerate(problems) if problem.layout != "whole"]
    matrices, counts = [grads[number] for number in deferred], [problems[number].n for number in deferred]

    def step(given: Decided) -> Callable[[], None]:
        def run() -> None:
            table.bind(grads)
            fused_step(table, given.control, given.hyper, given.bias)

        return run

    def close() -> None:
        close_step(
            first.control, partials, present,
            window=0, position=0, max_grad_norm=1.0, grad_scale=None, found_inf=None,
        )  # fmt: skip

    def norm() -> None:
        table.bind(grads)
        partial_norms(table, partials)

    def select() -> None:
        grouped_choices(grouped_scores(matrices, problems[deferred[0]].kind, "square"), counts)

    closed = exactly(sum(8 * -(-problem.numel // NORM_TILE) + 32 for problem in problems))
    ops = [
        ModelOp("fused_step", Call(step(adding)), _total(problems, FOLD_ADD)),
        ModelOp("fused_step_first", Call(step(first)), _total(problems, FOLD_OVERWRITE)),
        ModelOp("partial_norms", Call(norm), _sum(OPS["partial_norms"].moved, problems)),
        ModelOp("close_step", Call(close), closed),
        ModelOp("write_masters", Call(lambda: write_masters(table, adding.control)), _sum(_written, problems)),
    ]
    if deferred:
        moved = _sum(_chosen, [problems[number] for number in deferred])
        ops.append(ModelOp("channel_scores + select_channels", Call(select, captured=False), moved))
    return ops


def _total(problems: list[Problem], fold: int) -> Moved:
    def moved(problem: Problem) -> Moved:
        return OPS["fused_step_whole"].moved(problem) if problem.layout == "whole" else step_moved(problem, fold=fold)

    return _sum(moved, problems)


def _written(problem: Problem) -> Moved:
    return OPS["write_masters"].moved(problem)


def _chosen(problem: Problem) -> Moved:
    return OPS["channel_scores"].moved(problem) + OPS["select_channels"].moved(problem)


def _sum(moved: Callable[[Problem], Moved], problems: list[Problem]) -> Moved:
    return sum((moved(problem) for problem in problems), Moved(0, 0))
