"""What every optimizer step cost, measured without making anything wait.

On a GPU a point in time is a timing event on the compute stream. It is asked about later, when the device has passed it
anyway, and then used again. A step costs the host two events, two more for every section, and no synchronisation.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

STEPS_AT_ONCE = 4  # resolved in one begin_step: more than one comes in, so that the queue empties, and never a burst


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; times in seconds, traffic in bytes.

    "Device" is the compute stream's own time, on the CPU the wall clock. Traffic and waiting between two steps (uploads
    under backward) belong to the second; a stall there is in the totals of `Telemetry` only, and in `compute_seconds`.
    """

    step: int
    seconds: float | None  # end of the previous step() to the end of this one; None where no finished step precedes it
    compute_seconds: float | None  # the part before this step() began: forward and backward; None likewise
    optimizer_seconds: float  # begin to end of step() on the device, stalls left out
    stall_seconds: float  # the device stood still for the CPU or for PCIe
    selection_seconds: float  # exchange of owners, in selecting steps
    host_seconds: float  # the trainer's thread inside step()
    host_wait_seconds: float  # of which it waited for the worker
    bytes_to_host: int
    bytes_to_device: int
    worker_busy_seconds: float  # since the previous record
    ring_occupancy: float  # share of the window's slots sent and not yet processed when step() began, 0 to 1
    staleness: int | None  # 0: a result became visible in its window's last step; 1: one that waited; None: none did


class Clock(Protocol):
    """Points in time ("marks") and the seconds between them. A mark that was given back must not be used again."""

    def mark(self, stream: torch.cuda.Stream | None = None) -> Any: ...
    def reached(self, mark: Any) -> bool: ...
    def wait(self, mark: Any) -> None: ...
    def between(self, first: Any, last: Any) -> float: ...
    def give_back(self, mark: Any) -> None: ...


class HostClock:
    """The wall clock: a mark is reached when it is made."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self, stream: torch.cuda.Stream | None = None) -> float:
        return self._now()

    def reached(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        pass

    def between(self, first: float, last: float) -> float:
        return last - first

    def give_back(self, mark: float) -> None:
        pass


class DeviceClock:
    """A GPU's clock: a mark is a timing event, taken from a pool because creating one costs more than recording it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def mark(self, stream: torch.cuda.Stream | None = None) -> torch.cuda.Event:
        """The point at which `stream` (the device's current one if None) has done all that is queued on it now."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device) if stream is None else stream)
        return event

    def reached(self, mark: torch.cuda.Event) -> bool:
        return mark.query()

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def between(self, first: torch.cuda.Event, last: torch.cuda.Event) -> float:
        return first.elapsed_time(last) / 1e3

    def give_back(self, mark: torch.cuda.Event) -> None:
        self._free.append(mark)


def clock_of(device: torch.device) -> Clock:
    """The clock on which work on `device` is timed."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()


@dataclass(eq=False, slots=True)
class _Section:
    kind: str
    begin: Any
    end: Any
    seconds: float | None = None  # until both marks are reached


@dataclass(eq=False, slots=True)
class _Counts:
    """What is counted from the end of one step to the end of the next."""

    host_wait_seconds: float = 0.0
    bytes_to_host: int = 0
    bytes_to_device: int = 0


@dataclass(eq=False, slots=True)
class _Step:
    """A step under way or queued. It gives `before` and `begin` back; `end` is the next step's `before`."""

    step: int
    ring_occupancy: float
    worker_busy_total: float
    host_begin: float
    before: Any  # end of the previous step, if that was finished
    begin: Any
    counts: _Counts
    end: Any = None  # stays None if the step was broken off
    sections: list[_Section] = field(default_factory=list)
    host_seconds: float = 0.0
    worker_busy_seconds: float = 0.0
    staleness: int | None = None


