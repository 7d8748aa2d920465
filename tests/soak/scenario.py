"""What a seed stands for: a small model, the optimizer's settings, its gradients, and the faults that will happen."""

from __future__ import annotations

import math
import random
from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.driving import DTYPES, make_gradients, make_parameters
from tests.soak.history import N_GROUPS, Moment, draw_history
from tests.soak.settings import draw_places, draw_settings

# Where a fault strikes: in the trainer's own process, by the name of a function in `faults.py`, or from the driver.
LETHAL = ("kill", "kill in a step", "stop for good", "flip a bit", "foreign ready", "lost slot", "worker error")
HARMLESS = ("stop worker", "slow worker")
AT_START = ("no descriptors", "no memory", "kill at start")
FROM_OUTSIDE = ("stop trainer", "kill trainer", "terminate trainer", "interrupt trainer", "kill starting trainer")
KINDS = (*LETHAL, *HARMLESS, *AT_START, *FROM_OUTSIDE)
IN_STREAM = "non-finite gradient"


@dataclass(frozen=True)
class Fault:
    """kind: of KINDS; step: before which it strikes, from 0; draw: a number that decides its details."""

    index: int
    kind: str
    step: int
    draw: int


@dataclass
class Scenario:
    """Everything that happens, decided by the seed alone; moments inside a step are the machine's own."""

    seed: int
    shapes: list[tuple[int, ...]] = field(init=False)
    dtype: torch.dtype = field(init=False)
    passes: int = field(init=False)  # backward passes a step
    settings: dict[str, Any] = field(init=False)
    groups: list[dict[str, Any]] = field(init=False)
    steps: int = field(init=False)
    history: list[Moment] = field(init=False)  # by step
    save_every: int = field(init=False)
    faults: list[Fault] = field(init=False)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        self.dtype = draw.choice([*DTYPES.values()])
        self.shapes = [(24, 16), *(self._shape(draw) for _ in range(draw.randint(1, 5)))]
        self.passes = draw.choice([1, 1, 2, 3])
        self.settings = draw_settings(draw, self.dtype, self.passes)
        self.groups = [
            {"lr": draw.choice([0.01, 0.03]), "weight_decay": draw.choice([0.0, 0.2]), "betas": (0.9, beta2)}
            for beta2 in (0.99, 0.999)[:N_GROUPS]
        ]
        self.steps = draw.randint(12, 30)
        self.save_every = draw.randint(1, 6)
        strikes = sorted(draw.randrange(self.steps) for _ in range(draw.randint(2, 5)))
        kinds = [draw.choice(LETHAL + LETHAL + HARMLESS + AT_START + FROM_OUTSIDE) for _ in strikes]
        self.faults = [
            Fault(index, kind, 0 if kind in AT_START else step, draw.randrange(1 << 30))
            for index, (kind, step) in enumerate(zip(kinds, strikes, strict=True))
        ]
        self.history = draw_history(random.Random(f"{self.seed} history"), len(self.shapes), self.steps)
        self._strange = {
            step: draw.choice([math.inf, -math.inf, math.nan]) for step in range(self.steps) if draw.random() < 0.1
        }

    @staticmethod
    def _shape(draw: random.Random) -> tuple[int, ...]:
        return tuple(draw.choice([1, 3, 8, 13, 31, 64]) for _ in range(draw.choice([1, 2, 2, 3])))

    def settings_from(self, step: int) -> dict[str, Any]:
        """Those of a trainer that starts, step 0, or goes on after `step` steps, on another machine as it were."""
        if step == 0:
            return self.settings
        return self.settings | draw_places(random.Random(f"{self.seed} {step}"), self.passes)

    @property
    def defers(self) -> bool:
        """Whether there is a matrix with deferred channels, and so a worker; the first one is large enough for all."""
        return self.settings["topk_ratio"] != 1

    @property
    def skipped(self) -> int:
        """Steps whose gradient is not finite."""
        return sum(step % len(self.shapes) not in self.history[step].absent for step in self._strange)

    def gradients(self) -> list[list[Tensor]]:
        """Of all steps, one tensor a parameter."""
        stream = make_gradients(self.shapes, self.dtype, self.steps, seed=self.seed)
        for step, value in self._strange.items():
            numbers = stream[step][step % len(self.shapes)].view(-1)
            numbers[step % numbers.numel()] = value
        return stream

    def parameters(self, step: int, known: Container[int]) -> list[nn.Parameter]:
        """After so many steps: zeros where the weights come with the state, which knows these; else as at the start."""
        made = make_parameters(self.shapes, self.dtype, seed=self.seed)
        parameters = [nn.Parameter(torch.zeros_like(each)) if n in known else each for n, each in enumerate(made)]
        for moment in self.history[step:]:
            for index in moment.thawed:
                parameters[index].requires_grad_(False)
        return parameters

    def param_groups(self, parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        half = len(parameters) // 2
        parts = [part for part in (parameters[:half], parameters[half:]) if part]
        return [{"params": part, **group} for part, group in zip(parts, self.groups, strict=False)]
