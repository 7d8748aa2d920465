"""A held-out loss at a time, and the order of the runs."""

from __future__ import annotations

import pytest

from tests.compare.making import run
from zenflow.compare.curve import Point
from zenflow.compare.run import schedule
from zenflow.compare.side import _curve
from zenflow.diagnose.figures import StepParts
from zenflow.training.metrics import Evaluation


@pytest.mark.parametrize(
    ("seconds", "loss"), [(0.0, 4.0), (1.25, 3.75), (2.5, 3.5), (9.99, 2.002), (10.0, 2.0), (99.0, 2.0)]
)
def test_between_two_evaluations_it_is_on_their_line(seconds, loss):
    assert run("a", 0).loss_at(seconds) == pytest.approx(loss)


def test_the_slower_of_a_pair_is_read_where_the_faster_ends():
    slow = run("a", 0, speed=0.5)
    assert slow.seconds == pytest.approx(20) and slow.loss_at(run("b", 0).seconds) == pytest.approx(3.0)


@pytest.mark.parametrize(("repeats", "order"), [(1, "ab"), (2, "abba"), (3, "abbaab"), (4, "abbaabba")])
def test_a_drift_favours_neither_side(repeats, order):
    plan = schedule(repeats)
    assert "".join(side for side, _ in plan) == order
    assert [repeat for _, repeat in plan] == [number // 2 for number in range(2 * repeats)]
    if repeats % 2 == 0:
        places = {side: sum(place for place, (name, _) in enumerate(plan) if name == side) for side in "ab"}
        assert places["a"] == places["b"]


def test_time_is_that_of_the_steps_and_of_the_last_results():
    parts = [StepParts(seconds, 0.0, 0.0) for seconds in (1.0, 2.0, 4.0)]
    evaluations = [Evaluation(0, 9.0, None), Evaluation(2, 8.0, 0.5), Evaluation(3, 7.0, None)]
    expected = (Point(0, 0.0, 9.0), Point(2, 3.0, 8.0, {"accuracy": 0.5}), Point(3, 7.25, 7.0))
    assert _curve(parts, evaluations, 0.25) == expected
