"""From what was measured to the figures that a verdict looks at. Pure arithmetic: no torch, no files.

A figure that cannot be had is None. Times in seconds, sizes in bytes, bandwidths in bytes a second, shares from 0 to 1.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from zenflow.diagnose.health import LossHealth, examine
from zenflow.diagnose.numbers import p95

ADAMW_BYTES = 16  # a parameter on the device: weight, gradient, fp32 master (or none for fp32 weights) and moments


@dataclass(frozen=True)
class StepParts:
    """One step, from the end of the one before, on the device's clock (on the CPU the wall's).

    `data` is device time without work while the loop waited for a batch, `optimizer` from begin to end of the
    optimizer's step, the waiting in it included. The rest is forward and backward.
    """

    seconds: float
    data: float
    optimizer: float


@dataclass(frozen=True)
class Offload:
    """Of an optimizer that keeps records: what it waited for in each measured step, and moved, a mean a step.

    `stalls` are device time in which nothing ran because a result of the CPU, or a copy, had not come.
    """

    stalls: Sequence[float]
    bytes_to_host: float
    bytes_to_device: float
    worker_busy: float  # the CPU optimizer's pass
    pass_bytes: float  # that the pass reads and writes in host memory


@dataclass(frozen=True)
class Ceilings:
    """What this machine gives at best, in bytes a second: pinned copies each way, and host memory (triad)."""

    to_host: float | None = None
    to_device: float | None = None
    triad: float | None = None


@dataclass(frozen=True)
class Memory:
    """Device memory. `activations` is the peak of a step over what lay there before it: activations and gradients."""

    peak: int
    activations: int
    card: int


@dataclass(frozen=True)
class HostMemory:
    """What an optimizer on the host finds: `deferred` elements by the name of their dtype, and bytes.

    `available` is what another run may take, this one's optimizer being gone; None where it is not known.
    """

    deferred: dict[str, int]
    available: int | None


@dataclass(frozen=True)
class Measured:
    """All that a diagnosis has seen. `wall` is the host's time over the measured steps, as the CPU seconds are."""

    engine: str
    device: str
    offloads: bool
    parameters: int
    steps: Sequence[StepParts]
    losses: Sequence[float]
    wall: float
    trainer_cpu: float
    trainer_cpus: float  # logical ones that it may use, within the cgroup's quota
    worker_cpu: float | None = None
    worker_cpus: float | None = None
    offload: Offload | None = None
    host: HostMemory | None = None  # with `offload`
    ceilings: Ceilings = field(default_factory=Ceilings)
    memory: Memory | None = None
    utilisation: float | None = None  # as NVML tells it
    skipped_steps: int = 0
    validation_before: float | None = None  # held-out loss
    validation_after: float | None = None
    scores_before: dict[str, float] = field(default_factory=dict)  # of the task, held out: accuracy, Matthews, ...
    scores_after: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Figures:
    """A mean a step, except median and p95; `steady_p95` is that of the steps' times without the waiting for data.

    `usual_stall` is the median step's: a wait that the mean alone has is one of few steps.
    `busy_share` is an upper bound: gaps between two launches within forward and backward count as busy.
    """

    steps: int
    median: float
    p95: float
    steady_median: float
    steady_p95: float
    mean: float
    data: float
    compute: float
    optimizer: float
    stall: float | None
    usual_stall: float | None
    data_share: float
    optimizer_share: float
    stall_share: float | None
    busy_share: float
    idle_share: float
    idle_median: float | None  # of a step's idle time; None where an optimizer on the host keeps no records
    idle_p95: float | None
    utilisation: float | None
    trainer_cpus: float  # CPUs' worth of time, user and system
    worker_cpus: float | None
    bytes_to_host: float | None
    bytes_to_device: float | None
    achieved_bandwidth: float | None  # over the whole step
    to_host: float | None  # seconds that these bytes take at the ceilings
    to_device: float | None
    worker_busy: float | None
    pass_bandwidth: float | None
    pass_share: float | None  # of triad
    peak: int | None
    card: int | None
    adamw_bytes: int | None  # that AdamW with all its state on the device would need
    health: LossHealth


def summarise(measured: Measured) -> Figures:
    """The figures of at least one measured step."""
    mean, data, optimizer = (
        statistics.fmean(getattr(step, name) for step in measured.steps) for name in ("seconds", "data", "optimizer")
    )
    offload, memory, ceilings = measured.offload, measured.memory, measured.ceilings
    # On the device's clock a part may exceed its whole by a rounding.
    stall = None if offload is None else min(statistics.fmean(offload.stalls), optimizer)
    moved = None if offload is None else offload.bytes_to_host + offload.bytes_to_device
    idle = data + (stall or 0.0)
    times = [step.seconds for step in measured.steps]
    steady = [step.seconds - step.data for step in measured.steps]
    idle_times = _idle_times(measured)
    pass_bandwidth = _per(offload and offload.pass_bytes, offload and offload.worker_busy)
    return Figures(
        steps=len(times),
        median=statistics.median(times),
        p95=p95(times),
        steady_median=statistics.median(steady),
        steady_p95=p95(steady),
        mean=mean,
        data=data,
        compute=max(0.0, mean - data - optimizer),
        optimizer=optimizer - (stall or 0.0),
        stall=stall,
        usual_stall=None if offload is None else statistics.median(offload.stalls),
        data_share=data / mean,
        optimizer_share=optimizer / mean,
        stall_share=None if stall is None else stall / mean,
        busy_share=1 - idle / mean,
        idle_share=idle / mean,
        idle_median=statistics.median(idle_times) if idle_times else None,
        idle_p95=p95(idle_times) if idle_times else None,
        utilisation=measured.utilisation,
        trainer_cpus=measured.trainer_cpu / measured.wall,
        worker_cpus=_per(measured.worker_cpu, measured.wall),
        bytes_to_host=offload and offload.bytes_to_host,
        bytes_to_device=offload and offload.bytes_to_device,
        achieved_bandwidth=_per(moved, mean),
        to_host=_per(offload and offload.bytes_to_host, ceilings.to_host),
        to_device=_per(offload and offload.bytes_to_device, ceilings.to_device),
        worker_busy=offload and offload.worker_busy,
        pass_bandwidth=pass_bandwidth,
        pass_share=_per(pass_bandwidth, ceilings.triad),
        peak=None if memory is None else memory.peak,
        card=None if memory is None else memory.card,
        adamw_bytes=None if memory is None else ADAMW_BYTES * measured.parameters + memory.activations,
        health=examine(
            measured.losses,
            measured.skipped_steps,
            [loss for loss in (measured.validation_before, measured.validation_after) if loss is not None],
        ),
    )


def _idle_times(measured: Measured) -> list[float]:
    """Each step's; none where the waiting for the CPU is not known, or not of every step."""
    if measured.offload is None:
        return [] if measured.offloads else [step.data for step in measured.steps]
    if len(measured.offload.stalls) != len(measured.steps):
        return []
    return [step.data + stall for step, stall in zip(measured.steps, measured.offload.stalls, strict=True)]


def _per(amount: float | None, unit: float | None) -> float | None:
    return None if amount is None or not unit else amount / unit
