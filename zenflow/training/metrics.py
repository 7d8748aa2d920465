"""What a run records: metrics.jsonl line by line, and at the end one table."""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from zenflow.telemetry import StepRecord
from zenflow.training.engines import Engine, Report
from zenflow.training.rates import DeferredRates
from zenflow.training.scores import SCORES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """After `step` steps: the held-out mean loss (of a token or a text), and the share of right classes if any.

    `scores` are the task's others, by their names in `scores.SCORES`.
    """

    step: int
    loss: float
    accuracy: float | None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def named_scores(self) -> dict[str, float]:
        """All of them, `accuracy` first."""
        return ({} if self.accuracy is None else {"accuracy": self.accuracy}) | self.scores


@dataclass
class History:
    """Everything that was recorded, for the table and the plot. Losses and seconds have one entry a step.

    `engine` has one for each step of which the engine keeps a record: `engine_part`.
    """

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    engine: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    report: Report = field(default_factory=lambda: Report(grad_norm=math.nan))


class StepTimer:
    """Seconds between two calls, on the device's own clock where it has one, without waiting for the device."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """A step begins."""
        self._begin = self._now()

    def stop(self) -> None:
        """It has been queued to its end."""
        self._marks.append((self._begin, self._now()))

    def read(self) -> list[float]:
        """The seconds of each step since the last reading; waits for the device."""
        if self._cuda and self._marks:
            self._marks[-1][1].synchronize()
            seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self._marks]
        else:
            seconds = [end - begin for begin, end in self._marks]
        self._marks.clear()
        return seconds


@dataclass(frozen=True)
class _Step:
    """A step whose loss is still on the device; `seen` are the tokens up to its end."""

    number: int
    loss: Tensor
    lr: float
    tokens: int
    seen: int


class Recorder:
    """Writes every step once and in order, when all of it is known.

    Losses and times are read at every `log_every`-th step and before an evaluation, which wait for the device anyway;
    `grad_norm` and `skipped_steps` are those of the step at which they are read. The engine's record of a step comes
    when the device has passed it, and its line waits for that; `rates` adds what the CPU process applied. `tokens` and
    `elapsed_seconds`, the steps' own times together, are those up to a line's end. A line is in the file as soon as it
    is written. A context, to be left before the engine ends: a run that fails keeps the steps that it has finished, at
    worst without the engine's part.
    """

    def __init__(
        self,
        folder: Path,
        timer: StepTimer,
        engine: Engine,
        log_every: int,
        tracker: Any | None,
        rates: DeferredRates | None = None,
    ) -> None:
        self.history = History()
        self._file = open(folder / "metrics.jsonl", "x", encoding="utf-8")  # noqa: SIM115 (closed by __exit__)
        self._timer, self._engine, self._log_every, self._tracker = timer, engine, log_every, tracker
        self._unread: list[_Step] = []
        self._lines: deque[dict[str, Any]] = deque()  # read, and waiting for the engine's record
        self._records: dict[int, StepRecord] | None = {}  # by step; None where the engine keeps none
        self._rates, self._tokens, self._elapsed = rates, 0, 0.0

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, *, last: bool) -> None:
        """`loss` is a scalar on the device, `lr` the rate that this step applied, `tokens` the real ones in it."""
        self._tokens += tokens
        self._unread.append(_Step(number, loss, lr, tokens, self._tokens))
        if last or number % self._log_every == 0:
            self._read(self._engine.report())
        self._take_records()
        self._write_lines()

    def evaluation(self, result: Evaluation) -> None:
        """One pass over the held-out samples."""
        if self._unread:
            self._read(self._engine.report())
        self._take_records(wait=True)
        self._write_lines()
        self.history.evaluations.append(result)
        scores = {f"validation_{name}": value for name, value in result.named_scores.items()}
        seen = {"tokens": self._tokens, "elapsed_seconds": self._elapsed}
        self._write({"step": result.step, "validation_loss": result.loss} | scores | seen)
        told = "".join(f", {name} {value:.3f}" for name, value in result.named_scores.items())
        log.info("step %d: validation loss %.4f%s", result.step, result.loss, told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            # Each on its own: an engine that broke off in a step refuses, a device that failed has no losses any more.
            for read in (self._read, partial(self._take_records, wait=True)):
                try:
                    read()
                except Exception as error:
                    log.warning("the last lines of metrics.jsonl are not complete: %s", error)
            self._write_lines(incomplete=True)
        finally:
            self._file.close()

    def _read(self, report: Report | None = None) -> None:
        """Losses and times of the steps since the last reading; waits for the device."""
        if not self._unread:
            return
        losses, seconds = torch.stack([step.loss for step in self._unread]).tolist(), self._timer.read()
        first = len(self._lines)
        # An interrupt between the timer and `step` leaves a time without a step.
        for step, loss, duration in zip(self._unread, losses, seconds, strict=False):
            self.history.losses.append(loss)
            self.history.seconds.append(duration)
            self.history.tokens.append(step.tokens)
            line = {"step": step.number, "loss": loss, "lr": step.lr, "batch_tokens": step.tokens, "tokens": step.seen}
            self._elapsed += duration
            self._lines.append(line | {"seconds": duration, "elapsed_seconds": self._elapsed})
        self._unread.clear()
        if self._rates is not None:
            new = list(islice(self._lines, first, None))
            self._rates.read(new, None if report is None else report.skipped_steps)
        if report is not None:
            self.history.report = report
            self._lines[-1] |= {"grad_norm": report.grad_norm, "skipped_steps": report.skipped_steps}

    def _take_records(self, wait: bool = False) -> None:
        new = self._engine.records(wait)
        if new is None:
            self._records = None
        elif self._records is not None:
            self._records |= {record.step: record for record in new}

    def _write_lines(self, incomplete: bool = False) -> None:
        """All lines up to the first whose record is not known; with `incomplete`, that and the rest too."""
        while self._lines:
            line, record = self._lines[0], None
            if self._records is not None:
                record = self._records.pop(line["step"], None)
                if record is None and not incomplete:
                    return
            self._lines.popleft()
            if record is not None:
                self.history.engine.append(engine_part(record, line["seconds"]))
                line |= self.history.engine[-1]
                line |= {} if self._rates is None else self._rates.complete(line)
            self._write(line)

    def _write(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._file, flush=True)
        if self._tracker is not None:
            self._tracker.log(record)


def engine_part(record: StepRecord, seconds: float) -> dict[str, Any]:
    """What a step's line says of the engine: the record's fields, less those that are None.

    `compute_seconds` is forward and backward within `seconds`, the step's own time. The record's own would begin at the
    end of the step before, and hold an evaluation that lies between.
    """
    kept = {item.name: getattr(record, item.name) for item in fields(record)}
    del kept["step"], kept["seconds"]
    kept["compute_seconds"] = max(0.0, seconds - record.optimizer_seconds - record.stall_seconds)
    return {name: value for name, value in kept.items() if value is not None}


@dataclass(frozen=True)
class Subject:
    """What was trained, on what, by whom: the table's first rows."""

    model: str
    data: str
    engine: str
    device: str
    parameters: int
    weight_bytes: int
    topk_ratio: float | None
    update_interval: int | None


