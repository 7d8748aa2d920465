"""One pass over the gradient: AdamW for the selected channels, the deferred accumulator for the rest.

For every parameter whose `fold` is not FOLD_NONE, with `g = (f32(grad) * inv_scale) * clip` (two roundings):

    selected   m, v, p = the order of `numerics.adamw_` with t = start + advance;  weight = round(p)
    deferred   accumulator = round(g) if fold is FOLD_OVERWRITE else round(f32(accumulator) + g)

and the accumulator of selected channels is 0; entries without an accumulator have nothing folded. With FOLD_NONE only
`weight = round(p)` of the selected channels is written. `round` is to the nearest, ties to even, in the tensor's own
dtype; but where masters are bf16, `p = weight = ` what `stochastic_rounding` gives p in its place in the matrix.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zenflow_kernels import cards, tiles
from zenflow_kernels.columns import step_columns
from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, StepControl
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, triton_dtype, uses_triton
from zenflow_kernels.fold import fold_tile
from zenflow_kernels.numerics import CHUNK_PER_THREAD, HYPER, HYPER_WIDTH, adamw_, chunks
from zenflow_kernels.selected import positions_kernel, update_share, write_share
from zenflow_kernels.stochastic_rounding import check_key, round_at_reference, signed_words
from zenflow_kernels.table import ALIGN_BYTES, CHANNEL_TILE, Entry, Launch, Table

NONE = tl.constexpr(FOLD_NONE)
FOLD_BLOCK = 4096  # elements of the gradient folded at once
UPDATE_BLOCK = 1024  # selected elements updated at once
WARPS = 4
REGISTERS = 128  # of a thread that steps by rows, at most: four programs share 65,536
NO_LIMIT = 256  # registers: more than a thread can have


@triton.jit(do_not_specialize=["bias_length", "first", "seed_low", "seed_high", "step"])
def _step_kernel(
    fields_ptr, grad_ptrs, tile_entry_ptr,
    fold_ptr, advance_ptr, inv_scale_ptr, clip_ptr, hyper_ptr, bias_ptr,
    bias_length, first, seed_low, seed_high, step,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr,
    FOLDS: tl.constexpr, BY_ROWS: tl.constexpr, EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    entry = tl.load(tile_entry_ptr + tile)
    block, part, row_0, col_0, height, width = tiles.tile_extent(fields_ptr, entry, tile, TILE, ROW_MULTIPLE)
    state_0, position_0, dense_0, size, share_width = tiles.share_extent(
        fields_ptr, entry, block, part, row_0, col_0, height, width, KIND
    )
    fold = tl.load(fold_ptr + first + entry)
    STATE_EVEN: tl.constexpr = EVEN and KIND == tiles.WHOLE
    if fold != NONE:
        grad_ptr = tiles.pointer(tl.load(grad_ptrs + entry), WEIGHT_DTYPE, EVEN)
        inv_scale, clip = tl.load(inv_scale_ptr), tl.load(clip_ptr)
        if BY_ROWS:
            step_columns(
                fields_ptr, entry, grad_ptr,
                row_0, col_0, height, width, state_0, position_0, dense_0, size, share_width,
                fold, inv_scale, clip, hyper_ptr,
                WEIGHT_DTYPE, ACC_DTYPE, EVEN, ROW_MULTIPLE, BLOCK_R, BLOCK_C, BLOCK,
            )  # fmt: skip
        else:
            if FOLDS:
                fold_tile(
                    grad_ptr,
                    tiles.pointer(tiles.field(fields_ptr, entry, tiles.SLOT), tl.int32, False),
                    tiles.pointer(tiles.field(fields_ptr, entry, tiles.ACCUMULATOR), ACC_DTYPE, EVEN),
                    row_0, col_0, height, width,
                    tiles.field(fields_ptr, entry, tiles.COLS, ROW_MULTIPLE), fold, inv_scale, clip,
                    KIND, ACC_DTYPE, ROW_MULTIPLE, BLOCK_R, BLOCK_C, False,
                )  # fmt: skip
            update_share(
                fields_ptr, entry, grad_ptr, state_0, position_0, dense_0, size, share_width,
                tl.load(advance_ptr + first + entry), inv_scale, clip, hyper_ptr, bias_ptr, bias_length,
                seed_low, seed_high, step,
                KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, BLOCK,
            )  # fmt: skip
    else:
        write_share(
            fields_ptr, entry, state_0, position_0, dense_0, size, share_width,
            KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "cohort"])
def _write_kernel(
    fields_ptr, tile_entry_ptr, cohort_ptr, first, cohort,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr,
    EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    entry = tl.load(tile_entry_ptr + tile)
    if (cohort == 0) | (tl.load(cohort_ptr + first + entry) == cohort):
        block, part, row_0, col_0, height, width = tiles.tile_extent(fields_ptr, entry, tile, TILE, ROW_MULTIPLE)
        state_0, position_0, dense_0, size, share_width = tiles.share_extent(
            fields_ptr, entry, block, part, row_0, col_0, height, width, KIND
        )
        STATE_EVEN: tl.constexpr = EVEN and KIND == tiles.WHOLE
        write_share(
            fields_ptr, entry, state_0, position_0, dense_0, size, share_width,
            KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, BLOCK,
        )  # fmt: skip


def fused_step(
    table: Table, control: StepControl, hyper: Tensor, bias: Tensor, *, seed: int = 0, step: int = 0
) -> None:
    """Update the selected channels of every entry and fold the gradients of the others.

    `hyper` fp32 `[groups, 8]` in the order of `numerics.HYPER`; `bias` fp32 `[groups, length, 2]`, the table of
    `1 / (1 - beta1**t)` and `1 / sqrt(1 - beta2**t)` by t, whose last row stands for every larger t. The gradients are
    those of the last `table.bind`, which are let go of, and the decision that of the last `close_step`. Masters in bf16
    are rounded by the draws of `seed`, in [0, 2**64), `step`, in [0, 2**32), and their entry's stream.
    """
    _check_factors(table, hyper, bias)
    check_key(seed=seed, step=step)
    if uses_triton(table.fields):
        _launch_step(table, control, hyper, bias, seed, step)
    else:
        fused_step_reference(table, control, hyper, bias, seed=seed, step=step)
    table.release()


def _launch_step(table: Table, control: StepControl, hyper: Tensor, bias: Tensor, seed: int, step: int) -> None:
    with on_device(table.fields):
        _find_positions(table, control.advance, hyper, bias)
        for launch in table.launches:
            even, chosen = launch.even and table.grads_aligned, _constants(table, launch)
            _step_kernel[(launch.tile_entry.numel(),)](
                table.fields, table.grad_ptrs, launch.tile_entry,
                control.fold, control.advance, control.inv_scale, control.clip, hyper, bias,
                bias.shape[1], table.first, *signed_words(seed), signed_words(step)[0],
                ACC_DTYPE=triton_dtype(table.accumulator_dtype), FOLDS=launch.folds, BY_ROWS=launch.by_rows,
                BLOCK_R=max(1, chosen["FOLD_BLOCK"] // launch.block_cols), BLOCK_C=launch.block_cols,
                **_register_limit(launch, chosen["REGISTERS"]),
                **_launch_options(table, launch, even, chosen),
            )  # fmt: skip


def write_masters(table: Table, control: StepControl, *, cohort: int = 0) -> None:
    """Write the rounded masters over the weights of the selected channels, and touch nothing else.

    cohort: of the entries for which that is done, by `control.cohort`; 0 for all.
    """
    if not uses_triton(table.fields):
        return write_masters_reference(table, control, cohort=cohort)
    with on_device(table.fields):
        _find_positions(table)
        for launch in table.launches:
            _write_kernel[(launch.tile_entry.numel(),)](
                table.fields, launch.tile_entry, control.cohort, table.first, cohort,
                **_launch_options(table, launch, launch.even, _constants(table, launch)),
            )  # fmt: skip


def _find_positions(
    table: Table, advance: Tensor | None = None, hyper: Tensor | None = None, bias: Tensor | None = None
) -> None:
    # Before every pass, not once a selection: only the engine knows when it writes `slot`, and to ask the slots of all
    # parameters for their versions would cost the host what this launch costs.
    if table.launches and table.channel_tile_entry.numel():
        positions_kernel[(table.channel_tile_entry.numel(),)](
            table.fields, table.channel_tile_entry, advance, hyper, bias,
            0 if bias is None else bias.shape[1], table.first,
            FACTORS=bias is not None, BLOCK=CHANNEL_TILE,
            **EXACT,
        )  # fmt: skip


def _constants(table: Table, launch: Launch) -> dict[str, int]:
    own = {"FOLD_BLOCK": FOLD_BLOCK, "UPDATE_BLOCK": UPDATE_BLOCK, "WARPS": WARPS, "REGISTERS": REGISTERS}
    return cards.constants("fused_step", table.launch_class(launch.kind), table.device, **own)


def _register_limit(launch: Launch, registers: int) -> dict[str, int]:
    # What a compiler for AMD does not know is an error to Triton.
    limited = launch.by_rows and registers < NO_LIMIT and torch.version.hip is None
    return {"maxnreg": registers} if limited else {}


def _launch_options(table: Table, launch: Launch, even: bool, chosen: dict[str, int]) -> dict[str, Any]:
    return {
        "KIND": tiles.KINDS[launch.kind],
        "WEIGHT_DTYPE": triton_dtype(table.weight_dtype),
        "MASTER_DTYPE": triton_dtype(table.master_dtype),
        "EVEN": even,
        "ROW_MULTIPLE": ALIGN_BYTES // table.weight_dtype.itemsize if even else 1,
        "TILE": table.step_tile,
        "BLOCK": chosen["UPDATE_BLOCK"],
        "num_warps": chosen["WARPS"],
        **EXACT,
    }


def _check_factors(table: Table, hyper: Tensor, bias: Tensor) -> None:
    for name, tensor, tail in (("hyper", hyper, (HYPER_WIDTH,)), ("bias", bias, (bias.shape[-2], 2))):
        good = tensor.dtype == torch.float32 and tensor.device == table.device and tensor.is_contiguous()
        if not good or tuple(tensor.shape[1:]) != tail:
            raise ValueError(
                f"{name} must be contiguous torch.float32 [groups, {', '.join(map(str, tail))}] on {table.device}, "
                f"got {tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}"
            )


def fused_step_reference(
    table: Table, control: StepControl, hyper: Tensor, bias: Tensor, *, seed: int = 0, step: int = 0
) -> None:
    """The same step by torch; reads `control` on the host, so it waits where that is on a GPU."""
    folds, advances = control.fold.tolist(), control.advance.tolist()
    inv_scale, clip, factors = control.inv_scale.item(), control.clip.item(), hyper.tolist()
    for number, entry in enumerate(table.entries):
        fold, advance = folds[table.first + number], advances[table.first + number]
        channel = _channels(entry)
        if fold == FOLD_NONE or not entry.weight.numel():
            _write(entry, channel)
            continue
        grad = table.grad(number)
        assert grad is not None, f"entry {number} folds without a gradient"
        t = (entry.start[: channel.numel()].long() + advance).clamp(max=bias.shape[1] - 1)
        step_entry_reference(
            entry, channel, grad, (inv_scale, clip), factors[entry.group], bias[entry.group][t], add=fold == FOLD_ADD,
            seed=seed, step=step,
        )  # fmt: skip


def step_entry_reference(
    entry: Entry,
    channel: Tensor,
    grad: Tensor,
    scales: tuple[float, float],
    factors: list[float],
    bias: Tensor,
    *,
    add: bool,
    **key: int,
) -> None:
    """One entry's step by torch, its decision known on the host.

    `channel` int64 `[n]` is the channel at each position of the compact state (`[1]` for a whole parameter, `[0]`
    before the first selection), `grad` `[rows, cols]`, `scales` the inverse loss scale and the clip factor, `factors`
    the group's row of the hyperparameter table, `bias` fp32 `[n, 2]` the two corrections of each channel. `add`: the
    accumulator is added to, else overwritten. `key`: `seed` and `step`, where its master is bf16.
    """
    if channel.numel():
        master = entry.master.float()  # itself if it is fp32
        _update(entry, master, channel, grad, scales, factors, bias)
        if entry.master.dtype == torch.bfloat16:
            places = _places(entry, channel)
            entry.master.copy_(round_at_reference(master, places, stream=entry.stream, **key))
    if entry.accumulator is not None:
        _fold(entry.accumulator, grad, scales, add=add)
        entry.accumulator.index_fill_(entry.axis, channel, 0)
    _write(entry, channel)


def write_masters_reference(table: Table, control: StepControl, *, cohort: int = 0) -> None:
    """`write_masters` by torch."""
    cohorts = control.cohort[table.first :].tolist()
    for entry, its_cohort in zip(table.entries, cohorts, strict=False):
        if cohort in (0, its_cohort):
            _write(entry, _channels(entry))


def _channels(entry: Entry) -> Tensor:
    """int64: the channel at each position of the compact state; empty before the first selection."""
    if entry.slot is None:
        return entry.start.new_zeros(1, dtype=torch.int64)
    chosen = torch.nonzero(entry.slot >= 0).view(-1)
    assert chosen.numel() in (0, entry.selected), f"{chosen.numel()} slots for {entry.selected} selected channels"
    channel = torch.empty_like(chosen)
    channel[entry.slot[chosen].long()] = chosen
    return channel


def _places(entry: Entry, channel: Tensor) -> Tensor:
    """int64 of the compact state's shape: the number of each of its elements in the weight."""
    rows, cols = entry.shape
    r, c = (torch.arange(size, device=channel.device) for size in (rows, cols))
    r, c = (channel if entry.kind == "row" else r), (channel if entry.kind == "column" else c)
    return r[:, None] * cols + c[None, :]


