"""Loss curves over steps or training time: mean lines with bands over seeds, and how far they lie from the baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zenflow.report.figures import Curve, coincide, mean_curve, training_line, validation_line
from zenflow.report.look import (
    GREY_LINE,
    MOST_NAMES,
    QUIET,
    WIDE_RATIO,
    WIDTH,
    Tag,
    entitle,
    is_wide,
    label_ends,
    plain_log,
    rows_height,
    seeds_note,
    usual_note,
)
from zenflow.report.paint import Look, paint
from zenflow.report.runs import Run
from zenflow.report.study import Study
from zenflow.terminal import counted

UNITS = ((1, "ms", 1e-3), (300, "s", 1), (3 * 3600, "min", 60), (float("inf"), "h", 3600))
MOST_MARKERS = 12  # on one line
SAME_AS = "= "  # before another name of one curve
FEW = 4  # lines, of which the bands may be strong
HEIGHT = 2.6  # inches of a row
LOG_RATIO = 4  # of the highest to the lowest loss, from which the start would flatten the rest of a linear axis


@dataclass(frozen=True)
class Named:
    """A setting's curve and its look, None for grey; whether it is the baseline's.

    lines: x and y of its runs by their seeds, in the curve's units; of runs that have each seed once. first: where all
    of its runs have their second point.
    """

    name: str
    curve: Curve
    look: Look | None
    is_base: bool
    lines: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    first: float = 0.0


def draw(study: Study, over_seconds: bool) -> tuple[str, Any]:
    """(title, figure): training and validation loss; below them, with a baseline, the difference to it in percent.

    The lines' names stand at their ends, in the last panel.
    """
    title = f"Loss against {'training time' if over_seconds else 'steps'}: {study.title}"
    longest = max(run.seconds for setting in study.settings for run in setting.runs)
    unit, second = next((unit, second) for limit, unit, second in UNITS if longest < limit)
    scale = second if over_seconds else 1.0
    training = named_curves(study, lambda run: training_line(run, over_seconds), scale)
    validation = named_curves(study, lambda run: validation_line(run, over_seconds), scale)
    differs = study.baseline is not None and len(study.settings) > 1
    lines = differences(validation, from_first=over_seconds) if differs else validation
    tags = end_tags(lines, validation)
    heights = [HEIGHT] * differs + [rows_height(tags, HEIGHT)]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
    rows = figure.subfigures(1 + differs, 1, squeeze=False, height_ratios=heights)[:, 0]
    above = rows[0].subplots(1, 2)
    panels = [(above[0], "training loss (running mean)", training), (above[1], "validation loss", validation)]
    if differs:
        panels.append((rows[1].subplots(), f"validation loss above {study.base_name} (%)", lines))
    for axis, label, curves in panels:
        plot_lines(axis, curves, markers=not over_seconds, log_ratio=LOG_RATIO)
        axis.set_ylabel(label)
        axis.set_xlabel(f"training time ({unit})" if over_seconds else "step")
        if not over_seconds:
            axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.margins(x=0.02)
    notes = seeds_note(study, "bands")
    if differs and notes:
        notes[0] += ", below of the differences seed by seed"
    if over_seconds and len(study.settings) > 1:
        above[1].axvline(study.seconds / scale, color=QUIET, linewidth=0.8, linestyle=":", zorder=1)
        notes.append("dotted: the shortest run's end, where losses are compared")
        if differs:
            notes.append("below: from where both have been evaluated after the start")
    entitle(figure, title, notes + tags_notes(validation, tags) + usual_note(study))
    label_ends(panels[-1][0], tags)
    return title, figure


def named_curves(study: Study, line: Callable[[Run], tuple[Any, Any]], scale: float = 1.0) -> list[Named]:
    """Every setting's mean curve of its runs' lines (x, y), x in units of `scale`; of those whose runs all have one."""
    looks = paint(study)
    named = []
    for setting in study.settings:
        lines = [line(run) for run in setting.runs]
        if not all(x for x, _ in lines):
            continue
        curve = mean_curve(lines)
        curve = Curve(curve.x / scale, curve.mean, curve.std)
        scaled = [(np.asarray(x) / scale, y) for x, y in lines]
        by_seed = dict(zip(setting.seeds, scaled, strict=True)) if len(set(setting.seeds)) == len(lines) else {}
        first = max(float(x[min(1, len(x) - 1)]) for x, _ in scaled)
        named.append(Named(setting.label, curve, looks.get(setting.name), setting is study.baseline, by_seed, first))
    return named


def end_tags(curves: Sequence[Named], compared: Sequence[Named]) -> list[Tag]:
    """A name at each curve's end; one for those that coincide, as "adamw\\n= zero_offload", in the first one's colour.

    compared: the curves of losses or scores by which they do, one each. Of more than there can be, grey ones have none.
    The baseline, if there is one, is the first.
    """
    leaders: list[int] = []
    names: dict[int, list[str]] = {}
    for place in sorted(range(len(curves)), key=lambda place: curves[place].look is None):
        if curves[place].look is None and len(curves) > MOST_NAMES:
            continue
        same = next((first for first in leaders if coincide(compared[place].curve, compared[first].curve)), None)
        if same is None:
            leaders.append(same := place)
        names.setdefault(same, []).append(curves[place].name)
    tags = []
    for place, curve in ((place, curves[place]) for place in sorted(leaders)):
        color = None if curve.look is None else curve.look.color
        tags.append(Tag(f"\n{SAME_AS}".join(names[place]), curve.curve.x[-1], curve.curve.mean[-1], color))
    return tags


def tags_notes(curves: Sequence[Named], tags: Sequence[Tag]) -> list[str]:
    """What the names at the lines' ends do not say."""
    notes = ["=: the same curve, to rounding"] if any(f"\n{SAME_AS}" in tag.name for tag in tags) else []
    grey = sum(curve.look is None for curve in curves)
    return notes + ([f"grey: {counted(grey, 'more setting')}"] if grey and len(curves) > MOST_NAMES else [])