def summarise(subject: Subject, history: History) -> dict[str, Any]:
    """The run's figures under plain names, None where there is none. Seconds, bytes, shares from 0 to 1.

    Means of a step's time, of `compute` (forward and backward) and of `optimizer` are over all steps but the first,
    which compiles and selects. Traffic is in bytes, and in M, the bytes of the weights.
    """
    first, last = history.evaluations[0], history.evaluations[-1]
    steps, seconds, report = len(history.losses), sum(history.seconds), history.report
    ordered = sorted(history.seconds)
    return {
        **vars(subject),
        "steps": steps,
        "tokens": sum(history.tokens),
        "train_loss_first": history.losses[0],
        "train_loss_last": statistics.fmean(history.losses[-10:]),
        "validation_loss_before": first.loss,
        "validation_loss_after": last.loss,
        "validation_accuracy_before": first.accuracy,
        "validation_accuracy_after": last.accuracy,
        **{f"validation_{name}_before": value for name, value in first.scores.items()},
        **{f"validation_{name}_after": value for name, value in last.scores.items()},
        "training_seconds": seconds,
        "tokens_per_second": sum(history.tokens) / seconds,
        "step_seconds_mean": statistics.fmean(history.seconds[1:] or history.seconds),
        "step_seconds_median": statistics.median(ordered),
        "step_seconds_p95": ordered[math.ceil(0.95 * steps) - 1],
        "compute_seconds_per_step": _mean(history, "compute_seconds"),
        "optimizer_seconds_per_step": _mean(history, "optimizer_seconds"),
        "stall_seconds_per_step": report.stall_seconds / steps,
        "stall_share": report.stall_seconds / seconds,
        "host_wait_seconds_per_step": report.host_wait_seconds / steps,
        "bytes_to_host_per_step": report.bytes_to_host / steps,
        "bytes_to_device_per_step": report.bytes_to_device / steps,
        "m_to_host_per_step": report.bytes_to_host / steps / subject.weight_bytes,
        "m_to_device_per_step": report.bytes_to_device / steps / subject.weight_bytes,
        "ring_occupancy": _mean(history, "ring_occupancy"),
        "windows": report.windows,
        "selections": report.selections,
        "skipped_steps": report.skipped_steps,
        "worker_busy_share": report.worker_busy_seconds / seconds,
    }


