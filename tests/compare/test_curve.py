"""A held-out loss at a time, and the order of the runs."""

from __future__ import annotations

import pytest

from tests.compare.making import run
from zenflow.compare.run import schedule


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
