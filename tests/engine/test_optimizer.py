"""What makes it a real `torch.optim.Optimizer`: hooks, groups, defaults, names, and being called in any context."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.engine.driving import SHAPES, Builder, Pair, feed, make_gradients, make_parameters

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
