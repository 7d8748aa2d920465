"""Columns that are folded and updated a few rows at a time: blocks that end anywhere, and who is stepped so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from zenflow_kernels import cards, fused_step
from zenflow_kernels.control import FOLD_ADD
from zenflow_kernels.fused_step import fused_step as run_step
from zenflow_kernels.fused_step import fused_step_reference, write_masters
from zenflow_kernels.numerics import HYPER
from zenflow_kernels.table import STEP_TILE

from tests.kernels.building import Spec, assert_equal, decide, make_world

# Of a tile's rows, those that are folded at once; selected elements of a row, and of a block.
SHAPES = {
    "blocks over many rows": Spec("column", 37, 40, 9),
    "rows over many blocks": Spec("column", 5, 300, 150),
    "a block a row": Spec("column", 19, 128, 64),
    "wide": Spec("column", 3, 1601, 37),
    "nothing selected": Spec("column", 9, 40, 0),
    "unaligned": Spec("column", 13, 72, 31, shift=1),
}


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("tile", [256, STEP_TILE], ids=["parts of rows", "one tile"])
@pytest.mark.parametrize("offset", [0, 1])
def test_bits_are_the_references_wherever_a_block_ends(spec, tile, offset, device, monkeypatch):
    monkeypatch.setattr(fused_step, "FOLD_BLOCK", 256)
    monkeypatch.setattr(fused_step, "UPDATE_BLOCK", 64)
    world = make_world([spec, spec], device, torch.bfloat16, acc_dtype=torch.bfloat16, step_tile=tile)
    decide(world, offset)
    twin = world.twin()
    assert all(launch.by_rows for launch in world.table.launches)
    with cards.ignored():  # a measured card has blocks of its own
        run_step(world.table, world.control, world.hyper, world.bias)
    fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias)
    assert_equal(world, twin)


OLD = {
    "any bits": lambda new, gen: torch.randint(-(2**15), 2**15, new.shape, generator=gen, dtype=torch.int16),
    "one bit off": lambda new, gen: new ^ (1 << torch.randint(0, 16, new.shape, generator=gen)).to(torch.int16),
    "other sign": lambda new, gen: new ^ -(2**15),
    "the same": lambda new, gen: new,
}


@pytest.mark.parametrize("old", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_no_weight_keeps_a_bit_that_is_not_its_master_s(old, dtype, device):
    """Only weights that change are written: zeros of the other sign change, and so does NaN of another payload."""
    world = make_world([Spec("column", 9, 64, 17), Spec("column", 6, 24, 5, shift=1)], device, dtype)
    decide(world, 1)
    world.control.fold.fill_(FOLD_ADD)
    world.hyper[:, [HYPER.index("lr"), HYPER.index("decay")]] = torch.tensor([0.0, 1.0], device=device)
    gen = torch.Generator().manual_seed(0)
    for entry in world.table.entries:
        entry.master.view(-1)[:4] = torch.tensor([0.0, -0.0, float("inf"), float("nan")], device=device)
        channel = torch.argsort(entry.slot)[-entry.selected :]
        new = entry.master.to(dtype).view(torch.int16)
        entry.weight.view(torch.int16)[:, channel] = old(new.cpu(), gen).to(device)
    run_step(world.table, world.control, world.hyper, world.bias)
    after = [entry.weight.view(torch.int16).clone() for entry in world.table.entries]
    write_masters(world.table, world.control)  # which writes them all
    for entry, weights in zip(world.table.entries, after, strict=True):
        assert torch.equal(entry.weight.view(torch.int16), weights)


def test_before_the_first_selection_everything_is_folded(device):
    """The compact state of no channel is neither read nor written: it holds NaN."""
    world = make_world([Spec("column", 37, 40, 9)], device, torch.bfloat16, step_tile=1024, first=0)
    decide(world, 2)
    (entry,) = world.table.entries
    entry.slot.fill_(-1)
    for tensor in (entry.master, entry.exp_avg, entry.exp_avg_sq):
        tensor.fill_(float("nan"))
    twin = world.twin()
    run_step(world.table, world.control, world.hyper, world.bias)
    fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias)
    assert_equal(world, twin)
    assert bool(torch.isfinite(entry.accumulator).all() & torch.isfinite(entry.weight).all())


@pytest.mark.parametrize("specs", [[Spec("column", 3, 9, 2)], [Spec("column", 4, 5, 1), Spec("column", 7, 33, 6)]])
def test_factors_follow_every_step(specs, device):
    """t, learning rate and bias table of each step, none of them the step's before."""
    world = make_world(specs, device, torch.bfloat16, first=0)
    twin, grads = world.twin(), list(world.table.grads)
    twin_grads = list(twin.table.grads)
    for number in range(3):
        for one, its in ((world, grads), (twin, twin_grads)):
            decide(one, 1)
            one.control.fold.fill_(1)
            one.control.advance.add_(number)
            one.hyper[:, 0] = 0.01 / (number + 1)
            one.table.bind(its)
        run_step(world.table, world.control, world.hyper, world.bias[:, : 257 - 60 * number].contiguous())
        fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias[:, : 257 - 60 * number].contiguous())
        assert_equal(world, twin)


