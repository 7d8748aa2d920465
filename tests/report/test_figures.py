"""Statistics against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.report.making import PART, make
from zenflow.report.figures import (
    Spread,
    breakdown,
    equal_seconds,
    equal_step,
    loss_at_seconds,
    loss_at_step,
    mean_curve,
    percent,
    run_figures,
    spread,
    training_line,
    validation_line,
)
from zenflow.report.runs import read
from zenflow.report.tables import three_digits, time_words


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([None, None], None),
        ([3.0], Spread(3.0, None, 1)),
        ([1.0, None, 3.0], Spread(2.0, math.sqrt(2), 2)),
        ([2.0, 4.0, 9.0], Spread(5.0, math.sqrt((9 + 1 + 16) / 2), 3)),
    ],
    ids=["none", "unknown", "one", "two of three", "three"],
)
def test_mean_and_sample_deviation(values, expected):
    found = spread(values)
    assert (found is None) == (expected is None)
    if expected is not None:
        assert (found.mean, found.n) == (expected.mean, expected.n)
        assert found.std == (None if expected.std is None else pytest.approx(expected.std, rel=1e-15))


def test_percent_of_means():
    assert percent(Spread(1.5, None, 1), Spread(1.25, 9.0, 3)) == pytest.approx(20.0, rel=1e-15)
    assert percent(Spread(1.0, None, 1), Spread(2.0, None, 1)) == -50.0
    assert percent(None, Spread(2.0, None, 1)) is None
    assert percent(Spread(1.0, None, 1), Spread(0.0, None, 1)) is None


def test_one_run(tmp_path):
    """Steps of 4, 1, 2 and 1 s with 10 tokens each."""
    run = read(make(tmp_path / "run", {0: 3.0, 2: 1.0, 4: 1.5}, [4.0, 1.0, 2.0, 1.0], train=lambda step: step * 1.0))
    figures = run_figures(run)
    assert (figures["final_loss"], figures["best_loss"], figures["best_step"]) == (1.5, 1.0, 2)
    assert figures["training_seconds"] == 8.0 and figures["tokens_per_second"] == 5.0
    assert figures["step_ms_median"] == 1500.0 and figures["step_ms_p95"] == 4000.0
    assert figures["train_loss_last"] == 2.5 and "final_accuracy" not in figures
    totals = ("stall_share", "m_to_host", "m_to_device", "worker_busy_share", "skipped_steps")
    assert [figures[name] for name in totals] == [0.2, 0.25, 0.125, 0.4, 0]


def test_where_a_step_s_time_goes(tmp_path):
    """The first step is left out; stalls between steps, in the summary's total alone, are taken out of the floor."""
    seconds = [8.0, 1.0, 1.0, 1.0]
    stall = (0.2 * sum(seconds) + 0.4) / 4  # of the lines, and 0.1 s a step between them
    made = make(tmp_path / "run", {0: 2.0, 4: 1.0}, seconds, totals={"stall_seconds_per_step": stall})
    parts = breakdown(read(made))
    expected = {
        "step_ms": 1000.0,
        "floor_ms": 1e3 * (PART["compute_seconds"] - 0.1),
        "optimizer_ms": 1e3 * (PART["optimizer_seconds"] - PART["selection_seconds"]),
        "selection_ms": 1e3 * PART["selection_seconds"],
        "stall_ms": 1e3 * (PART["stall_seconds"] + 0.1),
        "host_wait_ms": 1e3 * PART["host_wait_seconds"],
    }
    assert parts == pytest.approx(expected, rel=1e-12)
    stacked = ("floor_ms", "optimizer_ms", "selection_ms", "stall_ms")
    assert sum(parts[name] for name in stacked) == pytest.approx(parts["step_ms"], rel=1e-12)


def test_a_run_of_one_step_and_an_engine_without_records(tmp_path):
    run = read(make(tmp_path / "run", {0: 2.0, 1: 1.0}, 0.5, steps=1, engine={}))
    parts = breakdown(run)
    assert parts.pop("step_ms") == 500.0 and set(parts.values()) == {None}
    assert run_figures(run)["step_ms_p95"] == 500.0


