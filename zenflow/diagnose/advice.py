"""Which ZenFlow to try first, from a synchronous run's measured times. An estimate to be tested, without torch."""

from __future__ import annotations

from dataclasses import dataclass

from zenflow.diagnose.figures import Figures

SHARES = (0.1, 0.05, 0.01)  # k, tried in this order until it fits on the card
WINDOWS = (1, 2, 4, 8, 16)  # U, likewise until the CPU's work fits into the window
SELECTED_BYTES = 12  # k of these a parameter: fp32 master and moments on the device
ACCUMULATOR_BYTES = 2  # a parameter, with accumulate_on=gpu


@dataclass(frozen=True)
class Advice:
    """A first setting to try. Times in seconds; `work` is the CPU pass and the copies of one window.

    `stall` a step is what is left if all of it overlaps that can: an estimate from this run's times, which leaves out
    that a busy CPU slows launching, and what the selected channels cost the device.
    """

    topk_ratio: float
    update_interval: int
    accumulate_on: str
    floor: float  # a step without its stall
    work: float
    stall: float
    copies_known: bool

    @property
    def overrides(self) -> str:
        """The words for zenflow-train, or for b of zenflow-compare."""
        words = f"engine=zenflow engine.topk_ratio={self.topk_ratio:g} engine.update_interval={self.update_interval}"
        return words + ("" if self.accumulate_on == "gpu" else f" engine.accumulate_on={self.accumulate_on}")


def advise(figures: Figures, parameters: int, memory_share: float) -> Advice:
    """The largest k that fits on the card, and the smallest U of `WINDOWS` whose floor steps cover a window's work.

    For a run with every parameter deferred. If no U is long enough it is the longest, with the stall that remains.
    Of U staggered cohorts each has a U-th of that work and two steps for it (`visible_after`), so that what decides is
    as ever whether the CPU gets through a window's work in its steps. Uneven cohorts, as where one matrix is most of
    the model, are not reckoned with.
    memory_share: of the card, that may be used.
    """
    assert figures.worker_busy is not None and figures.stall is not None
    k, accumulate_on = _share(figures, parameters, memory_share)
    floor, to_host, to_device = figures.mean - figures.stall, figures.to_host or 0.0, figures.to_device or 0.0
    for window in WINDOWS:
        # With accumulate_on=host the gradients of every step travel, selected channels included.
        down = (1 - k) * to_host if accumulate_on == "gpu" else window * to_host
        work = (1 - k) * (figures.worker_busy + to_device) + down
        if work <= window * floor:
            break
    copies_known = figures.to_host is not None and figures.to_device is not None
    return Advice(k, window, accumulate_on, floor, work, max(0.0, work / window - floor), copies_known)


def _share(figures: Figures, parameters: int, memory_share: float) -> tuple[float, str]:
    if figures.card is None or figures.peak is None:
        return SHARES[0], "gpu"
    free = memory_share * figures.card - figures.peak
    for accumulator, place in ((ACCUMULATOR_BYTES, "gpu"), (0, "host")):
        for k in SHARES:
            if (SELECTED_BYTES * k + accumulator) * parameters <= free:
                return k, place
    return SHARES[-1], "host"
