"""What b has to show against a, as intervals over paired seeds. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from zenflow.compare.curve import Run
from zenflow.diagnose.numbers import Interval, interval

MET, MISSED, OPEN = "met", "missed", "open"
Pair = tuple[Run, Run]


@dataclass(frozen=True)
class Criterion:
    """One question. `difference` is b's from a's as a share; it has to lie above (or below) `limit` with all of it.

    `state`: met, missed, or open where the interval holds the limit.
    """

    name: str
    difference: Interval
    limit: float
    above: bool
    state: str


def criterion(name: str, differences: Sequence[float], limit: float, *, above: bool) -> Criterion:
    """Student's 95% interval of the paired differences against the limit; not finite ones leave it open."""
    if not all(map(math.isfinite, differences)):
        return Criterion(name, Interval(math.nan, -math.inf, math.inf, len(differences)), limit, above, OPEN)
    return _criterion(name, interval(differences), limit, above)


def _criterion(name: str, found: Interval, limit: float, above: bool) -> Criterion:
    if found.low > limit:
        state = MET if above else MISSED
    elif found.high < limit:
        state = MISSED if above else MET
    else:
        state = OPEN
    return Criterion(name, found, limit, above, state)


def throughput(pairs: Sequence[Pair], min_gain: float) -> Criterion:
    """Gain in tokens a second; the interval is taken of the ratios' logarithms."""
    found = interval([math.log(b.tokens_per_second / a.tokens_per_second) for a, b in pairs])
    gain = Interval(*(_expm1(value) for value in (found.mean, found.low, found.high)), found.n)
    return _criterion("tokens a second", gain, min_gain, above=True)


def waiting(pairs: Sequence[Pair]) -> Criterion:
    """Change of the device's waiting a step (data, CPU, PCIe), as a share of a's step."""
    return criterion("waiting of the device", [(b.idle - a.idle) / a.mean for a, b in pairs], 0.0, above=False)


def loss_after_steps(pairs: Sequence[Pair], max_rise: float) -> Criterion:
    """Rise of the held-out loss after all steps."""
    return _loss("held-out loss, equal steps", pairs, lambda run, _: run.curve[-1].loss, max_rise)


def loss_after_time(pairs: Sequence[Pair], max_rise: float) -> Criterion:
    """Rise of the held-out loss at the moment at which the faster run of the pair has ended."""
    return _loss("held-out loss, equal time", pairs, lambda run, seconds: run.loss_at(seconds), max_rise)


def _loss(name: str, pairs: Sequence[Pair], loss: Callable[[Run, float], float], max_rise: float) -> Criterion:
    rises = []
    for a, b in pairs:
        common = min(a.seconds, b.seconds)
        one, other = loss(a, common), loss(b, common)
        rises.append((other - one) / abs(one) if one else math.nan)
    return criterion(name, rises, max_rise, above=False)


def _expm1(value: float) -> float:
    return math.expm1(value) if value < 700 else math.inf
