"""Statistics against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest

from zenflow.diagnose.numbers import interval, p95, slope, spread


@pytest.mark.parametrize(("n", "expected"), [(1, 1), (19, 19), (20, 19), (101, 96)])
def test_p95_is_one_of_the_values_and_covers_95_percent(n, expected):
    assert p95([float(value) for value in range(n, 0, -1)]) == expected


@pytest.mark.parametrize("values", [[], [3.0]])
def test_no_slope_without_two_values(values):
    assert slope(values) == 0.0


def test_the_slope_of_a_line_survives_a_quarter_of_outliers():
    line = [5.0 - 0.25 * place for place in range(13)]
    assert slope(line) == pytest.approx(-0.25)
    line[2] = line[7] = line[11] = 1e6
    assert slope(line) == pytest.approx(-0.25, rel=0.2)


def test_spread_is_the_scaled_median_deviation():
    assert spread([1.0, 2.0, 3.0, 4.0, 1000.0]) == pytest.approx(1.4826)


def test_interval_of_three_values():
    """Mean 2, deviation 1: half-width 4.303 / sqrt(3)."""
    found = interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3)
    assert found.high - found.mean == pytest.approx(4.303 / math.sqrt(3))
    assert found.mean - found.low == pytest.approx(4.303 / math.sqrt(3))


def test_one_value_says_nothing_and_equal_ones_everything():
    assert (interval([5.0]).low, interval([5.0]).high) == (-math.inf, math.inf)
    assert (interval([5.0, 5.0]).low, interval([5.0, 5.0]).high) == (5.0, 5.0)


def test_many_values_use_the_last_quantile():
    values = [0.0, 1.0] * 20
    deviation = math.sqrt(40 * 0.25 / 39)
    assert interval(values).high - 0.5 == pytest.approx(2.042 * deviation / math.sqrt(40))
