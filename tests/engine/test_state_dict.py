"""Saving and loading on the same machine: masters, moments, t, owners, sums, the clock and what is pending."""

from __future__ import annotations

import copy
import io
import os
import signal
from typing import Any

import pytest
import torch

from tests.engine.driving import (
    RULES,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from tests.engine.resuming import Run, assert_same_state, make_script
from tests.processes import wait_until_stopped
from zenflow import ZenFlow

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 4, "select_interval": 8}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def advance(engine: ZenFlow, parameters: list[torch.nn.Parameter], stream: list[list[torch.Tensor]]) -> list[Any]:
    weights = []
    for grads in stream:
        feed(parameters, grads)
        engine.step()
        weights.append(snapshot(parameters))
    return weights


def test_loading_shows_the_saved_weights(device: str, build: Builder) -> None:
    """Masters win over weights, and a pending result stays invisible."""
    stream = make_gradients(SHAPES, torch.bfloat16, 6)
    first = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(first, **SETTINGS)
    advance(engine, first, stream)
    saved = through_a_file(engine.state_dict())
    second = make_parameters(SHAPES, torch.bfloat16, device, seed=9)
    resumed = build(second, **SETTINGS)
    resumed.load_state_dict(saved)
    for index, (parameter, other) in enumerate(zip(first, second, strict=True)):
        assert_same_bits(other, parameter, f"weight {index}")


def test_weights_without_a_saved_state_keep_what_was_loaded_into_them(device: str, build: Builder) -> None:
    """Frozen when it was saved, trainable when the new optimizer is built, and the model loaded after that: the pending
    result of its bucket brings no older weight back, and what is written into it meanwhile stays."""
    shapes, settings = [(16, 12), (7, 13)], {**SETTINGS, "select_interval": 100}
    first = make_parameters(shapes, torch.bfloat16, device)
    first[1].requires_grad_(False)
    engine = build(first, **settings)
    advance(engine, first, make_gradients(shapes, torch.bfloat16, 4))
    second = make_parameters(shapes, torch.bfloat16, device, seed=9)
    resumed = build(second, **settings)
    with torch.no_grad():
        second[1].copy_(first[1])
    resumed.load_state_dict(through_a_file(engine.state_dict()))
    for grads in make_gradients(shapes, torch.bfloat16, 9, seed=2):
        with torch.no_grad():
            second[1].neg_()
        feed(second, [grads[0], None])
        resumed.step()
        with torch.no_grad():
            second[1].neg_()
        assert_same_bits(second[1], first[1])


def test_saving_changes_nothing(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for grads in make_gradients(SHAPES, torch.bfloat16, 13):
        pair.step(grads)
        pair.engine.state_dict()
        pair.check_weights()
    pair.check_state()


COPIED: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "gpu-fp32": (torch.float32, {}),
    "host-bf16": (torch.bfloat16, {"accumulate_on": "host", "importance_over": "window"}),
    "stochastic-bf16": (torch.bfloat16, {"selected_masters": "stochastic"}),
    "predicted-bf16": (torch.bfloat16, {"weight_prediction": 1.0, "visible_after": 1, "importance_over": "average"}),
    "k=1": (torch.bfloat16, {"topk_ratio": 1}),
}


def test_c6_a_learning_rate_in_a_tensor_is_copied_too(device: str, build: Builder) -> None:
    """Schedulers fill such a tensor in place."""
    parameters = make_parameters(SHAPES, torch.float32, device)
    engine = build(parameters, lr=torch.tensor(0.5))
    saved = [engine.state_dict()]
    feed(parameters, make_gradients(SHAPES, steps=1)[0])
    engine.step()
    engine.flush()
    saved += [engine.state_dict(), engine.adamw_state_dict()]
    torch.optim.lr_scheduler.LambdaLR(engine, lambda epoch: 0.25)
    assert float(engine.param_groups[0]["lr"]) == 0.125
    assert [float(state["param_groups"][0]["lr"]) for state in saved] == [0.5] * 3


@pytest.mark.parametrize("mode", COPIED)
def test_c6_a_state_is_a_copy_and_stays_what_it_was(mode: str, device: str, build: Builder) -> None:
    """C6: nothing in it is live memory, so that a thread may write it while training goes on: neither what was saved
    after a step nor what was loaded changes with the steps that follow."""
    dtype, given = COPIED[mode]
    script = make_script(dtype, given, 9)
    run, resumed = (Run.start(script, device, build) for _ in range(2))
    saved, then = [], []
    for number in range(9):
        run.play(number)
        saved.append(run.engine.state_dict())
        then.append(copy.deepcopy(saved[-1]))
    for number in range(4, 8):
        resumed.engine.load_state_dict(saved[number])
        for later in range(number + 1, 9):
            resumed.play(later)
    for one in (run, resumed):
        one.engine.flush()
    for number, (state, expected) in enumerate(zip(saved, then, strict=True)):
        assert_same_state(state, expected, f"after step {number + 1}, ")


