"""A simulation of what the engine has gives the engine's weights, masters, moments and owners, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.engine.driving import DEFAULT, USUAL, assert_same_bits, backward, make_gradients, make_parameters
from tests.engine.simulation import TOGETHER
from zenflow import ZenFlow, ZenFlowConfig
from zenflow.simulate.rule import Rule
from zenflow.simulate.simulation import Simulation

SHAPES = [(16, 12), (7, 13), (5,), (8, 4, 3, 2), (31, 3), (1, 9)]
HOST = {"accumulate_on": "host"}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": DEFAULT,
    "default-without-warm-up": USUAL,
    "together": {},
    "prompt": {"overlap_step": False},
    "half-window": {"visible_after": 2},
    "stagger": {"stagger": True},
    "stagger-prompt": {"stagger": True, "overlap_step": False},
    "stagger-1-prediction": {"stagger": True, "visible_after": 1, "weight_prediction": 1.5},
    "prediction": {"weight_prediction": 1.0},
    "replay": HOST | {"deferred_rule": "replay"},
    "replay-prediction-stagger": HOST | {"deferred_rule": "replay", "weight_prediction": 1.0, "stagger": True},
    "host": HOST,
    "host-default": HOST | USUAL,
    "warm-up": {"full_warm_up_rounds": 5},
    "warm-up-default": USUAL | {"full_warm_up_rounds": 5},
    "scale-none": {"deferred_lr_scale": "none"},
    "scale-2-rows": {"deferred_lr_scale": 2.0, "channel_dim": "row", "importance": "magnitude"},
    "k-0": {"topk_ratio": 0.0, "update_interval": 3},
    "k-1": {"topk_ratio": 1.0},
    "bfloat16-ring": {"ring_dtype": "bfloat16"},
}
IN_BFLOAT16 = ("default", "together", "host", "stagger-1-prediction", "replay-prediction-stagger")
OPTIMIZER = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture
def close() -> Iterator[list[ZenFlow]]:
    made: list[ZenFlow] = []
    yield made
    for optimizer in made:
        optimizer.close(flush=False)


def check(step: int, ours: list[Parameter], theirs: list[Parameter]) -> None:
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert_same_bits(one, other, f"weight {index} after step {step}")


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in SETTINGS] + [(name, torch.bfloat16) for name in IN_BFLOAT16],
    ids=[f"{name}-fp32" for name in SETTINGS] + [f"{name}-bf16" for name in IN_BFLOAT16],
)
def test_a_rule_of_the_engine_gives_the_engine_s_bits(name: str, dtype: torch.dtype, close: list[ZenFlow]) -> None:
    """Fifteen steps: a learning rate that moves, clipping, decay, selections, an absent and an infinite gradient."""
    config = ZenFlowConfig(**{
        "topk_ratio": 0.3, "select_interval": 6, "min_deferred_numel": 0, "max_grad_norm": 0.5, "worker_threads": 1,
    } | TOGETHER | SETTINGS[name])  # fmt: skip
    theirs, ours = make_parameters(SHAPES, dtype), make_parameters(SHAPES, dtype)
    engine = ZenFlow(theirs, lr=0.01, config=config, **OPTIMIZER)
    close.append(engine)
    simulation = Simulation(ours, Rule(config), lr=0.01, **OPTIMIZER)
    for number, grads in enumerate(make_gradients(SHAPES, dtype, steps=15, exact=True)):
        if number == 3:
            grads[1] = None
        if number == 7:
            grads[0][2, 1] = float("inf")
        for optimizer, parameters in ((engine, theirs), (simulation, ours)):
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
            backward(parameters, grads)
            optimizer.step()
        check(number + 1, ours, theirs)
    engine.flush()
    simulation.flush()
    check(simulation.steps, ours, theirs)
    for parameter, matrix in zip(theirs, simulation.state_dict()["matrices"], strict=True):
        state = engine.channel_state(parameter)
        for part in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(matrix[part], getattr(state, part), part)
        if parameter.dim() >= 2 and name != "k-1":  # else no channel has an owner of its own
            assert matrix["selected"].tolist() == state.selected.nonzero().flatten().tolist()
            assert matrix["exponents"].tolist() == [state.step.tolist()] * 2
    stats = engine.stats()
    assert simulation.skipped == stats.skipped_steps == 1
    if name != "k-1":  # nothing is deferred
        assert simulation.windows == stats.windows
        assert simulation.selections == stats.selections
