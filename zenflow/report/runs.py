"""Run folders as `zenflow-train` leaves them: found, read, and either whole or left out with the reason.

A whole run has config.json (every `auto` resolved), summary.json and, in metrics.jsonl, all of its steps and its last
evaluation. Nothing in them says where the folder lies, so it may have been moved. Up to a number of steps that it has
made an unfinished run is as good as a whole one.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from zenflow.training.errors import InputError
from zenflow.training.schema import Peer
from zenflow.training.sweep import overrides_of

CONFIG, METRICS, SUMMARY, LOG = "config.json", "metrics.jsonl", "summary.json", "train.log"
LOOKED_FOR = f"folders with {METRICS} and {CONFIG}, as zenflow-train writes them"
ENGINE_PART = ("compute_seconds", "optimizer_seconds", "selection_seconds", "stall_seconds", "host_wait_seconds")
MACHINE = ("device", "torch")
STALL = "stall_seconds_per_step"
TOTALS = ("stall_share", "m_to_host_per_step", "m_to_device_per_step", "worker_busy_share", "skipped_steps")
HELD_OUT = "validation_"  # before the names of what an evaluation gives
_LOG_LINE = re.compile(r"^\[[^]]*\]\[([\w.]+)\]\[(\w+)\] - (.*)", flags=re.M)


@dataclass(frozen=True)
class Step:
    """A step's line: its training loss, real tokens, own seconds, and what the engine said of it (None if nothing).

    busy_seconds: the CPU process's work; skipped: the steps skipped so far. None where a line does not say it.
    """

    loss: float
    tokens: int
    seconds: float
    engine: dict[str, float] | None
    busy_seconds: float | None = None
    skipped: float | None = None


@dataclass(frozen=True)
class Evaluation:
    """Held-out loss and scores after `step` steps, which took `seconds` of training (evaluations excluded).

    scores: what the run recorded beside the loss, as {"accuracy": 0.9}; more is better.
    """

    step: int
    seconds: float
    loss: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Run:
    """A whole run, or one up to a number of steps. `steps` holds step 1 first and each once.

    `evaluations` are in the order of their steps. `overrides` are what its sweep varied, None if it was no job of one.
    `upto` is that number, None of a whole one; `unfinished` says how far a run came that did not end, and `made` the
    steps that it made.
    """

    folder: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    steps: list[Step]
    evaluations: list[Evaluation]
    repeated: int  # lines of steps that a later line replaced: a resumed run goes through some steps twice
    overrides: tuple[str, ...] | None = None
    upto: int | None = None
    unfinished: str | None = None
    made: int = 0

    @property
    def seconds(self) -> float:
        """Of all steps together."""
        return sum(step.seconds for step in self.steps)


@dataclass(frozen=True)
class LeftOut:
    """A run without usable figures: why, and its configuration where that can be read."""

    folder: Path
    reason: str
    config: dict[str, Any] | None = None
    overrides: tuple[str, ...] | None = None


class _Unusable(Exception):
    """The reason for which a run is left out."""


def find(folders: Sequence[Path]) -> list[Path]:
    """All run folders in and below `folders`, each once, sorted. Errors: InputError for a folder that has none."""
    found: set[Path] = set()
    for folder in folders:
        if not folder.is_dir():
            raise InputError(f"{folder} is no folder; allowed: a folder below which there are {LOOKED_FOR}.")
        below = {path.resolve() for path in _walk(folder)}
        if not below:
            raise InputError(f"{folder} holds no run, and no folder below it does; looked for {LOOKED_FOR}.")
        found |= below
    return sorted(found, key=_natural)


def _walk(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name != "wandb"]
        if _is_run(Path(path), files):
            yield Path(path)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    """Hydra numbers the jobs of a sweep: 2 comes before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.parts]


def _is_run(folder: Path, files: Iterable[str]) -> bool:
    """Metrics, or a trace of a run that did not come so far. Other programs have files of these names, too."""
    if METRICS in files:
        return True
    try:
        if CONFIG in files and {"engine", "optimizer", "seed"} <= set(_object(folder / CONFIG)):
            return True
    except _Unusable:
        pass
    return LOG in files and any(_log_lines(folder))


