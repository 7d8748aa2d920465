"""A run's figures under plain names, and as one table."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

from zenflow.report.settings import PEERS, SIMULATED
from zenflow.training.metrics import History
from zenflow.training.scores import SCORES


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
    if s["topk_ratio"] is not None and not s["engine"].startswith(PEERS):
        counts = f"{s['windows']:,}, selections {s['selections']:,}, skipped steps {s['skipped_steps']:,}"
        rows += [*([] if s["engine"].startswith(SIMULATED) else _offload_rows(s)), ("windows", counts)]
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
        ("CPU optimizer", f"busy {s['worker_busy_share']:.1%} of the time{ring}"),
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"
