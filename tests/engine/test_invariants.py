"""The invariants I1 to I6 and I8, each against AdamW with fp32 masters or against itself, on both schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.driving import (
    DTYPES,
    SCHEDULES,
    SHAPES,
    USUAL,
    Builder,
    ReferencePair,
    assert_same_bits,
    cohorts_of,
    differing,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)

DIMS = ["column", "row"]


def follows_reference(build: Builder, device: str, dtype: str, steps: int = 20, **settings: Any) -> ReferencePair:
    exact = settings.get("max_grad_norm") is not None
    pair = ReferencePair(
        build, make_parameters(SHAPES, DTYPES[dtype], device), lr=0.03, weight_decay=0.2, betas=(0.9, 0.98), **settings
    )
    for grads in make_gradients(SHAPES, DTYPES[dtype], steps, exact=exact):
        pair.step(grads)
    pair.check_state(owners=False)
    return pair


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("max_grad_norm", [None, 0.7], ids=["no-clip", "clip"])
@pytest.mark.parametrize("channel_dim", DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_i1_k_1_is_adamw(
    dtype: str, channel_dim: str, max_grad_norm: float | None, schedule: str, device: str, build: Builder
) -> None:
    settings = {"topk_ratio": 1, "channel_dim": channel_dim, "max_grad_norm": max_grad_norm}
    pair = follows_reference(build, device, dtype, **settings, **SCHEDULES[schedule])
    assert pair.engine.stats().worker_pid is None


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(
    ("dtype", "ring_dtype", "max_grad_norm"),
    [
        ("bf16", "auto", None),
        ("bf16", "float32", 0.7),
        ("fp16", "auto", 0.7),
        ("fp32", "auto", 0.7),
        ("fp32", "float32", None),
    ],
)
def test_i2_k_0_synchronous_is_adamw(
    dtype: str, ring_dtype: str, max_grad_norm: float | None, schedule: str, device: str, build: Builder
) -> None:
    settings = {"topk_ratio": 0, "update_interval": 1, "overlap_step": False, **SCHEDULES[schedule]}
    follows_reference(build, device, dtype, ring_dtype=ring_dtype, max_grad_norm=max_grad_norm, **settings)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("channel_dim", DIMS)
@pytest.mark.parametrize(
    ("dtype", "ring_dtype", "max_grad_norm"), [("bf16", "auto", None), ("bf16", "float32", 0.7), ("fp32", "auto", 0.7)]
)
@pytest.mark.parametrize("topk_ratio", [0.05, 0.5])
def test_i3_any_k_synchronous_is_adamw(
    topk_ratio: float,
    dtype: str,
    ring_dtype: str,
    max_grad_norm: float | None,
    channel_dim: str,
    schedule: str,
    device: str,
    build: Builder,
) -> None:
    pair = follows_reference(
        build,
        device,
        dtype,
        topk_ratio=topk_ratio,
        update_interval=1,
        overlap_step=False,
        select_interval=3,
        channel_dim=channel_dim,
        ring_dtype=ring_dtype,
        max_grad_norm=max_grad_norm,
        **SCHEDULES[schedule],
    )
    assert pair.engine.stats().selections == 7


@pytest.mark.parametrize("channel_dim", DIMS)
@pytest.mark.parametrize("max_grad_norm", [None, 0.7], ids=["no-clip", "clip"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("topk_ratio", "update_interval"), [(0, 4), (0.1, 1), (0.1, 4), (0.5, 5), (1, 4)])
def test_i4_replay_without_delay_is_adamw_at_every_window_end(
    topk_ratio: float,
    update_interval: int,
    dtype: str,
    max_grad_norm: float | None,
    channel_dim: str,
    device: str,
    build: Builder,
) -> None:
    """On a fixed stream of gradients, with learning rate and decay that change in every step, and selections."""
    pair = ReferencePair(
        build, make_parameters(SHAPES, DTYPES[dtype], device), lr=0.03, weight_decay=0.2, betas=(0.9, 0.98),
        accumulate_on="host", deferred_rule="replay", overlap_step=False, select_interval=7,
        topk_ratio=topk_ratio, update_interval=update_interval, channel_dim=channel_dim, max_grad_norm=max_grad_norm,
    )  # fmt: skip
    for step, grads in enumerate(make_gradients(SHAPES, DTYPES[dtype], 20, exact=max_grad_norm is not None), start=1):
        for group in pair.engine.param_groups:
            group.update(lr=0.03 / step, weight_decay=0.2 / step)
        at_end = step % update_interval == 0
        pair.step(grads, check=at_end)
        if at_end:
            pair.check_state(owners=False)


@pytest.mark.parametrize("max_grad_norm", [None, 0.7], ids=["no-clip", "clip"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("topk_ratio", "update_interval"), [(0, 4), (0.1, 1), (0.1, 4), (0.5, 5)])
def test_i4_usual_replayed_masters_are_adamw_s_at_each_window_s_end_and_weights_after_a_flush(
    topk_ratio: float, update_interval: int, dtype: str, max_grad_norm: float | None, device: str, build: Builder
) -> None:
    """Late results and predictions change what is visible, and on a fixed stream of gradients no master."""
    pair = ReferencePair(
        build, make_parameters(SHAPES, DTYPES[dtype], device), lr=0.03, weight_decay=0.2, betas=(0.9, 0.98),
        accumulate_on="host", deferred_rule="replay", select_interval=7, topk_ratio=topk_ratio,
        update_interval=update_interval, max_grad_norm=max_grad_norm, **USUAL,
    )  # fmt: skip
    start, predicted = 0, 0
    for step, grads in enumerate(make_gradients(SHAPES, DTYPES[dtype], 20, exact=max_grad_norm is not None), start=1):
        for group in pair.engine.param_groups:
            group.update(lr=0.03 / step, weight_decay=0.2 / step)
        pair.step(grads, check=False)
        drained = bool(topk_ratio) and step % 7 == 0
        for index, cohort in enumerate(cohorts_of(pair.engine)):
            if drained or cohort is None or (step - start) % update_interval == cohort % update_interval:
                expected = pair.model.states[index].master
                actual = pair.engine.channel_state(pair.parameters[index]).master
                assert_same_bits(actual.view(expected.shape), expected, f"master {index} after step {step}")
                predicted += differing(pair.parameters[index], pair.model.visible(index))
        if drained:
            start = step
            pair.check_weights()
            pair.check_state(owners=False)
    assert predicted > 0, "what is visible of a late result is not its master"
    pair.engine.flush()
    pair.check_weights()
    pair.check_state(owners=False)


def trajectory(
    build: Builder, device: str, steps: int, flush: bool = False, **settings: Any
) -> tuple[list[Any], list[Any]]:
    """Weights after every step, and every parameter's channel state after the last, if asked for after a `flush()`."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **{"lr": 0.02, "topk_ratio": 0.3, "select_interval": 8, **settings})
    weights = []
    for grads in make_gradients(SHAPES, torch.bfloat16, steps, exact="max_grad_norm" in settings):
        feed(parameters, grads)
        engine.step()
        weights.append(snapshot(parameters))
    if flush:
        engine.flush()
        weights[-1] = snapshot(parameters)
    return weights, [engine.channel_state(parameter) for parameter in parameters]


