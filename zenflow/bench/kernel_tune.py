"""A search for better launch constants, on tensors that nobody else sees.

Kernels of this package write in place, so nothing is tuned where it is used: production launches have fixed constants,
the card's in `zenflow_kernels.cards` or the defaults. A run of this search prints what others would take, and the entry
that makes the best of them the card's. Every candidate works on tensors built for it alone, is called once before it is
timed, and what it wrote then is compared with what today's constants write.

One constant is varied at a time, the others being the best so far, in the order in which they are listed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from zenflow_kernels import cards, channels, fused_step, importance, norm, stochastic_rounding, table, topk

from zenflow.bench.kernel_ops import OPS, Work
from zenflow.bench.kernel_problem import Problem


@dataclass(frozen=True)
class Knob:
    """A constant that a launcher reads, and the values to try."""

    module: ModuleType
    name: str
    values: tuple[Any, ...]

    @property
    def label(self) -> str:
        return f"{self.module.__name__.rpartition('.')[2]}.{self.name}"


_STEP = (
    Knob(table, "STEP_TILE", (4096, 8192, 16384, 32768, 65536)),
    Knob(fused_step, "FOLD_BLOCK", (1024, 2048, 4096, 8192)),
    Knob(fused_step, "UPDATE_BLOCK", (256, 512, 1024, 2048)),
    Knob(fused_step, "PARTS", (2, 4, 8)),
    Knob(fused_step, "WARPS", (2, 4, 8)),
    Knob(fused_step, "REGISTERS", (64, 128, fused_step.NO_LIMIT)),
)
_COMPACT = (
    Knob(channels, "TILE_ROWS", (1, 2, 4, 8, 16)),
    Knob(channels, "TILE_COLS", (128, 256, 512)),
    Knob(channels, "WARPS", (1, 2, 4, 8)),
)
_SCORES = (
    Knob(importance, "COLUMN_BLOCK", ((16, 256), (8, 512), (32, 128), (16, 512))),
    Knob(importance, "ROW_BLOCK", ((512, 4), (256, 16), (512, 8), (1024, 4))),
    Knob(importance, "COLUMN_UNROLL", (1, 2, 4)),
    Knob(importance, "ROW_UNROLL", (1, 2, 4)),
    Knob(importance, "WARPS", (4, 8)),
)
FUSED_STEPS = ("fused_step", "fused_step_first", "fused_step_alone", "fused_step_stochastic", "fused_step_whole")
KNOBS = {
    "partial_norms": (Knob(norm, "NORM_BLOCK", (2048, 4096, 8192)), Knob(norm, "WARPS", (4, 8, 16))),
    **dict.fromkeys(FUSED_STEPS, _STEP),
    "write_masters": _STEP,
    "channel_scores": _SCORES,
    "running_scores": _SCORES,
    "select_channels": (Knob(topk, "BLOCK", (2048, 4096)), Knob(topk, "WARPS", (8, 16, 32))),
    "gather_channels": _COMPACT,
    "scatter_channels": _COMPACT,
    "stochastic_rounding": (Knob(stochastic_rounding, "WARPS", (2, 4, 8)),),
}
# By the benchmark's op, that of `zenflow_kernels.cards`; others share one's constants, or have bits in theirs.
SHIPPED = {name: name for name in cards.TUNABLE} | {
    "fused_step_alone": "fused_step",
    "fused_step_whole": "fused_step",
    "fused_step_stochastic": "fused_step",
}
ONE_CLASS = ("select_channels", "stochastic_rounding")
ALONE = ("fused_step_alone", "write_masters")  # of columns or rows without an accumulator
# By layout, what the scores, or a step with an accumulator, do not read there.
UNUSED = {
    "columns": ("ROW_BLOCK", "ROW_UNROLL", "PARTS"),
    "rows": ("COLUMN_BLOCK", "COLUMN_UNROLL", "REGISTERS"),
    "whole": ("FOLD_BLOCK", "PARTS", "REGISTERS"),
}
# By op and layout, where that is not so.
UNUSED_BY = {
    ("fused_step_alone", "columns"): ("FOLD_BLOCK", "REGISTERS"),
    ("fused_step_alone", "rows"): ("FOLD_BLOCK", "REGISTERS"),
    ("write_masters", "columns"): ("FOLD_BLOCK", "UPDATE_BLOCK", "PARTS", "WARPS", "REGISTERS"),
    ("write_masters", "rows"): ("FOLD_BLOCK", "PARTS", "REGISTERS"),
}

Setting = dict[Knob, Any]


@dataclass(frozen=True)
class Candidate:
    """One setting: its constants, its outputs after one call compared with today's, its times or why it has none."""

    constants: dict[str, Any]
    label: str
    same_bits: bool | None
    result: Any
    today: bool = False
    best: bool = False