def test_equal_steps_are_the_last_that_all_have(tmp_path):
    first = read(make(tmp_path / "a", {0: 3.0, 2: 2.0, 4: 1.0}))
    second = read(make(tmp_path / "b", {0: 3.0, 2: 2.5, 3: 2.0, 6: 1.0}, steps=6))
    third = read(make(tmp_path / "c", {0: 3.0, 5: 1.0}, steps=5))
    assert equal_step([first]) == 4 and equal_step([first, second]) == 2
    assert equal_step([first, second, third]) is None, "the start is no result"
    assert loss_at_step(second, 2) == 2.5 and loss_at_step(third, 2) is None and loss_at_step(third, None) is None


def test_equal_wall_clock_is_linear_between_evaluations(tmp_path):
    """Evaluations of the slow run stand at 0, 4 + 1 and 4 + 1 + 2 + 3 s of training."""
    slow = read(make(tmp_path / "slow", {0: 4.0, 2: 3.0, 4: 1.0}, [4.0, 1.0, 2.0, 3.0]))
    fast = read(make(tmp_path / "fast", {0: 4.0, 4: 2.0}, 1.5))
    assert equal_seconds([slow, fast]) == 6.0
    assert loss_at_seconds(slow, 6.0) == pytest.approx(3.0 - 2.0 * (6 - 5) / 5, rel=1e-15)
    assert loss_at_seconds(slow, 2.5) == pytest.approx(3.5, rel=1e-15)
    assert loss_at_seconds(fast, 6.0) == 2.0
    assert validation_line(slow, over_seconds=True) == ([0.0, 5.0, 10.0], [4.0, 3.0, 1.0])
    assert validation_line(slow, over_seconds=False) == ([0, 2, 4], [4.0, 3.0, 1.0])


def test_the_training_loss_s_mean_starts_without_bias(tmp_path):
    run = read(make(tmp_path / "run", {0: 2.0, 4: 1.0}, 0.5, train=lambda step: float(step)))
    x, y = training_line(run, over_seconds=True)
    assert x == [0.5, 1.0, 1.5, 2.0]
    assert y[:2] == pytest.approx([1.0, (0.9 * 1 + 2) / 1.9], rel=1e-14)


def test_mean_curve_over_what_all_have():
    """Lines over 0..4 and 1..6: their mean on 1..4, at every point of either."""
    curve = mean_curve([([0, 2, 4], [0.0, 2.0, 4.0]), ([1, 3, 6], [3.0, 5.0, 5.0])])
    assert curve.x.tolist() == [1, 2, 3, 4]
    assert curve.mean.tolist() == [2.0, 3.0, 4.0, 4.5]
    assert curve.std == pytest.approx(np.array([2, 2, 2, 1]) / math.sqrt(2), rel=1e-14)
    assert mean_curve([([0, 1], [1.0, 2.0])]).std is None


def test_a_long_curve_is_thinned_and_keeps_its_ends():
    x = list(range(5003))
    curve = mean_curve([(x, x), (x, x)])
    assert len(curve.x) == 400 and curve.x[[0, -1]].tolist() == [0, 5002]
    assert curve.mean == pytest.approx(curve.x)


@pytest.mark.parametrize(
    ("value", "words"),
    [(0, "0"), (0.12345, "0.123"), (631.2, "631"), (999.9, "1,000"), (1234.5, "1,230"), (1e7, "10,000,000")],
)
def test_three_digits_need_no_exponent(value, words):
    assert three_digits(value) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.9999, "1,000 ms"), (1, "1 s"), (119.6, "120 s"), (7200, "2 h"), (4e6, "1,110 h")]
)
def test_a_time_is_in_the_unit_in_which_it_is_read_best(seconds, words):
    assert time_words(seconds) == words