@pytest.mark.parametrize("rule", RULES)
def test_b17_a_save_waits_for_a_busy_worker(
    rule: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B17, F16: a window is on its way to a worker that does nothing before somebody waits for it: what is saved then
    is what a worker that has finished long ago would have left."""
    script = make_script(torch.bfloat16, RULES[rule], 9)
    run, slow = (Run.start(script, device, build) for _ in range(2))
    for number in range(3):
        run.play(number)
    for number in range(2):
        slow.play(number)
    pipeline = slow.engine._pipeline
    pipeline.wait_for_worker()
    worker, wait_done = pipeline.client.worker_pid, pipeline.client.wait_done

    def waiting(*arguments: Any) -> float:
        os.kill(worker, signal.SIGCONT)
        return wait_done(*arguments)

    os.kill(worker, signal.SIGSTOP)
    wait_until_stopped(worker)
    slow.play(2)
    assert pipeline.uploads.pending
    monkeypatch.setattr(pipeline.client, "wait_done", waiting)
    assert_same_state(slow.engine.state_dict(), run.engine.state_dict())


def test_c12_masters_and_moments_stay_fp32(device: str, build: Builder) -> None:
    """C12: nothing is cast to the weights' dtype on the way out or in."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    advance(engine, parameters, make_gradients(SHAPES, torch.bfloat16, 4))
    states = [engine.channel_state(parameter) for parameter in parameters]
    saved = engine.state_dict()
    for index, (shape, state) in enumerate(zip(SHAPES, states, strict=True)):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert saved["state"][index][name].dtype == torch.float32
            assert tuple(saved["state"][index][name].shape) == shape
            assert_same_bits(saved["state"][index][name].reshape(getattr(state, name).shape), getattr(state, name))
    engine.load_state_dict(through_a_file(saved))
    for parameter, state in zip(parameters, states, strict=True):
        again = engine.channel_state(parameter)
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(again, name), getattr(state, name), name)


def test_the_state_is_empty_before_the_first_step_and_loading_it_is_nothing(device: str, build: Builder) -> None:
    """Accelerate does both when it prepares an optimizer."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    empty = pair.engine.state_dict()
    assert empty["state"] == {}
    pair.engine.load_state_dict(through_a_file(empty))
    pair.check_weights()
    for grads in make_gradients(SHAPES, torch.bfloat16, 9):
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 160], ids=["one-bucket", "several-buckets"])
@pytest.mark.parametrize("topk_ratio", [0, 0.3, 1], ids=lambda k: f"k={k}")
def test_b1_buckets_and_betas_after_a_jump_in_steps(
    topk_ratio: float, bucket_bytes: int, device: str, build: Builder
) -> None:
    """B1: t jumps to 1,000 by a loaded state and betas change midway: every channel's bias correction is its own."""
    shapes = [(12, 10), (31, 3), (5,)]
    settings = {**SETTINGS, "topk_ratio": topk_ratio, "bucket_bytes": bucket_bytes}
    pair = Pair(build, make_parameters(shapes, torch.bfloat16, device), **settings)
    for step, grads in enumerate(make_gradients(shapes, torch.bfloat16, 16), start=1):
        if step == 5:
            saved = through_a_file(pair.engine.state_dict())
            for state, simulated in zip(saved["state"].values(), pair.model.states, strict=True):
                state["step"] = state["step"] + 1000
                simulated.step += 1000
            pair.engine.load_state_dict(saved)
        if step == 10:
            pair.engine.param_groups[0]["betas"] = (0.7, 0.9995)
        pair.step(grads)
    pair.check_state()


def test_a_state_of_another_shape_is_refused(device: str, build: Builder) -> None:
    parameters = make_parameters([(6, 10)], device=device)
    engine = build(parameters, **SETTINGS)
    advance(engine, parameters, make_gradients([(6, 10)], steps=2))
    others = make_parameters([(6, 11)], device=device)
    other = build(others, **SETTINGS)
    before = snapshot(others)
    with pytest.raises(ValueError, match="shape|6, 10"):
        other.load_state_dict(engine.state_dict())
    assert_same_bits(others[0], before[0])
