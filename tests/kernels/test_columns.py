"""Columns, folded and updated a few rows at a time or updated alone: blocks that end anywhere, and who does what."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from zenflow_kernels import cards, fused_step
from zenflow_kernels.control import FOLD_ADD
from zenflow_kernels.fused_step import fused_step as run_step
from zenflow_kernels.fused_step import write_masters
from zenflow_kernels.numerics import HYPER
from zenflow_kernels.step_reference import fused_step_reference, write_masters_reference
from zenflow_kernels.table import STEP_TILE

from tests.kernels.building import Spec, World, assert_equal, decide, make_world

# Of a tile's rows, those that are folded at once; selected elements of a row, and of a block.
SHAPES = {
    "blocks over many rows": Spec("column", 37, 40, 9),
    "rows over many blocks": Spec("column", 5, 300, 150),
    "a block a row": Spec("column", 19, 128, 64),
    "wide": Spec("column", 3, 1601, 37),
    "nothing selected": Spec("column", 9, 40, 0),
    "unaligned": Spec("column", 13, 72, 31, shift=1),
}


WEIGHTS = {"bf16": (torch.bfloat16, False), "fp32": (torch.float32, False), "stochastic": (torch.bfloat16, True)}
KEY = {"seed": 2**63 + 5, "step": 2**31 + 7}


def check_step(specs: list[Spec], weights: tuple[torch.dtype, bool], device: str, tile: int, offset: int) -> None:
    """A table's step and `write_masters` against the references."""
    dtype, stochastic = weights
    specs = [replace(spec, stochastic=stochastic) for spec in specs]
    check_world(make_world(specs, device, dtype, acc_dtype=dtype, step_tile=tile), offset)


