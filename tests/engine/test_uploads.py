"""Results that land in the weights under backward: when they may, and that no bit differs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import RULES, Builder, Pair, assert_same_bits, make_parameters, snapshot
from tests.engine.uploading import (
    SETTINGS,
    SHAPES,
    UNCHECKED,
    backward,
    step,
    stream_of,
)
from zenflow.uploading import Sent, Uploader


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_uploads_land_in_backward_and_change_no_bit(
    rule: str, dtype: torch.dtype, device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    """Window 1 is sent, window 2's last backward passes the check, and from window 3 on backward takes every bucket."""
    pair = Pair(build, make_parameters(SHAPES, dtype, device), **SETTINGS, **RULES[rule])
    buckets = sum(len(storage.segment.buckets) for storage in pair.engine._pipeline.storages)
    assert buckets > 3
    for number, grads in enumerate(stream_of(12, dtype), start=1):
        taken.clear()
        step(pair, grads)
        due = number % 2 == 0 and number > 2
        assert [in_backward for _, in_backward in taken] == [number > 4] * (buckets if due else 0)
    pair.check_state()
    assert pair.engine.stats().skipped_steps == 0


def test_weights_are_in_transit_from_backward_to_step_only(device: str, build: Builder) -> None:
    """What backward leaves is the worker's result, in every deferred channel."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    stream = stream_of(4)
    for grads in stream[:3]:
        step(pair, grads)
    assert not pair.engine._pipeline.uploads.in_transit
    before = snapshot(pair.parameters)
    backward(pair, stream[3])
    assert pair.engine._pipeline.uploads.in_transit
    if device == "cuda":
        torch.cuda.synchronize()
    for parameter, weight in zip(pair.parameters, before, strict=True):
        state = pair.engine.channel_state(parameter)
        if state.selected.all():
            assert_same_bits(parameter, weight)
        else:
            deferred = ~state.selected
            landed = parameter.detach().cpu().reshape(state.master.shape)[:, deferred]
            assert_same_bits(landed, state.master[:, deferred].to(torch.bfloat16))
    pair.step_on_grad()
    assert not pair.engine._pipeline.uploads.in_transit


def test_a_bucket_lands_as_soon_as_its_own_gradients_exist(device: str, build: Builder) -> None:
    """Each matrix is a bucket; the first registered gets its gradient last, and has its old weights until then."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)]).to(device)
    engine = build(model.parameters(), lr=0.1, topk_ratio=0, update_interval=1, bucket_bytes=1024, **UNCHECKED)
    assert len(engine._pipeline.storages[0].segment.buckets) == 4
    seen: list[list[bool]] = []
    before: list[Tensor] = []
    for _ in range(3):
        engine.zero_grad()
        x = torch.ones(2, 16, device=device, requires_grad=True)
        y = x
        for layer in model:
            y = layer(y)

            def look(_: Tensor) -> None:
                if before:
                    if device == "cuda":
                        torch.cuda.synchronize()
                    now = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
                    seen.append(now)

            y.register_hook(look)
        engine._pipeline.wait_for_worker()
        before[:] = [p.detach().clone() for p in model.parameters()]
        seen.clear()
        y.square().sum().backward()
        engine.step()
    # At the gradient of layer n's output the later layers have their gradients, and their next weights.
    assert [now.count(True) for now in seen] == [0, 1, 2, 3]
    assert all(now == sorted(now) for now in seen)


@pytest.mark.parametrize("given", [None, 2], ids=["learned", "given"])
def test_two_passes_a_step(given: int | None, device: str, build: Builder, taken: list[tuple[Sent, bool]]) -> None:
    """The second pass takes the buckets, never the first, whether their number was given or learned."""
    settings = {**SETTINGS, "backward_passes_per_step": given}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings, **UNCHECKED)
    for number, grads in enumerate(stream_of(10), start=1):
        taken.clear()
        step(pair, grads, passes=2)
        if number % 2 == 0 and number > 2:
            assert taken and all(in_backward for _, in_backward in taken)
    pair.check_state()