@contextmanager
def launch_constants(setting: Setting) -> Iterator[None]:
    """Launches inside use these constants, whatever the card."""
    before = {knob: getattr(knob.module, knob.name) for knob in setting}
    try:
        for knob, value in setting.items():
            setattr(knob.module, knob.name, value)
        with cards.ignored():
            yield
    finally:
        for knob, value in before.items():
            setattr(knob.module, knob.name, value)


def knobs_of(op: str, problem: Problem) -> tuple[Knob, ...]:
    """The constants that the op's launchers read for this problem; none if it has nothing to choose."""
    unused = UNUSED_BY.get((op, problem.layout), UNUSED.get(problem.layout, ()))
    return tuple(knob for knob in KNOBS.get(op, ()) if knob.name not in unused)


def class_of(op: str, problem: Problem) -> str:
    """The class of the op's launches on this problem, as `zenflow_kernels.cards` has it."""
    if op in ONE_CLASS:
        return cards.ALL
    stochastic = op == "fused_step_stochastic"
    dtype = torch.bfloat16 if stochastic else problem.dtype
    return cards.launch_class(problem.kind, dtype, stochastic=stochastic, alone=op in ALONE)


def todays(op: str, problem: Problem) -> Setting:
    """What a launch takes now: the constants of this card or the defaults."""
    knobs = knobs_of(op, problem)
    defaults = {knob.name: getattr(knob.module, knob.name) for knob in knobs}
    found = cards.constants(_shared(op), class_of(op, problem), problem.device, **defaults)
    return {knob: found[knob.name] for knob in knobs}


def _shared(op: str) -> str:
    """Whose constants in `cards` the op's launches take."""
    return "fused_step" if op in (*FUSED_STEPS, "write_masters") else op


def entry_of(op: str, problem: Problem, found: Sequence[Candidate]) -> dict[str, dict[str, dict[str, int]]]:
    """The best setting as a part of the card's entry in `cards.CARDS`: op -> class -> constants.

    Empty if today's are the best, if another op's constants are taken, or if the best changes a bit.
    """
    best = next((candidate for candidate in found if candidate.best), None)
    if op not in SHIPPED or best is None or best.today or not best.same_bits:
        return {}
    return {SHIPPED[op]: {class_of(op, problem): best.constants}}


def card_entry(card: str, best: dict[str, dict[str, dict[str, int]]]) -> str:
    """Lines of `cards.CARDS`: what it has of this card, and the parts `best` that `entry_of` found in their places."""
    known = cards.CARDS.get(card, {})
    lines = [f'    "{card}": {{']
    for op in dict.fromkeys([*known, *best]):
        lines.append(f'        "{op}": {{')
        for launch, values in (known.get(op, {}) | best.get(op, {})).items():
            lines.append(f'            "{launch}": {json.dumps(values)},')
        lines.append("        },")
    return "\n".join([*lines, "    },"])


def outputs_of(work: Work) -> list[Tensor]:
    """Call ours once; copies of everything that it wrote or returned."""
    made = work.ours.run()
    returned = [] if made is None else list(made) if isinstance(made, (list, tuple)) else [made]
    return [tensor.clone() for tensor in (*work.outputs, *returned)]


def tune(op: str, problem: Problem, measure: Callable[[Work], Any]) -> list[Candidate]:
    """Try the op's constants on `problem`; `measure(work)` gives an object with `p50`, and may raise.

    Every setting that was tried, today's first, the best one marked.
    """
    knobs = knobs_of(op, problem)
    best = todays(op, problem)
    expected = outputs_of(OPS[op].build(problem))
    tried = {_key(best): replace(_try(op, problem, best, expected, measure), today=True)}
    for knob in knobs:
        for value in knob.values:
            setting = best | {knob: value}
            if _key(setting) not in tried:
                tried[_key(setting)] = _try(op, problem, setting, expected, measure)
        best = min((best | {knob: value} for value in (*knob.values, best[knob])), key=lambda s: _ms(tried[_key(s)]))
    return [replace(found, best=key == _key(best)) for key, found in tried.items()]


def _try(op: str, problem: Problem, setting: Setting, expected: list[Tensor], measure: Callable) -> Candidate:
    label = " ".join(f"{knob.label}={_shown(value)}" for knob, value in setting.items())
    constants = {knob.name: value for knob, value in setting.items()}
    try:
        with launch_constants(setting):
            work = OPS[op].build(problem)
            same = all(_same(got, want) for got, want in zip(outputs_of(work), expected, strict=True))
            return Candidate(constants, label, same, measure(work))
    except Exception as error:  # a block may be too large for the card's shared memory or registers
        return Candidate(constants, label, None, error)


def _same(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def _ms(candidate: Candidate) -> float:
    return float("inf") if isinstance(candidate.result, Exception) else candidate.result.p50


def _key(setting: Setting) -> tuple[tuple[str, Any], ...]:
    return tuple((knob.label, value) for knob, value in setting.items())


def _shown(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
