"""Feeding the engine and the simulation the same gradients, and comparing every bit of what comes out."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.engine.simulated_state import Group
from tests.engine.simulation import DEFAULTS, TOGETHER, Reference, Simulation
from zenflow.config import ZenFlowConfig

if TYPE_CHECKING:
    from zenflow import ZenFlow

Builder = Callable[..., "ZenFlow"]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
SHAPES = [(16, 12), (7, 13), (5,), (8, 4, 3, 2), (), (31, 3), (1, 9)]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
# What a user has who says nothing: windows of cohorts, results two steps later, as predictions; and the same from the
# first step on, without its warm-up, in which there is neither.
DEFAULT = {name: getattr(ZenFlowConfig(), name) for name in TOGETHER}
USUAL = DEFAULT | {"full_warm_up_rounds": 0}
SCHEDULES: dict[str, dict[str, Any]] = {"usual": USUAL, "together": TOGETHER}
RULES: dict[str, dict[str, Any]] = {
    "gpu": {},
    "host": {"accumulate_on": "host"},
    "replay": {"accumulate_on": "host", "deferred_rule": "replay"},
}
STREAMS: dict[str, Callable[[ZenFlow], torch.cuda.Stream]] = {
    "copies": lambda engine: engine._pipeline.sender.stream,
    "uploads": lambda engine: engine._pipeline.uploader.stream,
    "compute": lambda engine: torch.cuda.current_stream(engine._pipeline.device),
}


def make_parameters(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]


def make_gradients(
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    steps: int = 12,
    seed: int = 1,
    exact: bool = False,
) -> list[list[Tensor]]:
    """Gradients of `steps` steps. With `exact`, small multiples of 1/32, so that every order of summing their squares
    gives the same norm and clipping can be compared bit for bit."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> Tensor:
        channel_scale = torch.randint(1, 3, shape[-1:], generator=generator) / 2
        if exact:
            return torch.randint(-15, 16, shape, generator=generator) / 16 * channel_scale
        return torch.randn(shape, generator=generator) * channel_scale * 0.1

    return [[draw(shape).to(dtype) for shape in shapes] for _ in range(steps)]


def feed(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)


def backward(parameters: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Leave exactly these gradients in `.grad`, by a backward pass that hooks can see."""
    feed(parameters, grads)
    arriving = [(p, p.grad) for p in parameters if p.grad is not None and p.requires_grad]
    for parameter, _ in arriving:
        parameter.grad = None
    if arriving:
        with torch.enable_grad():
            loss = torch.stack([(parameter * grad).float().sum() for parameter, grad in arriving]).sum()
        loss.backward()


def differing(actual: Tensor, expected: Tensor) -> int:
    """How many elements differ in any bit."""
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    integer = INTEGERS[actual.element_size()]
    one, other = (tensor.detach().cpu().contiguous().view(integer) for tensor in (actual, expected))
    return int((one != other).sum())


def assert_same_bits(actual: Tensor, expected: Tensor, what: str = "") -> None:
    count = differing(actual, expected)
    assert count == 0, f"{what}: {count} of {actual.numel()} elements differ"


def snapshot(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [parameter.detach().cpu().clone() for parameter in parameters]


def groups_of(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter]) -> list[Group]:
    """The settings that each parameter's param group holds right now."""
    owner = {id(p): param_group for param_group in optimizer.param_groups for p in param_group["params"]}
    return [Group.of(owner[id(parameter)]) for parameter in parameters]


class Pair:
    """An engine and what must equal it, a `Simulation` or a `Reference`, on the same parameters and gradients."""

    def __init__(self, build: Builder, parameters: Sequence[nn.Parameter], params: Any = None, **settings: Any) -> None:
        self.parameters = list(parameters)
        weights = snapshot(parameters)
        self.engine = build(self.parameters if params is None else params, **settings)
        self.mirrored = {key: value for key, value in settings.items() if key in DEFAULTS}
        groups = groups_of(self.engine, self.parameters)
        self.model: Simulation | Reference = self._mirror(weights, groups, self.mirrored)

    def _mirror(self, weights: list[Tensor], groups: list[Group], settings: dict[str, Any]) -> Simulation | Reference:
        return Simulation(weights, groups, **settings)

    def step(self, grads: Sequence[Tensor | None], check: bool = True) -> None:
        backward(self.parameters, grads)
        self.step_on_grad(check)

    def step_on_grad(self, check: bool = True) -> None:
        """One step on what `.grad` holds; the weights must be equal after it, if that is to be checked."""
        grads = [None if p.grad is None else p.grad.detach().cpu().clone() for p in self.parameters]
        self.model.groups = groups_of(self.engine, self.parameters)
        self.model.step(grads)
        self.engine.step()
        if check:
            self.check_weights()

    def check_weights(self) -> None:
        for index, parameter in enumerate(self.parameters):
            assert_same_bits(parameter, self.model.visible(index), f"weight {index}")

    def check_state(self, owners: bool = True) -> None:
        for index, (parameter, expected) in enumerate(zip(self.parameters, self.model.states, strict=True)):
            actual = self.engine.channel_state(parameter)
            for name in ("master", "exp_avg", "exp_avg_sq"):
                assert_same_bits(getattr(actual, name), getattr(expected, name), f"{name} of {index}")
            if len(actual.step) == len(expected.step):
                assert actual.step.tolist() == expected.step.tolist(), f"t of {index}"
            else:  # selected whole, or a reference that knows no channels
                assert actual.step.unique().tolist() == expected.step.unique().tolist(), f"t of {index}"
            if owners:
                owners_expected = expected.selected[: len(actual.selected)]
                assert actual.selected.tolist() == owners_expected.tolist(), f"owners of {index}"


class ReferencePair(Pair):
    """The engine against AdamW with fp32 masters."""

    model: Reference

    def _mirror(self, weights: list[Tensor], groups: list[Group], settings: dict[str, Any]) -> Reference:
        return Reference(weights, groups, settings.get("max_grad_norm"))

    def add(self, parameters: Sequence[nn.Parameter]) -> None:
        """Follow parameters that the engine was given later."""
        self.parameters += parameters
        added = Reference(snapshot(parameters), [])
        self.model.states += added.states
        self.model.shapes += added.shapes


def environment(**extra: str) -> dict[str, str]:
    """For a script in a process of its own that imports what this one can."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry), **extra}


def cohorts_of(engine: ZenFlow) -> list[int | None]:
    """By parameter, in the order of the groups."""
    found = {id(record.param): record.storage and record.storage.cohort for record in engine._pipeline.records}
    return [found.get(id(param)) for group in engine.param_groups for param in group["params"]]


def run_steps(engine: ZenFlow, parameters: list[nn.Parameter], steps: int) -> None:
    for grads in make_gradients(SHAPES, parameters[0].dtype, steps):
        feed(parameters, grads)
        engine.step()