def _scaled(grad: Tensor, scales: tuple[float, float]) -> Tensor:
    """fp32 `(grad * inv_scale) * clip`; a factor of 1 changes no bit and is left out."""
    scaled = grad.float()
    for scale in scales:
        if scale != 1:
            scaled = scaled * scale
    return scaled


def _update(
    entry: Entry, master: Tensor, channel: Tensor, grad: Tensor,
    scales: tuple[float, float], factors: list[float], bias: Tensor,
) -> None:  # fmt: skip
    chosen = grad if entry.kind == "whole" else grad.index_select(entry.axis, channel)
    hyper = dict(zip(HYPER, factors[: len(HYPER)], strict=True))
    lr = hyper.pop("lr")
    shape = {"column": (1, -1), "row": (-1, 1), "whole": (1, 1)}[entry.kind]
    first, second = bias[:, 0].view(shape), bias[:, 1].view(shape)
    state = (master, entry.exp_avg, entry.exp_avg_sq, _scaled(chosen, scales))
    adamw_(*state, step_size=first * lr, denom_scale=second, **hyper)


def _fold(accumulator: Tensor, grad: Tensor, scales: tuple[float, float], *, add: bool) -> None:
    limit = CHUNK_PER_THREAD * torch.get_num_threads() if grad.device.type == "cpu" else max(1, grad.numel())
    for piece in chunks(*grad.shape, limit):
        scaled = _scaled(grad[piece], scales)
        accumulator[piece].copy_(accumulator[piece].float().add_(scaled) if add else scaled)


def _write(entry: Entry, channel: Tensor) -> None:
    if entry.kind == "whole":
        entry.weight.copy_(entry.master)
    elif channel.numel():
        entry.weight.index_copy_(entry.axis, channel, entry.master.to(entry.weight.dtype))
