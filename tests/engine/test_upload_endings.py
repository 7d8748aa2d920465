"""What is left when it ends between backward and step, hooks that must not stay, gradients on their way."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import RULES, Builder, Pair, assert_same_bits, make_gradients, make_parameters, snapshot
from tests.engine.driving import backward as one_pass
from tests.engine.uploading import (
    LIMIT,
    SETTINGS,
    SHAPES,
    UNCHECKED,
    backward,
    hooks_of,
    step,
    stream_of,
)
from tests.processes import ends_within, within
from zenflow import WorkerError, ZenFlow
from zenflow.uploading import Sent, Uploader


def test_a_backward_pass_after_a_step_that_was_broken_off_leaves_the_word_to_step(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a step that had weights in transit: the next backward pass counts no gradient as one too many."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    stream = stream_of(5)
    for grads in stream[:3]:
        step(pair, grads)
    backward(pair, stream[3])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zenflow.step._reduce", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.engine.step()
    pair.engine.zero_grad()
    torch.stack([parameter.float().sum() for parameter in pair.parameters]).sum().backward()
    with pytest.raises(RuntimeError, match="broken off"):
        pair.engine.step()


@pytest.mark.parametrize("checked", [False, True], ids=["uploaded", "poisoned"])
@pytest.mark.parametrize("ending", ["flush", "close", "close-without-flush", "worker-killed", "exception"])
def test_an_end_between_backward_and_step_leaves_whole_weights(
    ending: str, checked: bool, device: str, build: Builder
) -> None:
    """Every weight is the rounded master of its channel's owner, none is NaN, none is the worker's scratch."""
    settings = {**SETTINGS, "upload_check": checked}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    stream = stream_of(4)
    for grads in stream[:3]:
        step(pair, grads)
    backward(pair, stream[3])
    nans = sum(int(parameter.isnan().sum()) for parameter in pair.parameters)
    assert (nans > 0) == checked
    states = [pair.engine.channel_state(parameter) for parameter in pair.parameters]
    if ending == "flush":
        pair.engine.flush()
        pair.model.flush()
        pair.check_weights()
        return
    if ending == "close":
        pair.engine.close()
        pair.model.flush()
        pair.check_weights()
        return
    if ending == "worker-killed":
        pid = pair.engine._pipeline.client.worker_pid
        os.kill(pid, signal.SIGKILL)
        assert ends_within(pid, LIMIT)
        pair.engine._pipeline.client._watch.join(LIMIT)
    if ending == "exception":
        with pytest.raises(KeyError), pair.engine:
            raise KeyError
    else:
        pair.engine.close(flush=False)
    for parameter, state in zip(pair.parameters, states, strict=True):
        expected = state.master.to(torch.bfloat16)
        assert_same_bits(parameter.detach().reshape(expected.shape), expected)


def test_training_goes_on_after_a_flush_between_backward_and_step(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for number, grads in enumerate(stream_of(14), start=1):
        backward(pair, grads)
        if number in (4, 9):
            pair.engine.flush()
            pair.model.flush()
            pair.check_weights()
        pair.step_on_grad()
    pair.check_state()


def test_an_optimizer_that_is_dropped_in_backward_is_collected(device: str) -> None:
    """Hooks that are set keep nobody alive, and go with the optimizer."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = ZenFlow(parameters, **SETTINGS, min_deferred_numel=0, worker_threads=1)
    pid = engine.stats().worker_pid
    assert hooks_of(parameters) > 0
    del engine
    gc.collect()
    assert ends_within(pid, LIMIT)
    assert hooks_of(parameters) == 0
    torch.stack([parameter.float().sum() for parameter in parameters]).sum().backward()


