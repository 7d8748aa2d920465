"""Late results shown as predictions: `master + a * (the window's update)` is visible, and never more than that."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    DTYPES,
    RULES,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    backward,
    make_gradients,
    make_parameters,
    snapshot,
)
from tests.engine.test_checkpoint_moves import moved
from tests.processes import ends_within
from zenflow import ZenFlow

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 3, "select_interval": 50}
SOONER = {"visible_after": 1, "weight_prediction": 1.0}
MODES: dict[str, dict[str, Any]] = {
    "a-window-later": {"weight_prediction": 1.0},
    "a-step-later": SOONER,
    "staggered": {**SOONER, "stagger": True},
}


def trained(build: Builder, device: str, steps: int, dtype: str = "bf16", **given: Any) -> Pair:
    pair = Pair(build, make_parameters(SHAPES, DTYPES[dtype], device), **{**SETTINGS, **given})
    for grads in make_gradients(SHAPES, DTYPES[dtype], steps):
        pair.step(grads)
    return pair


def masters_of(engine: ZenFlow, parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """Rounded as weights, in their shapes."""
    masters = (engine.channel_state(parameter).master for parameter in parameters)
    return [master.to(p.dtype).view(p.shape) for master, p in zip(masters, parameters, strict=True)]


def uploaded(engine: ZenFlow) -> int:
    return engine.stats().bytes_to_device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", MODES)
def test_a_flush_anywhere_leaves_masters_visible(mode: str, dtype: str, device: str, build: Builder) -> None:
    """Also of windows that do not run, and as the last thing that `close()` does; a second flush has nothing to do."""
    pair, predicted = trained(build, device, 0, dtype, **MODES[mode]), 0
    for grads in make_gradients(SHAPES, DTYPES[dtype], 20):
        pair.step(grads)
        step = pair.engine.stats().steps
        shown, masters = snapshot(pair.parameters), masters_of(pair.engine, pair.parameters)
        predicted += any(not torch.equal(one, other) for one, other in zip(shown, masters, strict=True))
        if step in (3, 4, 5, 7, 12, 15, 16):
            pair.engine.flush()
            pair.model.flush()
            for parameter, master in zip(pair.parameters, masters_of(pair.engine, pair.parameters), strict=True):
                assert_same_bits(parameter, master, f"after step {step}")
            before = uploaded(pair.engine)
            pair.engine.flush()
            assert uploaded(pair.engine) == before
            pair.model.flush()
            pair.check_weights()
            for parameter in pair.parameters:
                written(parameter)
    assert predicted > 4
    pair.check_state()
    pair.model.flush()
    pair.engine.close()
    pair.check_weights()


def test_a_close_without_a_flush_leaves_the_weights_as_they_are(device: str, build: Builder) -> None:
    pair = trained(build, device, 8, **SOONER)
    shown, masters = snapshot(pair.parameters), masters_of(pair.engine, pair.parameters)
    assert any(not torch.equal(one, other) for one, other in zip(shown, masters, strict=True))
    pair.engine.close(flush=False)
    for index, (parameter, expected) in enumerate(zip(pair.parameters, shown, strict=True)):
        assert_same_bits(parameter, expected, f"weight {index}")


@pytest.mark.parametrize("rule", RULES)
def test_on_given_gradients_masters_and_moments_are_those_of_a_run_that_predicts_nothing(
    rule: str, device: str, build: Builder
) -> None:
    """And so is the AdamW state of it, and every byte that travels: predictions only replace what is shown."""
    states, bytes_moved = [], []
    for factor in (0.0, 0.5, 2.0):
        pair = trained(build, device, 11, **RULES[rule], weight_prediction=factor, visible_after=2)
        stats = pair.engine.stats()
        bytes_moved.append((stats.bytes_to_device, stats.bytes_to_host))
        pair.engine.flush()
        states.append((pair.engine.adamw_state_dict()["state"], masters_of(pair.engine, pair.parameters)))
    assert bytes_moved[0] == bytes_moved[1] == bytes_moved[2]
    for state, masters in states[1:]:
        for index, (one, other) in enumerate(zip(masters, states[0][1], strict=True)):
            assert_same_bits(one, other, f"master {index}")
        for index, entry in state.items():
            for name, tensor in entry.items():
                assert_same_bits(tensor, states[0][0][index][name], f"{name} of {index}")


@pytest.mark.parametrize(
    ("dtype", "given", "more"),
    [
        ("bf16", {}, 2),
        ("bf16", {"ring_dtype": "float32"}, 2),
        ("bf16", {"accumulate_on": "host"}, 2),
        ("fp16", {}, 2),
        ("fp32", {}, 4),
        ("fp32", {"accumulate_on": "host"}, 8),
    ],
)
def test_what_it_costs_on_the_host(dtype: str, given: dict[str, Any], more: int, device: str, build: Builder) -> None:
    """A second shadow; for fp32 weights two, one of which is the ring's lane; nothing where nothing is late."""
    used = []
    for late in ({}, {"weight_prediction": 1.0}, {"weight_prediction": 1.0, "overlap_step": False}):
        engine = build(make_parameters([(64, 128)], DTYPES[dtype], device), **{**SETTINGS, **given, **late})
        used.append(engine.stats().host_bytes)
    assert used[1] - used[0] == more * 64 * 128
    assert used[2] == used[0]


