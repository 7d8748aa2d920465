"""Whether a run's loss looks as it should, without torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from zenflow.diagnose.numbers import slope, spread
from zenflow.terminal import counted

SPIKE = 6.0  # noise widths above the median of the `BEFORE` losses before it: a fast start is none
BEFORE = 9
MAX_SPIKES = 0.05  # share of the steps, and at least three
MAX_SKIPPED = 0.05  # likewise, of steps whose gradient was not finite
RISE = 0.05  # of the median loss, and at least two noise widths: what counts as rising


@dataclass(frozen=True)
class LossHealth:
    """Of the losses of consecutive steps; those that are not finite are left out of every other figure.

    `change` is the robust slope times the run's length, `noise` the width of a single loss, from the differences of
    neighbours. `faults` are sentences; none means healthy. `falling` may be false without a fault: a short run, or one
    that is done.
    """

    steps: int
    not_finite: int
    first: float | None  # means over the first and the last tenth
    last: float | None
    change: float
    noise: float
    spikes: int
    skipped_steps: int
    falling: bool
    faults: tuple[str, ...]


def examine(losses: Sequence[float], skipped_steps: int = 0, held_out: Sequence[float] = ()) -> LossHealth:
    """The health of a run; with no losses at all there is nothing to find a fault with.

    held_out: losses of evaluations, of which it is asked only whether they are finite.
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    change = slope(finite) * max(0, len(finite) - 1)
    noise = spread([b - a for a, b in pairwise(finite)]) / math.sqrt(2) if len(finite) > 1 else 0.0
    tenth = max(1, len(finite) // 10)
    spikes = _spikes(finite, SPIKE * noise) if noise else 0
    bad = len(losses) - len(finite)
    faults = []
    if bad:
        faults.append(f"{bad} of {len(losses)} losses are not finite")
    if not all(map(math.isfinite, held_out)):
        faults.append("the held-out loss is not finite")
    if finite and change > max(2 * noise, RISE * abs(statistics.median(finite))):
        faults.append(f"the loss rises by {change:.3g} over {counted(len(losses), 'step')}")
    if spikes > max(2, MAX_SPIKES * len(losses)):
        faults.append(f"{spikes} of {len(losses)} losses stand {SPIKE:g} noise widths above those before them")
    if skipped_steps > MAX_SKIPPED * max(1, len(losses)):
        faults.append(f"{counted(skipped_steps, 'step')} had to be skipped for a gradient that was not finite")
    return LossHealth(
        steps=len(losses),
        not_finite=bad,
        first=statistics.fmean(finite[:tenth]) if finite else None,
        last=statistics.fmean(finite[-tenth:]) if finite else None,
        change=change,
        noise=noise,
        spikes=spikes,
        skipped_steps=skipped_steps,
        falling=bool(finite) and change < 0,
        faults=tuple(faults),
    )


def _spikes(losses: Sequence[float], height: float) -> int:
    places = range(BEFORE, len(losses))
    return sum(losses[place] - statistics.median(losses[place - BEFORE : place]) > height for place in places)
