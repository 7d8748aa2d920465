"""What happens between a scenario's gradients: the engine's cases of parameters, groups and weights, under faults."""

from __future__ import annotations

import random
from dataclasses import dataclass

N_GROUPS = 2


@dataclass(frozen=True)
class Moment:
    """Before and in one step.

    rates: what each group's learning rate is multiplied by, as by a scheduler that knows only the last one; absent:
    parameters without a gradient, frozen ones among them; thawed: those that are frozen no more; swap: other weights
    and the old ones again; flush: the window ends before the step; scale: a GradScaler's, of all gradients.
    """

    rates: tuple[float, ...]
    absent: frozenset[int]
    thawed: frozenset[int]
    swap: bool
    flush: bool
    scale: float | None


def draw_history(draw: random.Random, n_parameters: int, steps: int) -> list[Moment]:
    """The first parameter has a gradient in every step, so that there always is one."""
    others = range(1, n_parameters)
    thaws = {index: draw.randrange(1, steps) for index in others if draw.random() < 0.15}
    return [
        Moment(
            rates=tuple(draw.choice([1.0, 1.0, 0.7, 1.2]) for _ in range(N_GROUPS)),
            absent=frozenset(index for index in others if step < thaws.get(index, 0) or draw.random() < 0.08),
            thawed=frozenset(index for index, thaw in thaws.items() if thaw == step),
            swap=draw.random() < 0.08,
            flush=draw.random() < 0.08,
            scale=draw.choice([None, None, None, 4.0]),
        )
        for step in range(steps)
    ]
