"""Runs made by hand: a takes 100 ms a step, of which it waits 40; its held-out loss falls from 4 to 2 in 100 steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zenflow.compare.curve import Point, Run
from zenflow.compare.judge import Judgement, judge

STEPS = 100
A = Run(
    side="a",
    seed=0,
    place=1,
    weights="w0",
    order="o0",
    median=0.1,
    p95=0.11,
    mean=0.1,
    tokens_per_second=1000.0,
    data=0.0,
    stall=0.04,
    trainer_cpus=1.0,
    worker_cpus=4.0,
    bytes_to_host=2e9,
    bytes_to_device=2e9,
    worker_busy=0.03,
    peak_bytes=10**10,
    skipped_steps=0,
    curve=(),
)


def run(side: str, seed: int, speed: float = 1.0, stall: float = 0.04, loss: float = 2.0, **changes: Any) -> Run:
    """`speed` in a's; `loss` the last one, to which it falls on a straight line."""
    seconds = 0.1 / speed
    curve = tuple(Point(step, step * seconds, 4.0 + (loss - 4.0) * step / STEPS) for step in (0, 25, 50, 75, STEPS))
    made = replace(
        A, side=side, seed=seed, weights=f"w{seed}", order=f"o{seed}", median=seconds, mean=seconds,
        tokens_per_second=1000.0 * speed, stall=stall, curve=curve,
    )  # fmt: skip
    return replace(made, **changes)


def judged(
    speeds: Sequence[float] = (1.5, 1.52, 1.49),
    stalls: Sequence[float] = (0.001, 0.002, 0.001),
    losses: Sequence[float] = (2.0, 2.01, 2.0),
    checks: Sequence = (),
    changes: dict[str, Any] | None = None,
    **settings: Any,
) -> Judgement:
    """Of one pair a seed, b's figures given; by default all in b's favour. `changes`: more of b's last run."""
    runs = []
    for seed, (speed, stall, loss) in enumerate(zip(speeds, stalls, losses, strict=True)):
        more = changes if changes and seed == len(speeds) - 1 else {}
        runs += [run("a", seed), run("b", seed, speed, stall, loss, **more)]
    return judge(runs, checks, **({"min_gain": 0.05, "max_loss_rise": 0.02} | settings))
