"""From what children measured to the figures of the tables. Pure arithmetic: no torch, no files.

A figure that cannot be had is None. M is the bytes of the bf16 weights: 2 a parameter.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from zenflow.bench.registry import CONTESTANTS, Job

WEIGHT_BYTES = 2
SELECTION_WINDOWS = 6  # from one selection to the next where selections are what is measured
ON_DEVICE = ("floor", "adamw")
MEMORY = {
    "gpu_bytes_over_floor": "peak_bytes",
    "process_bytes_over_floor": "host_growth_bytes",
    "machine_bytes_over_floor": "machine_growth_bytes",
}
Row = dict[str, Any]


def row_of(job: Job, result: dict[str, Any]) -> Row:
    """One contestant's own figures: ms and bytes a step, bytes a parameter. With `error` in the result, only that."""
    row: Row = {
        "table": "step",
        "trainer": job.trainer,
        "label": job.label,
        "note": CONTESTANTS[job.trainer].note,
        **{name: getattr(job, name) for name in ("shape", "batch", "length", "checkpointing", "steps", "window")},
    }
    if "error" in result:
        return row | {"error": result["error"]}
    totals, parameters, ordered = result["totals"], result["parameters"], sorted(result["step_ms"])
    weights = WEIGHT_BYTES * parameters
    return row | {
        "parameters": parameters,
        "device": result["device"],
        "mean_ms": result["mean_ms"],
        "own_floor_ms": _mean(result["floor_ms"]),
        "launch_ms": _mean(result["launch_ms"]),
        "median_ms": statistics.median(ordered),
        "p95_ms": ordered[math.ceil(0.95 * len(ordered)) - 1],
        "max_ms": ordered[-1],
        "stall_ms": _each(totals, "stall_seconds", job.steps, 1e3),
        "host_wait_ms": _each(totals, "host_wait_seconds", job.steps, 1e3),
        "to_host_m": _each(totals, "bytes_to_host", job.steps, 1 / weights),
        "to_device_m": _each(totals, "bytes_to_device", job.steps, 1 / weights),
        "worker_ms_a_window": _each(totals, "worker_busy_seconds", job.steps / job.window, 1e3),
        "copied_gb_per_s": _each(totals, "copied_bytes", job.steps, 1e-6 / result["mean_ms"]),
        "skipped_steps": totals.get("skipped_steps"),
        "peak_bytes": result["peak_bytes"],
        "host_bytes_a_parameter": None if result["host_bytes"] is None else result["host_bytes"] / parameters,
        "worker_threads": result["worker_threads"],
        "host_growth_bytes": result["host_growth_bytes"],
        "machine_growth_bytes": result["machine_growth_bytes"],
        "tokens_a_second": 1e3 * job.batch * job.length / result["mean_ms"],
        "loss_first": result["loss_first"],
        "loss_last": result["loss_last"],
        "first_step_ms": result["first_step_ms"],
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """The rows with what needs another: ratio to the floor, memory over the floors', stall removed.

    `floor_ms` is what a row's own process measured without its trainer, as other processes' may have had another host;
    where there is none, the mean of the floors. `stall_removed` is 1 - (mean - floor) / (the same of sync);
    `stall_removed_clock` 1 - stall / sync's stall. Both are for trainers that offload.
    """
    floors = [row for row in rows if row["trainer"] == "floor" and "error" not in row]
    sync = next((row for row in rows if row["trainer"] == "sync" and "error" not in row), None)
    if not floors:
        return list(rows)
    common = statistics.fmean(row["mean_ms"] for row in floors)
    whole = None if sync is None else sync["mean_ms"] - (sync["own_floor_ms"] or common)
    compared = []
    for row in rows:
        more: Row = {}
        if "error" not in row:
            floor = more["floor_ms"] = row["own_floor_ms"] or common
            more["ratio"] = row["mean_ms"] / floor
            for name, field in MEMORY.items():
                least = min((other[field] for other in floors if other[field] is not None), default=None)
                if least is not None:
                    more[name] = (row[field] - least) / row["parameters"]
            if more["ratio"] < 1 and row["trainer"] != "floor":
                more["note"] = ", ".join(filter(None, [row["note"], "below its own floor: the machine was not quiet"]))
            elif sync is not None and row["trainer"] not in ON_DEVICE:
                more["stall_removed"] = _removed(row["mean_ms"] - floor, whole)
                more["stall_removed_clock"] = _removed(row["stall_ms"], sync["stall_ms"])
        compared.append(row | more)
    return compared


def without_ratios(rows: Sequence[Row]) -> list[Row]:
    """What may be told when the tests are not green: times, not what follows from comparing them."""
    ratios = ("ratio", "launch_ratio", "stall_removed", "stall_removed_clock")
    return [{name: value for name, value in row.items() if name not in ratios} for row in rows]


def selection_row(job: Job, result: dict[str, Any]) -> Row:
    """What selections cost, from a run in which every `SELECTION_WINDOWS`-th window ends with one.

    Ordinary steps are those of the windows that neither select nor follow within two windows, of the same run.
    `extra_ms` is a period's time over that of as many ordinary steps: it holds the drained pipeline, too.
    `selecting_step_ms` is the period's slowest step less an ordinary one.
    """
    row = row_of(job, result)
    kept = {"table": "selection", **{name: row[name] for name in ("trainer", "label", "shape", "steps", "window")}}
    if "error" in row:
        return kept | {"error": row["error"]}
    length = SELECTION_WINDOWS * job.window
    times = [result["step_ms"][start : start + length] for start in range(0, job.steps, length)]
    if (ran := result["totals"]["selections"]) != len(times):
        return kept | {"error": f"{ran} selections ran in {len(times)} periods"}
    ordinary = statistics.fmean(step for period in times for step in period[2 * job.window : -job.window])
    extra = statistics.fmean(map(sum, times)) - length * ordinary
    return kept | {
        "ordinary_ms": ordinary,
        "first_step_ms": result["first_step_ms"],
        "first_exchange_ms": 1e3 * result["first_totals"]["selection_seconds"],
        "extra_ms": extra,
        "selecting_step_ms": statistics.median(map(max, times)) - ordinary,
        "exchange_ms": 1e3 * result["totals"]["selection_seconds"] / len(times),
        "a_step_at_100_ms": extra / 100,
        "a_step_at_1000_ms": extra / 1000,
    }


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _each(totals: dict[str, float], name: str, count: float | None, scale: float) -> float | None:
    return scale * totals[name] / count if name in totals and count else None


def _removed(rest: float | None, whole: float | None) -> float | None:
    """None where the synchronous run has nothing that could be removed."""
    return None if rest is None or whole is None or whole <= 0 else 1 - rest / whole
