"""Masters, moments and rates below the weights' precision."""

from __future__ import annotations

import math

import pytest
import torch

from tests.engine.driving import (
    DTYPES,
    SHAPES,
    Builder,
    Pair,
    ReferencePair,
    assert_same_bits,
    feed,
    groups_of,
    make_gradients,
    make_parameters,
    snapshot,
)
from tests.engine.simulation import Reference


@pytest.mark.parametrize("topk_ratio", [0, 0.5, 1], ids=lambda k: f"k={k}")
def test_c9_small_steps_are_not_lost_in_bf16(topk_ratio: float, device: str, build: Builder) -> None:
    """C9: a bf16 weight of 1.0, lr 1e-3, 100 steps: follows AdamW on fp32 masters, not frozen at 1."""
    weight = torch.nn.Parameter(torch.ones(4, 6, dtype=torch.bfloat16, device=device))
    settings = {"update_interval": 1, "overlap_step": False, "topk_ratio": topk_ratio}
    pair = ReferencePair(build, [weight], lr=1e-3, weight_decay=0.0, **settings)
    for _ in range(100):
        pair.step([torch.ones(4, 6, dtype=torch.bfloat16)])
    assert bool(((weight - 0.9).abs() < 0.005).all())


def test_c10_decay_alone_follows_the_exponential_in_both_halves(device: str, build: Builder) -> None:
    """C10: bf16, zero gradient, decay .01, lr 1e-2, 1,000 steps under `linear`: the factor is e^-.1."""
    weight = torch.nn.Parameter(torch.ones(4, 10, dtype=torch.bfloat16, device=device))
    engine = build([weight], lr=1e-2, weight_decay=0.01, topk_ratio=0.3, update_interval=4)
    for _ in range(1000):
        feed([weight], [torch.zeros(4, 10, dtype=torch.bfloat16)])
        engine.step()
    engine.flush()
    state = engine.channel_state(weight)
    expected = torch.full((4, 10), (1 - 1e-4) ** 1000)
    torch.testing.assert_close(state.master, expected, rtol=1e-4, atol=0)
    assert float(state.master[0, 0]) == pytest.approx(math.exp(-0.1), rel=1e-4)
    assert int(state.selected.sum()) == 3
    assert_same_bits(weight, state.master.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_r2_windows_are_reference_steps_on_their_mean_gradients(dtype: str, device: str, build: Builder) -> None:
    """R2: no decay, scale `none`: N windows equal N AdamW steps, each on its window's mean."""
    shapes = [(6, 10), (5, 7)]
    parameters = make_parameters(shapes, DTYPES[dtype], device)
    settings = {"lr": 0.02, "weight_decay": 0.0, "topk_ratio": 0, "deferred_lr_scale": "none"}
    engine = build(parameters, ring_dtype="float32", update_interval=4, **settings)
    reference = Reference(snapshot(parameters), groups_of(engine, parameters))
    stream = make_gradients(shapes, DTYPES[dtype], 20)
    for grads in stream:
        feed(parameters, grads)
        engine.step()
    engine.flush()
    for start in range(0, 20, 4):
        window = [[grad.float() for grad in grads] for grads in stream[start : start + 4]]
        reference.step([(a + b + c + d) / 4 for a, b, c, d in zip(*window, strict=True)])
    for index, parameter in enumerate(parameters):
        assert_same_bits(parameter, reference.visible(index), f"weight {index}")
        assert_same_bits(engine.channel_state(parameter).master, reference.states[index].master, f"master {index}")
        assert set(engine.channel_state(parameter).step.tolist()) == {5}


def test_r3_bits_below_bf16_survive_selections(device: str, build: Builder) -> None:
    """R3: a channel that changes owner keeps the master's low bits; owners rotate by construction."""
    weight = torch.nn.Parameter(torch.full((4, 6), 1.0, dtype=torch.bfloat16, device=device))
    engine = build(
        [weight], lr=1e-4, weight_decay=0.0, topk_ratio=1 / 6, update_interval=1, select_interval=1, overlap_step=False
    )
    for step in range(18):
        grad = torch.full((4, 6), 0.5, dtype=torch.bfloat16)
        grad[:, step % 6] = 1.0
        feed([weight], [grad])
        engine.step()
        assert engine.channel_state(weight).selected.nonzero().flatten().tolist() == [step % 6]
    master = engine.channel_state(weight).master
    assert set(engine.channel_state(weight).step.tolist()) == {18}
    assert not torch.equal(master.bfloat16().float(), master)
    torch.testing.assert_close(master, torch.full((4, 6), 1 - 18e-4), rtol=0, atol=3e-4)
    assert bool((weight.float() - master.to(device)).abs().max() < 2**-8)


class Scale:
    """What GradScaler hands to an optimizer that reads the scale itself."""

    def __init__(self, engine: torch.optim.Optimizer, device: str, scale: float, found_inf: float = 0.0) -> None:
        engine.grad_scale = torch.tensor(scale, device=device)
        engine.found_inf = torch.tensor(found_inf, device=device)


@pytest.mark.parametrize("topk_ratio", [0, 0.4, 1], ids=lambda k: f"k={k}")
def test_r4_both_halves_are_unscaled_and_clipped(topk_ratio: float, device: str, build: Builder) -> None:
    """R4: fp16 gradients that carry a scale of 2^16, clip 1e-3: AdamW on fp32 masters with the true gradients."""
    shapes = [(6, 10), (5, 7), (3,)]
    parameters = make_parameters(shapes, torch.float16, device)
    engine = build(
        parameters, lr=0.01, topk_ratio=topk_ratio, update_interval=1, overlap_step=False, max_grad_norm=1e-3
    )
    reference = Reference(snapshot(parameters), groups_of(engine, parameters), max_grad_norm=1e-3)
    for grads in make_gradients(shapes, torch.float16, 8, exact=True):
        scaled = [grad * 2.0**11 for grad in grads]
        true = [grad.float() / 2.0**16 for grad in scaled]
        feed(parameters, scaled)
        Scale(engine, device, 2.0**16)
        engine.step()
        del engine.grad_scale, engine.found_inf
        reference.step(true)
        norm = sum(float(grad.double().square().sum()) for grad in true) ** 0.5
        assert norm > 1e-3
        assert engine.stats().grad_norm == pytest.approx(norm, rel=1e-6)
    for index, parameter in enumerate(parameters):
        assert_same_bits(parameter, reference.visible(index), f"weight {index}")
        assert_same_bits(engine.channel_state(parameter).exp_avg, reference.states[index].exp_avg, f"exp_avg {index}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clip", [None, 1.0], ids=["no-clip", "clip"])
def test_grad_scaler_trains_as_no_scaler_does(clip: float | None, dtype: str, device: str, build: Builder) -> None:
    """Scale 2^k is exact here: the scaled run equals the plain one; inf steps are counted skips and halve the scale."""
    if device != "cpu" and dtype == "bf16":
        pytest.skip("torch's GradScaler does not take bf16 gradients on CUDA")
    shapes = [(6, 10), (5, 7), (3,)]
    plain = Pair(build, make_parameters(shapes, DTYPES[dtype], device), lr=0.02, topk_ratio=0.3, max_grad_norm=clip)
    parameters = make_parameters(shapes, DTYPES[dtype], device)
    engine = build(parameters, lr=0.02, topk_ratio=0.3, max_grad_norm=clip)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=4)
    scales = []
    for step, grads in enumerate(make_gradients(shapes, DTYPES[dtype], 11, exact=True), start=1):
        if step in (3, 7):
            grads[step % 2][1, 2] = float("inf")
        plain.step(grads)
        engine.zero_grad()
        loss = sum((p * g.to(device)).float().sum() for p, g in zip(parameters, grads, strict=True))
        scaler.scale(loss).backward()
        scaler.step(engine)
        scaler.update()
        scales.append(scaler.get_scale())
        for index, (one, other) in enumerate(zip(parameters, plain.parameters, strict=True)):
            assert_same_bits(one, other, f"weight {index} after step {step}")
    assert engine.stats().skipped_steps == 2
    assert scales[1:3] == [2.0**8, 2.0**7]
    assert scales[6] == scales[5] / 2
    assert scales[10] == 2 * scales[9]
    for one, other in zip(parameters, plain.parameters, strict=True):
        assert_same_bits(engine.channel_state(one).exp_avg, plain.engine.channel_state(other).exp_avg)


