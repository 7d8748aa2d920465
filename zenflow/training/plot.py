"""The picture of a run: training and validation loss over the steps, accuracy below them where there is one."""

from __future__ import annotations

from pathlib import Path

from zenflow.training.metrics import Evaluation, History

TRAIN, VALIDATION, ACCURACY = "#9aa5b1", "#c2410c", "#1d4ed8"
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
    from matplotlib.figure import Figure

    scored = [point for point in history.evaluations if point.accuracy is not None]
    figure = Figure(figsize=(8, 6.4 if scored else 4.5), layout="constrained")
    axes = figure.subplots(2 if scored else 1, 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + bool(scored)])
    _draw_losses(axes[0, 0], history)
    if scored:
        _draw_accuracy(axes[1, 0], scored)
    axes[-1, 0].set_xlabel("step")
    axes[0, 0].set_title(title, loc="left", fontsize=11)
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.06)
    figure.savefig(path, dpi=120)


def _draw_losses(axis, history: History) -> None:
    steps = range(1, len(history.losses) + 1)
    axis.plot(steps, history.losses, color=TRAIN, linewidth=0.8, alpha=0.7, label="train, each step")
    axis.plot(steps, smooth(history.losses), color="#374151", linewidth=1.8, label="train, running mean")
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


def _draw_accuracy(axis, scored: list[Evaluation]) -> None:
    axis.plot([point.step for point in scored], [point.accuracy for point in scored], color=ACCURACY, marker="o")
    for point in (scored[0], scored[-1]):
        _label(axis, point.step, point.accuracy, ACCURACY)
    axis.margins(y=0.2)
    axis.set_ylabel("validation accuracy")


def _label(axis, step: int, value: float, color: str) -> None:
    axis.annotate(f"{value:.3f}", (step, value), xytext=(5, 6), textcoords="offset points", color=color, fontsize=9)
