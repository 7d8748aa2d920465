"""One run of one side: the same loop as zenflow-train's, measured, with digests of what went into it."""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zenflow.compare.config import CompareConfig
from zenflow.compare.curve import Point, Run
from zenflow.compare.judge import Check
from zenflow.diagnose.figures import StepParts
from zenflow.diagnose.health import examine
from zenflow.diagnose.meter import Meter
from zenflow.diagnose.numbers import p95
from zenflow.diagnose.run import Watched
from zenflow.optimizer import ZenFlow
from zenflow.safetensors_file import content_of
from zenflow.telemetry import StepRecord
from zenflow.training import run as training
from zenflow.training.data import Batch, Samples
from zenflow.training.engines import Engine, build_engine
from zenflow.training.loop import Loop
from zenflow.training.metrics import Evaluation, History, StepTimer


@dataclass(frozen=True)
class Finished:
    """A run, and the checks of its function that were made with it."""

    run: Run
    checks: list[Check]


def run_side(side: str, config: CompareConfig, place: int) -> Finished:
    """Train once."""
    prepared = training.prepare(config)
    weights = digest(prepared.model.state_dict())
    model = prepared.model.to(prepared.device).train()
    with build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch) as engine:
        optimizer = getattr(engine, "optimizer", None)  # the optimizer itself: it has records and a process
        pid = optimizer.stats().worker_pid if isinstance(optimizer, ZenFlow) else None
        meter = Meter(prepared.device, 0, config.steps, pid)
        seen = _Seen(prepared.data.train)
        listener = _Listener(config, meter)
        data = replace(prepared.data, train=Watched(seen, meter))
        ending = _Ending(engine, prepared.device)
        Loop(config, model, data, ending, listener, StepTimer(prepared.device)).run()
        records = optimizer.records(wait=True) if isinstance(optimizer, ZenFlow) else None
        run = _run(side, config, place, (weights, seen.digest), meter, listener, records, ending)
        return Finished(run, _checks(run))


def digest(state: dict[str, Tensor]) -> str:
    """SHA-256 of names, dtypes, shapes and bits."""
    total = hashlib.sha256()
    for name, tensor in state.items():
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
        total.update(content_of(tensor))
    return total.hexdigest()


class _Seen:
    """Training samples, and a digest of all batches that were taken of them, in their order."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._total = samples, hashlib.sha256()

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: list[int]) -> Batch:
        batch = self._samples.batch(indices)
        for part in (batch.input_ids, batch.labels):
            self._total.update(f"{tuple(part.shape)}\0".encode())
            self._total.update(part.contiguous().numpy())
        return batch

    @property
    def digest(self) -> str:
        return self._total.hexdigest()


class _Ending:
    """An engine whose `flush()` at a run's end is timed: b's last results must not come for nothing."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self.device, self.seconds = engine, device, 0.0

    def flush(self) -> None:
        self._wait()
        started = time.perf_counter()
        self._engine.flush()
        self._wait()
        self.seconds += time.perf_counter() - started

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Listener:
    """What the loop tells its recorder; the meter stands still during an evaluation."""

    def __init__(self, config: CompareConfig, meter: Meter) -> None:
        self.history = History()
        self.losses: list[Tensor] = []
        self.tokens: list[int] = []
        self.evaluations: list[Evaluation] = []
        self._every, self._meter = config.evaluate_every, meter

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, *, last: bool) -> None:
        self.losses.append(loss)
        self.tokens.append(tokens)
        self._meter.end_step()
        if number % self._every == 0:
            self._meter.pause()

    def evaluation(self, result: Evaluation) -> None:
        self.evaluations.append(result)
        self._meter.resume()


def _run(
    side: str,
    config: CompareConfig,
    place: int,
    digests: tuple[str, str],
    meter: Meter,
    listener: _Listener,
    records: Sequence[StepRecord] | None,
    ending: _Ending,
) -> Run:
    parts, first = meter.parts(), config.compare.warm_up
    timed, times = parts[first:], [part.seconds for part in parts[first:]]
    skipped = ending.report().skipped_steps
    kept = None if records is None else [record for record in records if record.step > first]
    return Run(
        side=side,
        seed=config.seed,
        place=place,
        weights=digests[0],
        order=digests[1],
        median=statistics.median(times),
        p95=p95(times),
        mean=statistics.fmean(times),
        tokens_per_second=sum(listener.tokens[first:]) / sum(times),
        data=statistics.fmean(part.data for part in timed),
        stall=_mean(kept, "stall_seconds"),
        trainer_cpus=meter.trainer_cpu / meter.wall,
        worker_cpus=None if meter.worker_cpu is None else meter.worker_cpu / meter.wall,
        bytes_to_host=_mean(kept, "bytes_to_host"),
        bytes_to_device=_mean(kept, "bytes_to_device"),
        worker_busy=_mean(kept, "worker_busy_seconds"),
        peak_bytes=None if meter.memory is None else meter.memory.peak,
        skipped_steps=skipped,
        curve=_curve(parts, listener.evaluations, ending.seconds),
        faults=examine([float(loss) for loss in listener.losses], skipped).faults,
    )


def _curve(parts: Sequence[StepParts], evaluations: Sequence[Evaluation], ending: float) -> tuple[Point, ...]:
    """ending: seconds that the last results took after the last step, before they could be evaluated."""
    ends = [0.0, *accumulate(part.seconds for part in parts)]
    ends[-1] += ending
    return tuple(Point(found.step, ends[found.step], found.loss, found.named_scores) for found in evaluations)


def _mean(records: Sequence[StepRecord] | None, name: str) -> float | None:
    return None if records is None else statistics.fmean(getattr(record, name) for record in records)


def _checks(run: Run) -> list[Check]:
    """Of every run: the evaluations ended, with numbers, and the held-out loss fell."""
    losses = [point.loss for point in run.curve]
    course = f"seed {run.seed}: held-out loss {losses[0]:.4g} -> {losses[-1]:.4g}"
    finite = all(abs(loss) < float("inf") for loss in losses)
    return [
        Check(
            run.side,
            "evaluation",
            finite,
            f"seed {run.seed}: {len(losses)} evaluations, {'all' if finite else 'not all'} finite",
        ),
        Check(run.side, "training", losses[-1] < losses[0], course),
    ]
