"""Counters and clocks of a run: what moved, and how long the GPU stood still for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Stats:
    """Totals since construction (or the last `load_state_dict`), times in seconds, traffic in bytes.

    `grad_norm` is the last step's norm of the unscaled gradient before clipping. `stall_seconds` is device time between
    the end of the work that was queued and the arrival of the result that it waited for, `selection_seconds` the same
    for the exchange of owners; on the CPU they are the wall time of these sections. `host_wait_seconds` is the time in
    which the trainer's thread waited for the worker.
    """

    steps: int
    windows: int
    selections: int
    skipped_steps: int
    grad_norm: float
    stall_seconds: float
    selection_seconds: float
    host_wait_seconds: float
    bytes_to_host: int
    bytes_to_device: int
    worker_busy_seconds: float
    worker_pid: int | None


class StallClock:
    """Adds up the time between two points of the compute stream, without waiting for either."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._open: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    @contextmanager
    def section(self) -> Iterator[None]:
        """Count from the moment at which the device has done all that was queued, to the end of this block's work."""
        if self._device is None:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(torch.cuda.current_stream(self._device))
        yield
        end.record(torch.cuda.current_stream(self._device))
        self._open.append((begin, end))
        while self._open and self._open[0][1].query():
            self._close_oldest()

    def _close_oldest(self) -> None:
        begin, end = self._open.popleft()
        self._seconds += begin.elapsed_time(end) / 1e3

    def seconds(self) -> float:
        """The total; waits for sections that the device has not finished."""
        while self._open:
            self._open[0][1].synchronize()
            self._close_oldest()
        return self._seconds
