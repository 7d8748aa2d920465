"""Where a step's time goes in each setting: one stacked bar, the trainer's wait for the worker below it."""

from __future__ import annotations

from typing import Any

from zenflow.report.look import INK, entitle, page
from zenflow.report.study import Study
from zenflow.report.tables import three_digits

PARTS = (
    ("floor_ms", "floor part (forward, backward)", "#9aa5b1"),
    ("optimizer_ms", "optimizer", "#0072B2"),
    ("selection_ms", "selection", "#56B4E9"),
    ("stall_ms", "stall", "#D55E00"),
)
WHOLE = ("#d4d8de", "whole step (engine keeps no records)")
WAIT = (INK, "host wait (trainer's thread; overlaps)")
LEGEND = [label for _, label, _ in PARTS] + [WAIT[1], WHOLE[1]]
LEAST_SHARE = 0.005  # of the longest step, below which a part is not seen


def draw(study: Study) -> tuple[str, Any]:
    """(title, figure): mean ms a step over all steps but the first, and over the runs of a setting."""
    title = f"Where a step's time goes: {study.title}"
    figure, axes = page(1.5 + 0.36 * len(study.settings))
    axis = axes[0, 0]
    longest = max(setting.mean("step_ms") for setting in study.settings)
    named: dict[str, Any] = {}
    for place, setting in enumerate(study.settings):
        total, left = setting.mean("step_ms"), 0.0
        if setting.mean("floor_ms") is None:
            named[WHOLE[1]] = axis.barh(place, total, color=WHOLE[0], height=0.62)
        else:
            for field, label, color in PARTS:
                value = setting.mean(field)
                bar = axis.barh(place, value, left=left, color=color, height=0.62)
                if value > LEAST_SHARE * longest:
                    named.setdefault(label, bar)
                left += value
            wait = setting.mean("host_wait_ms")
            if wait > LEAST_SHARE * longest:
                named[WAIT[1]] = axis.barh(place + 0.38, wait, color=WAIT[0], height=0.09)
        where = {"textcoords": "offset points", "va": "center", "fontsize": 8}
        axis.annotate(three_digits(total), (total, place), (4, 0), **where)
    if study.baseline is not None:
        axis.axvline(study.baseline.mean("step_ms"), color=INK, linewidth=0.8, linestyle=":", zorder=0)
    axis.set_yticks(range(len(study.settings)), [setting.name for setting in study.settings])
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.set(xlim=(0, 1.1 * longest), ylim=(len(study.settings) - 0.4, -0.6))
    dotted = "" if study.baseline is None else f" (dotted: {study.baseline.name})"
    axis.set_xlabel(f"ms a step, mean over all steps but the first{dotted}")
    entitle(figure, title)
    order = [name for name in LEGEND if name in named]
    handles = [named[name] for name in order]
    figure.legend(handles, order, loc="outside lower left", ncols=3, frameon=False, fontsize=8, handlelength=1.2)
    return title, figure
