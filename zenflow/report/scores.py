"""Accuracy and whatever else the runs' evaluations hold beside the loss, over the steps."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from zenflow.report.curves import HEIGHT, end_tags, named_curves, plot_lines, tags_notes
from zenflow.report.figures import score_line, score_names
from zenflow.report.look import WIDTH, entitle, label_ends, rows_height, seeds_note, usual_note
from zenflow.report.study import Study

COLUMNS = 2


def draw(study: Study) -> tuple[str, Any] | None:
    """(title, figure): a panel a score, of the settings all of whose runs have it; None if there is no score.

    The lines' names stand at their ends, in the last panel.
    """
    names = score_names([run for setting in study.settings for run in setting.runs])
    if not names:
        return None
    title = f"Scores on the held-out samples: {study.title}"
    rows, columns = -(-len(names) // COLUMNS), min(COLUMNS, len(names))
    lines = [named_curves(study, lambda run, name=name: score_line(run, name)) for name in names]
    tags = end_tags(lines[-1], lines[-1])
    heights = [HEIGHT] * (rows - 1) + [rows_height(tags, HEIGHT)]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.4), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, height_ratios=heights).flat)
    for name, axis, curves in zip(names, panels, lines, strict=False):
        plot_lines(axis, curves, markers=True)
        axis.set(xlabel="step", ylabel=f"validation {name}")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        axis.margins(x=0.02)
    for spare in panels[len(names) :]:
        spare.set_axis_off()
    entitle(figure, title, seeds_note(study, "bands") + tags_notes(lines[-1], tags) + usual_note(study))
    label_ends(panels[len(names) - 1], tags)
    return title, figure
