"""A state that somebody has changed: refused as a ValueError before anything changes, or a state like any other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import product
from operator import getitem
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from tests.engine.driving import Builder, feed, make_gradients, make_parameters
from tests.engine.resuming import assert_same_state
from zenflow import ZenFlow

SHAPES = [(6, 10), (5,), (4, 6)]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 3}
REMOVED = object()
JUNK = [
    REMOVED, None, "x", b"x", -1, 2**40, 1.5, float("nan"), True, [], {}, (), [None], {"a": 1, 0: 2}, {0: None},
    torch.zeros(2), torch.zeros(3, 5, dtype=torch.int64), torch.tensor(float("nan")), torch.full((10,), -5),
    torch.zeros(0),
]  # fmt: skip


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything that a dict or a list in it holds."""
    if path:
        yield path
    if isinstance(state, dict | list):
        for key in state if isinstance(state, dict) else range(len(state)):
            yield from places(state[key], (*path, key))


def change(state: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        state = state[key]
    if value is REMOVED:
        del state[path[-1]]
    else:
        state[path[-1]] = value


@pytest.mark.parametrize(
    "kinds",
    [{"accumulate_on": "gpu"}, {"accumulate_on": "host"}, {"weight_prediction": 1.0}, {"importance_over": "average"}],
    ids=["gpu", "host", "predicted", "scores"],
)
def test_junk_in_any_place_is_refused_by_name_or_harmless(kinds: dict[str, Any], device: str, build: Builder) -> None:
    """Saved in the middle of a window with a result on its way, so that there is something everywhere."""
    engines = []
    for seed in (0, 4):
        parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=seed)
        groups = [{"params": parameters[:2]}, {"params": parameters[2:]}]
        engines.append(build(groups, **SETTINGS, **kinds))
        for grads in make_gradients(SHAPES, torch.bfloat16, 5, seed=seed):
            feed(parameters, grads)
            engines[-1].step()
    good, engine = engines[0].state_dict(), engines[1]
    everywhere = list(places(good))
    refusals = []

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(draw.sampled_from(everywhere), draw.sampled_from(range(len(JUNK))))
    def load_it(path: tuple[Any, ...], junk: int) -> None:
        before, damaged = engine.state_dict(), copy.deepcopy(good)
        change(damaged, path, JUNK[junk])
        try:
            engine.load_state_dict(damaged)
        except ValueError as error:
            refusals.append(str(error))
            assert_same_state(engine.state_dict(), before)

    load_it()
    assert len(refusals) > 50
    engine.load_state_dict(good)
    assert_same_state(engine.state_dict(), good)


WITHOUT_VALUES = {
    "meta": lambda tensor: tensor.to("meta"),
    "sparse": lambda tensor: tensor.to_sparse(),
    "complex": lambda tensor: tensor.to(torch.complex64),
}
OUT_OF_RANGE = {
    "negative-squares": (("state", 0, "exp_avg_sq"), lambda good: -1 - good),
    "endless-step": (("zenflow", "clock", "step"), lambda good: 2**32),
    "endless-window": (("zenflow", "clock", "window"), lambda good: 2**70),
    "endless-skips": (("zenflow", "skipped"), lambda good: 2**70),
    "endless-lr": (("zenflow", "hyper_log", 0, 0, 0), lambda good: 10**400),
    "endless-pending-lr": (("state", 0, "pending_hyper", 0, 0), lambda good: 10**400),
    "beta-of-1": (("zenflow", "hyper_log", 0, 0, 2), lambda good: 1.0),
    "pending-beta-of-2": (("state", 0, "pending_hyper", 0, 1), lambda good: 2.0),
    "endless-group-lr": (("param_groups", 0, "lr"), lambda good: 10**400),
}


@pytest.fixture
def trained(build: Builder) -> ZenFlow:
    """In the middle of a window with a result on its way."""
    parameters = make_parameters(SHAPES, torch.bfloat16)
    engine = build(parameters, **SETTINGS, importance_over="average")
    for grads in make_gradients(SHAPES, torch.bfloat16, 5):
        feed(parameters, grads)
        engine.step()
    return engine


def assert_refused(engine: ZenFlow, path: tuple[Any, ...], new: Callable[[Any], Any]) -> None:
    good = engine.state_dict()
    damaged = copy.deepcopy(good)
    change(damaged, path, new(reduce(getitem, path, good)))
    with pytest.raises(ValueError):
        engine.load_state_dict(damaged)
    assert_same_state(engine.state_dict(), good)


@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_tensors_without_usable_values_are_refused_everywhere(kind: str, trained: ZenFlow) -> None:
    state = trained.state_dict()
    tensors = [path for path in places(state) if isinstance(reduce(getitem, path, state), torch.Tensor)]
    names = {path[-1] for path in tensors}
    assert names >= {"master", "step", "selected", "accumulator", "weight", "scores", "window_log"}
    for path in tensors:
        assert_refused(trained, path, WITHOUT_VALUES[kind])


@pytest.mark.parametrize("name", OUT_OF_RANGE)
def test_numbers_that_no_run_has_are_refused(name: str, trained: ZenFlow) -> None:
    assert_refused(trained, *OUT_OF_RANGE[name])


@pytest.mark.parametrize(("part", "kind"), [*product(["exp_avg", "exp_avg_sq"], WITHOUT_VALUES), ("step", "meta")])
def test_an_adamw_state_without_usable_values_is_refused(part: str, kind: str, trained: ZenFlow) -> None:
    parameters = make_parameters(SHAPES)
    adamw = torch.optim.AdamW(parameters)
    feed(parameters, make_gradients(SHAPES, steps=1)[0])
    adamw.step()
    state, good = adamw.state_dict(), trained.state_dict()
    state["state"][0][part] = WITHOUT_VALUES[kind](state["state"][0][part])
    with pytest.raises(ValueError, match=part):
        trained.load_state_dict(state)
    assert_same_state(trained.state_dict(), good)
