"""What a run records: metrics.jsonl line by line, and the same for whoever draws and sums up."""

from __future__ import annotations

import logging
import math
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
from zenflow.training.metrics_file import MetricsFile, is_evaluation
from zenflow.training.rates import DeferredRates

log = logging.getLogger(__name__)
HELD_OUT = "validation_"  # before the names of what an evaluation gives


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
        self._device, self._cuda = device, device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []
        self._begin: Any = None

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
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
    worst without the engine's part. One that does not fail has written all its lines when it is left, or fails then.
    """

    def __init__(
        self,
        folder: Path,
        timer: StepTimer,
        engine: Engine,
        log_every: int,
        tracker: Any | None,
        rates: DeferredRates | None = None,
        file: MetricsFile | None = None,
    ) -> None:
        self.history = History()
        self._file = file or MetricsFile.create(folder)
        self._timer, self._engine, self._log_every, self._tracker = timer, engine, log_every, tracker
        self._unread: list[_Step] = []
        self._lines: deque[dict[str, Any]] = deque()  # read, and waiting for the engine's record
        self._records: dict[int, StepRecord] | None = {}  # by step; None where the engine keeps none
        self._rates, self._tokens, self._elapsed = rates, 0, 0.0
        self._take_up(self._file.lines)

    def position(self) -> int:
        """All that has been recorded is on the disk; the bytes of metrics.jsonl. Waits for the device."""
        self._read_all()
        return self._file.bring_down()

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
        self._read_all()
        self.history.evaluations.append(result)
        values = {HELD_OUT + name: value for name, value in ({"loss": result.loss} | result.named_scores).items()}
        seen = {"tokens": self._tokens, "elapsed_seconds": self._elapsed}
        self._write({"step": result.step} | values | seen)
        told = "".join(f", {name} {value:.3f}" for name, value in result.named_scores.items())
        log.info("step %d: validation loss %.4f%s", result.step, result.loss, told)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            # Each on its own: an engine that broke off in a step refuses, a device that failed has no losses any more.
            for read in (self._read, partial(self._take_records, wait=True)):
                try:
                    read()
                except Exception as error:
                    log.warning("the last lines of metrics.jsonl are not complete: %s", error)
            self._write_lines(incomplete=True)
            if kind is None:
                self._file.finish()
        finally:
            self._file.close()

    def _take_up(self, lines: list[dict[str, Any]]) -> None:
        """The history up to here, as the lines and the engine tell it."""
        if lines:
            self.history.report = self._engine.report()
        since_reading: list[dict[str, Any]] = []
        for line in lines:
            self._tokens, self._elapsed = line["tokens"], line["elapsed_seconds"]
            if is_evaluation(line):
                self.history.evaluations.append(_evaluation(line))
                continue
            self.history.losses.append(line["loss"])
            self.history.seconds.append(line["seconds"])
            self.history.tokens.append(line["batch_tokens"])
            if part := {name: line[name] for name in ENGINE_PART if name in line}:
                self.history.engine.append(part)
            since_reading.append(line)
            if self._rates is not None and "skipped_steps" in line:
                self._rates.read(since_reading, line["skipped_steps"])
                for known in since_reading:
                    self._rates.complete(known)
                since_reading.clear()

    def _read_all(self) -> None:
        if self._unread:
            self._read(self._engine.report())
        self._take_records(wait=True)
        self._write_lines()

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
        self._file.write(record)
        if self._tracker is not None:
            self._tracker.log(record)


ENGINE_PART = tuple(item.name for item in fields(StepRecord) if item.name not in ("step", "seconds"))


def _evaluation(line: dict[str, Any]) -> Evaluation:
    names = [name.removeprefix(HELD_OUT) for name in line if name.startswith(HELD_OUT)]
    scores = {name: line[HELD_OUT + name] for name in names}
    return Evaluation(line["step"], scores.pop("loss"), scores.pop("accuracy", None), scores)


def engine_part(record: StepRecord, seconds: float) -> dict[str, Any]:
    """What a step's line says of the engine: the record's fields, less those that are None.

    `compute_seconds` is forward and backward within `seconds`, the step's own time. The record's own would begin at the
    end of the step before, and hold an evaluation that lies between.
    """
    kept = {name: getattr(record, name) for name in ENGINE_PART}
    kept["compute_seconds"] = max(0.0, seconds - record.optimizer_seconds - record.stall_seconds)
    return {name: value for name, value in kept.items() if value is not None}
