"""What a diagnosis found: figures and verdict together, as text and as JSON. No torch."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from zenflow.diagnose.figures import Figures, Measured, summarise
from zenflow.diagnose.verdict import Thresholds, Verdict, judge
from zenflow.terminal import counted

WIDTH = 118


@dataclass(frozen=True)
class Result:
    """One diagnosis."""

    measured: Measured
    figures: Figures
    limits: Thresholds
    verdict: Verdict

    @classmethod
    def of(cls, measured: Measured, limits: Thresholds | None = None) -> Result:
        """Figures and verdict of what was measured; at least one step."""
        limits, figures = limits or Thresholds(), summarise(measured)
        verdict = judge(
            figures,
            parameters=measured.parameters,
            offloads=measured.offloads,
            host=measured.host,
            cpus=measured.trainer_cpus if measured.device == "cpu" else None,
            limits=limits,
            validation=(measured.validation_before, measured.validation_after),
        )
        return cls(measured, figures, limits, verdict)

    def json(self, **more: Any) -> str:
        """Everything, with `more` beside it; what is not finite becomes null."""
        return json.dumps(finite(asdict(self) | more), indent=2)

    def text(self) -> str:
        """The report for people."""
        verdict, m = self.verdict, self.measured
        parts = [
            f"{m.engine} on {m.device}, {m.parameters / 1e6:.1f}M parameters, {counted(self.figures.steps, 'step')}",
            f"verdict: {verdict.kind}\n\n{_wrapped(verdict.reason)}\n{_wrapped(verdict.next)}",
            _table(rows(self.figures, m)),
        ]
        if verdict.remarks:
            parts.insert(2, "\n".join(_wrapped(remark, "- ") for remark in verdict.remarks))
        return "\n\n".join(parts) + "\n"


def rows(f: Figures, m: Measured) -> list[tuple[str, str]]:
    """The figures under their names; one that could not be had is left out, or says so."""
    found = [
        ("step", f"median {_ms(f.median)}, p95 {_ms(f.p95)}, mean {_ms(f.mean)}"),
        ("forward and backward", _share(f.compute, f.mean)),
        ("optimizer, on the device", _share(f.optimizer, f.mean)),
        ("waiting for CPU or PCIe", "not known for this optimizer" if f.stall is None else _share(f.stall, f.mean)),
        ("waiting for data", _share(f.data, f.mean)),
        ("device", f"busy at most {f.busy_share:.1%}, idle at least {f.idle_share:.1%}" + _idle(f) + _nvml(f)),
        ("trainer", f"{f.trainer_cpus:.2f} CPUs of {m.trainer_cpus:g}"),
    ]
    if f.worker_cpus is not None and m.worker_cpus is not None:
        found.append(("CPU optimizer", f"{f.worker_cpus:.2f} CPUs of {m.worker_cpus:g}"))
    if f.worker_busy is not None:
        found.append(("pass over memory", f"{_ms(f.worker_busy)} a step" + _bandwidth(f, m)))
    if f.bytes_to_host is not None and f.bytes_to_device is not None:
        found.append(("traffic", f"{_mb(f.bytes_to_host)} to the host, {_mb(f.bytes_to_device)} to the device a step"))
    if f.to_host is not None and f.to_device is not None:
        found.append(
            (
                "PCIe",
                f"{_gbps(f.achieved_bandwidth)} over the step; at {_gbps(m.ceilings.to_host)} down and "
                f"{_gbps(m.ceilings.to_device)} up these copies take {_ms(f.to_host)} and {_ms(f.to_device)}",
            )
        )
    if f.peak is not None and f.card is not None and f.adamw_bytes is not None:
        found.append(
            (
                "device memory",
                f"peak {f.peak / 1e9:.1f} GB of {f.card / 1e9:.1f} GB; AdamW on the device would need at most "
                f"{f.adamw_bytes / 1e9:.1f} GB",
            )
        )
    return [*found, ("loss", _loss(f)), *_validation(m)]


def _idle(f: Figures) -> str:
    if f.idle_median is None or f.idle_p95 is None:
        return ""
    return f" (of a step: median {_ms(f.idle_median)}, p95 {_ms(f.idle_p95)})"


def _nvml(f: Figures) -> str:
    return "" if f.utilisation is None else f"; some kernel ran {f.utilisation:.0%} of the time, says NVML"


def _bandwidth(f: Figures, m: Measured) -> str:
    if f.pass_bandwidth is None:
        return ""
    told = f", {_gbps(f.pass_bandwidth)}"
    return told if f.pass_share is None else f"{told} ({f.pass_share:.0%} of triad, {_gbps(m.ceilings.triad)})"


def _loss(f: Figures) -> str:
    health = f.health
    if health.first is None or health.last is None:
        return "no finite one" if health.not_finite else "not given"
    course = "falling" if health.falling else "not falling"
    return (
        f"{health.first:.4g} -> {health.last:.4g}, {course} ({health.change:+.3g} over the run, noise "
        f"{health.noise:.2g}), spikes {health.spikes}, skipped steps {health.skipped_steps}"
    )


def _validation(m: Measured) -> list[tuple[str, str]]:
    if m.validation_before is None or m.validation_after is None:
        return []
    scores = [
        (f"held-out {name}", f"{m.scores_before[name]:.3f} -> {value:.3f}")
        for name, value in m.scores_after.items()
        if name in m.scores_before
    ]
    return [("held-out loss", f"{m.validation_before:.4g} -> {m.validation_after:.4g}"), *scores]


def _table(found: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in found)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in found)


def _wrapped(text: str, first: str = "") -> str:
    return fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)


def _share(seconds: float, mean: float) -> str:
    return f"{_ms(seconds)} ({seconds / mean:.1%})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _mb(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def _gbps(bandwidth: float | None) -> str:
    return "-" if bandwidth is None else f"{bandwidth / 1e9:.1f} GB/s"


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if dataclasses.is_dataclass(value):
        return finite(asdict(value))
    return None if isinstance(value, float) and not math.isfinite(value) else value
