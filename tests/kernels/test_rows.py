"""Rows that several programs update: a block lies in one row, whatever the lengths of rows, blocks and tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zenflow_kernels import fused_step
from zenflow_kernels.table import Table

from tests.kernels.building import Padded, Spec, make_world
from tests.kernels.test_columns import WEIGHTS, check_step, check_world

# Of blocks of 256 elements: rows of no whole number of vectors, too; more rows than are selected, or all of them.
SHAPES = {
    "shorter than a block": Spec("row", 9, 136, 3),
    "shorter and uneven": Spec("row", 7, 131, 7),
    "a block": Spec("row", 5, 256, 2),
    "no multiple of a block": Spec("row", 6, 600, 4),
    "no multiple of anything": Spec("row", 4, 521, 3),
    "nothing selected": Spec("row", 3, 300, 0),
    "unaligned": Spec("row", 5, 264, 2, shift=1),
}
# Parts of a row in a tile, or several of its rows and so several selected ones in a share.
TILES = {"parts of a row": 200, "odd parts of a row": 173, "several rows": 1600}


@pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES.keys())
@pytest.mark.parametrize("folds", [True, False], ids=["folded", "alone"])
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_bits_are_the_references(spec, tile, folds, weights, device, monkeypatch):
    monkeypatch.setattr(fused_step, "UPDATE_BLOCK", 256)
    monkeypatch.setattr(fused_step, "PARTS", 2)
    check_step([replace(spec, folds=folds)], weights, device, tile, 0)


@pytest.mark.parametrize("parts", [1, 3, 16])
@pytest.mark.parametrize("block", [64, 256])
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_any_number_of_programs_shares_the_blocks(parts, block, offset, device, monkeypatch):
    """More than there are blocks, and a number that divides them not."""
    monkeypatch.setattr(fused_step, "UPDATE_BLOCK", block)
    monkeypatch.setattr(fused_step, "PARTS", parts)
    specs = [Spec("row", 5, 300, 4), Spec("row", 5, 300, 4, folds=False)]
    check_step(specs, WEIGHTS["fp32"], device, 1024, offset)


@pytest.mark.parametrize("name", ["weight", "accumulator", "master", "exp_avg", "exp_avg_sq"])
def test_rows_are_read_in_vectors_only_where_all_their_tensors_are_aligned(name):
    """The state of columns is not a matter of their rows."""
    for kind in ("row", "column"):
        world = make_world([Spec(kind, 4, 256, 2)], "cpu", torch.bfloat16)
        (entry,) = world.table.entries
        assert [launch.even for launch in world.table.launches] == [True]
        moved = replace(entry, **{name: Padded("cpu").hold(getattr(entry, name), 1)})
        (launch,) = Table([moved], 0).launches
        assert launch.even is (kind == "column" and name not in ("weight", "accumulator"))


def test_a_gradient_alone_may_miss_its_alignment(device):
    """Aligned parameters, so that only the step's launch, and not the plan, knows of it."""
    for kind in ("row", "column"):
        for folds in (True, False):
            world = make_world([Spec(kind, 6, 256, 3, folds=folds)], device, torch.bfloat16, step_tile=512, first=0)
            world.table.bind([world.pad.hold(world.table.grads[0].cpu(), 1)])
            assert world.table.launches[0].even and not world.table.grads_aligned
            check_world(world, 1)
