"""Records and totals of a run's steps: right sums, nothing awaited, nothing left behind by a step that broke off."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.units.timing import CPU
from zenflow.telemetry import STEPS_AT_ONCE, HostClock, StepRecord, Telemetry


class Time:
    """Seconds that only the test moves; all of them powers of two, so that sums are exact."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class LateClock:
    """A device: a mark is a numbered object that is reached when the test says so, and may be in one place only."""

    def __init__(self, now: Time) -> None:
        self.now, self.until, self.waited = now, float("inf"), 0
        self.made, self.free = 0, []

    def mark(self, stream=None) -> list[float]:
        if not self.free:
            self.made += 1
        mark = self.free.pop() if self.free else [0.0]
        mark[:] = [self.now()]
        return mark

    def reached(self, mark: list[float]) -> bool:
        return mark[0] <= self.until

    def wait(self, mark: list[float]) -> None:
        self.waited += 1
        self.until = max(self.until, mark[0])

    def between(self, first: list[float], last: list[float]) -> float:
        assert self.reached(first) and self.reached(last), "a timing event that the device has not reached has no time"
        assert not any(mark is free for mark in (first, last) for free in self.free), "used after it was given back"
        return last[0] - first[0]

    def give_back(self, mark: list[float]) -> None:
        assert not any(mark is free for free in self.free), "given back twice"
        self.free.append(mark)


def on_fake_time(keep: int = 4096, late: bool = False) -> tuple[Telemetry, Time]:
    telemetry, now = Telemetry(CPU, keep), Time()
    telemetry._host_now = now
    telemetry._clock = LateClock(now) if late else HostClock(now)
    return telemetry, now


def plain_step(telemetry: Telemetry, now: Time, number: int, busy: float = 0.0) -> None:
    """4 s of backward, then a step of 2 s."""
    now.now += 4
    telemetry.begin_step(number, 0.0, busy)
    now.now += 2
    telemetry.end_step(None)


def test_a_record_says_where_the_step_went() -> None:
    telemetry, now = on_fake_time()
    plain_step(telemetry, now, 1, busy=3.0)
    now.now += 16
    telemetry.begin_step(2, 0.25, 8.0)
    now.now += 1
    for seconds in (0.5, 0.25):
        with telemetry.stall():
            now.now += seconds
            telemetry.add(bytes_to_device=7, host_wait_seconds=seconds / 2)
    with telemetry.selection():
        now.now += 8
        telemetry.add(bytes_to_host=5)
    telemetry.add(bytes_to_host=6)
    telemetry.end_step(1)
    first, second = telemetry.records()
    assert first == StepRecord(
        step=1,
        seconds=None,
        compute_seconds=None,
        optimizer_seconds=2.0,
        stall_seconds=0.0,
        selection_seconds=0.0,
        host_seconds=2.0,
        host_wait_seconds=0.0,
        bytes_to_host=0,
        bytes_to_device=0,
        worker_busy_seconds=3.0,
        ring_occupancy=0.0,
        staleness=None,
    )
    assert second == StepRecord(
        step=2,
        seconds=16 + 1 + 0.75 + 8,
        compute_seconds=16.0,
        optimizer_seconds=1 + 8.0,
        stall_seconds=0.75,
        selection_seconds=8.0,
        host_seconds=1 + 0.75 + 8,
        host_wait_seconds=0.375,
        bytes_to_host=11,
        bytes_to_device=14,
        worker_busy_seconds=5.0,
        ring_occupancy=0.25,
        staleness=1,
    )
    assert (telemetry.stall_seconds(), telemetry.selection_seconds()) == (0.75, 8.0)
    assert (telemetry.bytes_to_host, telemetry.bytes_to_device, telemetry.host_wait_seconds) == (11, 14, 0.375)