def written(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        kept = parameter.clone()
        parameter.mul_(0.3)
        parameter.copy_(kept)


def replaced(parameter: nn.Parameter) -> None:
    parameter.data = parameter.data.clone()


@pytest.mark.parametrize("change", [written, replaced])
@pytest.mark.parametrize("rule", RULES)
def test_weights_that_were_other_for_a_while_keep_their_masters(
    rule: str, change: Callable[[nn.Parameter], None], device: str, build: Builder
) -> None:
    """X3 after every step, with a result on its way and without, through selections that move channels both ways; also
    under replay, which without predictions asks for a flush()."""
    settings = {**SETTINGS, **SOONER, **RULES[rule], "visible_after": 2, "select_interval": 6}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    for grads in make_gradients(SHAPES, torch.bfloat16, 16):
        pair.step(grads)
        for parameter in pair.parameters:
            change(parameter)
    pair.check_state()
    assert pair.engine.stats().selections == 3


@pytest.mark.parametrize("steps", [6, 7, 8, 9], ids=lambda steps: f"after-{steps}")
@pytest.mark.parametrize("moves", [False, True], ids=["written", "replaced"])
def test_a_change_is_followed_exactly_where_it_was_made(moves: bool, steps: int, device: str, build: Builder) -> None:
    """One row: what is visible or on its way elsewhere is not taken for a change, what was on its way in that row does
    not come back, and what has been followed is not followed once more when the next result is on its way."""
    pair = trained(build, device, steps, **{**SOONER, "visible_after": 2})
    weight, state = pair.parameters[0], pair.model.states[0]
    with torch.no_grad():
        if moves:
            weight.data = weight.data.clone()
        weight[3] = 0.125
    for tensor in (state.master, state.visible, state.pending):
        if tensor is not None:
            tensor[3] = 0.125
    for grads in make_gradients(SHAPES, torch.bfloat16, 7, seed=5):
        pair.step(grads)
        written(weight)
    pair.check_state()


@pytest.mark.parametrize("loaded", [False, True], ids=["flushed", "loaded-and-flushed"])
def test_a_flush_replaces_a_prediction_that_came_with_dropped_gradients(
    loaded: bool, device: str, build: Builder
) -> None:
    """At a window's end, so that no window runs: what backward had uploaded stays when its gradients are dropped."""
    settings = {"update_interval": 2, "visible_after": 1, "weight_prediction": 1.0, "upload_check": False}
    pair = trained(build, device, 4, **settings)
    pair.engine._pipeline.wait_for_worker()
    backward(pair.parameters, make_gradients(SHAPES, torch.bfloat16, 1, seed=5)[0])
    assert pair.engine._pipeline.uploads.in_transit
    pair.engine.zero_grad()
    pair.model._age()
    pair.check_weights()
    if loaded:
        state = pair.engine.state_dict()
        pair.parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=7)
        pair.engine = build(pair.parameters, **{**SETTINGS, **settings})
        pair.engine.load_state_dict(state)
        pair.check_weights()
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()


@pytest.mark.parametrize("checked", [False, True], ids=["uploaded", "poisoned"])
def test_weights_in_transit_are_whole_when_the_worker_is_dead(checked: bool, device: str, build: Builder) -> None:
    """What backward has uploaded is the prediction; in the place of NaN comes what was visible before."""
    settings = {"update_interval": 2, "weight_prediction": 1.0, "upload_check": checked}
    pair = trained(build, device, 3, **settings)
    before = snapshot(pair.parameters)
    pair.engine._pipeline.wait_for_worker()
    last = make_gradients(SHAPES, torch.bfloat16, 1, seed=5)[0]
    backward(pair.parameters, last)
    assert pair.engine._pipeline.uploads.in_transit
    assert any(bool(parameter.isnan().any()) for parameter in pair.parameters) == checked
    if not checked:
        pair.model._age()
        before = [pair.model.visible(index).clone() for index in range(len(SHAPES))]
    pid = pair.engine.stats().worker_pid
    os.kill(pid, signal.SIGKILL)
    assert ends_within(pid, 5.0)
    pair.engine._pipeline.client._watch.join(5.0)
    pair.engine.close(flush=False)
    for index, (parameter, expected) in enumerate(zip(pair.parameters, before, strict=True)):
        assert_same_bits(parameter, expected, f"weight {index}")


