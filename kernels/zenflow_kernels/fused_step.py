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
from zenflow_kernels.columns import step_columns, write_columns
from zenflow_kernels.control import FOLD_NONE, StepControl
from zenflow_kernels.dispatch import EXACT, on_device, register_limit, tl, triton, triton_dtype, uses_triton
from zenflow_kernels.fold import fold_tile
from zenflow_kernels.numerics import HYPER_WIDTH
from zenflow_kernels.selected import positions_kernel, update_rows, update_share, write_share
from zenflow_kernels.step_reference import fused_step_reference, write_masters_reference
from zenflow_kernels.stochastic_rounding import check_key, signed_words
from zenflow_kernels.table import ALIGN_BYTES, CHANNEL_TILE, Launch, Table

NONE = tl.constexpr(FOLD_NONE)
FOLD_BLOCK = 2048  # elements of the gradient folded at once
UPDATE_BLOCK = 512  # selected elements updated at once
PARTS = 4  # programs that update a tile of long rows, or of columns without an accumulator
WARPS = 4
REGISTERS = 128  # of a thread that folds and updates columns in turn, at most: four programs share 65,536
NO_LIMIT = 256  # registers: more than a thread can have
# Of `write_masters` in columns: elements of a tile for a program, selected ones written at once, warps.
WRITE_TILE, WRITE_BLOCK, WRITE_WARPS = 4096, 512, 1


