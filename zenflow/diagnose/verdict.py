"""What limits a training run, and what follows from that. Pure arithmetic over `Figures`, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zenflow.config import ZenFlowConfig
from zenflow.diagnose.advice import Advice, HostNeed, advise
from zenflow.diagnose.figures import Figures, HostMemory
from zenflow.terminal import counted

OFFLOAD, DATA, COMPUTE = "offload-bound", "data-bound", "compute-bound"
MEMORY_RICH, UNHEALTHY, INCONCLUSIVE = "memory-rich", "unhealthy", "inconclusive"


@dataclass(frozen=True)
class Thresholds:
    """What decides. A share is one of the mean step.

    How busy the device is decides nothing: it is busy with what it is given, and says nothing of speed or quality.
    """

    min_steps: int = 20  # fewer give no verdict
    advised_steps: int = 100  # fewer give a remark
    noise: float = 1.5  # p95 over median of the steps without their waiting for data; more gives no verdict
    min_cpus: float = 0.5  # that a trainer which computes on the CPU must have had of each second it did not wait
    data_share: float = 0.10  # waiting for batches, from which on the data is to blame
    stall_share: float = 0.10  # waiting for CPU or PCIe, from which on the offload is
    memory_share: float = 0.90  # of the card, that AdamW with all its state may take; of the host's, that ZenFlow may


@dataclass(frozen=True)
class Verdict:
    """`kind` is one of the six words above; `reason` a sentence with the figures that led to it; `next` what to do.

    `remarks` limit what may be read into it. `advice` comes with offload-bound alone, unless the host lacks memory.
    """

    kind: str
    reason: str
    next: str
    remarks: tuple[str, ...]
    advice: Advice | None = None


def judge(
    figures: Figures,
    *,
    parameters: int,
    offloads: bool,
    host: HostMemory | None = None,
    cpus: float | None = None,
    limits: Thresholds | None = None,
    validation: tuple[float | None, float | None] = (None, None),
) -> Verdict:
    """The first that holds: unhealthy, inconclusive, data-bound, memory-rich, offload-bound, compute-bound.

    Of data and offload the one that is waited for longer. offloads: whether the run kept optimizer state on the host.
    host: that one's memory, where `figures` has a stall. cpus: those that the trainer may use, if they are the device.
    validation: the held-out loss before and after.
    """
    limits = limits or Thresholds()
    kind, reason, following, advice = _decide(figures, parameters, offloads, host, cpus, limits)
    return Verdict(kind, reason, following, tuple(_remarks(figures, kind, limits, validation)), advice)


Decision = tuple[str, str, str, Advice | None]


def _decide(
    figures: Figures,
    parameters: int,
    offloads: bool,
    host: HostMemory | None,
    cpus: float | None,
    limits: Thresholds,
) -> Decision:
    if figures.health.faults:
        return (
            UNHEALTHY,
            "; ".join(figures.health.faults) + ".",
            "Mend the training first (learning rate, precision, data): a faster step of it is worth nothing.",
            None,
        )
    if doubt := _doubt(figures, cpus, limits):
        return INCONCLUSIVE, *doubt, None
    stall_share = figures.stall_share or 0.0
    if figures.data_share >= max(limits.data_share, stall_share):
        return (
            DATA,
            f"The device waits {_ms(figures.data)} a step ({figures.data_share:.1%}) for the next batch.",
            "Load the data faster (workers, prefetch, tokenising ahead); ZenFlow does not change this wait.",
            None,
        )
    if offloads and _fits(figures, limits):
        return (
            MEMORY_RICH,
            f"AdamW with all its state on the device needs at most {_gb(figures.adamw_bytes)} of the card's "
            f"{_gb(figures.card)}.",
            "Do not offload at all: run it with engine=adamw.",
            None,
        )
    if offloads and figures.stall_share is None and figures.optimizer_share >= limits.stall_share:
        return (
            INCONCLUSIVE,
            f"The optimizer takes {figures.optimizer_share:.1%} of a step, and keeps no record of how much of that the "
            "device waits.",
            "Measure the same job with zenflow-diagnose engine=zero_offload, which does.",
            None,
        )
    if offloads and stall_share >= limits.stall_share:
        if (usual := figures.usual_stall or 0.0) < limits.stall_share * figures.median:
            return (
                INCONCLUSIVE,
                f"A mean step waits {_ms(figures.stall)} ({stall_share:.1%}) for the CPU or for PCIe, but the median "
                f"one {_ms(usual)}: it is the wait of few steps.",
                "Stop what else runs on this machine, measure more steps (diagnose.steps), and repeat.",
                None,
            )
        assert host is not None
        return _offload_bound(figures, parameters, host, limits)
    return (
        COMPUTE,
        f"Waiting for data takes {figures.data_share:.1%} and for CPU or PCIe {stall_share:.1%} of a step; the rest, "
        f"{_ms(figures.compute + figures.optimizer)}, is the device's own work or the launching of it.",
        "Look at kernels, batch size, compilation and communication; less waiting for the CPU would change little.",
        None,
    )


def _offload_bound(figures: Figures, parameters: int, host: HostMemory, limits: Thresholds) -> Decision:
    advice = advise(figures, parameters, limits.memory_share, host)
    reason = (
        f"The device waits {_ms(figures.stall)} a step ({figures.stall_share:.1%}) for the CPU or for PCIe"
        f"{_of_what(figures)}."
    )
    if not advice.fits:
        return (
            OFFLOAD,
            reason,
            f"No ZenFlow can be proposed: with windows of {counted(advice.update_interval, 'step')} it takes "
            f"{_need(advice.host)}, more than {limits.memory_share:.0%} of the {_gb(host.available)} available.",
            None,
        )
    known = "how much is available is not known" if host.available is None else f"{_gb(host.available)} are available"
    memory = f"It takes {_need(advice.host)}; {known}."
    if (longer := advice.longer) is not None:
        memory += (
            f" Windows of {longer.update_interval} steps would hide more, but take {_need(longer)}, more than "
            f"{limits.memory_share:.0%} of that."
        )
    return (
        OFFLOAD,
        reason,
        f"Try ZenFlow: {advice.overrides}, with all else as it is at first. {memory} By these measurements "
        f"{_fit(advice)}. That is an estimate: each step takes a share of that work, which is hidden under compute "
        "where it fits, not gone, and speed and quality are known only after zenflow-compare. No gradient is dropped; "
        "a longer window hides more and costs more quality, so look at the held-out loss before U grows.",
        advice,
    )


def _fit(advice: Advice) -> str:
    work = "the CPU's pass over the deferred channels and the copies take"
    if not advice.copies_known:
        work = "the CPU's pass over the deferred channels takes, without the copies, which could not be measured here,"
    window = counted(advice.update_interval, "step")
    return (
        f"{work} {_ms(advice.work)} a window of {window}, whose own work takes "
        f"{_ms(advice.update_interval * advice.floor)}: estimated stall {_ms(advice.stall)} a step, once the first "
        f"{counted(ZenFlowConfig.full_warm_up_rounds, 'step')} (full_warm_up_rounds), each as slow as one of this run, "
        "are over"
    )


def _need(host: HostNeed) -> str:
    return f"{host.a_parameter:.1f} bytes of host memory a deferred parameter, {_gb(host.size)} in all"


def _doubt(figures: Figures, cpus: float | None, limits: Thresholds) -> tuple[str, str] | None:
    if figures.steps < limits.min_steps:
        reason = f"{counted(figures.steps, 'measured step')} will not do; at least {limits.min_steps} are needed."
        return reason, f"Measure {limits.advised_steps} steps or more (diagnose.steps)."
    if cpus is not None and figures.trainer_cpus < limits.min_cpus * min(1.0, cpus) * figures.busy_share:
        return (
            f"The trainer had {figures.trainer_cpus:.2f} of {cpus:g} CPUs: other programs use this machine.",
            "Stop what else runs on this machine, and repeat.",
        )
    noise = figures.steady_p95 / figures.steady_median
    if noise > limits.noise:
        return (
            f"The steps are too uneven: without waiting for data their p95 is {noise:.2f} times their median; at most "
            f"{limits.noise:g} is allowed.",
            "Stop what else runs on this machine, fix the batches' length, or measure more steps, and repeat.",
        )
    return None


def _fits(figures: Figures, limits: Thresholds) -> bool:
    if figures.adamw_bytes is None or figures.card is None:
        return False
    return figures.adamw_bytes <= limits.memory_share * figures.card


def _of_what(figures: Figures) -> str:
    """What the wait is made of; the parts may overlap, and what they leave is launching and synchronisation."""
    parts = [f"the CPU's pass takes {_ms(figures.worker_busy)}"]
    if figures.to_host is not None and figures.to_device is not None:
        parts.append(f"the copies at their best {_ms(figures.to_host)} down and {_ms(figures.to_device)} up")
    return f": {', '.join(parts)}"


def _remarks(
    figures: Figures, kind: str, limits: Thresholds, validation: tuple[float | None, float | None]
) -> Iterator[str]:
    yield "All of this holds for this model, batch, length, machine and these versions; another run is measured anew."
    if figures.steps < limits.advised_steps:
        yield f"Only {counted(figures.steps, 'step')} measured; {limits.advised_steps} to 500 are advised."
    if not figures.health.falling:
        yield "The loss does not fall over these steps; whether the training works is not shown."
    before, after = validation
    if before is not None and after is not None and after > before:
        yield f"The held-out loss rises over these steps, from {before:.4g} to {after:.4g}: look at that first."
    if kind != DATA and figures.data_share >= limits.data_share:
        yield f"Waiting for batches takes {figures.data_share:.1%} of a step."
    if kind != OFFLOAD and (figures.stall_share or 0.0) >= limits.stall_share:
        yield f"Waiting for CPU or PCIe takes {figures.stall_share:.1%} of a step."
    told = "" if figures.utilisation is None else f", by NVML {figures.utilisation:.0%}"
    yield (
        f"The device is busy {figures.busy_share:.0%} of the time at most{told}; that alone says nothing about speed "
        "or quality."
    )


def _ms(seconds: float | None) -> str:
    return f"{1e3 * (seconds or 0.0):.1f} ms"


def _gb(size: int | None) -> str:
    return f"{(size or 0) / 1e9:.1f} GB"