def read(folder: Path, upto: int | None = None) -> Run | LeftOut:
    """The run in `folder`, or why it cannot be used. Never an exception for what the files hold.

    upto: take its first steps alone, whether it ended or not.
    """
    config, overrides = None, overrides_of(folder)
    try:
        config = _config(folder)
        steps, evaluations, repeated = _metrics(folder)
        _require_sound(config, steps, evaluations)
        unfinished = _unfinished(folder, config, steps, evaluations)
        if upto is not None:
            _require_reached(upto, config, steps, evaluations, unfinished)
        elif unfinished:
            raise _Unusable(unfinished)
        last = upto or config["steps"]
        whole = [steps[number] for number in range(1, last + 1)]
        ends = [0.0, *accumulate(step.seconds for step in whole)]
        placed = [Evaluation(step, ends[step], *evaluations[step]) for step in sorted(evaluations) if step <= last]
        summary = {} if unfinished else _summary(folder)
        if upto is not None:
            summary = {name: summary.get(name) for name in MACHINE} | _totals(whole)
        _require_finite(placed)
        again = sum(step <= last for step in repeated)
        return Run(folder, config, summary, whole, placed, again, overrides, upto, unfinished, len(steps))
    except _Unusable as reason:
        return LeftOut(folder, str(reason), config, overrides)


