"""How gradients come in: accumulation, hooks, gaps, bad values, odd layouts, closures."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.driving import (
    DTYPES,
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

MATRICES = [(6, 10), (9, 4), (3,)]


def test_a6_each_window_sums_its_own_gradients_only(device: str, build: Builder) -> None:
    """A6: constant gradient 1, three windows of 4. The sum one step before each end is 3, the mean at each end is 1."""
    (weight,) = parameters = make_parameters([(4, 8)], torch.bfloat16, device)
    engine = build(parameters, topk_ratio=0, update_interval=4, betas=(0.0, 0.999))
    for step in range(1, 13):
        feed(parameters, [torch.ones(4, 8, dtype=torch.bfloat16)])
        engine.step()
        if step % 4 == 3:
            accumulator = engine.state_dict()["state"][0]["accumulator"]
            assert torch.equal(accumulator.float().cpu(), torch.full((4, 8), 3.0))
        if step % 4 == 0:
            assert torch.equal(engine.channel_state(weight).exp_avg, torch.ones(4, 8))


def test_b3_b4_four_backward_passes_are_one_large_batch(device: str, build: Builder) -> None:
    """B3, B4: distinct micro-gradients, one step: the norm and the update are those of the whole batch."""
    rows = torch.randint(-3, 4, (8, 6), generator=torch.Generator().manual_seed(2)).float().to(device)
    results = []
    for batches in (rows.split(8), rows.split(2)):
        (weight,) = parameters = make_parameters([(5, 6)], device=device)
        engine = build(parameters, lr=0.01, topk_ratio=0.4, update_interval=1, overlap_step=False, max_grad_norm=1.0)
        for _ in range(3):
            engine.zero_grad()
            for batch in batches:
                (batch @ weight.T).sum().backward()
            norm = float(weight.grad.double().norm())
            engine.step()
            assert engine.stats().grad_norm == pytest.approx(norm, rel=1e-6)
        results.append((weight.detach().clone(), engine.channel_state(weight)))
    assert_same_bits(results[0][0], results[1][0])
    assert_same_bits(results[0][1].exp_avg, results[1][1].exp_avg)
    assert_same_bits(results[0][1].exp_avg_sq, results[1][1].exp_avg_sq)


def test_b19_accumulation_is_divided_by_the_user_alone(device: str, build: Builder) -> None:
    """B19: the loop accumulates 4 micro-batches while U = 4: the deferred mean is over steps, not micro-batches."""
    (weight,) = parameters = make_parameters([(3, 4)], device=device)
    engine = build(parameters, topk_ratio=0, update_interval=4, betas=(0.0, 0.999), overlap_step=False)
    for step in range(1, 5):
        engine.zero_grad()
        for _ in range(4):
            (weight * float(step) / 4).sum().backward()
        engine.step()
    assert torch.equal(engine.channel_state(weight).exp_avg, torch.full((3, 4), (1 + 2 + 3 + 4) / 4))


def shrink(parameter: nn.Parameter) -> None:
    parameter.grad.mul_(0.125)


@pytest.mark.parametrize("kind", ["tensor-hook", "post-accumulate-hook"])
def test_b5_the_norm_is_of_the_gradients_that_hooks_left(kind: str, device: str, build: Builder) -> None:
    """B5: a hook scales by a power of two; the logged norm and the one coefficient use the edited values."""
    parameters = make_parameters(MATRICES, device=device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2, max_grad_norm=1.0)
    for parameter in parameters:
        if kind == "tensor-hook":
            parameter.register_hook(lambda grad: grad * 0.125)
        else:
            parameter.register_post_accumulate_grad_hook(shrink)
    for grads in make_gradients(MATRICES, steps=6, exact=True):
        pair.engine.zero_grad()
        sum((p * g.to(device)).sum() for p, g in zip(parameters, grads, strict=True)).backward()
        edited = sum(float(g.double().square().sum()) for g in grads) ** 0.5 / 8
        assert edited != pytest.approx(1.0, rel=1e-2)
        pair.step_on_grad()
        assert pair.engine.stats().grad_norm == pytest.approx(edited, rel=1e-6)
    pair.check_state()


def test_norm_counts_selected_deferred_and_whole_channels(device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, topk_ratio=0.3)
    for grads in make_gradients(SHAPES, torch.bfloat16, 5):
        feed(parameters, grads)
        engine.step()
        expected = sum(float(g.double().square().sum()) for g in grads) ** 0.5
        assert engine.stats().grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("dtype", "value"), [(torch.bfloat16, 3e38), (torch.float32, 3e38), (torch.float16, 65504.0)])
def test_norm_cannot_overflow_on_finite_gradients(
    dtype: torch.dtype, value: float, device: str, build: Builder
) -> None:
    parameters = make_parameters([(16, 24)], dtype, device)
    engine = build(parameters, lr=1e-3, topk_ratio=0.25, max_grad_norm=1.0)
    feed(parameters, [torch.full((16, 24), value, dtype=dtype)])
    engine.step()
    stats = engine.stats()
    exact = float(torch.full((16, 24), value, dtype=dtype).double().norm())
    assert stats.skipped_steps == 0
    assert stats.grad_norm == pytest.approx(exact, rel=1e-5) or exact > torch.finfo(torch.float32).max
    assert bool(engine.channel_state(parameters[0]).exp_avg.isfinite().all())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["bf16", "fp32"])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_a_window_s_sum_of_finite_gradients_may_overflow(
    max_grad_norm: float | None, name: str, rule: str, device: str, build: Builder
) -> None:
    """Three gradients of 3e38 and a mean of 3e38: no step is skipped, and the element decays and moves no further, as
    under AdamW with that mean; it never becomes NaN."""
    parameters = make_parameters(MATRICES, DTYPES[name], device)
    settings = {"topk_ratio": 0.2, "update_interval": 3, "lr": 0.1, "weight_decay": 0.5, "max_grad_norm": max_grad_norm}
    pair = Pair(build, parameters, **settings, **RULES[rule], overlap_step=False)
    for step, grads in enumerate(make_gradients(MATRICES, DTYPES[name], 12)):
        if step:  # the first has selected other channels
            grads[0][2, 7], grads[1][3, 1] = 3e38, -3e38
        pair.step(grads, check=max_grad_norm is None)  # else the norm's last bit may differ
    assert pair.engine.stats().skipped_steps == 0
    for parameter, (row, col) in zip(parameters, ((2, 7), (3, 1)), strict=False):
        state = pair.engine.channel_state(parameter)
        assert not state.selected[col]
        assert bool(parameter.isfinite().all() and state.master.isfinite().all() and state.exp_avg.isfinite().all())
        assert bool(state.exp_avg_sq[row, col].isinf()) is (max_grad_norm is None)


def test_b6_an_unused_layer_with_accumulation_and_clipping(device: str, build: Builder) -> None:
    """B6: the unused layer has no gradient: no decay, no t, its bits stay; a NaN norm is a counted skip."""
    torch.manual_seed(0)
    used, unused = nn.Linear(6, 8).to(device), nn.Linear(6, 8).to(device)
    before = unused.weight.detach().clone()
    engine = build([*used.parameters(), *unused.parameters()], lr=0.1, weight_decay=0.5, max_grad_norm=0.1)
    for step in range(10):
        engine.zero_grad()
        for _ in range(2):
            used(torch.full((2, 6), float("nan") if step == 5 else 1.0, device=device)).sum().backward()
        engine.step()
    engine.flush()
    assert_same_bits(unused.weight, before)
    assert engine.channel_state(unused.weight).step.sum() == 0
    assert engine.stats().skipped_steps == 1
    assert bool(used.weight.isfinite().all())
    assert engine.channel_state(used.bias).step.tolist() == [9]


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_without_any_gradient_warns_once_at_the_caller_s_line(
    scheduled: bool, device: str, build: Builder
) -> None:
    """Whatever torch has wrapped around step()."""
    (parameter,) = make_parameters([(6, 8)], device=device)
    engine = build([parameter])
    if scheduled:
        torch.optim.lr_scheduler.ConstantLR(engine)
    with pytest.warns(UserWarning, match="found no gradient in any of its parameters") as warned:
        line = sys._getframe().f_lineno + 1
        engine.step()
    assert [(Path(warning.filename), warning.lineno) for warning in warned] == [(Path(__file__), line)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step()


@pytest.mark.parametrize("value", ["inf", "-inf", "nan"])
@pytest.mark.parametrize("half", ["selected", "deferred", "whole"])
def test_b7_one_bad_value_changes_no_state(half: str, value: str, device: str, build: Builder) -> None:
    """B7: the step is skipped in both halves, counted, and later steps are what they are without it."""
    parameters = make_parameters(MATRICES, torch.bfloat16, device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=4)
    stream = make_gradients(MATRICES, torch.bfloat16, 9)
    for step, grads in enumerate(stream, start=1):
        if step == 3:
            before = [pair.engine.channel_state(parameter) for parameter in parameters]
            weights = snapshot(parameters)
            selected = before[0].selected
            column = int(selected.nonzero()[0] if half == "selected" else (~selected).nonzero()[0])
            target = grads[2][1:2] if half == "whole" else grads[0][2, column : column + 1]
            target.fill_(float(value))
        pair.step(grads)
        if step == 3:
            for index, (parameter, old) in enumerate(zip(parameters, before, strict=True)):
                new = pair.engine.channel_state(parameter)
                assert torch.equal(new.step, old.step)
                for name in ("master", "exp_avg", "exp_avg_sq"):
                    assert_same_bits(getattr(new, name), getattr(old, name), f"{name} of {index}")
                assert_same_bits(parameter, weights[index])
    pair.check_state()
    assert pair.engine.stats().skipped_steps == 1


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced", "channels-last"])
def test_a_gradient_of_any_layout(layout: str, device: str, build: Builder) -> None:
    shape = (6, 4, 3, 3) if layout == "channels-last" else (6, 10)
    (weight,) = parameters = make_parameters([shape], torch.bfloat16, device)
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2)
    for (grad,) in make_gradients([shape], torch.bfloat16, 6):
        grad = grad.to(device)
        if layout == "transposed":
            weight.grad = grad.t().contiguous().t()
        elif layout == "expanded":
            weight.grad = grad[:, :1].expand(6, 10)
        elif layout == "sliced":
            weight.grad = torch.zeros(6, 21, dtype=grad.dtype, device=device)[:, 1::2].copy_(grad)
        else:
            weight.grad = grad.to(memory_format=torch.channels_last)
        assert not weight.grad.is_contiguous()
        pair.step_on_grad()
    pair.check_state()


def test_step_leaves_gradients_alone(device: str, build: Builder) -> None:
    parameters = make_parameters(MATRICES, device=device)
    engine = build(parameters, topk_ratio=0.3, update_interval=1, max_grad_norm=0.1)
    for grads in make_gradients(MATRICES, steps=3):
        feed(parameters, grads)
        pointers = [parameter.grad.data_ptr() for parameter in parameters]
        engine.step()
        assert [parameter.grad.data_ptr() for parameter in parameters] == pointers
        for parameter, grad in zip(parameters, grads, strict=True):
            assert_same_bits(parameter.grad, grad)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_may_come_at_once(set_to_none: bool, device: str, build: Builder) -> None:
    """The next step's gradients overwrite this one's memory while the worker is still busy with it."""
    pair = Pair(build, make_parameters(MATRICES, torch.bfloat16, device), topk_ratio=0.3, update_interval=2)
    for grads in make_gradients(MATRICES, torch.bfloat16, 8):
        sum((p.float() * g.to(device)).sum() for p, g in zip(pair.parameters, grads, strict=True)).backward()
        pair.step_on_grad()
        pair.engine.zero_grad(set_to_none=set_to_none)
        if not set_to_none:
            assert all(not bool(p.grad.any()) for p in pair.parameters)
    pair.check_state()


def test_a_closure_is_evaluated_once_and_first(device: str, build: Builder) -> None:
    (weight,) = parameters = make_parameters([(4, 6)], device=device)
    engine = build(parameters, lr=0.1, topk_ratio=0.5, update_interval=1, overlap_step=False)
    before, seen = weight.detach().clone(), []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        engine.zero_grad()
        seen.append(weight.detach().clone())
        loss = (weight * 2.0).sum()
        loss.backward()
        return loss

    loss = engine.step(closure)
    assert len(seen) == 1
    assert_same_bits(seen[0], before)
    assert float(loss) == pytest.approx(float(before.double().sum() * 2), rel=1e-4, abs=1e-4)
    assert not torch.equal(weight, before)
    assert engine.step() is None
