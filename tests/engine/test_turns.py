"""Threads use one engine in turn, a forked copy of the process not at all; and what inference mode must not touch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    backward,
    feed,
    make_gradients,
    make_parameters,
    run_steps,
    snapshot,
)
from tests.engine.resuming import assert_same_state
from zenflow import ZenFlow, checkpoint, step

SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 2, "upload_check": False}
MOMENT = 0.2  # seconds in which a thread that is not held back would be through


def in_a_child(call: Callable[[], Any]) -> str:
    """What `call` does in a forked copy of this process: the error in words, or "returned"."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            told = "returned"
        except BaseException as error:
            told = f"{type(error).__name__}: {error}"
        os.write(writer, told.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        told = file.read().decode()
    assert os.waitpid(child, 0)[1] == 0
    return told


def edit_and_save(engine: ZenFlow, parameters: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(3)
    engine.state_dict()


def edit_and_reload(engine: ZenFlow, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.mul_(3)
    engine.reload_weights()


CALLS: dict[str, Callable[[ZenFlow, list[nn.Parameter]], Any]] = {
    "step": lambda engine, parameters: engine.step(),
    "zero_grad": lambda engine, parameters: engine.zero_grad(),
    "flush": lambda engine, parameters: engine.flush(),
    "state_dict": edit_and_save,
    "reload_weights": edit_and_reload,
    "load_state_dict": lambda engine, parameters: engine.load_state_dict({"state": {}, "param_groups": []}),
    "load_adamw_state_dict": lambda engine, parameters: engine.load_adamw_state_dict({}),
    "adamw_state_dict": lambda engine, parameters: engine.adamw_state_dict(),
    "export_weights": lambda engine, parameters: engine.export_weights(nn.ParameterList(parameters)),
    "channel_state": lambda engine, parameters: engine.channel_state(parameters[0]),
    "add_param_group": lambda engine, parameters: engine.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
    "stats": lambda engine, parameters: engine.stats(),
    "records": lambda engine, parameters: engine.records(),
    "trace": lambda engine, parameters: engine.trace("/dev/null").__enter__(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forked_copy_is_refused_and_changes_nothing(name: str, build: Builder) -> None:
    parameters = make_parameters()
    engine = build(parameters, **SETTINGS)
    run_steps(engine, parameters, 5)
    before = engine.state_dict()
    told = in_a_child(lambda: CALLS[name](engine, parameters))
    assert told.startswith("RuntimeError: this process is a forked copy"), told
    assert_same_state(engine.state_dict(), before)


def test_a_forked_copy_lets_go_and_the_trainer_goes_on(build: Builder) -> None:
    pair = Pair(build, make_parameters(dtype=torch.bfloat16), **SETTINGS)
    stream = make_gradients(dtype=torch.bfloat16, steps=9)
    for grads in stream[:5]:
        pair.step(grads)
    assert in_a_child(pair.engine.close) == "returned"
    for grads in stream[5:]:
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize("checked", [True, False], ids=["tried", "untried"])
def test_no_result_goes_into_the_weights_of_a_forked_copy(checked: bool, build: Builder) -> None:
    """Its backward passes are its own: without a step of the engine's, nothing lands and nothing is tried."""
    parameters = make_parameters(dtype=torch.bfloat16)
    engine = build(parameters, **{**SETTINGS, "upload_check": checked})
    *stream, last = make_gradients(dtype=torch.bfloat16, steps=4)
    for grads in stream:
        backward(parameters, grads)
        engine.step()
    engine._pipeline.wait_for_worker()
    before = snapshot(parameters)

    def differentiate() -> None:
        backward(parameters, last)
        for parameter, weight in zip(parameters, before, strict=True):
            assert_same_bits(parameter, weight)

    assert in_a_child(differentiate) == "returned"
    backward(parameters, last)
    assert engine._pipeline.uploads.in_transit


def test_an_engine_without_a_cpu_optimizer_is_its_copy_s_own(build: Builder) -> None:
    parameters = make_parameters()
    engine = build(parameters, lr=0.02, topk_ratio=1.0)
    run_steps(engine, parameters, 2)
    assert in_a_child(lambda: run_steps(engine, parameters, 2)) == "returned"


class Meanwhile:
    """Has `call` made by another thread once, the first time that `function` is called, and goes on a moment later."""

    def __init__(self, function: Callable[..., Any], call: Callable[[], Any]) -> None:
        self._function, self._call = function, call
        self.thread: threading.Thread | None = None
        self.outcome: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.thread is None:
            self.thread = threading.Thread(target=self._run)
            self.thread.start()
            self.thread.join(MOMENT)
        return self._function(*args, **kwargs)

    def _run(self) -> None:
        try:
            self.outcome.append(self._call())
        except RuntimeError as error:
            self.outcome.append(error)


def test_a_save_by_another_thread_waits_for_the_step(build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = make_parameters(dtype=torch.bfloat16)
    engine = build(parameters, **SETTINGS)
    run_steps(engine, parameters, 4)
    meanwhile = Meanwhile(step.end_windows, engine.state_dict)
    monkeypatch.setattr(step, "end_windows", meanwhile)
    feed(parameters, make_gradients(dtype=torch.bfloat16, steps=1)[0])
    engine.step()
    meanwhile.thread.join()
    assert_same_state(meanwhile.outcome[0], engine.state_dict())


@pytest.mark.parametrize("phase", ["backward", "step"])
def test_a_step_of_another_thread_waits_for_the_save(
    phase: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a result on its way, which the backward pass would put into the weights that are being saved."""
    parameters = make_parameters(dtype=torch.bfloat16)
    engine = build(parameters, **SETTINGS)
    *stream, last = make_gradients(dtype=torch.bfloat16, steps=4)
    for grads in stream:
        backward(parameters, grads)
        engine.step()
    expected = engine.state_dict()
    assert any("weight" in entry for entry in expected["state"].values())

    def train() -> None:
        if phase == "backward":
            backward(parameters, last)
        else:
            feed(parameters, last)
            engine.step()

    meanwhile = Meanwhile(checkpoint._entry, train)
    monkeypatch.setattr(checkpoint, "_entry", meanwhile)
    saved = engine.state_dict()
    meanwhile.thread.join()
    assert meanwhile.outcome == [None]
    assert_same_state(saved, expected)


def test_a_closure_may_have_its_gradients_made_by_another_thread(build: Builder) -> None:
    """As autograd does where there is a GPU: its hooks wait for nothing that waits for them."""
    parameters = make_parameters(dtype=torch.bfloat16)
    engine = build(parameters, **SETTINGS)
    for grads in make_gradients(dtype=torch.bfloat16, steps=5):

        def closure(grads: list[torch.Tensor] = grads) -> None:
            thread = threading.Thread(target=backward, args=(parameters, grads))
            thread.start()
            thread.join()

        engine.step(closure)
    assert engine.stats().steps == 5


@pytest.mark.parametrize("built", [True, False], ids=["built-in-it", "laid-out-in-it"])
def test_inference_mode_leaves_an_engine_that_trains(built: bool, device: str, build: Builder) -> None:
    """An engine built in it, and a parameter that has its first gradient in a step made in it, train on outside."""
    runs = []
    for mode in (torch.inference_mode, nullcontext):
        parameters = make_parameters(dtype=torch.bfloat16, device=device)
        parameters[0].requires_grad_(False)
        with mode() if built else nullcontext():
            engine = build(parameters, **SETTINGS, select_interval=3)
        parameters[0].requires_grad_(True)
        for number, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 8)):
            feed(parameters, grads)
            with mode() if number % 3 == 0 else nullcontext():
                engine.step()
        engine.flush()
        runs.append(snapshot(parameters))
    for index, (one, other) in enumerate(zip(*runs, strict=True)):
        assert_same_bits(one, other, f"weight {index}")
