"""The picture of a run: training and validation loss over the steps, and below them the scores, if there are any."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zenflow.training.metrics import Evaluation, History

TRAIN, MEAN, VALIDATION = "#9aa5b1", "#374151", "#c2410c"
SCORES = ("#1d4ed8", "#15803d", "#7e22ce")
SMOOTHING = 0.9  # of the running mean


def smooth(values: list[float]) -> list[float]:
    """An exponential running mean that starts at the first value without bias."""
    result, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = SMOOTHING * total + (1 - SMOOTHING) * value, SMOOTHING * weight + (1 - SMOOTHING)
        result.append(total / weight)
    return result


def save_plot(history: History, title: str, path: Path) -> None:
    """Write a PNG. Needs matplotlib (the extra `plot`); errors: ImportError without it."""
    draw(history, title).savefig(path, dpi=120)


def draw(history: History, title: str) -> Any:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    scored = [point for point in history.evaluations if point.named_scores]
    figure = Figure(figsize=(8, 6.4 if scored else 4.5), layout="constrained")
    axes = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + bool(scored)])
    _draw_losses(axes[0, 0], history)
    if scored:
        _draw_scores(axes[1, 0], scored)
    axes[-1, 0].set_xlabel("step")
    axes[0, 0].set_title(title, loc="left", fontsize=11)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.06)
    return figure


def _draw_losses(axis, history: History) -> None:
    steps = range(1, len(history.losses) + 1)
    axis.plot(steps, history.losses, color=TRAIN, linewidth=0.8, alpha=0.7, label="train, each step")
    axis.plot(steps, smooth(history.losses), color=MEAN, linewidth=1.8, label="train, running mean")
    points = history.evaluations
    axis.plot(
        [point.step for point in points],
        [point.loss for point in points],
        color=VALIDATION,
        marker="o",
        linewidth=1.8,
        label="validation",
    )
    for point in (points[0], points[-1]):
        _label(axis, point.step, point.loss, VALIDATION)
    axis.set_ylabel("loss")
    axis.legend(frameon=False)


def _draw_scores(axis, scored: list[Evaluation]) -> None:
    names = list(dict.fromkeys(name for point in scored for name in point.named_scores))
    for name, color in zip(names, itertools.cycle(SCORES)):
        points = [(point.step, point.named_scores[name]) for point in scored if name in point.named_scores]
        axis.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
        for point in (points[0], points[-1]):
            _label(axis, *point, color)
    axis.margins(y=0.2)
    if len(names) > 1:
        axis.legend(frameon=False)
    axis.set_ylabel(f"validation {names[0]}" if len(names) == 1 else "validation scores")


def _label(axis, step: int, value: float, color: str) -> None:
    axis.annotate(f"{value:.3f}", (step, value), xytext=(5, 6), textcoords="offset points", color=color, fontsize=9)
