"""Where the time of a loop's steps goes, on the device's own clock, without making anything wait while they run."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from zenflow.cores import gpu_bus_id
from zenflow.diagnose.figures import Memory, StepParts
from zenflow.diagnose.nvml import Nvml
from zenflow.diagnose.processes import cpu_seconds
from zenflow.telemetry import clock_of

UTILISATION_EVERY = 10  # steps: NVML's own figure is a mean over about as long


@dataclass
class _Step:
    begin: Any
    end: Any = None
    data: list[tuple[Any, Any]] = field(default_factory=list)
    optimizer: list[tuple[Any, Any]] = field(default_factory=list)


class Meter:
    """Times `steps` steps after the first `warm_up` ones: a step reaches from one `end_step` to the next.

    What lies between `pause` and `resume`, an evaluation for example, belongs to no step; with no warm-up the first
    step begins at a `resume`. worker_pid: the CPU optimizer's process, if there is one. `wall` and the CPU times are in
    seconds, on the host, over the measured steps alone.
    """

    def __init__(self, device: torch.device, warm_up: int, steps: int, worker_pid: int | None = None) -> None:
        if warm_up < 0 or steps < 1:
            raise ValueError(f"warm_up is {warm_up}, steps {steps}; allowed: an integer >= 0, and one >= 1")
        self.warm_up, self.steps = warm_up, steps
        self.wall, self.trainer_cpu, self.worker_cpu = 0.0, 0.0, None
        self.memory: Memory | None = None
        self._device, self._worker_pid, self._clock = device, worker_pid, clock_of(device)
        self._ended, self._stopped = 0, False
        self._steps: list[_Step] = []
        self._utilisation: list[float] = []
        self._nvml = _open_nvml(device)
        self._start: tuple[float, float, float | None] | None = None  # None while nothing is counted
        self._resident = 0

    @property
    def full(self) -> bool:
        """Whether all steps have been measured."""
        return self._stopped or self._ended >= self.warm_up + self.steps

    @property
    def measuring(self) -> bool:
        """Whether the step under way is one of those that are measured."""
        return self.warm_up <= self._ended and not self.full

    @property
    def utilisation(self) -> float | None:
        """NVML's mean, 0 to 1; None without NVML."""
        return sum(self._utilisation) / len(self._utilisation) if self._utilisation else None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The block waits for the next batch: the device's time in it without work is the data's."""
        with self._section("data"):
            yield

    @contextmanager
    def optimizing(self) -> Iterator[None]:
        """The block is the optimizer's step."""
        with self._section("optimizer"):
            yield

    def end_step(self) -> None:
        """A step has been queued to its end."""
        if self.full:
            return
        self._ended += 1
        mark = self._clock.mark()
        if self._steps:
            self._steps[-1].end = mark
        if self._ended == self.warm_up:
            self._reset_peak()
            self._start = self._spent()
        elif self._ended % UTILISATION_EVERY == 0 and self._steps:
            self._ask_utilisation()
        if self.full:
            self.stop()
        elif self._ended >= self.warm_up:
            self._steps.append(_Step(mark))

    def pause(self) -> None:
        """What follows is no step's; waits for the device, since what is queued still is."""
        if self.measuring:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self._count()

    def resume(self) -> None:
        """The next step begins here."""
        if not self.measuring:
            return
        if self._steps and self._steps[-1].end is None:
            self._steps.pop()
        if not self._steps:
            self._reset_peak()
        self._steps.append(_Step(self._clock.mark()))
        self._start = self._spent()

    def stop(self) -> None:
        """Measure no further step, also if there were fewer than wanted; idempotent."""
        if self._stopped:
            return
        self._stopped = True
        self._count()
        if self._nvml is not None:
            self._nvml.close()
        if self._device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self._device)
            card = torch.cuda.get_device_properties(self._device).total_memory
            self.memory = Memory(peak, max(0, peak - self._resident), card)

    def parts(self) -> list[StepParts]:
        """The measured steps that have ended; waits for the device."""
        ended = [step for step in self._steps if step.end is not None]
        if ended:
            self._clock.wait(ended[-1].end)
        return [
            StepParts(self._clock.between(step.begin, step.end), self._sum(step.data), self._sum(step.optimizer))
            for step in ended
        ]

    @contextmanager
    def _section(self, kind: str) -> Iterator[None]:
        if not self._steps or self._steps[-1].end is not None:
            yield
            return
        begin = self._clock.mark()
        yield
        getattr(self._steps[-1], kind).append((begin, self._clock.mark()))

    def _sum(self, pairs: list[tuple[Any, Any]]) -> float:
        return sum(self._clock.between(*pair) for pair in pairs)

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            self._resident = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _count(self) -> None:
        """Add up what has been spent since the counting began, and end it."""
        if self._start is None:
            return
        (wall, trainer, worker), (wall_now, trainer_now, worker_now) = self._start, self._spent()
        self.wall += wall_now - wall
        self.trainer_cpu += trainer_now - trainer
        if worker is not None and worker_now is not None:
            self.worker_cpu = (self.worker_cpu or 0.0) + worker_now - worker
        self._start = None

    def _spent(self) -> tuple[float, float, float | None]:
        worker = None if self._worker_pid is None else cpu_seconds(self._worker_pid)
        return time.perf_counter(), cpu_seconds(os.getpid()) or 0.0, worker

    def _ask_utilisation(self) -> None:
        if self._nvml is not None:
            with suppress(OSError):
                self._utilisation.append(self._nvml.utilisation())


def _open_nvml(device: torch.device) -> Nvml | None:
    place = gpu_bus_id(device)
    with suppress(OSError):
        return None if place is None else Nvml(place)
    return None
