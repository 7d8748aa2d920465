"""The number of threads that the CPU optimizer takes for a window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zenflow.pace import HIGH, PATIENCE, Pace

PERIOD = 1_000_000


def after(pace: Pace, shares: list[float], urgent: bool = False, start: int = 0) -> list[int]:
    """Threads of each of as many windows as there are shares, each busy for its share of the time until the next."""
    threads = []
    for number, share in enumerate(shares):
        threads.append(pace.begin(start + number * PERIOD, urgent))
        pace.worked(round(share * PERIOD / 2))
        pace.worked(round(share * PERIOD / 2))
    return threads


def beside(pace: Pace, windows: int, busy: Callable[[int], int], step: Callable[[int], int]) -> list[tuple[int, int]]:
    """Threads and period of each window, on a host where the work takes `busy(threads)` and the trainer `step(threads)`
    at least; the longer of both is the time until the next window."""
    now, told = 0, []
    for _ in range(windows):
        threads = pace.begin(now, urgent=False)
        pace.worked(busy(threads))
        period = max(busy(threads), step(threads))
        told.append((threads, period))
        now += period
    return told


def test_a_worker_that_is_done_early_gives_threads_back_until_it_is_not() -> None:
    assert after(Pace(12, adapt=True), [0.5] * 9) == [8, 8, 5, 5, 3, 3, 2, 2, 2], "1 would take 1.0"
    assert after(Pace(12, adapt=True), [0.1] * 9) == [8, 8, 1, 1, 1, 1, 1, 1, 1]


def test_far_fewer_are_taken_at_once_where_far_fewer_do() -> None:
    """The slower of the two windows decides."""
    assert after(Pace(12, adapt=True), [0.3, 0.2])[-1] == 8
    assert after(Pace(12, adapt=True), [0.3, 0.2, 0.2])[-1] == 3


@pytest.mark.parametrize(("work", "threads"), [(500, 6), (900, 10), (60, 1)])
def test_work_that_follows_its_threads_settles_below_the_time_it_has(work: int, threads: int) -> None:
    """So many units of work, one a thread, in windows of 100: five threads would be just in time for 500."""
    told = beside(Pace(16, adapt=True), 40, lambda threads: work // threads, lambda threads: 100)
    assert told[-12:] == [(threads, 100)] * 12


def test_work_that_no_number_finishes_in_time_gets_all_threads() -> None:
    told = beside(Pace(12, adapt=True), 40, lambda threads: 3000 // threads, lambda threads: 100)
    assert told[-12:] == [(12, 250)] * 12


def test_threads_that_bring_no_window_sooner_are_given_back() -> None:
    """Memory bandwidth that 8 threads use up: 12 are hardly sooner done, and slow the trainer's launches."""
    told = beside(Pace(12, adapt=True), 80, lambda threads: 4000 // min(threads, 9), lambda threads: 380 + 10 * threads)
    assert told[-10:].count((8, 500)) >= 8
    trials = [number for number, (threads, _) in enumerate(told) if threads == 12]
    assert trials and len(trials) <= 2 * (80 // PATIENCE + 1)
    assert sum(period for _, period in told) < 1.01 * 80 * 500


def test_a_worker_that_is_late_gets_threads_at_once() -> None:
    pace = Pace(12, adapt=True)
    after(pace, [0.1] * 9)
    told = beside(pace, 14, lambda threads: 1200 // threads, lambda threads: 100)
    assert [threads for threads, _ in told] == [1, 2, 2, 3, 3, 4, 4, 6, 6, 9, 9, 12, 12, 12]


@pytest.mark.parametrize("share", [0.79, 0.9, HIGH])
def test_within_the_band_nothing_changes(share: float) -> None:
    assert set(after(Pace(12, adapt=True), [share] * 12)) == {8}


def test_one_early_window_is_not_enough() -> None:
    assert set(after(Pace(12, adapt=True), [0.5, 0.9] * 8)) == {8}


def test_urgent_windows_take_everything_and_teach_nothing() -> None:
    pace = Pace(12, adapt=True)
    assert after(pace, [0.5] * 4) == [8, 8, 5, 5]
    assert after(pace, [0.9, 0.1, 0.1, 0.1], urgent=True, start=4 * PERIOD) == [12] * 4
    assert after(pace, [0.9] * 3, start=8 * PERIOD) == [3, 3, 3]


def test_an_urgent_window_within_a_trial_leaves_it_to_the_others() -> None:
    pace = Pace(3, adapt=True)
    assert after(pace, [1.0]) == [2]
    assert pace.begin(PERIOD, urgent=True) == 3
    pace.worked(PERIOD)
    assert after(pace, [0.9] * 4, start=2 * PERIOD) == [3, 3, 2, 2], "no sooner than before: given back"


@pytest.mark.parametrize("most", [1, 2, 3, 16])
def test_there_is_always_a_thread_and_never_too_many(most: int) -> None:
    for share in (0.0, 0.5, 1.0, 5.0):
        assert all(1 <= threads <= most for threads in after(Pace(most, adapt=True), [share] * 40))


def test_a_fixed_number_stays() -> None:
    assert after(Pace(5, adapt=False), [0.1] * 9 + [1.0] * 3) == [5] * 12
