"""Which parameters the engine takes, and what it does with odd, frozen, tied and grouped ones."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    DTYPES,
    Builder,
    Pair,
    ReferencePair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)

SYNCHRONOUS = {"update_interval": 1, "overlap_step": False}


@pytest.mark.parametrize("settings", [{}, {"topk_ratio": 0}, {"topk_ratio": 1}], ids=["default", "k=0", "k=1"])
def test_a2_scalars_and_vectors_are_updated_as_the_reference(
    settings: dict[str, Any], device: str, build: Builder
) -> None:
    shapes = [(), (1,), (7,), (8, 3)]
    parameters = [nn.Parameter(torch.tensor(1.0, device=device)), *make_parameters(shapes[1:], device=device)]
    pair = ReferencePair(build, parameters[:3], params=parameters, lr=0.01, **settings)
    for grads in make_gradients(shapes, steps=6):
        feed(parameters[3:], grads[3:])
        pair.step(grads[:3])
    pair.check_state(owners=False)
    assert parameters[0].shape == ()


def test_a2_parameters_on_two_devices_are_refused_by_name(build: Builder) -> None:
    here, there = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.zeros(4, 4, device="meta"))
    with pytest.raises(ValueError, match=r"head\.weight"):
        build([("body.weight", here), ("head.weight", there)])


def test_a3_a_small_ratio_selects_one_channel(device: str, build: Builder) -> None:
    """A3: (16, 4) at k 0.1 is max(1, round(.4)) = 1 channel; k 0 is none."""
    for ratio, expected in ((0.1, 1), (0.3, 1), (0.4, 2), (0, 0)):
        pair = Pair(build, make_parameters([(16, 4)], device=device), topk_ratio=ratio)
        for grads in make_gradients([(16, 4)], steps=5):
            pair.step(grads)
        assert int(pair.engine.channel_state(pair.parameters[0]).selected.sum()) == expected
        pair.check_state()


def test_a3_ratio_zero_stores_an_empty_int64_selection(device: str, build: Builder) -> None:
    parameters = make_parameters([(16, 4)], device=device)
    engine = build(parameters, topk_ratio=0)
    feed(parameters, [torch.ones(16, 4)])
    engine.step()
    selected = engine.state_dict()["state"][0]["selected"]
    assert (selected.dtype, tuple(selected.shape)) == (torch.int64, (0,))


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_a13_a_convolution_picks_as_its_matrix(channel_dim: str, device: str, build: Builder) -> None:
    """A13: (8, 4, 5, 3) and (8, 60)."""
    (grad,) = make_gradients([(8, 4, 5, 3)], steps=1)[0]
    picks = []
    for shape in ((8, 4, 5, 3), (8, 60)):
        parameters = make_parameters([shape], device=device)
        engine = build(parameters, topk_ratio=0.25, channel_dim=channel_dim)
        feed(parameters, [grad.reshape(shape)])
        engine.step()
        state = engine.channel_state(parameters[0])
        assert state.master.shape == (8, 60)
        picks.append(state.selected)
    sums = grad.reshape(8, 60).square().sum(0 if channel_dim == "column" else 1)
    count = 15 if channel_dim == "column" else 2
    assert torch.equal(picks[0], picks[1])
    assert set(picks[0].nonzero().flatten().tolist()) == set(sums.topk(count).indices.tolist())


def test_b8_groups_keep_their_settings_in_both_halves(device: str, build: Builder) -> None:
    """B8: lr 1e-3 with decay .1, lr 0 with decay .1, lr 1e-3 with decay 0 and other betas."""
    shapes = [(6, 10), (6, 10), (6, 10), (5,), (5,)]
    parameters = make_parameters(shapes, torch.bfloat16, device)
    before = snapshot(parameters)
    groups = [
        {"params": parameters[0:1] + parameters[3:4], "lr": 1e-2, "weight_decay": 0.1},
        {"params": parameters[1:2] + parameters[4:5], "lr": 0.0, "weight_decay": 0.1},
        {"params": parameters[2:3], "lr": 1e-2, "weight_decay": 0.0, "betas": (0.5, 0.7), "eps": 1e-3},
    ]
    pair = Pair(build, parameters, params=groups, topk_ratio=0.3, select_interval=8)
    for grads in make_gradients(shapes, torch.bfloat16, 14):
        pair.step(grads)
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()
    pair.check_state()
    assert_same_bits(parameters[1], before[1])
    assert_same_bits(parameters[4], before[4])
    assert not torch.equal(parameters[0].detach().cpu(), before[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_b10_odd_sizes_in_every_dtype(dtype: str, device: str, build: Builder) -> None:
    """B10: 1, 7, 8, 15 and 1025 elements, in one bucket and deferred, follow AdamW on fp32 masters."""
    shapes = [(1, 1), (1, 7), (2, 4), (3, 5), (25, 41)]
    parameters = make_parameters(shapes, DTYPES[dtype], device)
    pair = ReferencePair(build, parameters, topk_ratio=0, lr=0.01, weight_decay=0.1, **SYNCHRONOUS)
    for grads in make_gradients(shapes, DTYPES[dtype], 5):
        pair.step(grads)
    pair.check_state(owners=False)


def test_mixed_dtypes_in_one_model(device: str, build: Builder) -> None:
    shapes = [(6, 10), (9, 4), (5, 7), (3,)]
    dtypes = [torch.bfloat16, torch.float32, torch.float16, torch.float32]
    parameters = [make_parameters([s], d, device)[0] for s, d in zip(shapes, dtypes, strict=True)]
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, select_interval=8)
    for grads in make_gradients(shapes, steps=10):
        pair.step([grad.to(dtype) for grad, dtype in zip(grads, dtypes, strict=True)])
    pair.check_state()


def test_b11_frozen_parameters_have_no_state_and_start_afresh(device: str, build: Builder) -> None:
    """B11: one frozen, unfrozen at step 5 in the middle of everything; a whole group frozen throughout."""
    shapes = [(6, 8), (5, 9), (4, 4), (3,)]
    parameters = make_parameters(shapes, torch.bfloat16, device)
    for parameter in parameters[1:]:
        parameter.requires_grad_(False)
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 1.0}]
    settings = {"lr": 0.02, "topk_ratio": 0.3, "select_interval": 4, **SYNCHRONOUS}
    pair = ReferencePair(build, parameters[:2], params=groups, **settings)
    frozen = snapshot(parameters[2:])
    for step, grads in enumerate(make_gradients(shapes, torch.bfloat16, 12), start=1):
        if step == 5:
            assert 1 not in pair.engine.state_dict()["state"]
            parameters[1].requires_grad_(True)
        pair.step([grads[0], grads[1] if step >= 5 else None])
    pair.check_state(owners=False)
    assert set(pair.engine.channel_state(parameters[1]).step.tolist()) == {8}
    for parameter, before in zip(parameters[2:], frozen, strict=True):
        assert_same_bits(parameter, before)
    assert not pair.engine.state_dict()["state"].keys() & {2, 3}


def test_b11_everything_frozen_is_no_work(device: str, build: Builder) -> None:
    parameters = make_parameters([(6, 8), (3,)], device=device)
    for parameter in parameters:
        parameter.requires_grad_(False)
    engine, before = build(parameters, lr=1.0), snapshot(parameters)
    for _ in range(5):
        engine.step()
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)
    assert engine.stats().steps == 5


def test_a_group_added_later_is_trained(device: str, build: Builder) -> None:
    """`add_param_group` in the middle of a run: a fresh t, its own settings, and a deferred half of its own."""
    shapes = [(6, 8), (3,), (5, 9), (4,)]
    parameters = make_parameters(shapes, torch.bfloat16, device)
    pair = ReferencePair(build, parameters[:2], lr=0.02, topk_ratio=0.3, select_interval=3, **SYNCHRONOUS)
    for step, grads in enumerate(make_gradients(shapes, torch.bfloat16, 10), start=1):
        if step == 4:
            pair.engine.add_param_group({"params": parameters[2:], "lr": 0.05, "weight_decay": 0.2})
            pair.add(parameters[2:])
        pair.step(grads[: len(pair.parameters)])
    pair.check_state(owners=False)
    assert set(pair.engine.channel_state(parameters[2]).step.tolist()) == {7}
    assert int((~pair.engine.channel_state(parameters[2]).selected).sum()) == 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


def test_b18_tied_weights_are_one_parameter_with_the_summed_gradient(device: str, build: Builder) -> None:
    torch.manual_seed(0)
    model = Tied().to(device)
    assert len(list(model.parameters())) == 1
    pair = Pair(build, [model.embed.weight], lr=0.05, topk_ratio=0.3, update_interval=2, overlap_step=False)
    tokens = torch.arange(10, device=device).reshape(2, 5)
    for _ in range(6):
        pair.engine.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        pair.step_on_grad()
    assert model.head.weight is model.embed.weight
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert len(pair.engine.state_dict()["state"]) == 1
    pair.check_state()


def test_b18_the_same_parameter_given_twice_is_updated_once(device: str, build: Builder) -> None:
    (weight,) = make_parameters([(4, 6)], device=device)
    (grads,) = make_gradients([(4, 6)], steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pair = ReferencePair(build, [weight], params=[weight, weight], lr=0.1, topk_ratio=0.3, **SYNCHRONOUS)
    pair.step(grads)
    pair.check_state(owners=False)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("names", [False, True], ids=["plain", "named"])
def test_b18_a_parameter_given_twice_is_one_state_after_a_load(names: bool, device: str, build: Builder) -> None:
    """B18: torch's numbers skip the place of the other; with another group behind, from our own state and to AdamW and
    back."""
    shapes = [(4, 6), (5, 7), (3,), (6, 4)]
    stream = make_gradients(shapes, torch.bfloat16, 9)
    settings = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 3, "select_interval": 4}

    def engine_over(parameters: list[nn.Parameter]) -> Any:
        first, second, third, fourth = parameters
        group = [first, second, first, third]
        if names:
            group = list(zip(("embedding", "body", "head", "bias"), group, strict=True))
        return build([{"params": group}, {"params": [("last", fourth)] if names else [fourth]}], **settings)

    runs = [make_parameters(shapes, torch.bfloat16, device, seed=seed) for seed in (0, 1, 2)]
    engines = [engine_over(parameters) for parameters in runs]
    for number, grads in enumerate(stream):
        if number == 5:
            saved = engines[0].state_dict()
            assert len(saved["state"]) == 4
            engines[1].load_state_dict(saved)
        for parameters, engine in list(zip(runs, engines, strict=True))[: 1 + (number >= 5)]:
            feed(parameters, grads)
            engine.step()
    for index, (one, other) in enumerate(zip(runs[0], runs[1], strict=True)):
        assert_same_bits(other, one, f"weight {index}")
    engines[0].flush()
    masters = [engines[0].channel_state(one).master.reshape(one.shape) for one in runs[0]]
    engines[2].load_adamw_state_dict(engines[0].adamw_state_dict(), masters=masters)
    for index, (one, other) in enumerate(zip(runs[0], runs[2], strict=True)):
        assert_same_bits(other, one, f"weight {index} from AdamW")
        assert_same_bits(engines[2].channel_state(other).master.reshape(one.shape), masters[index], f"master {index}")
    with pytest.raises(ValueError, match=r"entries \[0\]; this optimizer's 4 parameters go up to 4"):
        saved["state"][0] = saved["state"][1]
        engines[2].load_state_dict(saved)


@pytest.mark.parametrize("dtype", DTYPES)
def test_b16_construction_changes_no_bit_of_the_model(dtype: str, device: str, build: Builder) -> None:
    """B16: on a trained model the first loss is the model's own, tied or not."""
    torch.manual_seed(0)
    model = nn.Sequential(Tied(), nn.LayerNorm(11), nn.Linear(11, 5)).to(DTYPES[dtype]).to(device)
    tokens = torch.arange(10, device=device).reshape(2, 5)
    before, loss = copy.deepcopy(model.state_dict()), model(tokens).float().logsumexp(-1).sum()
    build(model.parameters(), topk_ratio=0.3)
    for name, value in model.state_dict().items():
        assert_same_bits(value, before[name], name)
    assert float(model(tokens).float().logsumexp(-1).sum()) == float(loss)


@pytest.mark.parametrize("when", ["before-the-first-step", "at-a-window's-end", "mid-window"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_b16_weights_loaded_later_are_kept(dtype: str, when: str, device: str, build: Builder) -> None:
    """B16: load_state_dict after construction, then steps at learning rate 0: the loaded weights stand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 6), nn.Linear(6, 7)).to(DTYPES[dtype]).to(device)
    loaded = {name: torch.randn_like(value) for name, value in model.state_dict().items()}
    engine = build(model.parameters(), lr=0.05, weight_decay=0, topk_ratio=0.3, overlap_step=False)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    steps_before = {"before-the-first-step": 0, "at-a-window's-end": 4, "mid-window": 6}[when]
    for step, grads in enumerate(make_gradients(shapes, DTYPES[dtype], steps_before + 8)):
        if step == steps_before:
            model.load_state_dict(loaded)
            for group in engine.param_groups:
                group["lr"] = 0.0
        feed(list(model.parameters()), grads)
        engine.step()
    engine.flush()
    for name, value in model.state_dict().items():
        assert_same_bits(value, loaded[name], name)