def test_hooks_are_gone_after_close_and_never_travel(device: str, build: Builder, tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.Tanh(), nn.Linear(30, 12)).to(device)
    engine = build(model.parameters(), **SETTINGS)
    torch.save(model, tmp_path / "model.pt")
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(tmp_path / "model.pt", weights_only=False),
    ]
    assert hooks_of(list(model.parameters())) > 0
    for other in copies:
        assert hooks_of(list(other.parameters())) == 0
        other(torch.ones(2, 12, device=device)).sum().backward()
    assert not engine._pipeline.uploads.arrived
    engine.close()
    assert hooks_of(list(model.parameters())) == 0


def test_only_steps_that_need_them_have_hooks(device: str, build: Builder) -> None:
    """While the passes are learned, then before a window's end alone."""
    settings = {**SETTINGS, "update_interval": 3}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    found = []
    for grads in stream_of(9):
        found.append(hooks_of(pair.parameters) > 0)
        step(pair, grads)
    assert found == [True, True, True, False, False, True, False, False, True]


# Gradients that are still on their way to the ring (accumulate_on: host)


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
def test_gradients_zeroed_in_place_at_once(rule: str, device: str, build: Builder) -> None:
    """zero_grad(set_to_none=False) comes after the copies, however slow they are."""
    shapes = [(256, 300), (64, 100)]
    settings = {**SETTINGS, "accumulate_on": "host", "deferred_rule": rule, "bucket_bytes": 1 << 14}
    pair = Pair(build, make_parameters(shapes, torch.bfloat16, device), **settings)
    for grads in make_gradients(shapes, torch.bfloat16, 9):
        products = [(p * g.to(device)).float().sum() for p, g in zip(pair.parameters, grads, strict=True)]
        torch.stack(products).sum().backward()
        if device == "cuda":
            with torch.cuda.stream(pair.engine._pipeline.sender.stream):
                torch.cuda._sleep(20_000_000)
        pair.step_on_grad()
        pair.engine.zero_grad(set_to_none=False)
        assert all(parameter.grad is not None and not bool(parameter.grad.any()) for parameter in pair.parameters)
    pair.check_state()


@pytest.mark.gpu
def test_a_gradient_changed_on_its_way_is_an_error_by_name(build: Builder) -> None:
    shapes = [(256, 300), (64, 100)]
    parameters = make_parameters(shapes, torch.bfloat16, "cuda")
    engine = build(parameters, **SETTINGS, accumulate_on="host")
    for grads in make_gradients(shapes, torch.bfloat16, 3):
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad.cuda()
        engine.step()
    parameters[1].grad.zero_()
    for call in (engine.step, engine.flush, lambda: engine.zero_grad(set_to_none=False)):
        with pytest.raises(ValueError, match=r"gradient of parameter 1 of group 0 .*zero_grad"):
            call()


# The device's side


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gpu", "host"])
def test_without_the_drivers_words_the_host_polls(
    rule: str, build: Builder, monkeypatch: pytest.MonkeyPatch, taken: list[tuple[Sent, bool]]
) -> None:
    for module in ("uploading", "sending", "storage"):
        monkeypatch.setattr(f"zenflow.{module}.stream_words", lambda device: None)
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, "cuda"), **SETTINGS, select_interval=6, **RULES[rule])
    assert pair.engine._pipeline.uploader._words is None
    for grads in stream_of(14):
        step(pair, grads)
    assert any(in_backward for _, in_backward in taken)
    pair.check_state()


