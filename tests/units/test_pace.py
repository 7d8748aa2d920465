"""The number of threads that the CPU optimizer takes for a window."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zenflow.pace import HIGH, PATIENCE_NS, RUN_NS, Pace

MS = 1_000_000
PERIOD = RUN_NS // 2  # two windows are a run


def after(pace: Pace, shares: list[float], urgent: bool = False, start: int = 0) -> list[int]:
    """Threads of each of as many windows as there are shares, each busy for its share of the time until the next."""
    threads = []
    for number, share in enumerate(shares):
        threads.append(pace.begin(start + number * PERIOD, urgent))
        pace.worked(round(share * PERIOD / 2))
        pace.worked(round(share * PERIOD / 2))
    return threads


def beside(
    pace: Pace, seconds: float, busy: Callable[[int], int], step: Callable[[int], int], now: int = 0
) -> list[tuple[int, int]]:
    """Threads and period in ms of each window, on a host where the work takes `busy(threads)` and the trainer at least
    `step(threads)` ms; the longer of both is the time until the next window."""
    told, end = [], now + seconds * 1e9
    while now < end:
        threads = pace.begin(now, urgent=False)
        pace.worked(busy(threads) * MS)
        period = max(busy(threads), step(threads))
        told.append((threads, period))
        now += period * MS
    return told


def test_a_worker_that_is_done_early_gives_threads_back_until_it_is_not() -> None:
    assert after(Pace(12, adapt=True), [0.5] * 9) == [8, 8, 5, 5, 3, 3, 2, 2, 2], "1 would take 1.0"
    assert after(Pace(12, adapt=True), [0.1] * 9) == [8, 8, 1, 1, 1, 1, 1, 1, 1]


def test_the_share_is_that_of_all_windows_of_a_run() -> None:
    """Cohorts of different sizes end one after another: (0.2 + 0.6 + ...) / n = 0.4 of 8 threads, up to 0.9, is 4."""
    pace, threads = Pace(12, adapt=True), []
    for number in range(12):
        threads.append(pace.begin(number * RUN_NS // 10, urgent=False))
        pace.worked(round((0.2, 0.6)[number % 2] * RUN_NS / 10))
    assert threads == [8] * 10 + [4] * 2


@pytest.mark.parametrize(("work", "threads"), [(500, 6), (900, 10), (60, 1)])
def test_work_that_follows_its_threads_settles_below_the_time_it_has(work: int, threads: int) -> None:
    """So many ms of work for one thread, in windows of 100: five threads would be just in time for 500."""
    told = beside(Pace(16, adapt=True), 10, lambda threads: work // threads, lambda threads: 100)
    assert told[-12:] == [(threads, 100)] * 12


def test_work_that_no_number_finishes_in_time_gets_all_threads() -> None:
    told = beside(Pace(12, adapt=True), 20, lambda threads: 3000 // threads, lambda threads: 100)
    assert told[-12:] == [(12, 250)] * 12


def test_threads_that_bring_no_window_sooner_are_given_back() -> None:
    """Memory bandwidth that 8 threads use up: 12 are hardly sooner done, and slow the trainer's launches."""
    told = beside(Pace(12, adapt=True), 90, lambda threads: 4000 // min(threads, 9), lambda threads: 380 + 10 * threads)
    trials = [number for number, (threads, _) in enumerate(told) if threads == 12]
    assert trials and all(threads in (8, 12) for threads, _ in told)
    assert len(trials) <= 2 * (90 // (PATIENCE_NS // 10**9) + 1)
    assert sum(period for _, period in told) < 1.01 * 500 * len(told)


def test_a_worker_that_is_late_gets_threads_run_by_run() -> None:
    pace = Pace(12, adapt=True)
    after(pace, [0.1] * 9)
    told = beside(pace, 18, lambda threads: 1200 // threads, lambda threads: 100, now=9 * PERIOD)
    assert list(dict.fromkeys(threads for threads, _ in told)) == [1, 2, 3, 4, 6, 9, 12]
    assert told[-1] == (12, 100)


@pytest.mark.parametrize("share", [0.79, 0.9, HIGH])
def test_within_the_band_nothing_changes(share: float) -> None:
    assert set(after(Pace(12, adapt=True), [share] * 12)) == {8}


def test_one_window_is_no_run_however_long() -> None:
    assert Pace(12, adapt=True).begin(0, urgent=False) == 8
    pace, threads = Pace(12, adapt=True), []
    for number in range(4):
        threads.append(pace.begin(number * 10 * RUN_NS, urgent=False))
    assert threads == [8, 8, 1, 1]


def test_urgent_windows_take_everything_and_teach_nothing() -> None:
    pace = Pace(12, adapt=True)
    assert after(pace, [0.5] * 4) == [8, 8, 5, 5]
    assert after(pace, [0.9, 0.1, 0.1, 0.1], urgent=True, start=4 * PERIOD) == [12] * 4
    assert after(pace, [0.9] * 3, start=8 * PERIOD) == [3, 3, 3]


def test_an_urgent_window_within_a_trial_leaves_it_to_the_others() -> None:
    pace = Pace(3, adapt=True)
    assert after(pace, [1.0] * 3) == [2, 2, 3]
    assert pace.begin(3 * PERIOD, urgent=True) == 3
    pace.worked(PERIOD)
    assert after(pace, [0.9] * 3, start=4 * PERIOD) == [3, 2, 2], "no sooner than before: given back"


@pytest.mark.parametrize("most", [1, 2, 3, 16])
def test_there_is_always_a_thread_and_never_too_many(most: int) -> None:
    for share in (0.0, 0.5, 1.0, 5.0):
        assert all(1 <= threads <= most for threads in after(Pace(most, adapt=True), [share] * 40))


def test_a_fixed_number_stays() -> None:
    assert after(Pace(5, adapt=False), [0.1] * 9 + [1.0] * 3) == [5] * 12