def _mean(history: History, name: str) -> float | None:
    values = [part[name] for part in history.engine[1:] or history.engine]
    return statistics.fmean(values) if values else None


def table(summary: dict[str, Any]) -> str:
    """The summary for people: one row a figure, before and after where a figure has both."""
    s = summary
    rows = [
        ("model", f"{s['model']}, {s['parameters'] / 1e6:.1f}M parameters"),
        ("data", s["data"]),
        ("engine", s["engine"]),
        ("device", s["device"]),
        ("steps", f"{s['steps']:,} ({s['tokens']:,} tokens)"),
        ("train loss", f"{s['train_loss_first']:.4f} -> {s['train_loss_last']:.4f} (mean of the last 10)"),
        ("validation loss", f"{s['validation_loss_before']:.4f} -> {s['validation_loss_after']:.4f}"),
    ]
    scores = [name for name in SCORES if s.get(f"validation_{name}_after") is not None]
    if not scores:
        before, after = (math.exp(min(s[f"validation_loss_{when}"], 700)) for when in ("before", "after"))
        rows.append(("validation perplexity", f"{before:.4g} -> {after:.4g}"))
    for name in scores:
        before, after = s[f"validation_{name}_before"], s[f"validation_{name}_after"]
        rows.append((f"validation {name}", f"{before:.3f} -> {after:.3f}"))
    rows += [
        ("speed", f"{s['tokens_per_second']:,.0f} tokens/s"),
        ("step", f"median {_seconds(s['step_seconds_median'])}, p95 {_seconds(s['step_seconds_p95'])}"),
    ]
    if s["topk_ratio"] is not None:
        rows += _offload_rows(s)
    width = max(len(name) for name, _ in rows)
    rule = "-" * max(width + 2 + len(value) for _, value in rows)
    return "\n".join([rule, *(f"{name:<{width}}  {value}" for name, value in rows), rule])


def _offload_rows(s: dict[str, Any]) -> list[tuple[str, str]]:
    parts, ring, down, up = [], "", s["bytes_to_host_per_step"], s["bytes_to_device_per_step"]
    if s["compute_seconds_per_step"] is not None:
        ring = f", the ring {s['ring_occupancy']:.0%} full when a step() begins"
        compute, optimizer = _seconds(s["compute_seconds_per_step"]), _seconds(s["optimizer_seconds_per_step"])
        parts = [("floor part", f"{compute} a step (forward and backward)"), ("optimizer", f"{optimizer} a step")]
    size = f"M = {s['weight_bytes'] / 1e6:.1f} MB of weights"
    return [
        *parts,
        ("stall", f"{_seconds(s['stall_seconds_per_step'])} a step ({s['stall_share']:.1%})"),
        ("host wait", f"{_seconds(s['host_wait_seconds_per_step'])} a step (the trainer's thread, for the worker)"),
        ("to the host", f"{down / 1e6:.1f} MB a step ({s['m_to_host_per_step']:.2f} M; {size})"),
        ("to the device", f"{up / 1e6:.1f} MB a step ({s['m_to_device_per_step']:.2f} M)"),
        ("windows", f"{s['windows']:,}, selections {s['selections']:,}, skipped steps {s['skipped_steps']:,}"),
        ("CPU optimizer", f"busy {s['worker_busy_share']:.1%} of the time{ring}"),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
