"""What `fused_step` does with the selected channels: AdamW in one share of the compact state, and their weights.

A share is the part of a parameter's compact state that one program updates, see `tiles`. Device code only.
"""

from __future__ import annotations

from zenflow_kernels import tiles
from zenflow_kernels.dispatch import tl, triton
from zenflow_kernels.numerics import HYPER, HYPER_WIDTH
from zenflow_kernels.stochastic_rounding import draws_at, round_to_bf16

N_HYPER = tl.constexpr(HYPER_WIDTH)
LR, EPS, DECAY = (tl.constexpr(HYPER.index(name)) for name in ("lr", "eps", "decay"))
BETA1, ONE_MINUS_BETA1 = (tl.constexpr(HYPER.index(name)) for name in ("beta1", "one_minus_beta1"))
BETA2, ONE_MINUS_BETA2 = (tl.constexpr(HYPER.index(name)) for name in ("beta2", "one_minus_beta2"))


@triton.jit
def scale_gradient(grad, inv_scale, clip):
    """fp32 `(grad * inv_scale) * clip`, two roundings."""
    return (grad.to(tl.float32) * inv_scale) * clip


@triton.jit
def write_share(
    fields_ptr, entry, state_0, position_0, dense_0, size, width,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """weight = round(master) in one share of the compact state."""
    cols = tiles.field(fields_ptr, entry, tiles.COLS)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    weight_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.WEIGHT), WEIGHT_DTYPE, ALIGNED) + dense_0
    master_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.MASTER), MASTER_DTYPE, ALIGNED) + state_0
    for offset in range(0, size, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        dense, _, mask = tiles.locate(offs, position_0, size, width, cols, channel_ptr, KIND)
        p = tl.load(master_ptr + offs, mask=mask, other=0.0)  # [BLOCK]
        tl.store(weight_ptr + dense, p.to(WEIGHT_DTYPE), mask=mask)


@triton.jit
def update_share(
    fields_ptr, entry, grad_ptr, state_0, position_0, dense_0, size, width,
    advance, inv_scale, clip, hyper_ptr, bias_ptr, bias_length, seed_low, seed_high, step,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW in one share of the compact state, in the written order of `numerics.adamw_`."""
    cols, group = tiles.field(fields_ptr, entry, tiles.COLS), tiles.field(fields_ptr, entry, tiles.GROUP)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    start_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.START), tl.int32, False)
    weight_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.WEIGHT), WEIGHT_DTYPE, ALIGNED) + dense_0
    master_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.MASTER), MASTER_DTYPE, ALIGNED) + state_0
    exp_avg_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG), tl.float32, ALIGNED) + state_0
    exp_avg_sq_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG_SQ), tl.float32, ALIGNED) + state_0
    grad_ptr += dense_0
    bias_ptr += 2 * group * bias_length
    hyper_ptr += N_HYPER * group
    lr, eps, decay = tl.load(hyper_ptr + LR), tl.load(hyper_ptr + EPS), tl.load(hyper_ptr + DECAY)
    beta1, one_minus_beta1 = tl.load(hyper_ptr + BETA1), tl.load(hyper_ptr + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper_ptr + BETA2), tl.load(hyper_ptr + ONE_MINUS_BETA2)
    stream = tiles.field(fields_ptr, entry, tiles.STREAM).to(tl.uint32).to(tl.int32, bitcast=True)
    for offset in range(0, size, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        dense, position, mask = tiles.locate(offs, position_0, size, width, cols, channel_ptr, KIND)
        g = scale_gradient(tl.load(grad_ptr + dense, mask=mask, other=0.0), inv_scale, clip)  # [BLOCK]
        p = tl.load(master_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
        t = tl.minimum(tl.load(start_ptr + position, mask=mask, other=0) + advance, bias_length - 1)
        step_size = lr * tl.load(bias_ptr + 2 * t, mask=mask, other=1.0)
        denom_scale = tl.load(bias_ptr + 2 * t + 1, mask=mask, other=1.0)
        m = beta1 * m + one_minus_beta1 * g
        v = beta2 * v + one_minus_beta2 * (g * g)
        p = p * decay
        p = p - step_size * tl.div_rn(m, tl.sqrt_rn(v) * denom_scale + eps)
        tl.store(exp_avg_ptr + offs, m, mask=mask)
        tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
        if master_ptr.dtype.element_ty == tl.bfloat16:
            p = round_to_bf16(p, draws_at(dense_0 + dense, seed_low, seed_high, step, stream))
        tl.store(master_ptr + offs, p, mask=mask)
        tl.store(weight_ptr + dense, p.to(WEIGHT_DTYPE), mask=mask)
