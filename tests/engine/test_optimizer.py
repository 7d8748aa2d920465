"""What makes it a real `torch.optim.Optimizer`: hooks, groups, defaults, names, and being called in any context."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import SHAPES, Builder, Pair, feed, make_gradients, make_parameters
from tests.engine.resuming import assert_same_state

SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 2}


def test_step_hooks_run_once_a_step(device: str, build: Builder) -> None:
    parameters = make_parameters(device=device)
    engine = build(parameters, **SETTINGS)
    calls: list[str] = []
    engine.register_step_pre_hook(lambda *_: calls.append("before"))
    engine.register_step_post_hook(lambda *_: calls.append("after"))
    for grads in make_gradients(steps=3):
        feed(parameters, grads)
        engine.step()
    assert calls == ["before", "after"] * 3


def test_groups_and_defaults_look_like_adamw(build: Builder) -> None:
    parameters = make_parameters()
    engine = build(parameters, lr=0.02, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.3, topk_ratio=0.3)
    (group,) = engine.param_groups
    assert [id(p) for p in group["params"]] == [id(p) for p in parameters]
    for settings in (group, engine.defaults):
        assert (settings["lr"], settings["betas"]) == (0.02, (0.8, 0.9))
        assert (settings["eps"], settings["weight_decay"]) == (1e-7, 0.3)
    assert "0.02" in repr(engine)


def test_named_parameters_and_plain_ones_train_alike(device: str, build: Builder) -> None:
    parameters = make_parameters(device=device)
    named = [(f"layer.{index}", parameter) for index, parameter in enumerate(parameters)]
    pair = Pair(build, parameters, params=named, **SETTINGS)
    for grads in make_gradients(steps=5):
        pair.step(grads)
    pair.check_state()


def test_a_generator_of_parameters_is_taken(device: str, build: Builder) -> None:
    model = nn.Linear(10, 6).to(device)
    pair = Pair(build, list(model.parameters()), params=model.parameters(), **SETTINGS)
    for grads in make_gradients([(6, 10), (6,)], steps=5):
        pair.step(grads)
    pair.check_state()


def test_step_under_no_grad_is_the_same(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), **SETTINGS)
    with torch.no_grad():
        for grads in make_gradients(dtype=torch.bfloat16, steps=5):
            pair.step(grads)
    pair.check_state()
    assert all(p.requires_grad and p.is_leaf and p.grad_fn is None for p in pair.parameters)


def test_two_calls_on_the_same_gradient_are_two_steps(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), **SETTINGS)
    for grads in make_gradients(dtype=torch.bfloat16, steps=3):
        pair.step(grads)
        pair.step_on_grad()
    pair.check_state()
    assert pair.engine.stats().steps == 6


def test_settings_changed_in_a_group_count_from_the_next_step(device: str, build: Builder) -> None:
    """Learning rate as a tensor, betas, eps and decay, each changed in the middle of a window."""
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), **{**SETTINGS, "update_interval": 4})
    changes: dict[int, dict[str, Any]] = {
        3: {"lr": torch.tensor(0.05)},
        6: {"betas": (0.5, 0.8)},
        9: {"eps": 1e-3},
        11: {"weight_decay": 0.4, "lr": 0.01},
    }
    for step, grads in enumerate(make_gradients(dtype=torch.bfloat16, steps=14), start=1):
        pair.engine.param_groups[0].update(changes.get(step, {}))
        pair.step(grads)
    pair.check_state()


def test_parameters_without_elements_are_no_work(device: str, build: Builder) -> None:
    shapes = [(0, 8), (8, 0), (0,), *SHAPES[:2]]
    pair = Pair(build, make_parameters(shapes, torch.bfloat16, device), params=None, **SETTINGS)
    for grads in make_gradients(shapes, torch.bfloat16, 5):
        pair.step(grads)
    assert pair.engine.stats().skipped_steps == 0


def test_a_closure_that_raises_is_no_step(device: str, build: Builder) -> None:
    engine = build(make_parameters(device=device), **SETTINGS)

    def closure() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.step(closure)
    assert engine.stats().steps == 0


def test_an_empty_group_beside_a_full_one(device: str, build: Builder) -> None:
    parameters = make_parameters(device=device)
    pair = Pair(build, parameters, params=[{"params": []}, {"params": parameters, "lr": 0.05}], **SETTINGS)
    for grads in make_gradients(steps=5):
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": [nn.Parameter(torch.zeros(3, 3))], "lr": -1.0},
        {"params": [nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))]},
        {"params": [nn.Parameter(torch.zeros(3, 3, device="meta"))]},
    ],
    ids=["lr", "dtype", "device"],
)
def test_a_group_that_is_refused_leaves_the_engine_as_it_was(wrong: dict[str, Any], build: Builder) -> None:
    pair = Pair(build, make_parameters(dtype=torch.bfloat16), **SETTINGS)
    stream = make_gradients(dtype=torch.bfloat16, steps=7)
    for grads in stream[:3]:
        pair.step(grads)
    with pytest.raises(ValueError):
        pair.engine.add_param_group(wrong)
    assert len(pair.engine.param_groups) == 1
    for grads in stream[3:]:
        pair.step(grads)
    pair.check_state()


def test_frozen_in_the_middle_and_trained_again(device: str, build: Builder) -> None:
    """While frozen a parameter takes no part: no decay, no t; then it goes on from where it was."""
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), **{**SETTINGS, "select_interval": 6})
    for step, grads in enumerate(make_gradients(dtype=torch.bfloat16, steps=14), start=1):
        frozen = 4 <= step < 9
        pair.parameters[1].requires_grad_(not frozen)
        pair.step([None if frozen and index == 1 else grad for index, grad in enumerate(grads)])
    pair.check_state()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
def test_the_default_dtype_does_not_matter(dtype: torch.dtype, device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(device=device), **SETTINGS)
    for grads in make_gradients(steps=5):
        pair.model.step(grads)
        feed(pair.parameters, grads)
        torch.set_default_dtype(dtype)
        try:
            pair.engine.step()
        finally:
            torch.set_default_dtype(torch.float32)
        pair.check_weights()
    pair.check_state()


def test_the_default_device_does_not_matter(device: str, build: Builder) -> None:
    """Here the default is a device without memory; `torch.set_default_device("cuda")` is the usual case."""
    pair = Pair(build, make_parameters(device=device), **{**SETTINGS, "select_interval": 4})
    for grads in make_gradients(steps=9):
        pair.model.step(grads)
        feed(pair.parameters, grads)
        with torch.device("meta"):
            pair.engine.step()
        pair.check_weights()
    pair.check_state()


def test_torch_s_distributed_checkpoint_makes_no_step_of_its_own(device: str, build: Builder) -> None:
    """It makes one where an optimizer's `state` is empty, to have something to save."""
    state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)).to(device)
    engine = build(model.parameters(), topk_ratio=0.3)
    for reloaded in (False, True):
        for _ in range(3):
            model(torch.ones(2, 6, device=device)).square().sum().backward()
            engine.step()
            engine.zero_grad()
        before = engine.state_dict()
        if reloaded:
            engine.load_state_dict(before)
        state_dict.get_optimizer_state_dict(model, engine)
        assert_same_state(engine.state_dict(), before)
