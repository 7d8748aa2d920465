"""Where a step's time goes in each setting: one stacked bar, the trainer's wait for the worker below it."""

from __future__ import annotations

import math
from textwrap import fill
from typing import Any

from zenflow.report.look import INK, entitle, in_lines, page, plain_ticks, usual_note
from zenflow.report.study import Study

PARTS = (
    ("floor_ms", "floor part (forward, backward)", "#9aa5b1"),
    ("optimizer_ms", "optimizer", "#0072B2"),
    ("selection_ms", "selection", "#56B4E9"),
    ("stall_ms", "stall", "#D55E00"),
)
WHOLE = ("#d4d8de", "whole step (engine keeps no records)")
WAIT = (INK, "host wait (trainer's thread; overlaps)")
LEGEND = [label for _, label, _ in PARTS] + [WAIT[1], WHOLE[1]]
FEW = 12  # settings, up to which there is room between their bars
LEAST_SHARE = 0.005  # of the longest step, below which a part is not seen


def draw(study: Study) -> tuple[str, Any]:
    """(title, figure): mean ms a step over all steps but the first, and over the runs of a setting."""
    title = f"Where a step's time goes: {study.title}"
    labels = [in_lines(setting.label, 44) for setting in study.settings]
    lines = 1 + max(label.count("\n") for label in labels)
    figure, axes = page(1.5 + max(0.36 if len(labels) <= FEW else 0.28, 0.14 * lines) * len(labels))
    axis = axes[0, 0]
    longest = max(setting.mean("step_ms") for setting in study.settings)
    decimals = max(0, 2 - math.floor(math.log10(longest)))
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
        axis.annotate(f"{total:,.{decimals}f}", (total, place), (4, 0), **where)
    if study.baseline is not None:
        line = axis.axvline(study.baseline.mean("step_ms"), color=INK, linewidth=0.8, linestyle=":", zorder=0)
        named[study.base_name] = line
    axis.set_yticks(range(len(labels)), labels, fontsize=8 if len(labels) <= FEW else 7, linespacing=0.9)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    axis.set(xlim=(0, 1.1 * longest), ylim=(len(study.settings) - 0.4, -0.6))
    axis.set_xlabel("ms a step, mean over all steps but the first")
    axis.xaxis.set_major_formatter(plain_ticks)
    entitle(figure, title)
    order = [name for name in (*LEGEND, study.baseline and study.base_name) if name in named]
    handles = [named[name] for name in order]
    figure.legend(handles, order, loc="outside lower left", ncols=3, frameon=False, fontsize=8, handlelength=1.2)
    if study.usual:
        axis.set_title(fill(*usual_note(study), 75), loc="left", fontsize=7.5, fontweight="normal")
    return title, figure