LOADS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "from-none": ({}, {"weight_prediction": 1.0}),
    "to-another": ({**SOONER, "visible_after": 2}, {"weight_prediction": 0.5}),
    "to-none": ({**SOONER, "visible_after": 2}, {"weight_prediction": 0.0}),
    "to-no-overlap": ({"weight_prediction": 1.5}, {"overlap_step": False, "weight_prediction": 1.5}),
    "there-and-back": ({"weight_prediction": 1.5}, {"weight_prediction": 0.0}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, "bf16") for name in LOADS), ("to-none", "fp32")])
def test_a_state_goes_on_under_another_prediction(
    name: str, dtype: str, device: str, build: Builder, tmp_path: Path
) -> None:
    """In every position of a window. Where nothing is predicted any more, a load shows the masters at once."""
    before, after = LOADS[name]
    stream = make_gradients(SHAPES, DTYPES[dtype], 12)
    for steps in (3, 4, 5):
        pair = Pair(build, make_parameters(SHAPES, DTYPES[dtype], device), **SETTINGS, **before)
        for number, grads in enumerate(stream):
            if number == steps:
                if name.startswith(("to-no", "there")):
                    show_masters(pair)
                moved(pair, build, tmp_path / f"{steps}", **{**SETTINGS, **before, **after})
            if number == steps + 1 and name == "there-and-back":
                moved(pair, build, tmp_path / f"{steps}-back", **{**SETTINGS, **before})
            for parameter in pair.parameters:
                written(parameter)
            pair.step(grads)
        pair.check_state()


def show_masters(pair: Pair) -> None:
    for state in pair.model.states:
        state.pending = None
        state.show_masters(~state.selected)


def test_a_state_from_before_there_were_predictions_is_one_without(device: str, build: Builder) -> None:
    pair = trained(build, device, 4)
    state = pair.engine.state_dict()
    del state["zenflow"]["config"]["weight_prediction"]
    pair.parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=7)
    pair.engine = build(pair.parameters, **SETTINGS)
    pair.engine.load_state_dict(state)
    for grads in make_gradients(SHAPES, torch.bfloat16, 6, seed=5):
        pair.step(grads)
    pair.check_state()


def weights_in(entry: dict[str, Any]) -> set[str]:
    return {"weight", "pending_weight", "pending_hyper"} & entry.keys()


def test_a_state_has_the_weights_that_its_masters_do_not_tell(device: str, build: Builder) -> None:
    """U 3, visible a step later: on its way after the third step of a window, visible from then on."""
    pair, found = trained(build, device, 0, **SOONER), []
    for grads in make_gradients(SHAPES, torch.bfloat16, 9):
        pair.step(grads)
        found.append(weights_in(pair.engine.state_dict()["state"][0]))
    plain, coming, shown = set(), {"weight", "pending_weight", "pending_hyper"}, {"weight"}
    assert found == [plain, plain, coming, shown, shown, coming, shown, shown, coming]
    pair.engine.flush()
    assert not weights_in(pair.engine.state_dict()["state"][0])


@pytest.mark.parametrize("key", ["weight", "pending_hyper", "weight and pending_hyper", "weight_prediction"])
def test_weights_without_what_belongs_to_them_are_refused_by_name(key: str, device: str, build: Builder) -> None:
    pair = trained(build, device, 3, **SOONER)
    state = copy.deepcopy(pair.engine.state_dict())
    for name in key.split(" and "):
        state["state"][0].pop(name, None)
    if key == "weight_prediction":
        state["zenflow"]["config"][key] = "1.0"
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has \[.*pending_.*allowed are \[\[\], "):
        pair.engine.load_state_dict(state)
    for grads in make_gradients(SHAPES, torch.bfloat16, 4, seed=5):
        pair.step(grads)


@pytest.mark.parametrize("given", [{"bucket_bytes": 32}, {"worker_threads": 2}, {"upload": "step"}], ids=str)
def test_i6_the_machine_changes_no_bit_of_a_prediction(given: dict[str, Any], device: str, build: Builder) -> None:
    shown = []
    for more in ({}, given):
        pair = trained(build, device, 8, **MODES["staggered"], max_grad_norm=None, **more)
        shown.append(snapshot(pair.parameters))
    for index, (one, other) in enumerate(zip(*shown, strict=True)):
        assert_same_bits(one, other, f"weight {index}")