def test_a_number_of_passes_that_varies_leaves_uploads_to_step(
    device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    for number, grads in enumerate(stream_of(12)):
        step(pair, grads, passes=1 + number % 3)
    assert taken and not any(in_backward for _, in_backward in taken)
    pair.check_state()


def test_a_step_with_fewer_passes_than_usual(device: str, build: Builder, taken: list[tuple[Sent, bool]]) -> None:
    """The last batch of an epoch: its step takes the uploads, the next window's backward again."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    for number, grads in enumerate(stream_of(12), start=1):
        taken.clear()
        step(pair, grads, passes=1 if number == 8 else 2)
        if number % 2 == 0 and number > 2:
            assert {in_backward for _, in_backward in taken} == {number != 8}
    pair.check_state()


@pytest.mark.parametrize("checked", [False, True], ids=["uploaded", "under-check"])
@pytest.mark.parametrize("given", [None, 1], ids=["learned", "given"])
def test_a_pass_too_many_is_an_error_with_both_ways_out(
    given: int | None, checked: bool, device: str, build: Builder
) -> None:
    settings = {**SETTINGS, "upload_check": checked, "backward_passes_per_step": given}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    stream = stream_of(5)
    for grads in stream[:3]:
        step(pair, grads)
    backward(pair, stream[3])
    loss = torch.stack([parameter.float().sum() for parameter in pair.parameters]).sum()
    with pytest.raises(RuntimeError, match=r"parameter \d of group 0.*backward_passes_per_step.*upload='step'"):
        loss.backward()
    pair.engine.flush()
    assert all(bool(parameter.isfinite().all()) for parameter in pair.parameters)


def test_too_many_passes_before_anything_was_taken_are_no_error(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the worker was not ready, nothing has landed, and step() puts all in order."""
    monkeypatch.setattr(Uploader, "may_wait", lambda self, sent: False)
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **UNCHECKED)
    for number, grads in enumerate(stream_of(8)):
        step(pair, grads, passes=1 if number < 5 else 3)
    pair.check_state()


@pytest.mark.parametrize("checked", [False, True], ids=["uploaded", "under-check"])
@pytest.mark.parametrize("when", ["in-the-window", "at-its-end"])
def test_gradients_that_are_dropped_without_a_step(when: str, checked: bool, device: str, build: Builder) -> None:
    """A loop that throws a batch away and calls zero_grad(): weights that were in transit are whole and finite then.

    What was due at this window's end is visible at once, and the number of passes a step is still known.
    """
    settings = {**SETTINGS, "upload_check": checked}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    stream = stream_of(12)
    drop_at = 3 if when == "in-the-window" else 4
    for number, grads in enumerate(stream, start=1):
        if number == drop_at:
            backward(pair, grads)
            pair.engine.zero_grad()
            assert not pair.engine._pipeline.uploads.in_transit
            assert all(bool(parameter.isfinite().all()) for parameter in pair.parameters)
            if when == "at-its-end":
                for state in pair.model.states:
                    state.show(~state.selected, state.pending if state.pending is not None else state.visible)
                    state.pending = None
            pair.check_weights()
        step(pair, grads)
    pair.check_state()


def test_a_step_inside_backward_by_the_users_own_hook(device: str, build: Builder) -> None:
    """One optimizer a parameter, stepped in its hook, which comes before ours: this gradient is no gradient of the next
    step, so the next result does not land before the next forward pass."""

    def run(upload: str) -> list[list[Tensor]]:
        parameters = make_parameters(SHAPES[:2], torch.bfloat16, device)
        engines = {p: build([p], **{**SETTINGS, **UNCHECKED, "upload": upload}) for p in parameters}

        def update(parameter: nn.Parameter) -> None:
            engines[parameter].step()
            engines[parameter].zero_grad()

        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(update)
        seen = []
        for grads in stream_of(10, shapes=SHAPES[:2]):
            for engine in engines.values():
                engine._pipeline.wait_for_worker()
            torch.stack(
                [(p * g.to(device)).float().sum() for p, g in zip(parameters, grads, strict=True)]
            ).sum().backward()
            seen.append(snapshot(parameters))
        return seen

    for number, (one, other) in enumerate(zip(run("backward"), run("step"), strict=True), start=1):
        for weight, expected in zip(one, other, strict=True):
            assert_same_bits(weight, expected, f"step {number}")
