"""What a run records: metrics.jsonl line by line, and at the end one table."""

from __future__ import annotations

import json
import logging
import math
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zenflow.training.engines import Engine, Report

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluation:
    """After `step` steps: the held-out mean loss (of a token or a text), and the share of right classes if any."""

    step: int
    loss: float
    accuracy: float | None


@dataclass
class History:
    """Everything that was recorded, for the table and the plot. Losses and seconds have one entry a step."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
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


class Recorder:
    """Writes each step once. Losses stay on the device until every `log_every`-th step, when all are read together.

    The engine's figures are read then too: `grad_norm` is that step's, `stall_seconds` what was added since.
    """

    def __init__(self, folder: Path, timer: StepTimer, log_every: int, tracker: Any | None) -> None:
        self.history = History()
        self._file = open(folder / "metrics.jsonl", "x", encoding="utf-8")  # noqa: SIM115 (closed by close)
        self._timer, self._log_every, self._tracker = timer, log_every, tracker
        self._waiting: list[tuple[int, Tensor, float, int]] = []
        self._tokens = 0

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, engine: Engine, *, last: bool) -> None:
        """`loss` is a scalar on the device, `lr` the rate that this step applied, `tokens` the real ones in it."""
        self._waiting.append((number, loss, lr, tokens))
        if last or number % self._log_every == 0:
            self._read(engine.report())

    def evaluation(self, result: Evaluation) -> None:
        """One pass over the held-out samples."""
        self.history.evaluations.append(result)
        values = {"validation_loss": result.loss, "validation_accuracy": result.accuracy}
        self._write({"step": result.step} | {name: value for name, value in values.items() if value is not None})
        accuracy = "" if result.accuracy is None else f", accuracy {result.accuracy:.3f}"
        log.info("step %d: validation loss %.4f%s", result.step, result.loss, accuracy)

    def close(self) -> None:
        self._file.close()

    def _read(self, report: Report) -> None:
        history, seconds = self.history, self._timer.read()
        losses = torch.stack([loss for _, loss, _, _ in self._waiting]).tolist()
        for (number, _, lr, tokens), loss, duration in zip(self._waiting, losses, seconds, strict=True):
            history.losses.append(loss)
            history.seconds.append(duration)
            history.tokens.append(tokens)
            self._tokens += tokens
            record = {"step": number, "loss": loss, "lr": lr, "batch_tokens": tokens, "seconds": duration}
            if number == self._waiting[-1][0]:
                record["grad_norm"] = report.grad_norm
                record["stall_seconds"] = report.stall_seconds - history.report.stall_seconds
                record["skipped_steps"] = report.skipped_steps
            self._write(record)
        history.report = report
        self._waiting.clear()

    def _write(self, record: dict[str, Any]) -> None:
        record["tokens"] = self._tokens  # seen so far
        print(json.dumps(record), file=self._file, flush=True)
        if self._tracker is not None:
            self._tracker.log(record)


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
    """The run's figures under plain names, None where there is none. Seconds, bytes, shares from 0 to 1."""
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
        "tokens_per_second": sum(history.tokens) / seconds,
        "step_seconds_median": statistics.median(ordered),
        "step_seconds_p95": ordered[math.ceil(0.95 * steps) - 1],
        "stall_seconds_per_step": report.stall_seconds / steps,
        "stall_share": report.stall_seconds / seconds,
        "bytes_to_host_per_step": report.bytes_to_host / steps,
        "bytes_to_device_per_step": report.bytes_to_device / steps,
        "windows": report.windows,
        "selections": report.selections,
        "skipped_steps": report.skipped_steps,
        "worker_busy_share": report.worker_busy_seconds / seconds,
    }


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
    if s["validation_accuracy_after"] is None:
        before, after = (math.exp(min(s[f"validation_loss_{when}"], 700)) for when in ("before", "after"))
        rows.append(("validation perplexity", f"{before:.4g} -> {after:.4g}"))
    else:
        before, after = s["validation_accuracy_before"], s["validation_accuracy_after"]
        rows.append(("validation accuracy", f"{before:.3f} -> {after:.3f}"))
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
    size = s["weight_bytes"]
    down, up = s["bytes_to_host_per_step"], s["bytes_to_device_per_step"]
    return [
        ("stall", f"{_seconds(s['stall_seconds_per_step'])} a step ({s['stall_share']:.1%})"),
        ("to the host", f"{down / 1e6:.1f} MB a step ({down / size:.2f} M; M = {size / 1e6:.1f} MB of weights)"),
        ("to the device", f"{up / 1e6:.1f} MB a step ({up / size:.2f} M)"),
        ("windows", f"{s['windows']:,}, selections {s['selections']:,}, skipped steps {s['skipped_steps']:,}"),
        ("CPU optimizer", f"busy {s['worker_busy_share']:.1%} of the time"),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