@triton.jit(do_not_specialize=["bias_length", "first", "seed_low", "seed_high", "step"])
def _step_kernel(
    fields_ptr, grad_ptrs, tile_entry_ptr,
    fold_ptr, advance_ptr, inv_scale_ptr, clip_ptr, hyper_ptr, bias_ptr,
    bias_length, first, seed_low, seed_high, step,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr, ACC_DTYPE: tl.constexpr,
    FOLDS: tl.constexpr, LONG_ROWS: tl.constexpr, EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    PARTS: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Of a tile's PROGRAMS the first PARTS update and the last one folds; a single one does both.
    tile = tl.program_id(0) // PROGRAMS
    part = tl.program_id(0) - tile * PROGRAMS
    entry = tl.load(tile_entry_ptr + tile)
    block, row_part, row_0, col_0, height, width = tiles.tile_extent(fields_ptr, entry, tile, TILE, ROW_MULTIPLE)
    state_0, position_0, dense_0, size, share_width = tiles.share_extent(
        fields_ptr, entry, block, row_part, row_0, col_0, height, width, KIND
    )
    fold = tl.load(fold_ptr + first + entry)
    STATE_EVEN: tl.constexpr = EVEN and KIND == tiles.WHOLE
    if fold != NONE:
        grad_ptr = tiles.pointer(tl.load(grad_ptrs + entry), WEIGHT_DTYPE, EVEN)
        inv_scale, clip = tl.load(inv_scale_ptr), tl.load(clip_ptr)
        stream = tiles.field(fields_ptr, entry, tiles.STREAM).to(tl.uint32).to(tl.int32, bitcast=True)
        key = (seed_low, seed_high, step, stream)
        if KIND == tiles.COLUMN:
            step_columns(
                fields_ptr, entry, grad_ptr, part,
                row_0, col_0, height, width, state_0, position_0, dense_0, size, share_width,
                fold, inv_scale, clip, hyper_ptr, key,
                WEIGHT_DTYPE, MASTER_DTYPE, ACC_DTYPE, FOLDS, EVEN, ROW_MULTIPLE, BLOCK_R, BLOCK_C, PARTS, BLOCK,
            )  # fmt: skip
        else:
            if FOLDS:  # noqa: SIM102  (known when it is compiled: without an accumulator there is no fold)
                if part == PROGRAMS - 1:
                    fold_tile(
                        grad_ptr,
                        tiles.pointer(tiles.field(fields_ptr, entry, tiles.SLOT), tl.int32, False),
                        tiles.pointer(tiles.field(fields_ptr, entry, tiles.ACCUMULATOR), ACC_DTYPE, EVEN),
                        row_0, col_0, height, width,
                        tiles.field(fields_ptr, entry, tiles.COLS, ROW_MULTIPLE), fold, inv_scale, clip,
                        KIND, ACC_DTYPE, ROW_MULTIPLE, BLOCK_R, BLOCK_C, False,
                    )  # fmt: skip
            if part < PARTS:
                if LONG_ROWS:
                    update_rows(
                        fields_ptr, entry, grad_ptr, part, position_0, dense_0, size, width,
                        inv_scale, clip, hyper_ptr, key,
                        WEIGHT_DTYPE, MASTER_DTYPE, EVEN, ROW_MULTIPLE, PARTS, BLOCK,
                    )  # fmt: skip
                else:
                    update_share(
                        fields_ptr, entry, grad_ptr, state_0, position_0, dense_0, size, share_width,
                        tl.load(advance_ptr + first + entry), inv_scale, clip, hyper_ptr, bias_ptr, bias_length, key,
                        KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, BLOCK,
                    )  # fmt: skip
    elif part < PARTS:
        write_share(
            fields_ptr, entry, part, state_0, position_0, dense_0, size, share_width,
            KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, PARTS, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=["first", "cohort"])
def _write_kernel(
    fields_ptr, tile_entry_ptr, cohort_ptr, first, cohort,
    KIND: tl.constexpr, WEIGHT_DTYPE: tl.constexpr, MASTER_DTYPE: tl.constexpr,
    EVEN: tl.constexpr, ROW_MULTIPLE: tl.constexpr, TILE: tl.constexpr,
    BLOCK_C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) - tile * PARTS
    entry = tl.load(tile_entry_ptr + tile)
    if (cohort == 0) | (tl.load(cohort_ptr + first + entry) == cohort):
        block, row_part, row_0, col_0, height, width = tiles.tile_extent(fields_ptr, entry, tile, TILE, ROW_MULTIPLE)
        state_0, position_0, dense_0, size, share_width = tiles.share_extent(
            fields_ptr, entry, block, row_part, row_0, col_0, height, width, KIND
        )
        if KIND == tiles.COLUMN:
            write_columns(
                fields_ptr, entry, part, height, state_0, position_0, dense_0, size, share_width,
                WEIGHT_DTYPE, MASTER_DTYPE, PARTS, BLOCK_C, BLOCK,
            )  # fmt: skip
        else:
            STATE_EVEN: tl.constexpr = EVEN and KIND == tiles.WHOLE
            write_share(
                fields_ptr, entry, part, state_0, position_0, dense_0, size, share_width,
                KIND, WEIGHT_DTYPE, MASTER_DTYPE, STATE_EVEN, PARTS, BLOCK,
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
            parts, programs = _programs(launch, chosen["PARTS"])
            in_turn = launch.kind == "column" and launch.folds
            _step_kernel[(launch.tile_entry.numel() * programs,)](
                table.fields, table.grad_ptrs, launch.tile_entry,
                control.fold, control.advance, control.inv_scale, control.clip, hyper, bias,
                bias.shape[1], table.first, *signed_words(seed), signed_words(step)[0],
                ACC_DTYPE=triton_dtype(table.accumulator_dtype), FOLDS=launch.folds, LONG_ROWS=launch.long_rows,
                BLOCK_R=max(1, chosen["FOLD_BLOCK"] // launch.block_cols), BLOCK_C=launch.block_cols,
                PARTS=parts, PROGRAMS=programs, BLOCK=chosen["UPDATE_BLOCK"], num_warps=chosen["WARPS"],
                **(register_limit(chosen["REGISTERS"]) if in_turn and chosen["REGISTERS"] < NO_LIMIT else {}),
                **_launch_options(table, launch, even),
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
            if launch.kind == "column":
                parts, block, warps = max(1, table.step_tile // WRITE_TILE), WRITE_BLOCK, WRITE_WARPS
                block_cols = min(block, launch.block_cols)
            else:
                chosen = _constants(table, launch)
                parts, block, warps = 1, chosen["UPDATE_BLOCK"], chosen["WARPS"]
                block_cols = block
            _write_kernel[(launch.tile_entry.numel() * parts,)](
                table.fields, launch.tile_entry, control.cohort, table.first, cohort,
                BLOCK_C=block_cols, PARTS=parts, BLOCK=block, num_warps=warps,
                **_launch_options(table, launch, launch.even),
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
    own = {
        "FOLD_BLOCK": FOLD_BLOCK,
        "UPDATE_BLOCK": UPDATE_BLOCK,
        "PARTS": PARTS,
        "WARPS": WARPS,
        "REGISTERS": REGISTERS,
    }
    return cards.constants("fused_step", table.launch_class(launch.kind, launch.folds), table.device, **own)


def _programs(launch: Launch, parts: int) -> tuple[int, int]:
    """Of a tile: programs that update it, and all of them."""
    if launch.long_rows:
        return parts, parts + launch.folds
    shared = launch.kind == "column" and not launch.folds
    return (parts, parts) if shared else (1, 1)


def _launch_options(table: Table, launch: Launch, even: bool) -> dict[str, Any]:
    return {
        "KIND": tiles.KINDS[launch.kind],
        "WEIGHT_DTYPE": triton_dtype(table.weight_dtype),
        "MASTER_DTYPE": triton_dtype(table.master_dtype),
        "EVEN": even,
        "ROW_MULTIPLE": ALIGN_BYTES // table.weight_dtype.itemsize if even else 1,
        "TILE": table.step_tile,
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
