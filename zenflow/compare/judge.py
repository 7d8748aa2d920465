"""Adopt, do not adopt, or not enough evidence. Pure arithmetic over runs, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zenflow.compare import criteria
from zenflow.compare.criteria import MET, MISSED, OPEN, Criterion, Pair
from zenflow.compare.curve import Run

ADOPT, REJECT, UNKNOWN = "adopt", "do not adopt", "not enough evidence"


@dataclass(frozen=True)
class Check:
    """A side's function: whether something works at all, and what was seen."""

    side: str
    name: str
    works: bool
    seen: str


@dataclass(frozen=True)
class Judgement:
    """`verdict` is one of the three words above; `reasons` are sentences with the figures that led to it."""

    verdict: str
    reasons: tuple[str, ...]
    criteria: tuple[Criterion, ...]
    remarks: tuple[str, ...]


def works(checks: Sequence[Check]) -> bool:
    """Whether all of it does."""
    return all(check.works for check in checks)


def pairs_of(runs: Sequence[Run]) -> list[Pair]:
    """(a, b) for every seed with both. ValueError where they did not start from the same weights and batches."""
    found = []
    for seed in dict.fromkeys(run.seed for run in runs):
        both = [run for side in "ab" for run in runs if (run.seed, run.side) == (seed, side)]
        if len(both) < 2:
            continue
        a, b = both
        for name in ("weights", "order"):
            if (one := getattr(a, name)) != (other := getattr(b, name)):
                raise ValueError(
                    f"seed {seed}: the {name} are {one[:12]} in a and {other[:12]} in b; allowed: the same"
                )
        found.append((a, b))
    return found


def judge(
    runs: Sequence[Run], checks: Sequence[Check], *, min_gain: float, max_loss_rise: float, same: bool = False
) -> Judgement:
    """In this order: function, then system, then quality at equal steps and at equal time.

    b is adopted if everything works and all four criteria are met; it is not if something of b's does not work or one
    criterion is missed; all else is not enough evidence, for example a side a that does not work itself. How busy
    device or CPU are is no criterion. same: whether both sides have the same settings. With no pair of runs, because a
    side did not work, there are no criteria.
    """
    pairs = pairs_of(runs)
    found = _criteria(pairs, min_gain, max_loss_rise) if pairs else ()
    broken = {
        side: [f"{side}: {_broken(check)}" for check in checks if check.side == side and not check.works]
        for side in "ab"
    }
    for run in runs:
        broken[run.side] += [f"{run.side}: seed {run.seed}: {fault}." for fault in run.faults]
    missed, left = ([_told(item) for item in found if item.state == state] for state in (MISSED, OPEN))
    if broken["b"] or missed:
        verdict, reasons = REJECT, [*broken["b"], *missed]
    elif broken["a"] or left:
        verdict, reasons = UNKNOWN, [*broken["a"], *left]
    else:
        verdict, reasons = ADOPT, [_told(item) for item in found if item.state == MET]
    return Judgement(verdict, tuple(reasons), found, tuple(_remarks(verdict, len(pairs), same)))


def _criteria(pairs: Sequence[Pair], min_gain: float, max_loss_rise: float) -> tuple[Criterion, ...]:
    return (
        criteria.throughput(pairs, min_gain),
        criteria.waiting(pairs),
        criteria.loss_after_steps(pairs, max_loss_rise),
        criteria.loss_after_time(pairs, max_loss_rise),
    )


def _broken(check: Check) -> str:
    return f"{check.name} does not work: {check.seen}."


def _told(item: Criterion) -> str:
    side = "above" if item.above else "below"
    state = {MET: "is", MISSED: "is not", OPEN: "is not shown to be"}[item.state]
    return f"{item.name}: {span(item)} {state} {side} {item.limit:+.1%}."


def span(item: Criterion) -> str:
    """The difference and its interval, as percentages."""
    found = item.difference
    if found.mean != found.mean:
        return "a difference that is not finite"
    return (
        f"{found.mean:+.1%} ({found.low:+.1%} to {found.high:+.1%})" if found.n > 1 else f"{found.mean:+.1%} (one seed)"
    )


def _remarks(verdict: str, repeats: int, same: bool) -> list[str]:
    remarks = ["All of this holds for this model, data, length and machine; it promises nothing for another."]
    if verdict == ADOPT:
        remarks.append("Take b to a longer run, and look at its held-out loss there too.")
    if repeats == 0:
        remarks.append("It ended here: speed and quality of what does not work are not compared.")
    elif repeats < 3:
        remarks.append(f"{repeats} of at least 3 advised repeats were run: intervals are wide, or everything.")
    if same:
        remarks.append("Both sides have the same settings: what differs is noise.")
    return remarks
