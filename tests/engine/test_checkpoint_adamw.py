"""States that move from and to torch's AdamW."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    DTYPES,
    SHAPES,
    Builder,
    ReferencePair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from zenflow.checkpoint_folder import load, save

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 3, "select_interval": 4}


def as_adamw(pair: ReferencePair) -> dict[str, Any]:
    """The reference's state in torch's form."""
    packed = torch.optim.AdamW([nn.Parameter(torch.zeros(())) for _ in pair.parameters]).state_dict()
    settings = {name: pair.engine.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    packed["param_groups"][0].update(settings)
    for index, (state, shape) in enumerate(zip(pair.model.states, pair.model.shapes, strict=True)):
        packed["state"][index] = {
            "step": torch.tensor(float(state.step[0])),
            "exp_avg": state.exp_avg.reshape(shape).clone(),
            "exp_avg_sq": state.exp_avg_sq.reshape(shape).clone(),
        }
    return packed


ADAMW = {"lr": 0.02, "weight_decay": 0.1}
LIKE_ADAMW = {
    "k=1": {"topk_ratio": 1},
    "k=0": {"topk_ratio": 0, "update_interval": 1, "overlap_step": False},
    "k=0.3": {"topk_ratio": 0.3, "update_interval": 1, "overlap_step": False, "select_interval": 3},
}
LIKE_ADAMW["k=0.3-host-rows"] = {**LIKE_ADAMW["k=0.3"], "channel_dim": "row", "accumulate_on": "host"}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", LIKE_ADAMW)
def test_a_run_goes_on_from_adamw_as_adamw_would(
    name: str, dtype: str, device: str, build: Builder, tmp_path: Path
) -> None:
    """From the reference's state, masters beside it where the weights are bf16: k = 1, and U = 1 at staleness 0, go on
    bit for bit (I1, I2, I3). So they do after another save, before or after the first selection."""
    pair = ReferencePair(build, make_parameters(SHAPES, DTYPES[dtype], device), **ADAMW, topk_ratio=1)
    stream = make_gradients(SHAPES, DTYPES[dtype], 9)
    for grads in stream[:4]:
        pair.step(grads)
    state = as_adamw(pair)
    masters = [
        one.master.reshape(shape).clone() for one, shape in zip(pair.model.states, pair.model.shapes, strict=True)
    ]
    pair.parameters = make_parameters(SHAPES, DTYPES[dtype], device, seed=7)
    pair.engine = build(pair.parameters, **{**ADAMW, "lr": 0.5}, **LIKE_ADAMW[name])
    pair.engine.load_adamw_state_dict(state, masters=masters)
    pair.check_weights()
    pair.check_state(owners=False)
    assert pair.engine.param_groups[0]["lr"] == ADAMW["lr"]
    assert "amsgrad" not in pair.engine.param_groups[0]
    assert pair.engine.stats().steps == 4
    for number, grads in enumerate(stream[4:]):
        if number in (0, 3):
            save(tmp_path / str(number), pair.engine.state_dict())
            pair.engine.load_state_dict(load(tmp_path / str(number)))
        pair.step(grads)
    pair.check_state(owners=False)


def test_a_state_of_torchs_own_adamw_loads_and_comes_back(device: str, build: Builder) -> None:
    """Two groups and a parameter without a gradient. There and back changes no bit, and both go on alike: torch's AdamW
    rounds in another order, so after five steps of lr 0.02 the weights differ by roundings only."""
    first = make_parameters(SHAPES, device=device)
    stream = make_gradients(SHAPES, steps=9)
    for grads in stream:
        grads[3] = None
    adamw = torch.optim.AdamW([{"params": first[:3]}, {"params": first[3:], "lr": 0.01, "betas": (0.8, 0.99)}], **ADAMW)
    for grads in stream[:4]:
        feed(first, grads)
        adamw.step()
    second = [nn.Parameter(parameter.detach().clone()) for parameter in first]
    engine = build([{"params": second[:3]}, {"params": second[3:]}], topk_ratio=1)
    engine.load_state_dict(adamw.state_dict())
    back, given = engine.adamw_state_dict(), adamw.state_dict()
    assert back["state"].keys() == given["state"].keys() == {0, 1, 2, 4, 5, 6}
    for index, entry in given["state"].items():
        assert back["state"][index].keys() == entry.keys()
        for name, tensor in entry.items():
            assert_same_bits(back["state"][index][name], tensor, f"{name} of {index}")
    third = [nn.Parameter(parameter.detach().clone()) for parameter in second]
    again = torch.optim.AdamW([{"params": third[:3]}, {"params": third[3:]}], lr=0.75)
    again.load_state_dict(copy.deepcopy(back))
    for grads in stream[4:]:
        for parameters, optimizer in ((first, adamw), (second, engine), (third, again)):
            feed(parameters, grads)
            optimizer.step()
    for index, (one, other, torchs) in enumerate(zip(first, second, third, strict=True)):
        assert_same_bits(torchs, one, f"weight {index}")
        difference = (other - one).detach().abs()
        assert difference.numel() == 0 or float(difference.max()) < 1e-5
        assert difference.numel() == 0 or float(difference.square().mean().sqrt()) < 1e-6


def test_moments_in_bf16_are_taken_exactly(device: str, build: Builder) -> None:
    first = make_parameters(SHAPES, torch.bfloat16, device)
    adamw = torch.optim.AdamW(first, **ADAMW)
    feed(first, make_gradients(SHAPES, torch.bfloat16, 1)[0])
    adamw.step()
    engine = build(first, **SETTINGS)
    engine.load_state_dict(adamw.state_dict())
    for index, parameter in enumerate(first):
        state = engine.channel_state(parameter)
        for name in ("exp_avg", "exp_avg_sq"):
            expected = adamw.state_dict()["state"][index][name]
            assert expected.dtype == torch.bfloat16
            assert_same_bits(getattr(state, name).view(expected.shape), expected.float().cpu(), f"{name} of {index}")
        assert_same_bits(state.master.view(parameter.shape), parameter.detach().float().cpu(), f"master of {index}")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_channels_of_different_t_keep_their_corrected_moments(
    channel_dim: str, dtype: str, device: str, build: Builder
) -> None:
    """Selected channels have an update a step, deferred ones one a window: AdamW's step is the largest, and the moments
    that it will correct for bias are those of each channel, to one rounding of fp32 (relative, 2**-23); C12: whatever
    dtype the weights have."""
    parameters = make_parameters(SHAPES, DTYPES[dtype], device)
    engine = build(parameters, **{**SETTINGS, "channel_dim": channel_dim, "select_interval": 50}, betas=(0.8, 0.99))
    for grads in make_gradients(SHAPES, DTYPES[dtype], 6):
        feed(parameters, grads)
        engine.step()
    with pytest.raises(RuntimeError, match="flush"):
        engine.adamw_state_dict()
    engine.flush()
    exported = engine.adamw_state_dict()["state"]
    for index, parameter in enumerate(parameters):
        own, entry = engine.channel_state(parameter), exported[index]
        assert entry["step"].item() == 6
        if index in (0, 1, 5):
            assert set(own.step.tolist()) == {2, 6}
        per_channel = own.step.double().view((-1, 1) if channel_dim == "row" else (1, -1))
        for name, beta in (("exp_avg", 0.8), ("exp_avg_sq", 0.99)):
            assert entry[name].dtype == torch.float32
            expected = getattr(own, name).double() / (1 - beta**per_channel)
            actual = entry[name].reshape(expected.shape).double() / (1 - beta**6)
            torch.testing.assert_close(actual, expected, rtol=2**-23, atol=0)
    torch.optim.AdamW(parameters).load_state_dict(engine.adamw_state_dict())


def change(name: str, value: Any) -> Any:
    return lambda state: state["param_groups"][0].update({name: value})


NOT_OURS = {
    "amsgrad": (change("amsgrad", True), "amsgrad is True"),
    "maximize": (change("maximize", True), "maximize is True"),
    "adam": (change("decoupled_weight_decay", False), "decoupled_weight_decay is False"),
    "shape": (lambda state: state["state"][0].update(exp_avg=torch.zeros(3)), r"exp_avg of parameter 0.*\(3,\)"),
    "no-tensor": (lambda state: state["state"][1].update(exp_avg_sq=3), "exp_avg_sq of parameter 1.* is 3"),
    "half-a-step": (lambda state: state["state"][0].update(step=torch.tensor(1.5)), "step of parameter 0.* is 1.5"),
    "no-end-of-steps": (lambda state: state["state"][0].update(step=torch.tensor(math.inf)), "step of .* is inf"),
    "many-steps": (lambda state: state["state"][0].update(step=2.0**80), r"step of .*; allowed .* 2\*\*31 - 1"),
    "two-steps": (lambda state: state["state"][0].update(step=torch.ones(2)), r"step of .* is tensor\(\[1., 1.\]\)"),
    "step-of-none": (lambda state: state["state"][0].update(step=None), "step of .* is None"),
    "nan": (lambda state: state["state"][0]["exp_avg"].fill_(float("nan")), "exp_avg of parameter 0.*NaN"),
    "stranger": (lambda state: state["state"].update({9: state["state"][0]}), r"entries \[9\]"),
    "masters": (lambda state: None, "2 masters.*one for each of 7"),
}


def test_what_adamw_has_and_we_have_not_is_refused_by_name(device: str, build: Builder) -> None:
    first, second = (make_parameters(SHAPES, device=device, seed=seed) for seed in (0, 1))
    adamw = torch.optim.AdamW(first, **ADAMW)
    feed(first, make_gradients(SHAPES, steps=1)[0])
    adamw.step()
    engine, kept = build(second, **{**SETTINGS, "lr": 0.5}), snapshot(second)
    for name, (spoil, words) in NOT_OURS.items():
        state = copy.deepcopy(adamw.state_dict())
        spoil(state)
        with pytest.raises(ValueError, match=words):
            engine.load_adamw_state_dict(state, masters=second[:2] if name == "masters" else None)
        assert engine.param_groups[0]["lr"] == 0.5, name
        assert engine.state_dict()["state"] == {}, name
        for index, (weight, expected) in enumerate(zip(second, kept, strict=True)):
            assert_same_bits(weight, expected, f"weight {index} after {name}")
