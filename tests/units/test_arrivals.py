"""How many gradients a parameter gets a step, learned from the first steps that had any."""

from __future__ import annotations

import pytest

from zenflow.arrivals import Arrivals


def run(arrivals: Arrivals, *steps: dict[int, int]) -> None:
    """Steps by the number of gradients of each parameter."""
    for counts in steps:
        arrivals.begin_step()
        for index, count in counts.items():
            assert [arrivals.count(index) for _ in range(count)] == list(range(1, count + 1))
        arrivals.end_step()


@pytest.mark.parametrize("window", [1, 2, 3, 7])
@pytest.mark.parametrize("passes", [1, 2, 5])
def test_known_after_a_window_of_equal_steps(window: int, passes: int) -> None:
    arrivals = Arrivals(window)
    run(arrivals, *[{0: passes}] * (window - 1))
    assert arrivals.usual(0) is None
    run(arrivals, {0: passes})
    assert arrivals.usual(0) == passes


def test_steps_without_a_gradient_teach_nothing() -> None:
    arrivals = Arrivals(2)
    run(arrivals, {0: 3}, {}, {1: 1}, {0: 3})
    assert (arrivals.usual(0), arrivals.usual(1), arrivals.usual(2)) == (3, None, None)


def test_a_number_that_varies_is_never_known() -> None:
    arrivals = Arrivals(3)
    run(arrivals, {0: 2, 1: 1}, {0: 2, 1: 1}, {0: 1, 1: 1}, {0: 2}, {0: 2}, {0: 2})
    assert (arrivals.usual(0), arrivals.usual(1)) == (0, 1)


def test_what_is_known_stays() -> None:
    arrivals = Arrivals(2)
    run(arrivals, {0: 2}, {0: 2}, {0: 1}, {0: 3})
    assert arrivals.usual(0) == 2


def test_a_step_that_begins_anew_forgets_what_came() -> None:
    arrivals = Arrivals(1)
    arrivals.begin_step()
    assert not arrivals.any
    arrivals.count(0)
    assert arrivals.any
    run(arrivals, {0: 1})
    assert arrivals.usual(0) == 1
    assert not arrivals.any
