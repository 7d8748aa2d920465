"""Weights without fp32 masters: the fused step computes in fp32, in the written order, and rounds stochastically."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zenflow_kernels import cards
from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, FOLD_OVERWRITE
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.step_reference import fused_step_reference, step_entry_reference
from zenflow_kernels.stochastic_rounding import (
    LANES,
    SPAN,
    draws_at_reference,
    draws_reference,
    round_at_reference,
    round_stochastically_reference,
)
from zenflow_kernels.table import Entry, Table

from tests.kernels.building import HYPERS, Padded, Spec, assert_equal, bits, decide, make_world, values

TILE = SPAN * LANES
KEY = {"seed": 2**63 + 12345, "step": 2**32 - 3}  # each beyond its signed type


def spec(kind: str, rows: int, cols: int, selected: int = 1, **given: int) -> Spec:
    return Spec(kind, rows, cols, selected, stochastic=True, **given)


TABLES = {
    # More than one tile of draws in each, lanes and tiles that end inside a row.
    "column": [spec("column", 70, 136, 11), spec("column", 3, 3001, 30, group=1), spec("column", 6, 24, 5, shift=1)],
    "row": [spec("row", 136, 70, 11), spec("row", 5, 2517, 2, group=1), spec("row", 9, 16, 0)],
    "whole": [spec("whole", 67, 131), spec("whole", 1, 1000, group=1), spec("whole", 1, 1), spec("whole", 2, 5)],
    "unfolded": [spec("column", 7, 33, 5, folds=False), spec("row", 7, 33, 5, folds=False), spec("whole", 3, 3)],
}


# Skipped, like every test of that dtype, where the interpreter's bf16 cannot be trusted.
bf16 = pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"], indirect=True)


@pytest.mark.parametrize("specs", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("offset", [0, 1, 2])
@bf16
def test_step_equals_the_reference_bit_for_bit(specs, offset, device, dtype):
    world = make_world(specs, device, torch.bfloat16, acc_dtype=torch.bfloat16, seed=offset, step_tile=4096)
    decide(world, offset)
    twin = world.twin()
    fused_step(world.table, world.control, world.hyper, world.bias, **KEY)
    fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias, **KEY)
    assert_equal(world, twin)


@pytest.mark.parametrize("kind", ["column", "row", "whole"])
@bf16
def test_a_weight_is_what_the_whole_matrix_rounded_would_be(kind, device, dtype):
    """The other way round: AdamW on fp32 masters of the same values, put in their places in a matrix, which
    `round_stochastically` rounds at once."""
    world = make_world([spec(kind, 70, 136, 11)], device, torch.bfloat16, first=0, step_tile=1024)
    decide(world, FOLD_OVERWRITE)
    entry = world.table.entries[0]
    channel = torch.zeros(1, dtype=torch.int64)
    if kind != "whole":
        chosen = torch.nonzero(entry.slot.cpu() >= 0).view(-1)
        channel = chosen[entry.slot.cpu()[chosen].long().argsort()]
    twin = replace(entry, **{name: getattr(entry, name).cpu().float().clone() for name in ("master", "weight")})
    twin = replace(twin, **{name: getattr(entry, name).cpu().clone() for name in ("exp_avg", "exp_avg_sq", "start")})
    twin = replace(twin, accumulator=None, slot=None if entry.slot is None else entry.slot.cpu())
    advance = int(world.control.advance[0])
    bias = world.bias.cpu()[0][(twin.start.long() + advance).clamp(max=256)]
    grad = world.table.grads[0].cpu()
    scales = (1.0, float(world.control.clip))
    step_entry_reference(twin, channel, grad, scales, world.hyper.tolist()[0], bias, add=False)
    before = entry.weight.cpu().clone()
    fused_step(world.table, world.control, world.hyper, world.bias, **KEY)
    rounded = round_stochastically_reference(twin.weight, stream=entry.stream, **KEY)
    mine = torch.ones(70, 136, dtype=torch.bool)
    if kind != "whole":
        mine = torch.zeros_like(mine).index_fill_(entry.axis, channel, True)
    assert torch.equal(bits(entry.weight), bits(torch.where(mine, rounded, before)))
    nearest = torch.where(mine, twin.weight.bfloat16(), before)
    assert int((bits(entry.weight) != bits(nearest)).sum()) > 0.05 * int(mine.sum())


@pytest.mark.parametrize("kind", ["column", "row", "whole"])
@bf16
def test_tiles_blocks_and_neighbours_change_no_bit(kind, device, dtype, monkeypatch):
    results = []
    for tile, block, neighbour in ((4096, 1024, False), (1000, 256, True), (136, 128, False)):
        monkeypatch.setattr("zenflow_kernels.fused_step.UPDATE_BLOCK", block)
        world = make_world([spec(kind, 20, 136, 5)], device, torch.bfloat16, first=1)
        others = make_world([spec("whole", 1, 3)], device, torch.bfloat16).table.entries if neighbour else ()
        table = Table([*world.table.entries, *others], 1, step_tile=tile)
        table.bind([*world.table.grads, *(torch.zeros(1, 3, device=device).bfloat16() for _ in others)])
        decide(world, 0)
        with cards.ignored():  # a measured card has a block of its own
            fused_step(table, world.control, world.hyper, world.bias, **KEY)
        results.append(bits(world.table.entries[0].weight))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("change", ["seed", "step", "stream"])
@bf16
def test_every_part_of_the_key_counts(change, device, dtype):
    """And without a gradient nothing is rounded again: a skipped step writes the weights as they were."""
    results = []
    for number in (5, 6):
        world = make_world([spec("column", 40, 50, 20)], device, torch.bfloat16, first=0)
        entry = replace(world.table.entries[0], stream=number if change == "stream" else 5)
        table = Table([entry], 0)
        table.bind(world.table.grads)
        decide(world, FOLD_ADD)
        given = {"seed": 5, "step": 5} | ({} if change == "stream" else {change: number})
        fused_step(table, world.control, world.hyper, world.bias, **given)
        results.append(bits(entry.weight))
        world.control.fold.fill_(FOLD_NONE)
        entry.weight.fill_(7.0)
        if number == 5:
            fused_step(table, world.control, world.hyper, world.bias, seed=9)
        else:
            write_masters(table, world.control)
        mine = entry.slot.cpu() >= 0
        assert torch.equal(bits(entry.weight)[:, mine], results[-1][:, mine])
        assert bool((entry.weight.cpu()[:, ~mine] == 7).all())
    assert not torch.equal(*results)


def test_draws_at_any_place_are_those_of_the_whole():
    key = {"seed": KEY["seed"], "step": 9, "stream": 4}
    place = torch.randperm(3 * TILE, generator=torch.Generator().manual_seed(0))[:5003]
    whole = draws_reference(0, 3, **key, device=torch.device("cpu"))
    assert torch.equal(draws_at_reference(place, **key), whole[place])
    far = 2**45 + torch.arange(TILE)
    beyond = draws_reference(2**45 // TILE, 1, **key, device=torch.device("cpu"))
    assert torch.equal(draws_at_reference(far, **key), beyond)
    x = values((3 * TILE,), torch.Generator().manual_seed(1))
    rounded = round_stochastically_reference(x, **key)
    turned = place[:5000].view(100, 50).T  # not contiguous
    got = round_at_reference(x[turned].contiguous(), turned, **key)
    assert torch.equal(bits(got), bits(rounded[turned]))
    assert round_at_reference(x[:0], place[:0], **key).shape == (0,)


@bf16
def test_small_updates_arrive_on_average(device, dtype):
    """C9 without a master: 64 steps of 1e-4 on bf16 1.0, whose lower neighbour is 2**-8 away."""
    pad, n = Padded(device), 2048
    one = torch.ones(1, n)
    weight = pad.hold(one.bfloat16())
    start = pad.hold(torch.zeros(1, dtype=torch.int32))
    entry = Entry(weight, "whole", 0, weight, *(pad.hold(one * 0) for _ in range(2)), start, None, None)
    world = make_world([Spec("whole", 1, 1)], device, torch.float32, first=0)
    world.hyper[0] = torch.tensor([1e-4, 0.9, 0.1, 0.999, 0.001, 1e-8, 1.0, 0.0])
    assert HYPERS[0][1:3] == (0.9, 0.999)
    table = Table([entry], 0)
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.control.inv_scale.fill_(1)
    world.control.clip.fill_(1)
    for step in range(1, 65):
        table.bind([one.bfloat16().to(device)])
        world.control.advance.fill_(step)
        fused_step(table, world.control, world.hyper, world.bias, seed=1, step=step)
    # Variance of a step: at most 1e-4 * 2**-8; of the mean over 2048 weights after 64 of them, 1.2e-8.
    assert abs(weight.double().mean().item() - (1 - 64e-4)) < 5 * 1.1e-4
    assert len(weight.unique()) > 1
    pad.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"master": torch.zeros(4, 2, dtype=torch.float16)}, "entry 0: master.*float16"),
        ({"stream": -1}, r"stream must be in \[0, 2\*\*32\), got -1"),
        ({"stream": 2**32}, "stream.*got 4294967296"),
    ],
    ids=str,
)
def test_wrong_entries_are_refused(change, message):
    entry = make_world([spec("column", 4, 6, 2)], "cpu", torch.bfloat16).table.entries[0]
    with pytest.raises(ValueError, match=message):
        Table([replace(entry, **change)], 0)


def test_bf16_masters_need_bf16_weights_and_company():
    fp32 = make_world([Spec("column", 4, 6, 2)], "cpu", torch.float32).table.entries[0]
    with pytest.raises(ValueError, match="entry 0: master.*bfloat16"):
        Table([replace(fp32, master=fp32.master.bfloat16())], 0)
    entries = make_world([spec("column", 4, 6, 2), spec("column", 4, 6, 2)], "cpu", torch.bfloat16).table.entries
    with pytest.raises(ValueError, match="share one master dtype"):
        Table([entries[0], replace(entries[1], master=entries[1].master.float())], 0)


@pytest.mark.parametrize(("given", "message"), [({"seed": 2**64}, "seed"), ({"step": -1}, "step must")], ids=str)
def test_wrong_keys_are_refused(given, message):
    world = make_world([spec("whole", 1, 4)], "cpu", torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        fused_step(world.table, world.control, world.hyper, world.bias, **given)
