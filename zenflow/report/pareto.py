"""Quality against speed: every setting a point, and the front of those that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.axes import Axes

from zenflow.report.look import (
    MOST_NAMES,
    QUIET,
    Tag,
    entitle,
    is_wide,
    label_points,
    page,
    plain_ticks,
    seeds_note,
    usual_note,
)
from zenflow.report.paint import Look, paint
from zenflow.report.settings import ZENFLOW
from zenflow.report.study import Setting, Study
from zenflow.terminal import counted

GREY = Look(QUIET, "o")


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, loss) that no other equals or beats in both and beats in one; fastest first."""
    ordered = sorted(range(len(points)), key=lambda index: (-points[index][0], points[index][1]))
    best, kept = float("inf"), []
    for index in ordered:
        if points[index][1] < best or (kept and points[index] == points[kept[-1]]):
            best = points[index][1]
            kept.append(index)
    return kept


def draw(study: Study) -> tuple[str, Any]:
    """(title, figure): tokens a second to the right, validation loss at equal steps (the final one if none) upwards."""
    name = "final_loss" if study.step is None else "loss_at_equal_steps"
    when = "at the end" if study.step is None else f"after {counted(study.step, 'step')}"
    title = f"Quality against speed: {study.title}"
    points = [(setting.mean("tokens_per_second"), setting.mean(name)) for setting in study.settings]
    figure, axes = page(4.2, width=6.0)
    axis = axes[0, 0]
    best = front(points)
    looks, everyone = paint(study), len(points) <= MOST_NAMES
    tags, bars = [], []
    for index, (setting, (speed, loss)) in enumerate(zip(study.settings, points, strict=True)):
        look = looks.get(setting.name, GREY)
        across, upwards = (setting.spreads[field].std or 0.0 for field in ("tokens_per_second", name))
        style = {"color": look.color, "markersize": 5.5, "elinewidth": 0.8, "zorder": 3 if setting.name in looks else 2}
        axis.errorbar(speed, loss, xerr=across or None, yerr=upwards or None, fmt=look.marker, **style)
        bars.append((across, upwards))
        named = everyone or index in best or setting.name in looks
        tags.append(Tag(_short(setting, study) if named else "", speed, loss, None if look is GREY else look.color))
    if is_wide([speed for speed, _ in points]):
        axis.set_xscale("log")
    axis.margins(0.16, 0.14)
    axis.set_xlim(left=max(0.0, axis.get_xlim()[0]))  # no speed is negative
    border = _draw_front(axis, [points[index] for index in best])
    axis.set(xlabel="speed (tokens/s)", ylabel=f"validation loss {when}")
    axis.xaxis.set_major_formatter(plain_ticks)
    notes = [f"dashed: the front, which no other setting beats in both; better is right and down{_unnamed(study)}"]
    if unnamed := sum(tag.name == "" for tag in tags):
        notes.append(f"grey without a name: {counted(unnamed, 'more setting')}")
    entitle(figure, title, notes + seeds_note(study, "bars") + usual_note(study))
    label_points(axis, tags, bars, border)
    return title, figure


def _draw_front(axis: Axes, corners: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The border of what the settings on the front (fastest first) reach, from the axes' left to their top."""
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    corners = [(left, corners[-1][1]), *reversed(corners), (corners[0][0], top)]
    axis.step(*zip(*corners, strict=True), where="pre", color=QUIET, linewidth=1.2, linestyle="--", zorder=1)
    axis.set(xlim=(left, right), ylim=(bottom, top))
    return [corner for here, there in pairwise(corners) for corner in (here, (here[0], there[1]), there)]


def _short(setting: Setting, study: Study) -> str:
    """Without the engine where there is more to say: most points of a sweep are ZenFlow's, if none has another name."""
    renamed = any(other.engine != other.values["engine"] for other in study.settings)
    return setting.label if renamed else setting.label.removeprefix(f"{ZENFLOW}, ")


def _unnamed(study: Study) -> str:
    shortened = any(_short(setting, study) != setting.label for setting in study.settings)
    return "; without an engine's name: ZenFlow" if shortened else ""
