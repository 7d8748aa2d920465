"""Run folders written by hand, as `zenflow-train` leaves them, with figures that are chosen."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ENGINE: dict[str, Any] = {
    "topk_ratio": 0.1,
    "update_interval": 4,
    "overlap_step": True,
    "accumulate_on": "gpu",
    "upload": "backward",
}
CONFIG: dict[str, Any] = {
    "name": "made",
    "seed": 0,
    "device": "cpu",
    "threads": 1,
    "steps": 4,
    "batch_size": 8,
    "evaluate_every": 2,
    "plot": True,
    "trace": None,
    "trace_steps": [5, 16],
    "engine": ENGINE,
    "model": {"kind": "tiny", "path": None, "package": None, "dtype": "float32", "layers": 2},
    "data": {"kind": "stdlib", "path": "/usr/lib/python3", "max_length": 64, "max_characters": 1000},
    "optimizer": {"lr": 0.002, "schedule": "linear"},
    "tracking": {"mode": "disabled", "group": None},
}
ZERO_OFFLOAD = {"engine.topk_ratio": 0.0, "engine.update_interval": 1, "engine.overlap_step": False}
PART = {
    "compute_seconds": 0.5,
    "optimizer_seconds": 0.3,
    "selection_seconds": 0.0625,
    "stall_seconds": 0.2,
    "host_wait_seconds": 0.125,
}


def config(**changes: Any) -> dict[str, Any]:
    """CONFIG with changes, in which a double underscore stands for a dot: engine__topk_ratio=0.5, engine={}."""
    result = copy.deepcopy(CONFIG)
    for name, value in changes.items():
        group, _, key = name.partition("__")
        if key:
            result[group][key] = value
        else:
            result[group] = value
    return result


def lines(
    configuration: dict[str, Any],
    losses: dict[int, float],
    seconds: float | Sequence[float] = 1.0,
    scores: dict[str, dict[int, float]] | None = None,
    train: Callable[[int], float] = lambda step: 1.0,
) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl: validation losses after the given steps, `seconds` of each step or of all.

    scores: by name, after the same steps.
    """
    steps = configuration["steps"]
    times = [seconds] * steps if isinstance(seconds, (int, float)) else list(seconds)
    part = PART if configuration["engine"] else {}
    result = []
    for number in range(steps + 1):
        if number:
            times_of = {name: value * times[number - 1] for name, value in part.items()}
            line = {"step": number, "loss": train(number), "batch_tokens": 10, "tokens": 10 * number}
            result.append(line | {"seconds": times[number - 1]} | times_of)
        if number in losses:
            known = {f"validation_{name}": values[number] for name, values in (scores or {}).items()}
            result.append({"step": number, "validation_loss": losses[number]} | known)
    return result


def summary(**changes: Any) -> dict[str, Any]:
    """What the report takes from summary.json."""
    values = {
        "device": "cpu, 1 thread",
        "torch": "2.10.0",
        "stall_share": 0.2,
        "stall_seconds_per_step": 0.2,
        "m_to_host_per_step": 0.25,
        "m_to_device_per_step": 0.125,
        "worker_busy_share": 0.4,
        "skipped_steps": 0,
    }
    return values | changes


def make(
    folder: Path,
    losses: dict[int, float],
    seconds: float | Sequence[float] = 1.0,
    *,
    totals: dict[str, Any] | None = None,
    scores: dict[str, dict[int, float]] | None = None,
    train: Callable[[int], float] = lambda step: 1.0,
    job: Sequence[str] | None = None,
    **changes: Any,
) -> Path:
    """A whole run of CONFIG with `changes` in `folder`; of a sweep that varied `job`."""
    configuration = config(**changes)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(configuration, indent=2))
    write_lines(folder, lines(configuration, losses, seconds, scores, train))
    (folder / "summary.json").write_text(json.dumps(summary(**(totals or {}))))
    if job is not None:
        (folder / "job.json").write_text(json.dumps({"sweep": "made", "job": 0, "overrides": list(job)}))
    return folder


def end_early(folder: Path, last: int) -> Path:
    """The run as a signal leaves it after the step `last`."""
    written = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    write_lines(folder, [line for line in written if line["step"] <= last])
    (folder / "summary.json").unlink()
    (folder / "train.log").write_text(log_line("WARNING", f"interrupted by SIGTERM after step {last}"))
    return folder


def write_lines(folder: Path, written: Sequence[dict[str, Any]]) -> None:
    """metrics.jsonl of these lines."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in written))


def log_line(level: str, message: str, module: str = "zenflow.training.run") -> str:
    """A line of train.log."""
    return f"[2026-11-29 20:27:32,531][{module}][{level}] - {message}\n"