@pytest.mark.gpu
@pytest.mark.parametrize("predicted", [0.0, 1.0], ids=["plain", "predicted"])
def test_e7_a_worker_killed_while_a_stream_waits_for_it(predicted: float, build: Builder) -> None:
    """E7: the upload stream waits for a window that a stopped worker never finishes; its end frees the stream, which
    finds what was visible before, though the window's gradient had come to that place."""
    given = {**SETTINGS, **UNCHECKED, "weight_prediction": predicted}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, "cuda"), **given)
    stream = stream_of(8)
    for grads in stream[:5]:
        step(pair, grads)
    pair.engine._pipeline.wait_for_worker()
    torch.cuda.synchronize()
    pid = pair.engine._pipeline.client.worker_pid
    os.kill(pid, signal.SIGSTOP)
    try:
        pair.step(stream[5], check=False)  # window 2 lands, window 3 is sent to a worker that is stopped
        pair.step(stream[6], check=False)
        before = snapshot(pair.parameters)
        one_pass(pair.parameters, stream[7])
        assert not pair.engine._pipeline.uploader.stream.query(), "the upload stream waits for window 3"
    finally:
        os.kill(pid, signal.SIGKILL)
    within(LIMIT, torch.cuda.synchronize)
    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        pair.engine.step()
    pair.engine.close(flush=False)
    for index, (parameter, weight) in enumerate(zip(pair.parameters, before, strict=True)):
        assert_same_bits(parameter, weight, f"weight {index}")


@pytest.mark.parametrize("ending", ["worker-killed", "interrupted"])
def test_a_step_that_breaks_off_between_two_uploads_leaves_no_scratch(
    ending: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload brings what the worker has in selected channels; `close()` writes the selected masters over it."""
    settings = SETTINGS | {"upload": "step", "select_interval": 2}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    stream, calls, upload = stream_of(6), [0], Uploader.upload
    for grads in stream[:5]:
        step(pair, grads)
    pair.engine._pipeline.wait_for_worker()
    client = pair.engine._pipeline.client

    def broken_off(self: Uploader, sent: Sent) -> None:
        calls[0] += 1
        if calls[0] == 3:
            if ending == "interrupted":
                raise KeyboardInterrupt
            os.kill(client.worker_pid, signal.SIGKILL)
            client._watch.join(LIMIT)
        upload(self, sent)

    one_pass(pair.parameters, stream[5])
    monkeypatch.setattr(Uploader, "upload", broken_off)
    with pytest.raises((WorkerError, KeyboardInterrupt)):
        pair.engine.step()
    monkeypatch.undo()
    pair.model.step([parameter.grad.cpu() for parameter in pair.parameters])
    pair.engine.close(flush=False)
    for record, parameter in zip(pair.engine._pipeline.records, pair.parameters, strict=True):
        expected = pair.model.visible(record.index).view(record.weight.shape)
        channels, dim = record.selected, 0 if record.kind == "row" else 1
        one, other = (
            flat.index_select(dim, channels) for flat in (parameter.detach().cpu().view_as(expected), expected)
        )
        assert_same_bits(one, other, record.name)


class Fails(torch.autograd.Function):
    """Breaks backward off in the middle, as running out of memory does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise MemoryError("in the middle of backward")


@pytest.mark.parametrize("checked", [False, True], ids=["uploaded", "poisoned"])
def test_training_goes_on_after_a_backward_that_broke_off(checked: bool, device: str, build: Builder) -> None:
    """Some buckets have landed when it does; zero_grad() makes the weights whole, and the batch is tried again."""
    torch.manual_seed(0)
    first, last = nn.Linear(12, 12).to(device), nn.Linear(12, 12).to(device)
    parameters = [*first.parameters(), *last.parameters()]
    pair = Pair(build, parameters, **SETTINGS | {"bucket_bytes": 1, "upload_check": checked})
    for number in range(1, 11):
        x = torch.randn(3, 12, device=device)
        pair.engine.zero_grad()
        pair.engine._pipeline.wait_for_worker()
        if number in (4, 8):
            with pytest.raises(MemoryError, match="in the middle"):
                last(Fails.apply(first(x))).square().sum().backward()
            assert pair.engine._pipeline.uploads.in_transit
            pair.engine.zero_grad()
            for state in pair.model.states:
                if state.pending is not None:
                    state.show(~state.selected, state.pending)
                    state.pending = None
            pair.check_weights()
        last(first(x)).square().sum().backward()
        pair.step_on_grad()
    pair.check_state()
    assert pair.engine.stats().skipped_steps == 0
