"""Which ZenFlow to try first, from a synchronous run's measured times. An estimate to be tested, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zenflow.config import ZenFlowConfig
from zenflow.diagnose.figures import Figures, HostMemory
from zenflow.geometry import ITEM_BYTES, Segment, lay_out_for
from zenflow.ring_layout import bytes_of

SHARES = (0.1, 0.05, 0.01)  # k, tried in this order until it fits on the card
WINDOWS = (1, 2, 4, 8, 16)  # U, likewise until the CPU's work fits into the window
SELECTED_BYTES = 12  # k of these a parameter: fp32 master and moments on the device


@dataclass(frozen=True)
class HostNeed:
    """Bytes of host memory with windows of `update_interval` steps, in all and for each deferred parameter."""

    update_interval: int
    size: int
    a_parameter: float


@dataclass(frozen=True)
class Advice:
    """A first setting to try. Times in seconds; `work` is the CPU pass and the copies of one window.

    `stall` a step is what is left if all of it overlaps that can: an estimate from this run's times, which leaves out
    that a busy CPU slows launching, what the selected channels cost the device, and the steps of the warm-up.
    `longer`: the window that the times ask for, where the host has no memory for it. Unless it `fits`, the host has
    none for the shortest either, which this is then.
    """

    topk_ratio: float
    update_interval: int
    accumulate_on: str
    floor: float  # a step without its stall
    work: float
    stall: float
    copies_known: bool
    host: HostNeed
    longer: HostNeed | None
    fits: bool

    @property
    def overrides(self) -> str:
        """The words for zenflow-train, or for b of zenflow-compare."""
        words = f"engine=zenflow engine.topk_ratio={self.topk_ratio:g} engine.update_interval={self.update_interval}"
        return words + ("" if self.accumulate_on == "gpu" else f" engine.accumulate_on={self.accumulate_on}")


def advise(figures: Figures, parameters: int, memory_share: float, host: HostMemory) -> Advice:
    """The largest k that fits on the card, and the smallest U of `WINDOWS` whose floor steps cover a window's work.

    For a run with every parameter deferred. If no U is long enough it is the longest, with the stall that remains, and
    none is longer than the host has memory for, where that is known.
    Of U staggered cohorts each has a U-th of that work and two steps for it (`visible_after`), so that what decides is
    as ever whether the CPU gets through a window's work in its steps. Uneven cohorts, as where one matrix is most of
    the model, are not reckoned with.
    memory_share: of the card, and of the host's available memory, that may be used.
    """
    assert figures.worker_busy is not None and figures.stall is not None
    k, accumulate_on = _share(figures, parameters, memory_share, host.deferred)
    floor, to_host, to_device = figures.mean - figures.stall, figures.to_host or 0.0, figures.to_device or 0.0

    def work(window: int) -> float:
        # With accumulate_on=host the gradients of every step travel, selected channels included.
        down = (1 - k) * to_host if accumulate_on == "gpu" else window * to_host
        return (1 - k) * (figures.worker_busy + to_device) + down

    wanted = next((window for window in WINDOWS if work(window) <= window * floor), WINDOWS[-1])
    needs = {window: host_need(window, accumulate_on, host.deferred) for window in WINDOWS if window <= wanted}
    room = None if host.available is None else memory_share * host.available
    held = [window for window, need in needs.items() if room is None or need.size <= room]
    window = max(held, default=WINDOWS[0])
    return Advice(
        topk_ratio=k,
        update_interval=window,
        accumulate_on=accumulate_on,
        floor=floor,
        work=work(window),
        stall=max(0.0, work(window) / window - floor),
        copies_known=figures.to_host is not None and figures.to_device is not None,
        host=needs[window],
        longer=needs[wanted] if window < wanted else None,
        fits=bool(held),
    )


def host_need(update_interval: int, accumulate_on: str, deferred: Mapping[str, int]) -> HostNeed:
    """What ZenFlow takes with these settings and else its defaults. deferred: elements by the name of their dtype."""
    segments = _segments(update_interval, accumulate_on, deferred)
    size = sum(map(bytes_of, segments))
    return HostNeed(update_interval, size, size / max(1, sum(deferred.values())))


def _segments(update_interval: int, accumulate_on: str, deferred: Mapping[str, int]) -> list[Segment]:
    config = ZenFlowConfig(update_interval=update_interval, accumulate_on=accumulate_on)
    return [lay_out_for(config, 0, [(numel, 1, 0)], dtype, n_groups=1) for dtype, numel in deferred.items()]


def _share(figures: Figures, parameters: int, memory_share: float, deferred: Mapping[str, int]) -> tuple[float, str]:
    if figures.card is None or figures.peak is None:
        return SHARES[0], "gpu"
    free = memory_share * figures.card - figures.peak
    on_device = sum(segment.numel * ITEM_BYTES[segment.ring_dtype] for segment in _segments(1, "gpu", deferred))
    for accumulator, place in ((on_device, "gpu"), (0, "host")):
        for k in SHARES:
            if SELECTED_BYTES * k * parameters + accumulator <= free:
                return k, place
    return SHARES[-1], "host"
