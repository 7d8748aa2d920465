"""The number of threads that the CPU optimizer takes for a window."""

from __future__ import annotations

import pytest

from zenflow.pace import HIGH, LOW, Pace

PERIOD = 1_000_000


def after(pace: Pace, shares: list[float], urgent: bool = False, start: int = 0) -> list[int]:
    """Threads of each of as many windows as there are shares, each busy for its share of the time until the next."""
    threads = []
    for number, share in enumerate(shares):
        threads.append(pace.begin(start + number * PERIOD, urgent))
        pace.worked(round(share * PERIOD / 2))
        pace.worked(round(share * PERIOD / 2))
    return threads


def test_a_worker_that_is_done_early_gives_threads_back_until_it_is_not() -> None:
    threads = after(Pace(12, adapt=True), [0.5] * 30)
    assert threads[:5] == [12, 12, 10, 10, 9]
    assert threads[-1] == 1 and sorted(threads, reverse=True) == threads


def test_work_that_follows_its_threads_settles_below_the_time_it_has() -> None:
    """500 units of work, one a thread, in windows of 100: five threads are just in time, six take 83."""
    pace, now, shares = Pace(16, adapt=True), 0, []
    for _ in range(40):
        busy = 500 // pace.begin(now, urgent=False)
        pace.worked(busy)
        now += max(100, busy)
        shares.append(busy / 100)
    assert shares[0] == 0.31 and all(0.7 <= share <= 1 for share in shares[-12:])


def test_a_worker_that_is_late_gets_threads_at_once() -> None:
    pace = Pace(12, adapt=True)
    after(pace, [0.5] * 30)
    assert after(pace, [1.0] * 8, start=30 * PERIOD) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert after(pace, [1.0] * 5, start=38 * PERIOD) == [10, 12, 12, 12, 12]


@pytest.mark.parametrize("share", [LOW, 0.9, HIGH])
def test_within_the_band_nothing_changes(share: float) -> None:
    assert set(after(Pace(8, adapt=True), [share] * 12)) == {8}


def test_one_early_window_is_not_enough() -> None:
    assert set(after(Pace(8, adapt=True), [0.5, 0.9] * 8)) == {8}


def test_urgent_windows_take_everything_and_teach_nothing() -> None:
    pace = Pace(12, adapt=True)
    after(pace, [0.5] * 5)
    assert after(pace, [0.9, 0.1, 0.1, 0.1], urgent=True, start=5 * PERIOD) == [12] * 4
    assert after(pace, [0.9] * 3, start=9 * PERIOD) == [9, 9, 9]


def test_a_fixed_number_stays() -> None:
    assert after(Pace(5, adapt=False), [0.1] * 9 + [1.0] * 3) == [5] * 12