def test_records_cannot_be_changed() -> None:
    telemetry, now = on_fake_time()
    plain_step(telemetry, now, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        telemetry.records()[0].step = 2  # type: ignore[misc]


def test_between_steps_stalls_go_to_the_totals_and_traffic_to_the_next_step() -> None:
    telemetry, now = on_fake_time()
    telemetry.add(bytes_to_host=1, host_wait_seconds=0.5)
    with telemetry.stall():
        now.now += 1
    plain_step(telemetry, now, 1)
    with telemetry.stall(), telemetry.selection():
        now.now += 2
    telemetry.add(bytes_to_device=3)
    plain_step(telemetry, now, 2)
    first, second = telemetry.records()
    for record in (first, second):
        assert (record.stall_seconds, record.selection_seconds, record.optimizer_seconds) == (0, 0, 2)
    assert (first.bytes_to_host, first.bytes_to_device, first.host_wait_seconds) == (1, 0, 0.5)
    assert (second.bytes_to_host, second.bytes_to_device, second.host_wait_seconds) == (0, 3, 0)
    assert (second.compute_seconds, second.seconds) == (2 + 4, 2 + 4 + 2)
    assert (telemetry.stall_seconds(), telemetry.selection_seconds()) == (3, 2)
    assert (telemetry.bytes_to_host, telemetry.bytes_to_device, telemetry.host_wait_seconds) == (1, 3, 0.5)


@pytest.mark.parametrize("late", [False, True], ids=["host", "device"])
def test_a_step_that_broke_off_leaves_no_record_and_spoils_none(late: bool) -> None:
    telemetry, now = on_fake_time(late=late)
    plain_step(telemetry, now, 1)
    now.now += 4
    telemetry.begin_step(2, 0.5, 1.0)
    with pytest.raises(KeyError), telemetry.stall():
        now.now += 64
        telemetry.add(bytes_to_host=9)
        raise KeyError
    with telemetry.stall():  # the flush that may follow
        now.now += 8
    plain_step(telemetry, now, 2, busy=2.0)
    plain_step(telemetry, now, 3, busy=2.5)
    records = telemetry.records(wait=True)
    assert [record.step for record in records] == [1, 2, 3]
    assert [record.seconds for record in records] == [None, None, 6]
    assert [record.compute_seconds for record in records] == [None, None, 4]
    assert [record.optimizer_seconds for record in records] == [2, 2, 2]
    assert [record.stall_seconds for record in records] == [0, 0, 0]
    assert [record.bytes_to_host for record in records] == [0, 0, 0]
    assert [record.worker_busy_seconds for record in records] == [0, 2.0, 0.5]
    assert (telemetry.stall_seconds(), telemetry.bytes_to_host) == (8, 9)


def test_a_first_step_that_broke_off_many_times() -> None:
    telemetry, now = on_fake_time(late=True)
    for _ in range(3):
        telemetry.begin_step(1, 0.0, 0.0)
        now.now += 1
    plain_step(telemetry, now, 1)
    (record,) = telemetry.records()
    assert (record.step, record.seconds, record.optimizer_seconds) == (1, None, 2)


def test_a_worker_that_was_started_anew_counts_from_nothing() -> None:
    telemetry, now = on_fake_time()
    for number, busy in enumerate((4.0, 6.0, 1.0, 1.5)):
        plain_step(telemetry, now, number, busy)
    assert [record.worker_busy_seconds for record in telemetry.records()] == [4.0, 2.0, 1.0, 0.5]


def test_ending_what_has_not_begun_is_a_fault() -> None:
    telemetry, now = on_fake_time()
    plain_step(telemetry, now, 1)
    with pytest.raises(AssertionError, match="begin_step"):
        telemetry.end_step(None)


@pytest.mark.parametrize("keep", [1, 2, 7])
def test_the_latest_are_kept(keep: int) -> None:
    telemetry, now = on_fake_time(keep)
    for number in range(17):
        plain_step(telemetry, now, number)
    assert [record.step for record in telemetry.records()] == list(range(17))[-keep:]


def test_nothing_is_awaited_until_somebody_asks() -> None:
    telemetry, now = on_fake_time(late=True)
    clock = telemetry._clock
    clock.until = -1.0
    for number in range(5):
        now.now += 4
        telemetry.begin_step(number, 0.0, 0.0)
        with telemetry.stall():
            now.now += 1
        telemetry.end_step(None)
    assert telemetry.records() == []
    assert clock.waited == 0
    clock.until = 11.0  # in the third step
    assert [record.step for record in telemetry.records()] == [0, 1]
    assert clock.waited == 0
    assert telemetry.stall_seconds() == 5
    assert clock.waited > 0
    clock.until = 11.0
    assert [record.step for record in telemetry.records()] == [0, 1]
    assert [record.step for record in telemetry.records(wait=True)] == [0, 1, 2, 3, 4]
    assert [record.stall_seconds for record in telemetry.records()] == [1] * 5


def test_few_steps_are_resolved_at_once_and_the_queue_still_empties() -> None:
    telemetry, now = on_fake_time(late=True)
    clock = telemetry._clock
    clock.until = -1.0
    for number in range(29):
        plain_step(telemetry, now, number)
    assert len(telemetry._steps) == 29
    clock.until = float("inf")
    lengths = []
    for number in range(29, 49):
        before = len(telemetry._steps)
        plain_step(telemetry, now, number)
        lengths.append(len(telemetry._steps))
        assert before + 1 - lengths[-1] <= STEPS_AT_ONCE
    assert lengths[-1] <= 1
    assert [record.step for record in telemetry.records()] == list(range(49))


def test_marks_are_used_again() -> None:
    telemetry, now = on_fake_time(late=True)
    for number in range(101):
        telemetry.begin_step(number, 0.0, 0.0)
        if number % 13 == 5:
            continue  # broken off
        with telemetry.stall():
            now.now += 1
        telemetry.end_step(None)
    assert telemetry._clock.made <= 8
    assert sum(record.stall_seconds for record in telemetry.records()) == telemetry.stall_seconds() > 0


def test_a_device_that_finishes_nothing_does_not_fill_the_memory() -> None:
    telemetry, now = on_fake_time(keep=5, late=True)
    telemetry._clock.until = -1.0
    for number in range(23):
        plain_step(telemetry, now, number)
    assert len(telemetry._steps) == 5
    assert telemetry._clock.made <= 2 * 6 + 1
    assert [record.step for record in telemetry.records(wait=True)] == [18, 19, 20, 21, 22]
    assert [record.seconds for record in telemetry.records()] == [6] * 5


def test_the_real_clock_on_the_cpu() -> None:
    telemetry = Telemetry(CPU)
    for number in range(3):
        telemetry.begin_step(number, 0.0, 0.0)
        with telemetry.stall():
            torch.ones(101).sum()
        telemetry.end_step(0)
    first, second, third = telemetry.records()
    assert first.seconds is None
    for record in (second, third):
        assert 0 < record.stall_seconds < record.host_seconds < record.seconds
        assert record.seconds == pytest.approx(
            record.compute_seconds + record.optimizer_seconds + record.stall_seconds, abs=1e-9
        )
