"""From runs to figures: what one run gave, means over seeds, losses at equal steps and at equal wall-clock.

Pure arithmetic. Times are training time: the sum of the steps' own seconds, evaluations excluded. A figure that cannot
be had is None.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zenflow.report.runs import Run
from zenflow.training.plot import smooth

CURVE_POINTS = 400
SAME = 5e-5  # of a loss: less is +0.00% in the tables
FINAL = "final_"  # before a score's name: its value after the last step
TRAIN_LAST = 10  # steps whose mean is the last training loss, as in summary.json


@dataclass(frozen=True)
class Spread:
    """A mean over `n` runs and their standard deviation (n - 1 in the denominator; None for one run)."""

    mean: float
    std: float | None
    n: int


def spread(values: Sequence[float | None]) -> Spread | None:
    """Of the values that there are; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def percent(value: Spread | None, base: Spread | None) -> float | None:
    """By how many percent the mean lies above the base's mean."""
    return None if value is None or base is None or base.mean == 0 else 100 * (value.mean / base.mean - 1)


def equal_step(runs: Sequence[Run]) -> int | None:
    """The last step after which all runs were evaluated; None if that is only the start."""
    common = set.intersection(*({point.step for point in run.evaluations} for run in runs))
    return max(common - {0}, default=None)


def equal_seconds(runs: Sequence[Run]) -> float:
    """The training time of the shortest run."""
    return min(run.seconds for run in runs)


def loss_at_step(run: Run, step: int | None) -> float | None:
    """The validation loss after `step` steps; None if there was no evaluation."""
    return next((point.loss for point in run.evaluations if point.step == step), None)


def loss_at_seconds(run: Run, seconds: float) -> float:
    """The validation loss after so much training time, linear between the evaluations before and after it."""
    times, losses = ([getattr(point, name) for point in run.evaluations] for name in ("seconds", "loss"))
    return float(np.interp(seconds, times, losses))


def run_figures(run: Run) -> dict[str, float | None]:
    """One run's own figures: losses, scores, shares from 0 to 1, ms a step, M (the weights' bytes) a step."""
    ordered = sorted(step.seconds for step in run.steps)
    best = min((point for point in run.evaluations if point.step), key=lambda point: point.loss)
    final, summary = run.evaluations[-1], run.summary
    return {
        "final_loss": final.loss,
        **{f"{FINAL}{name}": value for name, value in final.scores.items()},
        "best_loss": best.loss,
        "best_step": best.step,
        "train_loss_last": statistics.fmean(step.loss for step in run.steps[-TRAIN_LAST:]),
        "training_seconds": run.seconds,
        "tokens_per_second": sum(step.tokens for step in run.steps) / run.seconds,
        "step_ms_median": 1e3 * statistics.median(ordered),
        "step_ms_p95": 1e3 * ordered[math.ceil(0.95 * len(ordered)) - 1],
        "stall_share": summary["stall_share"],
        "m_to_host": summary["m_to_host_per_step"],
        "m_to_device": summary["m_to_device_per_step"],
        "worker_busy_share": summary["worker_busy_share"],
        "skipped_steps": summary["skipped_steps"],
        **breakdown(run),
    }


def breakdown(run: Run) -> dict[str, float | None]:
    """Where a step's time went, ms: means over all steps but the first, which compiles and selects.

    Floor (forward and backward), optimizer, selection and stall add up to `step_ms`; the trainer's wait for the worker
    overlaps them. Stalls between two steps are in the summary's total alone, and are taken out of the floor here. A run
    whose engine keeps no records has `step_ms` only.
    """
    steps = run.steps[1:] or run.steps
    result: dict[str, float | None] = {"step_ms": 1e3 * statistics.fmean(step.seconds for step in steps)}
    names = ("floor_ms", "optimizer_ms", "selection_ms", "stall_ms", "host_wait_ms")
    parts = [step.engine for step in steps if step.engine is not None]
    if not parts:
        return result | dict.fromkeys(names)
    mean = {name: 1e3 * statistics.fmean(part[name] for part in parts) for name in parts[0]}
    recorded = statistics.fmean(step.engine["stall_seconds"] for step in run.steps if step.engine is not None)
    between = max(0.0, 1e3 * ((run.summary["stall_seconds_per_step"] or 0.0) - recorded))
    between = min(between, mean["compute_seconds"])
    selection = min(mean["selection_seconds"], mean["optimizer_seconds"])
    values = (
        mean["compute_seconds"] - between,
        mean["optimizer_seconds"] - selection,
        selection,
        mean["stall_seconds"] + between,
        mean["host_wait_seconds"],
    )
    return result | dict(zip(names, values, strict=True))


@dataclass(frozen=True)
class Curve:
    """A line with its band: mean and standard deviation over runs at each x, arrays [points]; no std of one run."""

    x: np.ndarray
    mean: np.ndarray
    std: np.ndarray | None


def mean_curve(lines: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Curve:
    """The mean of lines (x ascending, y), linear between their points, over the part of x that all have."""
    start, end = max(x[0] for x, _ in lines), min(x[-1] for x, _ in lines)
    grid = np.unique(np.concatenate([np.clip(x, start, end) for x, _ in lines]))
    if len(grid) > CURVE_POINTS:
        grid = np.linspace(start, end, CURVE_POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in lines])
    return Curve(grid, values.mean(axis=0), values.std(axis=0, ddof=1) if len(lines) > 1 else None)


def coincide(one: Curve, other: Curve) -> bool:
    """Whether two lines are one to the eye and in the tables: at the same x, with means that are equal to rounding."""
    return np.array_equal(one.x, other.x) and np.allclose(one.mean, other.mean, rtol=SAME, atol=0)


def validation_line(run: Run, over_seconds: bool) -> tuple[list[float], list[float]]:
    """(steps or training seconds, validation losses) of a run."""
    points = run.evaluations
    return [point.seconds if over_seconds else point.step for point in points], [point.loss for point in points]


def score_names(runs: Sequence[Run]) -> list[str]:
    """The scores that some evaluation has, in the order in which they appear."""
    return list(dict.fromkeys(name for run in runs for point in run.evaluations for name in point.scores))


def score_line(run: Run, name: str) -> tuple[list[float], list[float]]:
    """(steps, values of a score) of a run, at the evaluations that have it."""
    points = [point for point in run.evaluations if name in point.scores]
    return [point.step for point in points], [point.scores[name] for point in points]


def training_line(run: Run, over_seconds: bool) -> tuple[list[float], list[float]]:
    """(steps or training seconds, running means of the training loss) of a run; the mean starts without bias."""
    ends = np.cumsum([step.seconds for step in run.steps]).tolist()
    return (ends if over_seconds else list(range(1, len(ends) + 1))), smooth([step.loss for step in run.steps])
