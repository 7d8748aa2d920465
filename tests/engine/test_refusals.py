"""What is refused is refused whole: nothing has been counted, changed or lost, and training goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import Builder, Pair, assert_same_bits, feed, make_gradients, make_parameters

SHAPES = [(6, 10), (5, 7), (3,)]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 4, "select_interval": 8}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, float("nan"))),
        ("lr", -0.1),
        ("eps", float("inf")),
        ("lr", float("nan")),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [3, 4])
def test_a_bad_setting_between_steps_is_refused_by_name(
    name: str, value: Any, at: int, device: str, build: Builder
) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for step, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 10), start=1):
        if step == at:
            feed(pair.parameters, grads)
            group = pair.engine.param_groups[0]
            good, group[name] = group[name], value
            with pytest.raises(ValueError, match=name):
                pair.engine.step()
            group[name] = good
        pair.step(grads)
    pair.check_state()
    assert pair.engine.stats().steps == 10


def test_a_bad_gradient_is_refused_by_name_and_the_step_can_be_repeated(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for step, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 10), start=1):
        if step in (2, 4):
            feed(pair.parameters, grads)
            pair.parameters[1].grad = torch.ones(SHAPES[1], dtype=torch.bfloat16, device=device).to_sparse()
            with pytest.raises(ValueError, match="parameter 1 of group 0.*sparse"):
                pair.engine.step()
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize("added_at", [1, 2, 3, 4])
def test_a_group_may_come_in_mid_window_and_wait_for_its_gradients(added_at: int, device: str, build: Builder) -> None:
    """Its first gradient comes two windows later; the others never notice."""
    shapes, late = SHAPES, [(4, 6)]
    pair = Pair(build, make_parameters(shapes, torch.bfloat16, device), **SETTINGS)
    added = make_parameters(late, torch.bfloat16, device, seed=3)
    before = added[0].detach().cpu().clone()
    for step, grads in enumerate(make_gradients(shapes, torch.bfloat16, 12), start=1):
        if step == added_at:
            pair.engine.add_param_group({"params": added, "lr": 0.5})
        if step == 11:
            added[0].grad = torch.ones_like(added[0])
        pair.step(grads)
        if step < 11:
            assert_same_bits(added[0], before)
    pair.check_state()
    state = pair.engine.channel_state(added[0])
    assert state.selected.sum() == 2
    assert state.step[state.selected].tolist() == [2, 2]  # steps 11 and 12: the gradient stays
    assert state.step[~state.selected].tolist() == [1] * 4


def halves(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": parameters[:1]}, {"params": parameters[1:], "weight_decay": 0.2}]


@pytest.mark.parametrize("how", ["loaded", "refused"])
def test_a_flush_ends_a_window_that_is_older_than_a_group_with_a_place(how: str, device: str, build: Builder) -> None:
    """Its place comes with a load, since it is there at construction, or with its first gradient, in a step that is
    refused for the sake of another."""
    parameters, late = (make_parameters(s, torch.bfloat16, device, seed=3) for s in (SHAPES, [(4, 6)]))
    pair = Pair(build, parameters, params=halves(parameters), **SETTINGS)
    for grads in make_gradients(SHAPES, torch.bfloat16, 5):
        pair.step(grads)
    pair.engine.add_param_group({"params": late, "lr": 0.5})
    if how == "loaded":
        state = pair.engine.state_dict()
        pair.parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=8)
        pair.engine = build([*halves(pair.parameters), {"params": late}], **SETTINGS)
        pair.engine.load_state_dict(state)
    else:
        late[0].grad, pair.parameters[0].grad = torch.ones_like(late[0]), pair.parameters[0].grad.to_sparse()
        with pytest.raises(ValueError, match="sparse"):
            pair.engine.step()
    before = late[0].detach().cpu().clone()
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()
    assert_same_bits(late[0], before)
    late[0].grad = None
    for grads in make_gradients(SHAPES, torch.bfloat16, 4, seed=5):
        pair.step(grads)
    pair.check_state()


def trained(build: Builder, device: str, steps: int = 6) -> Pair:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for grads in make_gradients(SHAPES, torch.bfloat16, steps):
        pair.step(grads)
    return pair


def test_a_group_without_gradients_gets_its_state_back(device: str, build: Builder) -> None:
    """The state of a parameter that the new optimizer has not seen a gradient of is loaded, not forgotten."""
    first = trained(build, device)
    late = make_parameters([(4, 6)], torch.bfloat16, device, seed=3)
    first.engine.add_param_group({"params": late})
    late[0].grad = torch.ones_like(late[0])
    first.engine.step()
    expected = first.engine.channel_state(late[0])
    again = make_parameters([*SHAPES, (4, 6)], torch.bfloat16, device, seed=8)
    second = build(again[:-1], **SETTINGS)
    second.add_param_group({"params": again[-1:]})
    second.load_state_dict(first.engine.state_dict())
    actual = second.channel_state(again[-1])
    for name in ("master", "exp_avg", "exp_avg_sq"):
        assert_same_bits(getattr(actual, name), getattr(expected, name), name)
    assert actual.step.tolist() == expected.step.tolist()


def drop(key: str) -> Callable[[dict], None]:
    return lambda state: state["state"][0].pop(key)


def put(key: str, value: Any, index: int = 0) -> Callable[[dict], None]:
    return lambda state: state["state"][index].__setitem__(key, value)


DAMAGES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "no step": (drop("step"), "step"),
    "no master": (drop("master"), "master"),
    "moment in half precision": (put("exp_avg", torch.zeros(6, 10, dtype=torch.bfloat16)), "exp_avg"),
    "moment of another shape": (put("exp_avg_sq", torch.zeros(10, 6)), "exp_avg_sq"),
    "steps of too few channels": (put("step", torch.zeros(9, dtype=torch.int64)), "step"),
    "owners out of range": (put("selected", torch.tensor([1, 2, 10])), "selected"),
    "an owner twice": (put("selected", torch.tensor([1, 2, 2])), "selected"),
    "too many owners": (put("selected", torch.arange(4)), "selected"),
    "a NaN": (lambda state: state["state"][0]["master"][1, 2:3].fill_(float("nan")), "master.*NaN"),
    "whole or not": (put("whole", None), "whole"),
    "no pending steps": (put("pending_hyper", None), "pending_hyper"),
    "pending steps of two numbers": (put("pending_hyper", [[1.0, 2.0]]), "pending_hyper"),
    "pending steps of words": (put("pending_hyper", [["a"] * 5]), "pending_hyper"),
    "scalars of words": (lambda state: state["zenflow"]["hyper_log"].__setitem__(0, [["a"] * 5]), "hyper_log"),
    "presence of words": (lambda state: state["zenflow"]["present_log"].__setitem__(0, "a"), "present_log"),
    "a window below one": (lambda state: state["zenflow"]["clock"].update(window=0), "window"),
    "no accumulator": (drop("accumulator"), "accumulator"),
    "an entry is missing": (lambda state: state["state"].pop(1), "parameter 1 of group 0"),
    "an entry too many": (lambda state: state["state"].update({7: state["state"][0]}), "7"),
    "no clock": (lambda state: state["zenflow"].pop("clock"), "clock"),
    "another version": (lambda state: state["zenflow"].update(format=99), "99"),
    "another ratio": (lambda state: state["zenflow"]["config"].update(topk_ratio=0.5), "topk_ratio"),
    "somebody else's": (lambda state: state.pop("zenflow"), "zenflow"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_state_is_refused_before_anything_changes(damage: str, device: str, build: Builder) -> None:
    pair = trained(build, device)
    state = copy.deepcopy(pair.engine.state_dict())
    hurt, named = DAMAGES[damage]
    hurt(state)
    state["param_groups"][0]["lr"] = 0.125
    with pytest.raises(ValueError, match=named):
        pair.engine.load_state_dict(state)
    assert pair.engine.param_groups[0]["lr"] == SETTINGS["lr"]
    for grads in make_gradients(SHAPES, torch.bfloat16, 6, seed=5):
        pair.step(grads)
    pair.check_state()


class Wrapper(torch.Tensor):
    """No memory of its own, another tensor inside: what a `DTensor` and torchao's quantized weights are."""

    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return cls(args[0].inner) if function in (torch.ops.aten.detach.default,) else NotImplemented


def test_a_weight_that_is_none_of_its_own_is_refused_by_name_unless_it_is_frozen(build: Builder) -> None:
    plain = make_parameters([(6, 10)])[0]
    wrapped = [nn.Parameter(Wrapper(torch.zeros(4, 4)), requires_grad=False) for _ in range(2)]
    engine = build([("plain", plain), ("one", wrapped[0]), ("other", wrapped[1])], lr=0.1)
    feed([plain], make_gradients([(6, 10)], steps=1)[0])
    engine.step()
    wrapped[1].requires_grad_(True)
    with pytest.raises(ValueError, match="other is a Wrapper; .*neither sharded nor quantized"):
        build([("plain", make_parameters([(6, 10)])[0]), ("one", wrapped[0]), ("other", wrapped[1])], lr=0.1)
    with pytest.raises(ValueError, match="weight has no shape yet"):
        build(nn.LazyLinear(4).named_parameters(), lr=0.1)
