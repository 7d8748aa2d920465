"""What `fused_step` does with selected rows and with parameters selected whole: AdamW, and their weights.

A share is what a tile has of a parameter's compact state, see `tiles`. One of long rows is updated by several programs,
each some of its blocks, and a block lies in one row (`update_rows`). That of short rows, of which a block has several,
or of a parameter selected whole is updated by one program, which finds each element's channel and factors
(`update_share`). Columns have an update of their own, in `columns.py`. Device code only.
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
def channel_pointers(fields_ptr, entry, position_0):
    """The channel and the two factors of the first of a share's positions."""
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    size_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.STEP_SIZE), tl.float32, False)
    scale_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.DENOM_SCALE), tl.float32, False)
    return channel_ptr + position_0, size_ptr + position_0, scale_ptr + position_0


@triton.jit
def state_pointers(
    fields_ptr, entry, dense_0, state_0,
    WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """The weight at `dense_0`, and at `state_0` of the compact state the master and both moments."""
    weight_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.WEIGHT), WEIGHT_DTYPE, ALIGNED)
    master_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.MASTER), MASTER_DTYPE, ALIGNED)
    exp_avg_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG), tl.float32, ALIGNED)
    exp_avg_sq_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.EXP_AVG_SQ), tl.float32, ALIGNED)
    return weight_ptr + dense_0, master_ptr + state_0, exp_avg_ptr + state_0, exp_avg_sq_ptr + state_0


@triton.jit
def chosen_size(channel_ptr, size):
    """`size`, or 0 before the first selection: no position has a channel then, and afterwards each has one."""
    return tl.where(tl.load(channel_ptr, mask=size > 0, other=-1) >= 0, size, 0)


@triton.jit
def load_places(dense, offs, mask, grad_ptr, state, inv_scale, clip):
    """fp32: the scaled gradient at the places `dense`; master and moments of the compact state's elements `offs`."""
    _, master_ptr, exp_avg_ptr, exp_avg_sq_ptr = state
    g = scale_gradient(tl.load(grad_ptr + dense, mask=mask, other=0.0), inv_scale, clip)
    p = tl.load(master_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0)
    v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0)
    return g, p, m, v


@triton.jit
def store_places(dense, offs, mask, m, v, p, old, state, dense_0, key):
    """Both moments, the master and the weights, whose places count from `dense_0`; a bf16 master is rounded by `key`.

    old: None, or the weights that are there: then only those whose bits change are written.
    """
    weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr = state
    tl.store(exp_avg_ptr + offs, m, mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v, mask=mask)
    if master_ptr.dtype.element_ty == tl.bfloat16:
        seed_low, seed_high, step, stream = key
        p = round_to_bf16(p, draws_at(dense_0 + dense, seed_low, seed_high, step, stream))
    tl.store(master_ptr + offs, p, mask=mask)
    new = p.to(weight_ptr.dtype.element_ty)
    if old is not None:
        mask = mask & (new.to(tl.int16, bitcast=True) != old.to(tl.int16, bitcast=True))
    tl.store(weight_ptr + dense, new, mask=mask)


@triton.jit
def write_share(
    fields_ptr, entry, part, state_0, position_0, dense_0, size, width,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """weight = round(master) in every PARTSth block of one share of the compact state."""
    cols = tiles.field(fields_ptr, entry, tiles.COLS)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    weight_ptr, master_ptr, _m, _v = state_pointers(
        fields_ptr, entry, dense_0, state_0, WEIGHT_DTYPE, MASTER_DTYPE, ALIGNED
    )
    for offset in range(part * BLOCK, size, PARTS * BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        dense, _, mask = tiles.locate(offs, position_0, size, width, cols, channel_ptr, KIND)
        p = tl.load(master_ptr + offs, mask=mask, other=0.0)  # [BLOCK]
        tl.store(weight_ptr + dense, p.to(WEIGHT_DTYPE), mask=mask)


@triton.jit
def update_share(
    fields_ptr, entry, grad_ptr, state_0, position_0, dense_0, size, width,
    advance, inv_scale, clip, hyper_ptr, bias_ptr, bias_length, key,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW in one share of the compact state, in the written order of `numerics.adamw_`."""
    cols, group = tiles.field(fields_ptr, entry, tiles.COLS), tiles.field(fields_ptr, entry, tiles.GROUP)
    channel_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.CHANNEL), tl.int32, False)
    start_ptr = tiles.pointer(tiles.field(fields_ptr, entry, tiles.START), tl.int32, False)
    state = state_pointers(fields_ptr, entry, dense_0, state_0, WEIGHT_DTYPE, MASTER_DTYPE, ALIGNED)
    bias_ptr += 2 * group * bias_length
    lr, hyper = tl.load(hyper_ptr + N_HYPER * group + LR), load_hyper(hyper_ptr, group)
    for offset in range(0, size, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        dense, position, mask = tiles.locate(offs, position_0, size, width, cols, channel_ptr, KIND)
        g, p, m, v = load_places(dense, offs, mask, grad_ptr + dense_0, state, inv_scale, clip)  # [BLOCK]
        t = tl.load(start_ptr + position, mask=mask, other=0) + advance
        first_factor, denom_scale = corrections(bias_ptr, bias_length, t, mask)
        m, v, p = adamw(m, v, p, g, lr * first_factor, denom_scale, hyper)
        store_places(dense, offs, mask, m, v, p, None, state, dense_0, key)


@triton.jit
def update_rows(
    fields_ptr, entry, grad_ptr, part, position_0, dense_0, size, width,
    inv_scale, clip, hyper_ptr, key,
    WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """AdamW in every PARTSth block of a share of rows, or of parts of a row.

    A block lies in one row: its channel and both factors are scalars, and its tensors are read and written in vectors.
    """
    cols = tiles.field(fields_ptr, entry, tiles.COLS, ROW_MULTIPLE)
    channel_ptr, size_ptr, scale_ptr = channel_pointers(fields_ptr, entry, position_0)
    weight_ptr, master_ptr, exp_avg_ptr, exp_avg_sq_ptr = state_pointers(
        fields_ptr, entry, 0, 0, WEIGHT_DTYPE, MASTER_DTYPE, EVEN
    )
    hyper = load_hyper(hyper_ptr, tiles.field(fields_ptr, entry, tiles.GROUP))
    row_blocks = tl.cdiv(width, BLOCK)
    for block in range(part, chosen_size(channel_ptr, size) // width * row_blocks, PARTS):
        r = block // row_blocks
        # No more than a vector of fp32 in a thread, or 16-bit tensors would have a layout of their own.
        offs = tl.max_contiguous((block - r * row_blocks) * BLOCK + tl.arange(0, BLOCK), 4)
        mask = offs < width  # [BLOCK]
        weight_0 = tl.load(channel_ptr + r).to(tl.int64) * cols + dense_0
        state_0 = (position_0 + r) * cols + dense_0
        state = (weight_ptr + weight_0, master_ptr + state_0, exp_avg_ptr + state_0, exp_avg_sq_ptr + state_0)
        step_size, denom_scale = tl.load(size_ptr + r), tl.load(scale_ptr + r)
        g, p, m, v = load_places(offs, offs, mask, grad_ptr + weight_0, state, inv_scale, clip)
        m, v, p = adamw(m, v, p, g, step_size, denom_scale, hyper)
        store_places(offs, offs, mask, m, v, p, None, state, weight_0, key)