def differences(curves: Sequence[Named], *, from_first: bool = False) -> list[Named]:
    """The same curves in percent above the baseline's mean, over the part of x that it has too.

    Bands are those of the differences seed by seed; where the seeds are others, of the curve itself. from_first: begin
    where both have been evaluated after the start, before which the loss falls too fast to be a straight line.
    """
    (reference,) = (named for named in curves if named.is_base)
    base, result = reference.curve, []
    for named in curves:
        first, last = max(named.curve.x[0], base.x[0]), min(named.curve.x[-1], base.x[-1])
        if from_first and max(named.first, reference.first) < last:
            first = max(named.first, reference.first, first)
        x = np.unique(np.clip(np.concatenate([named.curve.x, base.x]), first, last))
        below = np.interp(x, base.x, base.mean)
        mean = 100 * (np.interp(x, named.curve.x, named.curve.mean) / below - 1)
        std = None if named.curve.std is None else 100 * np.interp(x, named.curve.x, named.curve.std) / below
        if std is not None and named.lines and named.lines.keys() == reference.lines.keys():
            ours, theirs = (
                np.stack([np.interp(x, *side.lines[seed]) for seed in named.lines]) for side in (named, reference)
            )
            std = (100 * (ours / theirs - 1)).std(axis=0, ddof=1)
        result.append(Named(named.name, Curve(x, mean, std), named.look, named.is_base))
    return result


def plot_lines(axis: Axes, curves: Sequence[Named], markers: bool, log_ratio: float = WIDE_RATIO) -> None:
    """Means and bands: grey ones below, the baseline dashed on top, so that a line under it is still seen.

    log_ratio: of the highest to the lowest mean, from which the axis is logarithmic.
    """
    bands = sum(named.look is not None for named in curves)
    alpha = 0.18 if bands <= FEW else min(0.09, 0.63 / bands)
    for named in curves:
        x, mean, std = named.curve.x, named.curve.mean, named.curve.std
        if named.look is None:
            axis.plot(x, mean, **GREY_LINE)
            continue
        color = named.look.color
        shape: dict[str, Any] = {"linestyle": named.look.dashes, "zorder": 4 if named.is_base else 3}
        if markers and len(x) <= MOST_MARKERS and not named.is_base:
            shape |= {"marker": named.look.marker, "markersize": 3.5}
        axis.plot(x, mean, color=color, linewidth=1.5, **shape)
        if std is not None:
            axis.fill_between(x, mean - std, mean + std, color=color, alpha=alpha, linewidth=0, zorder=2)
    if is_wide([float(value) for named in curves for value in named.curve.mean], log_ratio):
        plain_log(axis)
