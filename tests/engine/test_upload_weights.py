"""Uploads in backward beside parameters that come and go, and weights that others write."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.engine.driving import Builder, Pair, assert_same_bits, make_parameters, snapshot
from tests.engine.uploading import (
    SETTINGS,
    SHAPES,
    UNCHECKED,
    backward,
    step,
    stream_of,
)
from zenflow.uploading import Sent


def test_frozen_unfrozen_and_added_parameters(device: str, build: Builder, taken: list[tuple[Sent, bool]]) -> None:
    """A bucket that lacks a gradient is left to step(); newcomers are learned before backward takes theirs."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    parameters[1].requires_grad_(False)
    late = make_parameters([(9, 10)], torch.bfloat16, device, seed=5)
    pair = Pair(build, parameters, **SETTINGS, **UNCHECKED)
    for number, grads in enumerate(stream_of(20), start=1):
        if number == 4:
            parameters[1].requires_grad_(True)
        if number == 9:
            pair.engine.add_param_group({"params": late})
        if number in (13, 14):
            parameters[0].requires_grad_(False)
        if number == 15:
            parameters[0].requires_grad_(True)
        given = list(grads)
        for index in (0, 1):
            if not parameters[index].requires_grad:
                given[index] = None
        taken.clear()
        backward(pair, given)
        if number >= 9:
            late[0].grad = None
            (late[0].float() * (number / 7)).sum().backward()
        pair.step_on_grad()
        if number == 20:
            assert len({sent.storage for sent, _ in taken}) == 3
            assert all(in_backward for _, in_backward in taken)
    assert set(pair.engine.channel_state(late[0]).step.tolist()) <= {12, 6}
    pair.check_state()


def test_a_frozen_parameter_keeps_its_bucket_for_step(
    device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    settings = {**SETTINGS, "bucket_bytes": 1}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings, **UNCHECKED)
    for number, grads in enumerate(stream_of(8), start=1):
        if number == 7:
            pair.parameters[0].requires_grad_(False)
        taken.clear()
        step(pair, [None if number >= 7 and index == 0 else grad for index, grad in enumerate(grads)])
    record = pair.engine._pipeline.records[0]
    for sent, in_backward in taken:
        assert in_backward == (record.index not in sent.storage.members[sent.bucket.index])
    assert {in_backward for _, in_backward in taken} == {True, False}


def change(parameter: nn.Parameter, kind: str) -> None:
    if kind == "moved":
        parameter.data = parameter.data.clone()
    elif kind == "moved-and-changed":
        parameter.data = parameter.data * 0.5
    else:
        with torch.no_grad():
            parameter.mul_(0.5)


KINDS = ["moved", "moved-and-changed", "written"]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_changed_before_backward(
    kind: str, device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    """Backward leaves the bucket to step(), which follows the change first; then the deferred result may cover it."""
    shapes = [(16, 12), (7, 13)]
    results = []
    for upload in ("backward", "step"):
        parameters = make_parameters(shapes, torch.bfloat16, device)
        pair = Pair(build, parameters, **SETTINGS | {"bucket_bytes": 1}, **UNCHECKED, upload=upload)
        for number, grads in enumerate(stream_of(9, shapes=shapes), start=1):
            if number == 6:
                change(parameters[0], kind)
            taken.clear()
            backward(pair, grads)
            pair.engine.step()
            if number == 6 and upload == "backward":
                mine = [in_backward for sent, in_backward in taken if 0 in sent.storage.members[sent.bucket.index]]
                assert mine and not any(mine)
                assert any(in_backward for _, in_backward in taken)
        pair.engine.flush()
        results.append(snapshot(parameters))
        pair.engine.close()
    for one, other in zip(*results, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_changed_between_backward_and_step_are_an_error_by_name(kind: str, device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    named = [(f"layer{index}", parameter) for index, parameter in enumerate(parameters)]
    pair = Pair(build, parameters, params=named, **SETTINGS, **UNCHECKED)
    stream = stream_of(6)
    for grads in stream[:5]:
        step(pair, grads)
    backward(pair, stream[5])
    change(parameters[1], kind)
    for call in (pair.engine.step, pair.engine.flush, pair.engine.zero_grad):
        with pytest.raises(ValueError, match=r"layer1 .*between backward\(\) and step\(\).*upload='step'"):
            call()
    with pytest.raises(ValueError, match=r"layer\d .*between backward\(\) and step\(\)"):
        pair.engine.reload_weights()
    pair.engine.close(flush=False)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_changed_after_step_are_followed(kind: str, device: str, build: Builder) -> None:
    """At learning rate 0 the changed weights stand, whatever was on its way when they were changed."""
    (weight,) = parameters = make_parameters([(16, 12)], torch.float32, device)
    pair = Pair(build, parameters, **SETTINGS | {"weight_decay": 0}, **UNCHECKED)
    stream = stream_of(12, torch.float32, [(16, 12)])
    for grads in stream[:6]:
        step(pair, grads)
    pair.engine.flush()
    for group in pair.engine.param_groups:
        group["lr"] = 0.0
    change(weight, kind)
    expected = weight.detach().clone()
    for grads in stream[6:]:
        backward(pair, grads)
        pair.engine.step()
        assert_same_bits(weight, expected)


def test_state_dict_between_backward_and_step_is_refused(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    stream = stream_of(6)
    for grads in stream[:5]:
        step(pair, grads)
        pair.engine.state_dict()
    backward(pair, stream[5])
    with pytest.raises(RuntimeError, match="between backward.*upload='step'"):
        pair.engine.state_dict()
    pair.step_on_grad()
    assert pair.engine.state_dict()["state"]


@pytest.mark.parametrize("flushed", [False, True])
def test_replay_with_weights_changed_while_a_result_is_on_its_way(flushed: bool, device: str, build: Builder) -> None:
    """An error that names flush(), before anything is counted; after a flush() the change is followed."""
    shapes = [(16, 12)]
    settings = {**SETTINGS, "accumulate_on": "host", "deferred_rule": "replay", "weight_decay": 0}
    (weight,) = parameters = make_parameters(shapes, torch.float32, device)
    pair = Pair(build, parameters, **settings)
    stream = stream_of(8, torch.float32, shapes)
    for grads in stream[:3]:
        step(pair, grads)
    if flushed:
        pair.engine.flush()
    change(weight, "written")
    expected = weight.detach().clone()
    for group in pair.engine.param_groups:
        group["lr"] = 0.0
    for grads in stream[3:]:
        backward(pair, grads)
        if not flushed:
            with pytest.raises(ValueError, match=r"parameter 0 of group 0.*replay.*flush\(\)"):
                pair.engine.step()
            assert pair.engine.stats().steps == 3
            continue
        pair.engine.step()
        assert_same_bits(weight, expected)
