"""One step against the same step in float64, with a bound for every rounding that the written order makes.

u is the unit roundoff of fp32, 2**-24. With exact constants, in units of u and to first order:

    g     2 |g|                                             two scales
    m     (2 + 2) M,  M = |beta1 m| + |(1 - beta1) g|       g, the product, the sum
    v     (2 * 2 + 3) V                                     g twice, two products, the sum
    p     |p decay| + |p_new| + 13.5 step M / d             d = sqrt(v) scale + eps is off by 3.5 + 3; m, the quotient
                                                            and the step's two products make the rest
    sum   2 |g| + |sum|                                     and the accumulator's own rounding

The whole numbers above these, below, leave room for the second order.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from zenflow_kernels.control import FOLD_ADD, FOLD_OVERWRITE
from zenflow_kernels.fused_step import fused_step
from zenflow_kernels.numerics import HYPER

from tests.kernels.building import Spec, World, make_world

U, U_BF16 = 2.0**-24, 2.0**-8
TINY = 1e-37  # below it fp32 has no relative precision
SPECS = [
    Spec("column", 7, 13, 3),
    Spec("column", 3, 701, 70, group=1),
    Spec("row", 13, 7, 3),
    Spec("row", 5, 517, 2, group=1),
    Spec("whole", 3, 11),
    Spec("whole", 1, 997, group=1),
    Spec("column", 1, 1, 1),
]
SCALES = (0.5, 0.37)


def float64_of(world: World) -> dict[str, Tensor]:
    return {
        name: tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu().clone()
        for name, tensor in world.state().items()
    }


def assert_within(got: Tensor, exact: Tensor, bound: Tensor, name: str) -> None:
    """No element beyond its bound, and the root mean square well below it."""
    share = (got.cpu().double() - exact).abs() / (bound + TINY)
    assert share.max() <= 1, name
    assert share.square().mean().sqrt() <= 0.5, name


def assert_entry(world: World, number: int, old: dict[str, Tensor], grad: Tensor, add: bool) -> None:
    entry = world.table.entries[number]
    inv_scale, clip = (scale.item() for scale in (world.control.inv_scale, world.control.clip))
    g_all = grad.cpu().double() * inv_scale * clip
    if entry.slot is None:
        g, shape = g_all, (1, 1)
    else:
        slot = old[f"{number}.slot"]
        channel = torch.empty(entry.selected, dtype=torch.int64)
        channel[slot[slot >= 0].long()] = torch.nonzero(slot >= 0).view(-1)
        g, shape = g_all.index_select(entry.axis, channel), {1: (1, -1), 0: (-1, 1)}[entry.axis]
    h = dict(zip(HYPER, world.hyper[entry.group].tolist(), strict=False))
    t = (old[f"{number}.start"].long() + 40).clamp(max=world.bias.shape[1] - 1)
    first, second = world.bias[entry.group].cpu().double()[t].view(-1, 2).unbind(1)
    step, scale = h["lr"] * first.view(shape), second.view(shape)
    p, m, v = (old[f"{number}.{name}"] for name in ("master", "exp_avg", "exp_avg_sq"))
    m_new = h["beta1"] * m + h["one_minus_beta1"] * g
    big_m = (h["beta1"] * m).abs() + (h["one_minus_beta1"] * g).abs()
    v_new = h["beta2"] * v + h["one_minus_beta2"] * g * g
    d = v_new.sqrt() * scale + h["eps"]
    p_new = p * h["decay"] - step * m_new / d
    assert_within(entry.exp_avg, m_new, 5 * U * big_m, "exp_avg")
    assert_within(entry.exp_avg_sq, v_new, 8 * U * v_new, "exp_avg_sq")
    bound = 1.01 * U * ((p * h["decay"]).abs() + p_new.abs()) + 15 * U * step * big_m / d
    assert_within(entry.master, p_new, bound, "master")
    if entry.accumulator is not None:
        total = g_all + old[f"{number}.accumulator"] if add else g_all
        total.index_fill_(entry.axis, channel, 0)
        own = U if entry.accumulator.dtype == torch.float32 else U_BF16
        bound = 3 * U * g_all.abs() + 1.01 * (U + own) * total.abs()
        assert_within(entry.accumulator, total, bound, "accumulator")


@pytest.mark.parametrize("fold", [FOLD_OVERWRITE, FOLD_ADD], ids=["overwrite", "add"])
@pytest.mark.parametrize("acc_dtype", [torch.float32, torch.bfloat16], ids=["fp32 sum", "bf16 sum"])
def test_a_step_against_float64(fold, acc_dtype, device, dtype):
    world = make_world(SPECS, device, dtype, acc_dtype=acc_dtype, seed=fold)
    world.control.fold.fill_(fold)
    world.control.advance.fill_(40)
    world.control.inv_scale.fill_(SCALES[0])
    world.control.clip.fill_(SCALES[1])
    for grad in world.table.grads:
        grad.clamp_(-6e4, 6e4)  # fp16 cannot hold all that fp32 can
    old, grads = float64_of(world), list(world.table.grads)
    fused_step(world.table, world.control, world.hyper, world.bias)
    for number, grad in enumerate(grads):
        assert_entry(world, number, old, grad, fold == FOLD_ADD)
    world.pad.check()
