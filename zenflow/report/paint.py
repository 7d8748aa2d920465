"""Which settings have a colour, and which: one look a setting, in all pictures of a study.

Colours go first to what the sweep varied: the settings of ZenFlow, and of every engine of which there are several.
Where these differ in a number, their colours are an ordered scale, and what else they differ in is the line's pattern
and the point's marker; or, if that is too many, the other way round. The others, which are there to be compared with,
get what is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex

from zenflow.report.figures import coincide, mean_curve, validation_line
from zenflow.report.look import BASELINE, PALETTE
from zenflow.report.settings import ADAMWS, PEERS, ZERO_OFFLOAD, Values, differing, has, value_of
from zenflow.report.study import Setting, Study

COMPARED_WITH = (*ADAMWS, ZERO_OFFLOAD, *PEERS)
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)))
BASE_DASHES = (0, (4, 2))
SCALE, SCALE_ENDS = "viridis", (0.06, 0.75)  # neither black, which the baseline has, nor pale
BESIDE_SCALE = [("#D55E00", "D"), ("#CC79A7", "v")]  # which the scale has not
LEAST_STEPS = 3  # values of a number that make a scale


@dataclass(frozen=True)
class Look:
    """A setting's colour, the marker of its points, and the pattern of its line."""

    color: str
    marker: str
    dashes: Any = "-"


def paint(study: Study) -> dict[str, Look]:
    """The looks of the settings that have a colour, by name; the others are drawn in grey, with smaller names.

    The baseline is black. Where there are more settings than colours, those that have the baseline's losses come last,
    and of these what is there only to be compared with has none; without a scale each engine's best come first, and the
    best by the loss at equal steps.
    """
    others = [setting for setting in study.settings if setting is not study.baseline]
    varied = [setting for setting in others if _is_varied(setting, study)]
    own = [setting for setting in varied if setting.values["engine"] not in COMPARED_WITH]
    looks, free = _by_number(varied) or _by_number(own) or ({}, list(zip(PALETTE, MARKERS, strict=True)))
    rest = [setting for setting in others if setting.name not in looks]
    if len(rest) > len(free):
        rest = _neediest(study, rest, varied)[: len(free)]
    chosen = [setting for setting in others if setting in rest]  # in the study's order: colours stay from run to run
    looks |= {setting.name: Look(*pair) for setting, pair in zip(chosen, free, strict=False)}
    return looks | ({} if study.baseline is None else {study.baseline.name: Look(BASELINE, "o", BASE_DASHES)})


def _is_varied(setting: Setting, study: Study) -> bool:
    engine = setting.values["engine"]
    return engine not in COMPARED_WITH or sum(other.values["engine"] == engine for other in study.settings) > 1


def _neediest(study: Study, rest: Sequence[Setting], varied: Sequence[Setting]) -> list[Setting]:
    """The settings that may have a colour, by how much they need one."""
    figure = "final_loss" if study.step is None else "loss_at_equal_steps"
    ordered = sorted(rest, key=lambda setting: setting.mean(figure))
    leaders = {setting.values["engine"]: setting for setting in reversed(ordered)}.values()
    same = [setting for setting in rest if _has_losses_of(setting, study.baseline)]
    ordered = [setting for setting in ordered if setting in varied or setting not in same]
    return sorted(ordered, key=lambda setting: (setting in same, setting not in varied, setting not in leaders))


def _has_losses_of(setting: Setting, other: Setting | None) -> bool:
    """Whether they are the same at every evaluation, to rounding."""
    if other is None:
        return False
    one, two = (
        mean_curve([validation_line(run, over_seconds=False) for run in side.runs]) for side in (setting, other)
    )
    return coincide(one, two)


def _by_number(varied: Sequence[Setting]) -> tuple[dict[str, Look], list[tuple[str, str]]] | None:
    """Looks by the number in which the settings differ, the one of most values, and the colours and markers left over.

    None where there is no such number, or too much else that differs.
    """
    values = [setting.values for setting in varied]
    keys = differing(values)
    numbers = [key for key in keys if _is_number(values, key)]
    key = max(numbers, key=lambda key: len({each[key] for each in values}), default=None)
    steps = sorted({each[key] for each in values}) if key is not None else []
    if len(steps) < LEAST_STEPS:
        return None
    kinds = [_rest(each, [other for other in keys if other != key]) for each in values]
    if len(steps) == len(varied):  # each step is one setting, whatever else changes with it
        kinds = [()] * len(varied)
    order = [kind for kind, _ in Counter(kinds).most_common()]
    places = [(steps.index(each[key]), order.index(kind)) for each, kind in zip(values, kinds, strict=True)]
    if len(order) <= len(DASHES):
        low, high = SCALE_ENDS
        colors = [to_hex(colormaps[SCALE](value)) for value in np.linspace(low, high, len(steps))]
        looks = [Look(colors[step], MARKERS[kind], DASHES[kind]) for step, kind in places]
        free = BESIDE_SCALE
    elif len(steps) <= len(DASHES) and len(order) <= len(PALETTE) < len(varied):
        looks = [Look(PALETTE[kind], MARKERS[step], DASHES[step]) for step, kind in places]
        free = [(color, MARKERS[len(DASHES)]) for color in PALETTE[len(order) :]]
    else:
        return None
    return dict(zip((setting.name for setting in varied), looks, strict=True)), free


def _is_number(settings: Sequence[Values], key: str) -> bool:
    return all(isinstance(value_of(each, key), (int, float)) and not isinstance(each[key], bool) for each in settings)


def _rest(values: Values, keys: Sequence[str]) -> tuple[Hashable, ...]:
    return tuple(value_of(values, key) if has(values, key) else None for key in keys)