class Telemetry:
    """Records of steps, and totals since construction. Nothing waits, except where a method says so.

    A step that raises between `begin_step` and `end_step` leaves no record; the next one has None for `seconds` and
    `compute_seconds`. Its sections and traffic stay in the totals.
    """

    def __init__(self, device: torch.device, keep: int = 4096) -> None:
        self.host_wait_seconds = 0.0
        self.bytes_to_host = 0
        self.bytes_to_device = 0
        self._keep = keep
        self._clock: Clock = clock_of(device)
        self._host_now: Callable[[], float] = time.perf_counter
        self._totals = {"stall": 0.0, "selection": 0.0}  # of the sections that are resolved
        self._sections: deque[_Section] = deque()  # not yet resolved, oldest first, as are the steps
        self._steps: deque[_Step] = deque()
        self._records: deque[StepRecord] = deque(maxlen=keep)
        self._current: _Step | None = None
        self._counts = _Counts()
        self._last_end: Any = None
        self._worker_busy = 0.0  # the worker's total at the last record

    def begin_step(self, step: int, ring_occupancy: float, worker_busy_seconds: float) -> None:
        """Step number `step` begins; `worker_busy_seconds` is the worker's total so far."""
        host_begin = self._host_now()
        if self._current is not None:
            self._enqueue(self._current)
            self._counts = _Counts()
        self._current = _Step(
            step,
            ring_occupancy,
            worker_busy_seconds,
            host_begin,
            before=self._last_end,
            begin=self._clock.mark(),
            counts=self._counts,
        )
        self._last_end = None
        self._resolve(STEPS_AT_ONCE)

    def end_step(self, staleness: int | None) -> None:
        """The step that began last has queued all its work."""
        step = self._current
        assert step is not None, "end_step without begin_step"
        step.end = self._last_end = self._clock.mark()
        step.staleness = staleness
        total = step.worker_busy_total
        # A total below the last one comes from a worker that has been started anew.
        step.worker_busy_seconds = total - self._worker_busy if total >= self._worker_busy else total
        self._worker_busy = total
        self._current, self._counts = None, _Counts()
        step.host_seconds = self._host_now() - step.host_begin
        self._enqueue(step)

    def stall(self) -> AbstractContextManager[None]:
        """A context: from the moment at which the device has done all that was queued, to the end of the block's work.

        Inside a step it counts for its record too. A block that raises is not counted.
        """
        return self._section("stall")

    def selection(self) -> AbstractContextManager[None]:
        """The same for the exchange of owners; a stall inside it counts as both."""
        return self._section("selection")

    def add(self, *, bytes_to_host: int = 0, bytes_to_device: int = 0, host_wait_seconds: float = 0.0) -> None:
        """Count traffic and waiting in the totals, and in the record of the step that is under way or begins next."""
        self.bytes_to_host += bytes_to_host
        self.bytes_to_device += bytes_to_device
        self.host_wait_seconds += host_wait_seconds
        counts = self._counts
        counts.bytes_to_host += bytes_to_host
        counts.bytes_to_device += bytes_to_device
        counts.host_wait_seconds += host_wait_seconds

    def records(self, wait: bool = False) -> list[StepRecord]:
        """The latest `keep` steps that the device has finished, oldest first; `wait` waits for all that have ended."""
        self._resolve(None, wait)
        return list(self._records)

    def stall_seconds(self) -> float:
        """Total of all stalls; waits for those that the device has not finished."""
        self._resolve_sections(wait=True)
        return self._totals["stall"]

    def selection_seconds(self) -> float:
        """Total of all exchanges; waits for those that the device has not finished."""
        self._resolve_sections(wait=True)
        return self._totals["selection"]

    @contextmanager
    def _section(self, kind: str) -> Iterator[None]:
        begin = self._clock.mark()
        try:
            yield
        except BaseException:
            self._clock.give_back(begin)
            raise
        section = _Section(kind, begin, self._clock.mark())
        self._sections.append(section)
        if self._current is not None:
            self._current.sections.append(section)
        self._resolve_sections(wait=False)

    def _enqueue(self, step: _Step) -> None:
        self._steps.append(step)
        if len(self._steps) > self._keep:
            self._forget(self._steps.popleft())

    def _forget(self, step: _Step) -> None:
        # Only ever the oldest: the step before it, whose `end` is `before`, has been resolved or forgotten.
        for mark in (step.before, step.begin):
            if mark is not None:
                self._clock.give_back(mark)

    def _all_reached(self, marks: tuple[Any, ...], wait: bool) -> bool:
        if wait:
            for mark in marks:
                self._clock.wait(mark)
        return all(self._clock.reached(mark) for mark in marks)

    def _resolve_sections(self, wait: bool) -> None:
        while self._sections and self._all_reached((self._sections[0].end, self._sections[0].begin), wait):
            section = self._sections.popleft()
            section.seconds = self._clock.between(section.begin, section.end)
            self._totals[section.kind] += section.seconds
            self._clock.give_back(section.begin)
            self._clock.give_back(section.end)

    def _resolve(self, limit: int | None, wait: bool = False) -> None:
        """Turn the oldest `limit` steps (None: all), as far as the device has finished them, into records."""
        self._resolve_sections(wait)
        left = len(self._steps) if limit is None else min(limit, len(self._steps))
        while left:
            step = self._steps[0]
            if step.end is not None:
                marks = (step.end, step.begin) if step.before is None else (step.end, step.begin, step.before)
                if not self._all_reached(marks, wait) or any(section.seconds is None for section in step.sections):
                    return
                self._records.append(self._record(step))
            self._forget(self._steps.popleft())
            left -= 1

    def _record(self, step: _Step) -> StepRecord:
        between, first = self._clock.between, step.before is None
        spent = {"stall": 0.0, "selection": 0.0}
        for section in step.sections:
            spent[section.kind] += section.seconds
        return StepRecord(
            step=step.step,
            seconds=None if first else between(step.before, step.end),
            compute_seconds=None if first else between(step.before, step.begin),
            # The sum of many small stalls may exceed their step by a rounding.
            optimizer_seconds=max(0.0, between(step.begin, step.end) - spent["stall"]),
            stall_seconds=spent["stall"],
            selection_seconds=spent["selection"],
            host_seconds=step.host_seconds,
            host_wait_seconds=step.counts.host_wait_seconds,
            bytes_to_host=step.counts.bytes_to_host,
            bytes_to_device=step.counts.bytes_to_device,
            worker_busy_seconds=step.worker_busy_seconds,
            ring_occupancy=step.ring_occupancy,
            staleness=step.staleness,
        )
