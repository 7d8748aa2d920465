"""Robust statistics of a few hundred numbers, without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAD_TO_SIGMA = 1.4826  # of a normal distribution
# Two-sided 95% quantiles of Student's t for 1 to 30 degrees of freedom.
T_95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def p95(values: Sequence[float]) -> float:
    """The smallest of the values that at least 95% of them do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def slope(values: Sequence[float]) -> float:
    """Theil and Sen's: the median of the slopes of all pairs, a place apart being 1; 0 for fewer than two values."""
    pairs = [
        (later - earlier) / (second - first)
        for first, earlier in enumerate(values)
        for second, later in enumerate(values[first + 1 :], start=first + 1)
    ]
    return statistics.median(pairs) if pairs else 0.0


def spread(values: Sequence[float]) -> float:
    """The standard deviation as the median absolute deviation tells it; outliers do not move it."""
    middle = statistics.median(values)
    return MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


@dataclass(frozen=True)
class Interval:
    """A mean of `n` values with its 95% confidence interval, which is everything where one value is all there is."""

    mean: float
    low: float
    high: float
    n: int


def interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean; with more than 31 values the quantile of 30 degrees of freedom, a little wide."""
    n, mean = len(values), statistics.fmean(values)
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    half = T_95[min(n - 1, len(T_95)) - 1] * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)