def check_world(world: World, offset: int) -> None:
    """With the constants that the test has set; a measured card has its own."""
    decide(world, offset)
    twin = world.twin()
    with cards.ignored():
        run_step(world.table, world.control, world.hyper, world.bias, **KEY)
        fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias, **KEY)
        assert_equal(world, twin)
        for one in (world, twin):
            for entry in one.table.entries:
                entry.master.copy_(entry.exp_avg)
        write_masters(world.table, world.control)
        write_masters_reference(twin.table, twin.control)
    assert_equal(world, twin)


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("tile", [256, STEP_TILE], ids=["parts of rows", "one tile"])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_bits_are_the_references_wherever_a_block_ends(spec, tile, offset, weights, device, monkeypatch):
    monkeypatch.setattr(fused_step, "FOLD_BLOCK", 256)
    monkeypatch.setattr(fused_step, "UPDATE_BLOCK", 64)
    check_step([spec, spec], weights, device, tile, offset)


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_several_programs_update_a_tile_that_nobody_folds(spec, parts, weights, device, monkeypatch):
    """As many as the share has blocks, fewer and more; and several that write the masters."""
    monkeypatch.setattr(fused_step, "PARTS", parts)
    monkeypatch.setattr(fused_step, "UPDATE_BLOCK", 64)
    monkeypatch.setattr(fused_step, "WRITE_TILE", 512 // parts)
    monkeypatch.setattr(fused_step, "WRITE_BLOCK", 32)
    spec = replace(spec, folds=False)
    check_step([spec, spec], weights, device, 512, 1)


def _random(low: int, high: int, like: torch.Tensor, gen: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, like.shape, generator=gen).to(like.dtype)


OLD = {
    "any bits": lambda new, gen: _random(torch.iinfo(new.dtype).min, -torch.iinfo(new.dtype).min, new, gen),
    "one bit off": lambda new, gen: new ^ (1 << _random(0, torch.iinfo(new.dtype).bits, new, gen)),
    "other sign": lambda new, gen: new ^ torch.iinfo(new.dtype).min,
    "the same": lambda new, gen: new,
}
KINDS = {
    "bf16": (torch.bfloat16, False), "fp16": (torch.float16, False), "fp32": (torch.float32, False),
    "stochastic": (torch.bfloat16, True),
}  # fmt: skip


@pytest.mark.parametrize("old", OLD.values(), ids=OLD.keys())
@pytest.mark.parametrize("weights", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("folds", [True, False], ids=["folded", "alone"])
def test_no_weight_keeps_a_bit_that_is_not_its_master_s(old, weights, folds, device):
    """In 16 bits only weights that change are written: zeros of the other sign do, so does NaN of another payload."""
    dtype, stochastic = weights
    integer = torch.int32 if dtype == torch.float32 else torch.int16
    specs = [Spec("column", 9, 64, 17), Spec("column", 6, 24, 5, shift=1)]
    specs = [replace(spec, folds=folds, stochastic=stochastic) for spec in specs]
    world = make_world(specs, device, dtype)
    decide(world, 1)
    world.control.fold.fill_(FOLD_ADD)
    world.hyper[:, [HYPER.index("lr"), HYPER.index("decay")]] = torch.tensor([0.0, 1.0], device=device)
    gen = torch.Generator().manual_seed(0)
    for entry in world.table.entries:
        special = torch.tensor([0.0, -0.0, float("inf"), float("nan")], device=device)
        entry.master.view(-1)[:4] = special.to(entry.master.dtype)
        channel = torch.argsort(entry.slot)[-entry.selected :]
        new = entry.master.to(dtype).view(integer)
        entry.weight.view(integer)[:, channel] = old(new.cpu(), gen).to(device)
    run_step(world.table, world.control, world.hyper, world.bias)
    after = [entry.weight.view(integer).clone() for entry in world.table.entries]
    write_masters(world.table, world.control)  # which writes them all
    for entry, weights in zip(world.table.entries, after, strict=True):
        assert torch.equal(entry.weight.view(integer), weights)


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
    """And where they are folded."""
    for dtype in (torch.bfloat16, torch.float32):
        for spec, width in ((Spec("column", 2, cols, 1), expected), (Spec("column", 2, cols, 1, folds=False), 512)):
            (launch,) = make_world([spec], "cpu", dtype).table.launches
            assert launch.block_cols == min(expected, width)


class Recorder:
    """Stands for a kernel: what it was launched with."""

    def __init__(self) -> None:
        self.launched: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **options: self.launched.append({"programs": grid[0]} | options)


# Eight tiles each.
EVERY_LAUNCH = [
    Spec("column", 8, 256, 2), Spec("column", 8, 256, 2, folds=False), Spec("row", 8, 256, 2),
    Spec("row", 8, 256, 2, folds=False), Spec("row", 16, 128, 2), Spec("row", 16, 128, 2, folds=False),
    Spec("whole", 1, 2048),
]  # fmt: skip


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(fused_step, "_step_kernel", recorder)
    return recorder


@pytest.mark.parametrize("stochastic", [False, True], ids=["exact", "stochastic"])
def test_long_rows_and_columns_alone_are_updated_by_several_programs(stochastic, recorded, device, monkeypatch):
    """And long rows are folded by one more; elsewhere one program does all that there is to do in a tile."""
    monkeypatch.setattr(fused_step, "PARTS", 3)
    world = make_world([replace(spec, stochastic=stochastic) for spec in EVERY_LAUNCH], device, torch.bfloat16)
    with cards.ignored():
        run_step(world.table, world.control, world.hyper, world.bias)
    seen = [(one["programs"], one["PROGRAMS"], one["PARTS"], one["LONG_ROWS"]) for one in recorded.launched]
    one = (8, 1, 1, False)
    assert seen == [one, (24, 3, 3, False), (32, 4, 3, True), (24, 3, 3, True), one, one, one]


@pytest.mark.parametrize(("registers", "limit"), [(64, 64), (128, 128), (fused_step.NO_LIMIT, None)])
def test_the_limit_of_registers_is_for_columns_that_are_folded(registers, limit, recorded, device, monkeypatch):
    monkeypatch.setattr(fused_step, "REGISTERS", registers)
    monkeypatch.setattr(torch.version, "hip", None)
    world = make_world(EVERY_LAUNCH, device, torch.bfloat16)
    grads = list(world.table.grads)
    with cards.ignored():
        run_step(world.table, world.control, world.hyper, world.bias)
        monkeypatch.setattr(torch.version, "hip", "7.0")  # its compiler does not know the option
        world.table.bind(grads)
        run_step(world.table, world.control, world.hyper, world.bias)
    assert [one.get("maxnreg") for one in recorded.launched] == [limit, *[None] * 13]