def _totals(steps: Sequence[Step]) -> dict[str, float | None]:
    """What a summary would say of these steps alone, as far as their lines tell; the weights' bytes are in none."""
    engine = [step.engine for step in steps if step.engine is not None]
    busy = [step.busy_seconds for step in steps if step.busy_seconds is not None]
    skipped = [step.skipped for step in steps if step.skipped is not None]
    seconds = sum(step.seconds for step in steps)
    return dict.fromkeys((*TOTALS, STALL)) | {
        "stall_share": sum(part["stall_seconds"] for part in engine) / seconds if engine else None,
        "worker_busy_share": sum(busy) / seconds if busy else None,
        "skipped_steps": skipped[-1] if skipped else None,
    }


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise _Unusable(f"no {path.name}") from None
    except OSError as error:
        raise _Unusable(f"{path.name} cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise _Unusable(f"{path.name} is damaged: no UTF-8") from None


def _object(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise _Unusable(f"{path.name} is damaged: no JSON") from None
    if not isinstance(value, dict):
        raise _Unusable(f"{path.name} is damaged: no JSON object")
    return value


def _config(folder: Path) -> dict[str, Any]:
    if not (folder / CONFIG).exists() and (error := _error_in_log(folder)):
        raise _Unusable(f"did not start: {error}")
    config = _object(folder / CONFIG)
    kinds = {"seed": int, "steps": int, "engine": dict, "model": dict, "data": dict}
    for name, kind in kinds.items():
        if not isinstance(config.get(name), kind):
            raise _Unusable(f"{CONFIG} is damaged: {name} is {config.get(name)!r}")
    if config["steps"] < 1:
        raise _Unusable(f"{CONFIG} is damaged: steps is {config['steps']}")
    if "peer" in config["engine"] and config["engine"]["peer"] not in [*Peer.__members__]:
        raise _Unusable(f"{CONFIG} has an engine that is not known here: {config['engine']['peer']!r}")
    return config


def _summary(folder: Path) -> dict[str, Any]:
    """summary.json with None for a total that it lacks."""
    summary = _object(folder / SUMMARY)
    for name in (*TOTALS, STALL):
        summary.setdefault(name, None)
        if summary[name] is not None and not _is_number(summary[name]):
            raise _Unusable(f"{SUMMARY} is damaged: {name} is {summary[name]!r}")
    for name in MACHINE:
        if not isinstance(summary.get(name), str | None):
            raise _Unusable(f"{SUMMARY} is damaged: {name} is {summary[name]!r}")
    return summary


def _metrics(folder: Path) -> tuple[dict[int, Step], dict[int, tuple[float, dict[str, float]]], list[int]]:
    """Steps and evaluations by number, and the step of each line that a later line of the same step replaced."""
    steps: dict[int, Step] = {}
    evaluations: dict[int, tuple[float, dict[str, float]]] = {}
    lines, repeated = _text(folder / METRICS).splitlines(keepends=True), []
    for place, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            number = _step_number(line)
            if "validation_loss" in line:
                evaluations[number] = _evaluation(line)
            else:
                repeated += [number] if number in steps else []
                steps[number] = _step(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if place == len(lines) and not text.endswith("\n"):
                break  # torn off while it was written: what it lacks is missed below
            what = f"no {error}" if isinstance(error, KeyError) else "no step's and no evaluation's"
            raise _Unusable(f"{METRICS} is damaged: line {place} ({what})") from None
    return steps, evaluations, repeated


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(line: dict[str, Any], name: str) -> float:
    if not _is_number(line[name]):
        raise TypeError(name)
    return line[name]


def _step_number(line: dict[str, Any]) -> int:
    number = _number(line, "step")
    if number % 1:
        raise ValueError("step")
    return int(number)


def _step(line: dict[str, Any]) -> Step:
    known = all(name in line for name in ENGINE_PART)
    engine = {name: _number(line, name) for name in ENGINE_PART} if known else None
    loss, tokens, seconds = (_number(line, name) for name in ("loss", "batch_tokens", "seconds"))
    if not 0 < seconds < math.inf:
        raise ValueError("seconds")
    more = (_number(line, name) if name in line else None for name in ("worker_busy_seconds", "skipped_steps"))
    return Step(loss, tokens, seconds, engine, *more)


def _evaluation(line: dict[str, Any]) -> tuple[float, dict[str, float]]:
    values = {name.removeprefix(HELD_OUT): _number(line, name) for name in line if name.startswith(HELD_OUT)}
    return values.pop("loss"), values


_NO_ERROR = "no error in its log (still running, or killed)"


def _require_sound(config: dict[str, Any], steps: dict[int, Step], evaluations: dict) -> None:
    wanted = config["steps"]
    strangers = [number for number in (*steps, *evaluations) if not 0 <= number <= wanted]
    if strangers:
        raise _Unusable(f"{METRICS} is damaged: step {strangers[0]} of a run of {wanted}")
    hole = next(number for number in range(1, wanted + 2) if number not in steps)
    if max(steps, default=0) > hole:
        raise _Unusable(f"{METRICS} is damaged: step {hole} is missing")


def _unfinished(folder: Path, config: dict[str, Any], steps: dict[int, Step], evaluations: dict) -> str | None:
    """How far a run came that did not end, and why; None for a whole one. Its summary is written last."""
    wanted = config["steps"]
    if len(steps) < wanted:
        state = f"{len(steps)} of {wanted} steps"
    elif wanted not in evaluations:
        state = f"no evaluation after step {wanted}"
    elif not (folder / SUMMARY).exists():
        state = f"all steps, but no {SUMMARY}"
    else:
        return None
    return f"unfinished: {state}; {_error_in_log(folder) or _NO_ERROR}"


def _require_reached(
    upto: int, config: dict[str, Any], steps: dict[int, Step], evaluations: dict, unfinished: str | None
) -> None:
    """Whether there is something to compare after so many steps."""
    if len(steps) < upto:
        raise _Unusable(unfinished or f"ended after its {config['steps']} steps, before step {upto}")
    if upto not in evaluations:
        known = ", ".join(str(step) for step in sorted(evaluations) if step) or "none"
        raise _Unusable(f"no evaluation after step {upto}; there are those after {known}")


def _require_finite(evaluations: list[Evaluation]) -> None:
    for point in evaluations:
        if not math.isfinite(point.loss):
            raise _Unusable(f"diverged: the validation loss is {point.loss} after step {point.step}")


def _log_lines(folder: Path) -> list[tuple[str, str, str]]:
    """(level, message, what follows it up to the next line, as a traceback does) of this package's own lines."""
    try:
        text = (folder / LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = list(_LOG_LINE.finditer(text))
    bounds = [*(match.start() for match in found), len(text)]
    parts = [(*match.groups(), text[match.end() : end]) for match, end in zip(found, bounds[1:], strict=True)]
    return [(level, message, rest) for module, level, message, rest in parts if module.startswith("zenflow.")]


def _error_in_log(folder: Path) -> str | None:
    """The last error that the log tells: an exception's own line, or the sentence; None if there is none."""
    for level, message, rest in reversed(_log_lines(folder)):
        if level == "ERROR":
            return rest.strip().splitlines()[-1].strip() if rest.strip() else message
        if message.startswith("interrupted"):
            return "interrupted"
    return None
