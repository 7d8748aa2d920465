"""A state that somebody has changed: refused as a ValueError before anything changes, or a state like any other."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw

from tests.engine.driving import Builder, feed, make_gradients, make_parameters
from tests.engine.resuming import assert_same_state

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
