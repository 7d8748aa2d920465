"""What `fused_step` does with the selected channels: AdamW in one share of the compact state, and their weights.

A share is the part of a parameter's compact state that one program updates, see `tiles`. Columns that are stepped by
rows have an update of their own, in `columns.py`. Device code only.
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
def load_hyper(hyper_ptr, group):
    """eps, decay, beta1, one_minus_beta1, beta2 and one_minus_beta2 of a group."""
    hyper_ptr += N_HYPER * group
    eps, decay = tl.load(hyper_ptr + EPS), tl.load(hyper_ptr + DECAY)
    beta1, one_minus_beta1 = tl.load(hyper_ptr + BETA1), tl.load(hyper_ptr + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper_ptr + BETA2), tl.load(hyper_ptr + ONE_MINUS_BETA2)
    return eps, decay, beta1, one_minus_beta1, beta2, one_minus_beta2


@triton.jit
def adamw(m, v, p, g, step_size, denom_scale, hyper):
    """Both moments and the master after one step, in the written order of `numerics.adamw_`."""
    eps, decay, beta1, one_minus_beta1, beta2, one_minus_beta2 = hyper
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * (g * g)
    p = p * decay
    p = p - step_size * tl.div_rn(m, tl.sqrt_rn(v) * denom_scale + eps)
    return m, v, p


@triton.jit
def corrections(bias_ptr, bias_length, t, mask):
    """`1 / (1 - beta1**t)` and `1 / sqrt(1 - beta2**t)`; `t` is after the advance, and may be beyond the table."""
    t = tl.minimum(t, bias_length - 1)
    return tl.load(bias_ptr + 2 * t, mask=mask, other=1.0), tl.load(bias_ptr + 2 * t + 1, mask=mask, other=1.0)


@triton.jit(do_not_specialize=["bias_length", "first"])
def positions_kernel(
    fields_ptr, tile_entry_ptr, advance_ptr, hyper_ptr, bias_ptr,
    bias_length, first,
    FACTORS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Invert `slot` into the channel of each position of the compact state; FACTORS: find its two factors, too."""
    tile = tl.program_id(0)
    entry = tl.load(tile_entry_ptr + tile)
    slot_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.SLOT), tl.int32, False)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    channels = (tile - tiles.field(fields_ptr, entry, tiles.CHANNEL_TILE_0)) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slot_ptr + channels, mask=channels < tiles.field(fields_ptr, entry, tiles.CHANNELS), other=-1)
    mask = slot >= 0  # [BLOCK]
    tl.store(channel_ptr + slot, channels.to(tl.int32), mask=mask)
    if FACTORS:
        group = tiles.field(fields_ptr, entry, tiles.GROUP)
        start_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.START), tl.int32, False)
        size_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.STEP_SIZE), tl.float32, False)
        scale_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.DENOM_SCALE), tl.float32, False)
        t = tl.load(start_ptr + slot, mask=mask, other=0) + tl.load(advance_ptr + first + entry)
        first_factor, denom_scale = corrections(bias_ptr + 2 * group * bias_length, bias_length, t, mask)
        tl.store(size_ptr + slot, tl.load(hyper_ptr + N_HYPER * group + LR) * first_factor, mask=mask)
        tl.store(scale_ptr + slot, denom_scale, mask=mask)


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
    lr, hyper = tl.load(hyper_ptr + N_HYPER * group + LR), load_hyper(hyper_ptr, group)
    stream = tiles.field(fields_ptr, entry, tiles.STREAM).to(tl.uint32).to(tl.int32, bitcast=True)
    for offset in range(0, size, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        dense, position, mask = tiles.locate(offs, position_0, size, width, cols, channel_ptr, KIND)
        g = scale_gradient(tl.load(grad_ptr + dense, mask=mask, other=0.0), inv_scale, clip)  # [BLOCK]
        p = tl.load(master_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
        v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
        t = tl.load(start_ptr + position, mask=mask, other=0) + advance
        first_factor, denom_scale = corrections(bias_ptr, bias_length, t, mask)
        m, v, p = adamw(m, v, p, g, lr * first_factor, denom_scale, hyper)
        tl.store(exp_avg_ptr + offs, m, mask=mask)
        tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
        if master_ptr.dtype.element_ty == tl.bfloat16:
            p = round_to_bf16(p, draws_at(dense_0 + dense, seed_low, seed_high, step, stream))
        tl.store(master_ptr + offs, p, mask=mask)
        tl.store(weight_ptr + dense, p.to(WEIGHT_DTYPE), mask=mask)
