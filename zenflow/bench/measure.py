"""What a child does: build model and trainer, warm up, time whole windows without waiting in between."""

from __future__ import annotations

import math
import statistics
import time
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from zenflow.bench.ours import Floor
from zenflow.bench.processes import host_bytes, used_bytes
from zenflow.bench.registry import CONTESTANTS, LAUNCH_LENGTH, TRACED_WINDOWS, Job
from zenflow.bench.shapes import build_model, make_batches


def measure(job: Job) -> dict[str, Any]:
    """The contestant's figures: times in ms, memory in bytes, `totals` as the differences over the timed steps; of its
    `floor_steps`, `floor_ms` and `launch_ms`: a mean step before and, where that can be, after the contestant.

    Raises ValueError if a loss is not finite, and whatever the contestant raises.
    """
    device = _device(job.device)
    model = build_model(job.shape, job.length, device, job.checkpointing)
    batches = make_batches(job.shape, job.batch, job.length, device)
    floors = [own_floor(model, batches, job, device)]
    before = _host_memory()
    module, _, name = CONTESTANTS[job.trainer].build.partition(":")
    trainer = getattr(import_module(module), name)(model, job)
    try:
        first = Timed(trainer, batches, 1, device)
        first_totals = trainer.totals()
        warm_up = Timed(trainer, batches, job.warm_up - 1, device)
        start = trainer.totals()
        timed = Timed(trainer, batches, job.steps, device)
        totals = trainer.totals()
        after = _host_memory()
        if job.trace is not None:
            with trainer.trace(job):
                Timed(trainer, batches, TRACED_WINDOWS * job.window, device)
    finally:
        trainer.close()
    if CONTESTANTS[job.trainer].leaves:
        floors.append(own_floor(model, batches, job, device))
    losses = torch.stack(first.losses + warm_up.losses + timed.losses).tolist()
    _check_finite(losses)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "floor_ms": [floor[0] for floor in floors if floor],
        "launch_ms": [floor[1] for floor in floors if floor],
        "mean_ms": timed.total_ms / job.steps,
        "step_ms": timed.step_ms,
        "first_step_ms": first.total_ms,
        "first_totals": first_totals,
        "totals": {name: totals[name] - start[name] for name in totals.keys() & start.keys()},
        "host_bytes": totals.get("host_bytes"),
        "worker_threads": totals.get("worker_threads"),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "loss_first": losses[0],
        "loss_last": statistics.fmean(losses[-4:]),
        **{name: value - before[name] for name, value in after.items()},
    }


def own_floor(
    model: torch.nn.Module, batches: list[Tensor], job: Job, device: torch.device
) -> tuple[float, float] | None:
    """ms a step of forward and backward alone, over the job's `floor_steps`, of which half as many go before and do not
    count: on the batches, and on so few tokens that the host's launching is what takes the time. None without steps."""
    if not job.floor_steps:
        return None
    floor, times = Floor(model, job), []
    for tokens in (batches, [batch[:1, :LAUNCH_LENGTH].contiguous() for batch in batches]):
        Timed(floor, tokens, -(-job.floor_steps // 2), device)
        times.append(Timed(floor, tokens, job.floor_steps, device).total_ms / job.floor_steps)
    return times[0], times[1]


class Timed:
    """`steps` steps from an idle device to an idle device, with no waiting between.

    `total_ms` is wall time; `step_ms` lies between the ends of two steps, on the device's own clock where it has one.
    """

    def __init__(self, trainer: Any, batches: list[Tensor], steps: int, device: torch.device) -> None:
        self.losses: list[Tensor] = []
        _synchronize(device)
        start = time.perf_counter()
        moments = [_moment(device)]
        for number in range(steps):
            self.losses.append(trainer.step(batches[number % len(batches)]))
            moments.append(_moment(device))
        _synchronize(device)
        self.total_ms = 1e3 * (time.perf_counter() - start)
        pairs = zip(moments, moments[1:], strict=False)
        if device.type == "cuda":
            self.step_ms = [one.elapsed_time(other) for one, other in pairs]
        else:
            self.step_ms = [1e3 * (other - one) for one, other in pairs]


def _moment(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _host_memory() -> dict[str, int]:
    return {"host_growth_bytes": host_bytes(), "machine_growth_bytes": used_bytes()}


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


def _check_finite(losses: list[float]) -> None:
    for step, loss in enumerate(losses, start=1):
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {step} is {loss}; allowed: a finite number")
