"""Random histories: settings, shapes and dtypes drawn from a seed, and everything that may happen to a run mixed.

Absent and non-finite gradients, changed groups, flushes, weights swapped and moved, a checkpoint into a fresh engine,
parameters added late: after every step all weights equal the simulation's, bit for bit.
"""

from __future__ import annotations

import io
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import DTYPES, Builder, Pair, make_gradients, make_parameters, snapshot
from tests.engine.simulation import Simulation

STEPS = 20


class History:
    def __init__(self, seed: int, device: str, build: Builder, stagger: bool, predicted: bool, over: str) -> None:
        self.draw = draw = random.Random(seed)
        self.device, self.build = device, build
        self.shapes = [(7, 5), *(self._shape() for _ in range(draw.randint(1, 5)))]
        one_dtype = draw.choice([*DTYPES.values()])
        mixed = draw.random() < 0.4
        self.dtypes = [draw.choice([*DTYPES.values()]) if mixed else one_dtype for _ in self.shapes]
        self.settings = self._settings()
        longest = self.settings["update_interval"]
        if self.settings["overlap_step"] and (stagger or seed % 4 == 3):
            self.settings["visible_after"] = draw.choice(["auto", 1, longest, -(-longest // 2)])
        self.settings["stagger"], self.settings["importance_over"] = stagger, over
        if set(self.dtypes) == {torch.bfloat16}:
            self.settings["selected_masters"] = draw.choice(["stochastic", "float32"])
        self.settings["weight_prediction"] = random.Random(-1 - seed).choice([0.5, 1.0, 1.7]) if predicted else 0.0
        everyone = [
            make_parameters([shape], dtype, device, seed=index)[0]
            for index, (shape, dtype) in enumerate(zip(self.shapes, self.dtypes, strict=True))
        ]
        n_late = draw.choice([0, 0, 1])
        self.late, first = everyone[len(everyone) - n_late :], everyone[: len(everyone) - n_late]
        half = len(first) // 2
        groups = [{"params": part, **self._group()} for part in (first[:half], first[half:]) if part]
        self.pair = Pair(build, first, params=groups, **self.settings)

    def _shape(self) -> tuple[int, ...]:
        return tuple(self.draw.choice([1, 2, 3, 5, 8, 13]) for _ in range(self.draw.choice([0, 1, 2, 2, 3])))

    def _settings(self) -> dict[str, Any]:
        choose = self.draw.choice
        on_host = choose([True, False])
        return {
            "topk_ratio": choose([0.05, 0.2, 0.5]),
            "update_interval": choose([1, 2, 3, 5]),
            "select_interval": choose([1, 2, 3, 7, 50]),
            "full_warm_up_rounds": choose([0, 0, 1, 4]),
            "overlap_step": choose([True, True, False]),
            "channel_dim": choose(["column", "row"]),
            "importance": choose(["square", "magnitude"]),
            "deferred_lr_scale": choose(["linear", "linear", "none", 0.7]),
            "on_reselect": choose(["migrate", "migrate", "reset"]),
            "accumulate_on": "host" if on_host else "gpu",
            "deferred_rule": choose(["accumulate", "replay"]) if on_host else "accumulate",
            "ring_dtype": "auto" if on_host else choose(["auto", "float32", "bfloat16"]),
            "upload": choose(["backward", "backward", "step"]),
            "upload_check": choose([True, False]),
            "max_grad_norm": choose([None, 0.5]),
            "min_deferred_numel": choose([0, 20]),
            "bucket_bytes": choose([64, 256, 1 << 20]),
        }

    def _group(self) -> dict[str, Any]:
        choose = self.draw.choice
        betas = choose([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
        return {"lr": choose([0.01, 0.03, 0.0]), "weight_decay": choose([0, 0.3]), "betas": betas}

    def play(self) -> None:
        exact = self.settings["max_grad_norm"] is not None
        events = [self.change_a_group, self.swap_weights, self.move_a_weight, self.add_late, self.resume, self.flush]
        for grads in make_gradients(self.shapes, steps=STEPS, exact=exact):
            for event in events:
                if self.draw.random() < 0.1:
                    event()
            self.pair.step(self.disturbed(grads))
        self.flush()
        self.pair.check_state()

    def disturbed(self, grads: list[Tensor]) -> list[Tensor | None]:
        """The first matrix always has a gradient, so that a selection that is due has something to choose."""
        given: list[Tensor | None] = []
        for index, (grad, dtype) in enumerate(zip(grads, self.dtypes, strict=True)):
            absent = index > 0 and self.draw.random() < 0.15
            given.append(None if absent else grad.to(dtype))
        if self.draw.random() < 0.1:
            given[0].view(-1)[self.draw.randrange(given[0].numel())] = self.draw.choice([math.inf, math.nan])
        return given[: len(self.pair.parameters)]

    def change_a_group(self) -> None:
        self.draw.choice(self.pair.engine.param_groups).update(self._group())

    @torch.no_grad()
    def swap_weights(self) -> None:
        if self.settings["deferred_rule"] == "replay" and not self.settings["weight_prediction"]:
            self.flush()  # asked for by name, see test_upload_weights
        kept = [parameter.clone() for parameter in self.pair.parameters]
        for parameter in self.pair.parameters:
            parameter.mul_(0.3)
        for parameter, weight in zip(self.pair.parameters, kept, strict=True):
            parameter.copy_(weight)

    def move_a_weight(self) -> None:
        parameter = self.draw.choice(self.pair.parameters)
        parameter.data = parameter.data.clone()

    def add_late(self) -> None:
        if self.late:
            self.pair.engine.add_param_group({"params": self.late, **self._group()})
            added = Simulation(snapshot(self.late), [], **self.pair.mirrored)
            for state in added.states:
                state.cohort = None  # given with the first gradient
            self.pair.model.states += added.states
            self.pair.model.shapes += added.shapes
            self.pair.parameters += self.late
            self.late = []

    def resume(self) -> None:
        """Save, close, and go on in a fresh engine on fresh weights; what has no state yet comes from the model."""
        pair = self.pair
        file = io.BytesIO()
        torch.save(pair.engine.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        held = [parameter for group in pair.engine.param_groups for parameter in group["params"]]
        fresh = {
            id(p): nn.Parameter(torch.zeros_like(p) if index in saved["state"] else p.detach().clone())
            for index, p in enumerate(held)
        }
        groups = [
            {**group, "params": [fresh[id(p)] for p in group["params"]], "lr": 0.5}
            for group in pair.engine.param_groups
        ]
        pair.engine.close(flush=False)
        pair.parameters = [fresh[id(parameter)] for parameter in pair.parameters]
        pair.engine = self.build(groups, **self.settings)
        pair.engine.load_state_dict(saved)
        pair.check_weights()

    def flush(self) -> None:
        self.pair.engine.flush()
        self.pair.model.flush()
        self.pair.check_weights()


STAGGERED = (1, 3, 5, 9, 11, 12, 14, 15)  # with saves, late parameters, flushes and selections in them
PREDICTED = (4, 7, 17, 18, 20, 22, 23, 29, 30)  # with late results of several steps
SCORED = {6: "window", 14: "window", 29: "window", 9: "average", 18: "average"}
HISTORIES = {
    **{f"seed={seed}": (seed, False, False, "step") for seed in range(16)},
    **{f"seed={seed}-staggered": (seed, True, False, "step") for seed in STAGGERED},
    **{f"seed={seed}-predicted": (seed, seed % 2 == 0, True, "step") for seed in PREDICTED},
    **{f"seed={seed}-{over}": (seed, seed % 2 == 0, False, over) for seed, over in SCORED.items()},
}


@pytest.mark.parametrize("name", HISTORIES)
def test_any_history_equals_the_simulation(name: str, device: str, build: Builder) -> None:
    seed, stagger, predicted, over = HISTORIES[name]
    History(seed, device, build, stagger, predicted, over).play()
