"""`selected_masters: stochastic`: no fp32 master on the device; what changes owner, what is refused, what is kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    DTYPES,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    differing,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from zenflow import ZenFlow

BF16 = torch.bfloat16
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "select_interval": 8, "selected_masters": "stochastic"}


def run(build: Builder, device: str, steps: int, **given: Any) -> tuple[ZenFlow, list[nn.Parameter]]:
    parameters = make_parameters(SHAPES, BF16, device)
    engine = build(parameters, **{**SETTINGS, **given})
    for grads in make_gradients(SHAPES, BF16, steps):
        feed(parameters, grads)
        engine.step()
    return engine, parameters


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_a_selection_changes_no_visible_weight(channel_dim: str, device: str, build: Builder) -> None:
    """I5 for weights: the selecting step differs from a plain one in owners, and in masters that come to the device,
    which become what is visible of them; those that leave were it already."""
    given = {"overlap_step": False, "channel_dim": channel_dim}
    engine, weights = run(build, device, 8, **given)
    plain, plain_weights = run(build, device, 8, **given, select_interval=10**6)
    came = went = 0
    for index, (one, other) in enumerate(zip(weights, plain_weights, strict=True)):
        assert_same_bits(one, other, f"weight {index}")
        state, before = engine.channel_state(one), plain.channel_state(other)
        entered, left = state.selected & ~before.selected, before.selected & ~state.selected
        axis = 1 if channel_dim == "column" else 0
        weight = one.detach().cpu().reshape(state.master.shape).float()
        for name in ("exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(state, name), getattr(before, name), f"{name} of {index}")
        assert torch.equal(state.step, before.step)
        if len(state.selected) != state.master.shape[axis]:
            continue  # selected whole
        same = (~entered).nonzero().flatten()
        assert_same_bits(state.master.index_select(axis, same), before.master.index_select(axis, same), str(index))
        for moved in (entered, left):
            part = moved.nonzero().flatten()
            assert_same_bits(state.master.index_select(axis, part), weight.index_select(axis, part), f"master {index}")
        lost = entered.nonzero().flatten()
        came += differing(state.master.index_select(axis, lost), before.master.index_select(axis, lost))
        went += int(left.sum())
    assert came > 0 and went > 0


@pytest.mark.parametrize(
    "given",
    [{"bucket_bytes": 32}, {"worker_threads": 2, "core_binding": True}, {"upload": "step"}],
    ids=["buckets", "threads", "upload"],
)
def test_i6_the_machine_changes_no_bit(given: dict[str, Any], device: str, build: Builder) -> None:
    _, weights = run(build, device, 13)
    _, others = run(build, device, 13, **given)
    for index, (one, other) in enumerate(zip(weights, others, strict=True)):
        assert_same_bits(other, one, f"weight {index}")


def test_another_seed_rounds_otherwise_and_only_what_is_selected(device: str, build: Builder) -> None:
    engine, weights = run(build, device, 3, update_interval=5)
    _, others = run(build, device, 3, update_interval=5, rounding_seed=1)
    changed = 0
    for one, other in zip(weights, others, strict=True):
        selected = engine.channel_state(one).selected
        matrix, twin = (weight.detach().cpu().reshape(-1, len(selected)) for weight in (one, other))
        assert differing(matrix[:, ~selected], twin[:, ~selected]) == 0
        changed += differing(matrix[:, selected], twin[:, selected])
    assert changed > 0


def test_the_device_holds_two_bytes_a_selected_weight_or_none(device: str, build: Builder) -> None:
    """Of matrices a bf16 copy, which restores the weights after an upload; of what is selected whole nothing."""
    engine, parameters = run(build, device, 1)
    for record in engine._pipeline.records:
        assert record.master.dtype == BF16 and record.exp_avg.dtype == record.exp_avg_sq.dtype == torch.float32
        whole = record.kind == "whole"
        assert (record.master.data_ptr() == record.param.data_ptr()) is (whole and record.param.numel() > 0)
        assert whole or record.master.numel() == record.exp_avg.numel() < record.param.numel()


def test_weights_edited_by_hand_are_followed(device: str, build: Builder) -> None:
    """In place, through `.data`, and moved to other memory, in the middle of a window."""
    engine, parameters = run(build, device, 5)
    with torch.no_grad():
        parameters[0].mul_(0.5)
        parameters[2].mul_(0.5)
    parameters[1].data.add_(0.25)
    parameters[4].data = parameters[4].data + 1
    engine.reload_weights()
    for parameter in parameters:
        state = engine.channel_state(parameter)
        weight = parameter.detach().cpu().reshape(state.master.shape).float()
        part = state.selected if len(state.selected) == weight.shape[1] else slice(None)
        assert_same_bits(state.master[:, part], weight[:, part])
    kept = snapshot(parameters)
    engine.flush()
    feed(parameters, [None] * len(parameters))
    with pytest.warns(UserWarning, match="no gradient"):
        engine.step()
    state = engine.channel_state(parameters[0])
    assert_same_bits(parameters[0].detach().cpu()[:, state.selected], kept[0][:, state.selected])


def test_small_steps_arrive_on_average(device: str, build: Builder) -> None:
    """C9: bf16 1.0, lr 1e-4, 60 steps, of which rounding to the nearest would lose each: the mean of 3,000 weights."""
    parameters = [nn.Parameter(torch.ones(100, 60, dtype=BF16, device=device)) for _ in range(2)]
    engine = build(parameters, **{**SETTINGS, "lr": 1e-4, "topk_ratio": 0.5}, weight_decay=0.0, update_interval=60)
    for _ in range(60):
        feed(parameters, [torch.ones(100, 60, dtype=BF16)] * 2)
        engine.step()
    means = []
    for parameter in parameters:
        selected = engine.channel_state(parameter).selected
        weights = parameter.detach().cpu().double()[:, selected]
        # Variance: at most 1e-4 * 2**-8 a step; of the mean of 3,000 weights after 60 steps 7.8e-9.
        means.append(weights.mean().item())
        assert abs(means[-1] - (1 - 60e-4)) < 5 * 9e-5
        assert len(weights.unique()) > 1
    assert means[0] != means[1]  # two parameters do not share their draws


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_other_dtypes_are_refused_by_name(dtype: str, device: str, build: Builder) -> None:
    """At construction, in a later group, and when a frozen one wakes up; frozen ones may have any."""
    other = make_parameters([(6, 5)], DTYPES[dtype], device)[0]
    good = make_parameters([(6, 5)], BF16, device)[0]
    told = rf"odd has dtype {other.dtype}; allowed under .*stochastic.* is bfloat16"
    with pytest.raises(ValueError, match=told):
        build([("good", good), ("odd", other)], **SETTINGS)
    other.requires_grad_(False)
    engine = build([("good", good), ("odd", other)], **SETTINGS)
    feed([good], [torch.ones(6, 5, dtype=BF16)])
    engine.step()
    other.requires_grad_(True)
    feed([good, other], [torch.ones(6, 5, dtype=BF16), torch.ones(6, 5, dtype=other.dtype)])
    with pytest.raises(ValueError, match=told):
        engine.step()
    other.requires_grad_(False)
    with pytest.raises(ValueError, match="late has dtype"):
        engine.add_param_group({"params": [("late", nn.Parameter(torch.ones(3, 3, dtype=other.dtype, device=device)))]})


def carry(pair: Pair, build: Builder, masters: str) -> None:
    """Go on in a fresh engine with other masters, and so does the model."""
    state = pair.engine.state_dict()
    device = str(pair.parameters[0].device)
    pair.parameters = make_parameters(SHAPES, BF16, device, seed=9)
    pair.engine = build(pair.parameters, **{**SETTINGS, "selected_masters": masters})
    pair.engine.load_state_dict(state)
    pair.model.settings["selected_masters"] = masters
    if masters == "stochastic":
        for owned in pair.model.states:
            nearest = owned.master.to(BF16).float()
            owned.master = torch.where(owned.per_channel(owned.selected), nearest, owned.master)
    pair.check_weights()


@pytest.mark.parametrize("at", [(5, 10), (4, 8)], ids=str)
def test_masters_may_go_and_come_at_a_load(at: Sequence[int], device: str, build: Builder) -> None:
    """In the middle of a window or at its end, a result on its way: rounded once, and back from the weights."""
    pair = Pair(build, make_parameters(SHAPES, BF16, device), **{**SETTINGS, "selected_masters": "float32"})
    for number, grads in enumerate(make_gradients(SHAPES, BF16, 13)):
        if number in at:
            carry(pair, build, "stochastic" if number == at[0] else "float32")
        pair.step(grads)
    pair.check_state()


def test_exports_hold_the_weights(device: str, build: Builder) -> None:
    """`export_weights` gives fp32 whose selected values are the bf16 weights; AdamW's moments come from both sides."""
    net = nn.Sequential(nn.Linear(12, 7), nn.Linear(7, 5)).to(device, BF16)
    engine = build(net.parameters(), **{**SETTINGS, "update_interval": 2})
    for _ in range(3):
        net(torch.ones(4, 12, device=device, dtype=BF16)).float().square().sum().backward()
        engine.step()
        engine.zero_grad()
    engine.flush()
    exported, adamw = engine.export_weights(net), engine.adamw_state_dict()
    for index, (name, parameter) in enumerate(net.named_parameters()):
        state, weight = engine.channel_state(parameter), parameter.detach().cpu()
        assert exported[name].dtype == torch.float32
        assert_same_bits(exported[name].to(BF16), weight, name)
        selected = state.selected if weight.dim() == 2 else slice(None)
        assert_same_bits(exported[name][..., selected], weight[..., selected].float(), name)
        assert adamw["state"][index]["exp_avg"].dtype == torch.float32