@pytest.mark.parametrize("over", ["step", "window", "average"])
@pytest.mark.parametrize("channel_dim", DIMS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_i5_a_selection_changes_no_bit(schedule: str, channel_dim: str, over: str, device: str, build: Builder) -> None:
    """Without overlap a selecting step differs from a plain one in steps (c) and (d) alone; on the usual schedule,
    where a selection ends every window and shows masters, from a plain one with a flush behind it."""
    settings = {"update_interval": 4, "channel_dim": channel_dim, "importance_over": over, **SCHEDULES[schedule]}
    flush = schedule == "usual"
    settings["overlap_step"] = flush
    weights, states = trajectory(build, device, 8, select_interval=8, **settings)
    plain_weights, plain_states = trajectory(build, device, 8, flush, select_interval=10**6, **settings)
    changed_owner = 0
    for index, (state, plain) in enumerate(zip(states, plain_states, strict=True)):
        assert_same_bits(weights[-1][index], plain_weights[-1][index], f"weight {index}")
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(state, name), getattr(plain, name), f"{name} of {index}")
        assert torch.equal(state.step, plain.step)
        assert int(state.selected.sum()) == int(plain.selected.sum())
        changed_owner += int((state.selected != plain.selected).sum())
    assert changed_owner > 0


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bucket_bytes": 32},
        {"bucket_bytes": 500},
        {"worker_threads": 2},
        {"worker_threads": "auto"},
        {"core_binding": True},
        {"core_binding": False, "pt_reserved_cores_perc": 0.5},
    ],
    ids=["again", "bucket=32", "bucket=500", "threads=2", "threads=auto", "bound", "unbound"],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_i6_the_machine_changes_no_bit(schedule: str, settings: dict[str, Any], device: str, build: Builder) -> None:
    given = {"max_grad_norm": 0.5, **SCHEDULES[schedule]}
    base_weights, base_states = trajectory(build, device, 14, **given)
    weights, states = trajectory(build, device, 14, **given, **settings)
    for step, (expected, actual) in enumerate(zip(base_weights, weights, strict=True), start=1):
        for index, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_same_bits(other, one, f"weight {index} after step {step}")
    for expected, actual in zip(base_states, states, strict=True):
        assert torch.equal(expected.step, actual.step)
        assert torch.equal(expected.selected, actual.selected)
        assert_same_bits(actual.master, expected.master)


@pytest.mark.parametrize("update_interval", [1, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_i8_every_channel_has_one_owner(schedule: str, update_interval: int, device: str, build: Builder) -> None:
    """t counts the updates a channel received: one a step from the GPU, one a window from the worker, never both.

    A selection ends the windows of all cohorts, and all of the next ones begin with the step after it.
    """
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    settings = {"topk_ratio": 0.3, "update_interval": update_interval, "select_interval": 8}
    engine = build(parameters, **settings, **SCHEDULES[schedule])
    cohorts = cohorts_of(engine)
    assert {*cohorts} - {None} == ({*range(1, update_interval + 1)} if schedule == "usual" else {update_interval})
    received = [torch.zeros_like(engine.channel_state(parameter).step) for parameter in parameters]
    owned: list[torch.Tensor] = []
    for step, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 24), start=1):
        feed(parameters, grads)
        engine.step()
        states = [engine.channel_state(parameter) for parameter in parameters]
        if step == 1:
            owned = [state.selected for state in states]
        for index, (shape, state) in enumerate(zip(SHAPES, states, strict=True)):
            ends = step % 8 == 0 or (step % 8 - (cohorts[index] or 0)) % update_interval == 0
            received[index] += owned[index].long() + (~owned[index] & ends).long()
            assert state.step.tolist() == received[index].tolist(), f"t of {index} after step {step}"
            channels = shape and len(shape) > 1 and state.master.shape[1]
            assert int(state.selected.sum()) == (max(1, round(0.3 * channels)) if channels else len(state.selected))
        owned = [state.selected for state in states]
