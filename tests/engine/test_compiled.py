"""`torch.compile` around the model, or around a whole training step: the optimizer's own work is in no graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import Builder, assert_same_bits, snapshot
from zenflow import ZenFlow

Step = Callable[[nn.Module, ZenFlow, Tensor], Any]


def one_step(model: nn.Module, engine: ZenFlow, batch: Tensor) -> None:
    model(batch).square().sum().backward()
    engine.step()
    engine.zero_grad()


def by_closure(model: nn.Module, engine: ZenFlow, batch: Tensor) -> None:
    def closure() -> Tensor:
        engine.zero_grad()
        loss = model(batch).square().sum()
        loss.backward()
        return loss

    engine.step(closure)


def only_the_step(model: nn.Module, engine: ZenFlow, batch: Tensor) -> None:
    model(batch).square().sum().backward()
    torch.compile(engine.step, backend="eager")()
    engine.zero_grad()


def trained(step: Step, device: str, build: Builder) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)
    engine = build(model.parameters(), lr=0.02, topk_ratio=0.3, update_interval=2, select_interval=4, max_grad_norm=1.0)
    for _ in range(7):
        step(model, engine, torch.randn(3, 8, device=device))
    engine.flush()
    engine.load_state_dict(engine.state_dict())
    return snapshot(list(model.parameters()))


@pytest.mark.parametrize("step", [one_step, by_closure])
def test_a_training_step_that_is_compiled_as_a_whole_gives_the_same_bits(
    step: Step, device: str, build: Builder
) -> None:
    compiled = torch.compile(step, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")
        ends = [trained(each, device, build) for each in (step, compiled)]
    for one, other in zip(*ends, strict=True):
        assert_same_bits(one, other)


def test_a_step_that_is_compiled_alone_gives_the_same_bits(device: str, build: Builder) -> None:
    for one, other in zip(*(trained(step, device, build) for step in (one_step, only_the_step)), strict=True):
        assert_same_bits(one, other)
