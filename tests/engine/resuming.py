"""Runs that are saved at some step and go on in a fresh optimizer on fresh weights, beside the run that went on."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.engine.driving import SHAPES, Builder, assert_same_bits, backward, make_gradients, make_parameters, snapshot
from tests.engine.simulation import TOGETHER
from zenflow import ZenFlow
from zenflow.checkpoint_folder import load, save
from zenflow.state_tree import flatten

SETTINGS = {"topk_ratio": 0.3, "update_interval": 3, "select_interval": 5, "max_grad_norm": 0.5, **TOGETHER}


@dataclass
class Step:
    """What happens before and in one step; parameters and groups by number."""

    grads: list[Tensor | None]
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    frozen: dict[int, bool] = field(default_factory=dict)
    added: list[int] = field(default_factory=list)
    grad_scale: float | None = None
    swap: bool = False
    flush: bool = False


@dataclass
class Script:
    """A whole history: `groups` at the start, each a list of parameters and its settings, and the steps."""

    shapes: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    settings: dict[str, Any]
    groups: list[tuple[list[int], dict[str, Any]]]
    frozen: list[int]
    steps: list[Step]


class Run:
    """One optimizer that plays a script."""

    def __init__(self, script: Script, parameters: Sequence[nn.Parameter], groups: list[dict], build: Builder) -> None:
        self.script, self.build, self.parameters = script, build, list(parameters)
        self.engine: ZenFlow = build(groups, **script.settings)

    @classmethod
    def start(cls, script: Script, device: str, build: Builder) -> Run:
        parameters = [
            make_parameters([shape], dtype, device, seed=number)[0]
            for number, (shape, dtype) in enumerate(zip(script.shapes, script.dtypes, strict=True))
        ]
        for number in script.frozen:
            parameters[number].requires_grad_(False)
        groups = [{"params": [parameters[number] for number in members], **given} for members, given in script.groups]
        return cls(script, parameters, groups, build)

    def play(self, number: int) -> list[Tensor]:
        """One step of the script; the weights after it."""
        step, engine, parameters = self.script.steps[number], self.engine, self.parameters
        for group, given in step.groups.items():
            engine.param_groups[group].update(given)
        for index, frozen in step.frozen.items():
            parameters[index].requires_grad_(not frozen)
        if step.added:
            engine.add_param_group({"params": [parameters[index] for index in step.added]})
        if step.swap:
            swap_weights(engine, parameters)
        if step.flush:
            engine.flush()
        held = {id(param) for group in engine.param_groups for param in group["params"]}
        backward(parameters, [g if id(p) in held else None for p, g in zip(parameters, step.grads, strict=True)])
        if step.grad_scale is not None:
            engine.grad_scale = torch.tensor([step.grad_scale], device=parameters[0].device)
        engine.step()
        engine.grad_scale = None
        return snapshot(parameters)

    def save(self, folder: Path) -> None:
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        state = {
            "optimizer": self.engine.state_dict(),
            "weights": snapshot(self.parameters),
            "frozen": [not parameter.requires_grad for parameter in self.parameters],
            "groups": [[numbers[id(param)] for param in group["params"]] for group in self.engine.param_groups],
        }
        save(folder, state)

    @classmethod
    def resume(cls, script: Script, folder: Path, device: str, build: Builder) -> Run:
        """A fresh optimizer with other settings of its groups; weights that have a state are random before the load."""
        state = load(folder)
        parameters = []
        for number, weight in enumerate(state["weights"]):
            parameters.append(make_parameters([weight.shape], weight.dtype, device, seed=100 + number)[0])
            parameters[-1].requires_grad_(not state["frozen"][number])
        members = [number for group in state["groups"] for number in group]
        for number, weight in enumerate(state["weights"]):
            if number not in members or members.index(number) not in state["optimizer"]["state"]:
                parameters[number].data.copy_(weight)
        groups = [
            {"params": [parameters[number] for number in group], "lr": 0.75, "betas": (0.1, 0.2)}
            for group in state["groups"]
        ]
        run = cls(script, parameters, groups, build)
        run.engine.load_state_dict(state["optimizer"])
        for number, (parameter, weight) in enumerate(zip(parameters, state["weights"], strict=True)):
            assert_same_bits(parameter, weight, f"weight {number} after the load")
        return run


@torch.no_grad()
def swap_weights(engine: ZenFlow, parameters: Sequence[nn.Parameter]) -> None:
    """Other weights, as for an evaluation with averaged ones, and the old ones again (X3)."""
    if engine.config.deferred_rule == "replay" and not engine.config.predicts:
        engine.flush()
    kept = [parameter.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.mul_(0.3)
    for parameter, weight in zip(parameters, kept, strict=True):
        parameter.copy_(weight)


def assert_same_run(actual: Run, expected: Run) -> None:
    """Everything that a checkpoint of them would hold."""
    assert_same_state(actual.engine.state_dict(), expected.engine.state_dict())
    one, other = actual.engine.stats(), expected.engine.stats()
    for name in ("steps", "windows", "selections", "skipped_steps"):
        assert getattr(one, name) == getattr(other, name), name


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    for group in (*actual["param_groups"], *expected["param_groups"]):
        group.pop("differentiable", None)  # torch gives it to groups that are added after a load
    for index in actual["state"].keys() - expected["state"].keys():
        # It woke up without a gradient: the optimizer that was built after that has laid it out already.
        assert not actual["state"].pop(index)["step"].any()
        for row in actual["zenflow"]["present_log"]:
            assert not row.pop(index)
    (tree, tensors), (expected_tree, expected_tensors) = flatten(actual), flatten(expected)
    assert tree == expected_tree, what
    for name, tensor in expected_tensors.items():
        assert_same_bits(tensors[name], tensor, f"{what}{name}")


def check_resumed(
    script: Script, save_at: Sequence[int], device: str, build: Builder, folder: Path, *, rewinds: bool = False
) -> None:
    """Play `script` once without a break, saving after each of these numbers of steps; then go on from each of them, in
    a fresh optimizer, or one that `rewinds`."""
    run = Run.start(script, device, build)
    weights = []
    for number in range(len(script.steps)):
        weights.append(run.play(number))
        if number + 1 in save_at:
            run.save(folder / f"step-{number + 1}")
    resumed = None
    for steps in save_at:
        saved = folder / f"step-{steps}"
        if resumed is not None and rewinds:
            resumed.engine.load_state_dict(load(saved)["optimizer"])
        else:
            resumed = Run.resume(script, saved, device, build)
        for number in range(steps, len(script.steps)):
            played = resumed.play(number)
            for index, (one, other) in enumerate(zip(played, weights[number], strict=True)):
                assert_same_bits(one, other, f"saved after step {steps}: weight {index} after step {number + 1}")
        assert_same_run(resumed, run)
        if not rewinds:
            resumed.engine.close(flush=False)


def make_script(dtype: torch.dtype, given: dict[str, Any], n_steps: int) -> Script:
    """Two groups; step 5 is skipped, a gradient is absent in 2 and 7, a learning rate and betas change in 4 and 6."""
    steps = [Step([grad.to(dtype) for grad in grads]) for grads in make_gradients(steps=n_steps)]
    steps[4].grads[0].view(-1)[3] = math.inf
    steps[1].grads[1] = steps[6].grads[1] = None
    steps[3].groups, steps[5].groups = {0: {"lr": 0.005}}, {1: {"betas": (0.8, 0.99), "weight_decay": 0.0}}
    first, second = {"lr": 0.02, "weight_decay": 0.1}, {"lr": 0.01, "weight_decay": 0.3}
    groups = [([0, 2, 4, 6], first), ([1, 3, 5], second)]
    return Script(SHAPES, [dtype] * len(SHAPES), {**SETTINGS, **given}, groups, [], steps)


def draw_script(draw: random.Random, n_steps: int) -> Script:
    """Anything that the engine takes."""
    choose = draw.choice
    shapes = [(7, 5), *(tuple(choose([1, 2, 3, 5, 8, 13]) for _ in range(choose([0, 1, 2, 2, 3]))) for _ in range(3))]
    one_dtype = choose([torch.float32, torch.bfloat16, torch.float16])
    mixed = choose([False, False, True])
    dtypes = [choose([torch.float32, torch.bfloat16, torch.float16]) if mixed else one_dtype for _ in shapes]
    late = choose([[], [], [3]])
    early = [number for number in range(4) if number not in late]
    groups = choose([[early], [early[:2], early[2:]]])
    script = Script(
        shapes, dtypes, _draw_settings(draw), [(members, _draw_group(draw)) for members in groups],
        frozen=choose([[], [], [1]]), steps=[],
    )  # fmt: skip
    if set(dtypes) == {torch.bfloat16}:
        script.settings["selected_masters"] = choose(["float32", "stochastic"])
    for number, grads in enumerate(make_gradients(shapes, steps=n_steps, seed=draw.randint(0, 9))):
        step = Step([_draw_gradient(draw, index, grad.to(dtypes[index])) for index, grad in enumerate(grads)])
        if draw.random() < 0.15:
            step.groups[choose(range(len(groups)))] = _draw_group(draw)
        if draw.random() < 0.15:
            step.frozen[choose([1, 2])] = choose([True, False])
        if late and number >= 2 and draw.random() < 0.3:
            step.added, late = late, []
        step.grad_scale = choose([None, None, None, 4.0])
        step.swap, step.flush = draw.random() < 0.1, draw.random() < 0.1
        script.steps.append(step)
    return script


def _draw_settings(draw: random.Random) -> dict[str, Any]:
    choose = draw.choice
    on_host, longest, overlap = choose([False, True]), choose([3, 1, 2, 5]), choose([True, True, False])
    return {
        "topk_ratio": choose([0.2, 0, 0.05, 0.5, 1]),
        "update_interval": longest,
        "select_interval": choose([50, 1, 2, 3, 7]),
        "full_warm_up_rounds": choose([0, 0, 1, 4]),
        "overlap_step": overlap,
        "stagger": choose([False, True]),
        "visible_after": choose(["auto", 1, longest]) if overlap else "auto",
        "weight_prediction": choose([0.0, 0.0, 1.0, 0.7]),
        "channel_dim": choose(["column", "row"]),
        "importance": choose(["square", "magnitude"]),
        "importance_over": choose(["step", "window", "average"]),
        "deferred_lr_scale": choose(["linear", "none", 0.7]),
        "on_reselect": choose(["migrate", "migrate", "reset"]),
        "accumulate_on": "host" if on_host else "gpu",
        "deferred_rule": choose(["accumulate", "replay"]) if on_host else "accumulate",
        "ring_dtype": "auto" if on_host else choose(["auto", "float32", "bfloat16"]),
        "upload": choose(["backward", "step"]),
        "max_grad_norm": choose([None, 0.5]),
        "min_deferred_numel": choose([0, 20]),
        "bucket_bytes": choose([1 << 20, 64, 256]),
    }


def _draw_group(draw: random.Random) -> dict[str, Any]:
    choose = draw.choice
    betas = choose([(0.9, 0.999), (0.5, 0.9), (0.0, 0.99)])
    return {"lr": choose([0.01, 0.03, 0.0]), "weight_decay": choose([0, 0.3]), "betas": betas}


def _draw_gradient(draw: random.Random, index: int, grad: Tensor) -> Tensor | None:
    if index and draw.random() < 0.15:
        return None
    if grad.numel() and draw.random() < 0.05:
        grad.view(-1)[0] = draw.choice([math.inf, math.nan])
    return grad