@pytest.mark.parametrize(
    ("cols", "expected"),
    [(1, 8), (32, 32), (129, 512), (768, 512), (1535, 512), (1536, 2048), (2048, 2048), (2304, 512), (3072, 2048),
     (4096, 2048), (8960, 2048)],
)  # fmt: skip
def test_blocks_are_wide_where_the_matrix_fills_them(cols, expected):
    spec = Spec("column", 2, cols, 1)
    (launch,) = make_world([spec], "cpu", torch.bfloat16).table.launches
    assert (launch.block_cols, launch.by_rows) == (expected, True)
    (launch,) = make_world([spec], "cpu", torch.float32).table.launches
    assert (launch.block_cols, launch.by_rows) == (min(expected, 512), False)


def test_only_columns_in_16_bits_with_exact_masters_and_a_sum_are_stepped_by_rows():
    plain, bf16 = {"kind": "column", "rows": 4, "cols": 4}, torch.bfloat16
    cases: list[tuple[dict[str, Any], torch.dtype, bool]] = [
        ({}, bf16, True), ({}, torch.float16, True), ({}, torch.float32, False), ({"kind": "row"}, bf16, False),
        ({"kind": "whole"}, bf16, False), ({"folds": False}, bf16, False), ({"stochastic": True}, bf16, False),
    ]  # fmt: skip
    for changed, dtype, expected in cases:
        (launch,) = make_world([Spec(**plain | changed)], "cpu", dtype).table.launches
        assert launch.by_rows is expected, (changed, dtype)


@pytest.mark.parametrize(("registers", "limit"), [(64, 64), (128, 128), (fused_step.NO_LIMIT, None)])
def test_the_limit_of_registers_is_for_those_alone(registers, limit, device, monkeypatch):
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return lambda *args, **options: launched.append(options)

    monkeypatch.setattr(fused_step, "_step_kernel", Kernel())
    monkeypatch.setattr(fused_step, "REGISTERS", registers)
    monkeypatch.setattr(torch.version, "hip", None)
    world = make_world([Spec("column", 4, 8, 2), Spec("row", 4, 8, 2), Spec("whole", 1, 3)], device, torch.bfloat16)
    grads = list(world.table.grads)
    with cards.ignored():
        run_step(world.table, world.control, world.hyper, world.bias)
        monkeypatch.setattr(torch.version, "hip", "7.0")  # its compiler does not know the option
        world.table.bind(grads)
        run_step(world.table, world.control, world.hyper, world.bias)
    assert [one.get("maxnreg") for one in launched] == [limit, None, None, None, None, None]