def test_grad_scaler_with_unscale_and_clip_grad_norm(device: str, build: Builder) -> None:
    """`unscale_` first: the gradients are true ones then, and no scale may be taken off again."""
    parameters = make_parameters(SHAPES[:3], device=device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
    for grads in make_gradients(SHAPES[:3], steps=6):
        pair.engine.zero_grad()
        scaler.scale(sum((p * g.to(device)).sum() for p, g in zip(parameters, grads, strict=True))).backward()
        scaler.unscale_(pair.engine)
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        pair.model.groups = groups_of(pair.engine, parameters)
        pair.model.step([parameter.grad.detach().cpu().clone() for parameter in parameters])
        scaler.step(pair.engine)
        scaler.update()
        pair.check_weights()
    pair.check_state()


def test_found_inf_alone_skips_the_step(device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES[:3], torch.bfloat16, device)
    engine = build(parameters, lr=0.5, topk_ratio=0.3, update_interval=1, overlap_step=False)
    before = snapshot(parameters)
    feed(parameters, make_gradients(SHAPES[:3], torch.bfloat16, 1)[0])
    Scale(engine, device, 1.0, found_inf=1.0)
    engine.step()
    assert engine.stats().skipped_steps == 1
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)
        assert int(engine.channel_state(parameter).step.sum()) == 0
