"""Matrices with more elements than an int32 can count (C8, D4), and small ones under the same checks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zenflow_kernels.control import FOLD_OVERWRITE
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.numerics import HYPER, adamw_
from zenflow_kernels.step_reference import fused_step_reference
from zenflow_kernels.stochastic_rounding import round_at_reference
from zenflow_kernels.table import Entry, Table

from tests.kernels.building import Spec, World, bits, make_world


def world_of(device: str, clip: float) -> World:
    """What a step finds, with a decision made by hand: this one counts, and overwrites."""
    world = make_world([Spec("whole", 1, 1)], device, torch.bfloat16, first=0)
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.control.advance.fill_(1)
    world.control.inv_scale.fill_(1)
    world.control.clip.fill_(clip)
    return world


@pytest.mark.gpu
def test_more_elements_than_an_int32_can_count():
    """C8: a matrix of 2**31 + 2049 bf16 elements; every element of the fold, and the last rows of the update."""
    rows, cols, n = 2**20 + 1, 2049, 3
    grad = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    slot = torch.full((cols,), -1, dtype=torch.int32, device="cuda")
    channels = torch.tensor([5, 1000, cols - 1], device="cuda")
    slot[channels] = torch.arange(n, dtype=torch.int32, device="cuda")
    state = [torch.zeros(rows, n, device="cuda") for _ in range(3)]
    start = torch.zeros(n, dtype=torch.int32, device="cuda")
    accumulator = torch.full_like(grad, float("nan"))
    entry = Entry(torch.zeros_like(grad), "column", 0, *state, start, slot, accumulator)
    world = world_of("cuda", 1.0)
    table = Table([entry], 0)
    table.bind([grad])
    fused_step(table, world.control, world.hyper, world.bias)
    expected_fold = grad.clone()
    expected_fold[:, channels] = 0
    assert torch.equal(accumulator, expected_fold)

    for part in (slice(0, 3), slice(rows - 3, rows)):
        p, m, v = (torch.zeros(3, n) for _ in range(3))
        factors = dict(zip(HYPER, world.hyper[0, : len(HYPER)].tolist(), strict=True))
        first, second = world.bias[0, 1].cpu()
        step_size = factors.pop("lr") * first
        adamw_(p, m, v, grad[part][:, channels].float().cpu(), step_size=step_size, denom_scale=second, **factors)
        for got, want in zip(state, (p, m, v), strict=True):
            assert torch.equal(bits(got[part]), bits(want))
        assert torch.equal(bits(entry.weight[part][:, channels]), bits(p.bfloat16()))
        assert entry.weight[part].count_nonzero() == p.bfloat16().count_nonzero()


@pytest.mark.gpu
def test_a_whole_parameter_beyond_int32():
    """C8: 2**31 + 8 bf16 elements selected whole; the first and the last ones against the reference."""
    numel = 2**31 + 8
    grad = torch.empty(1, numel, dtype=torch.bfloat16, device="cuda").normal_()
    state = [torch.zeros(1, numel, device="cuda") for _ in range(3)]
    weight = torch.full_like(grad, float("nan"))
    start = torch.zeros(1, dtype=torch.int32, device="cuda")
    world = world_of("cuda", 1.0)
    table = Table([Entry(weight, "whole", 0, *state, start, None, None)], 0)
    table.bind([grad])
    fused_step(table, world.control, world.hyper, world.bias)
    assert not bool(torch.isnan(weight).any())
    for part in (slice(0, 100), slice(numel - 100, numel)):
        small = Table(
            [Entry(torch.zeros(1, 100).bfloat16(), "whole", 0, *(torch.zeros(1, 100) for _ in range(3)),
                   torch.zeros(1, dtype=torch.int32), None, None)], 0
        )  # fmt: skip
        small.bind([grad[:, part].cpu().contiguous()])
        twin = world.twin()
        fused_step_reference(small, twin.control, twin.hyper, twin.bias)
        for got, want in zip((weight, *state), (small.entries[0].weight, *_state(small)), strict=True):
            assert torch.equal(bits(got[:, part]), bits(want))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "cols"), [("column", 2049), ("row", 2048)], ids=["column", "row"])
def test_a_matrix_beyond_int32(kind, cols):
    """C8: 2**20 + 1 rows with an accumulator."""
    check_the_ends(kind, 2**20 + 1, cols, "cuda")


@pytest.mark.parametrize(("kind", "cols"), [("column", 41), ("row", 40), ("row", 136)], ids=str)
def test_the_ends_of_a_small_matrix(kind, cols, device):
    check_the_ends(kind, 37, cols, device)


def check_the_ends(kind: str, rows: int, cols: int, device: str) -> None:
    """Step and write_masters on a bf16 matrix, its first and its last rows by the reference on them alone."""
    channels = [cols - 1, 0, cols // 2] if kind == "column" else [rows - 1, rows - 3]
    n = len(channels)
    grad = torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_()
    weight, accumulator = torch.zeros_like(grad), torch.full_like(grad, float("nan"))
    state = [torch.rand((rows, n) if kind == "column" else (n, cols), device=device) for _ in range(3)]
    slot = torch.full((cols if kind == "column" else rows,), -1, dtype=torch.int32)
    slot[channels] = torch.arange(n, dtype=torch.int32)
    entry = Entry(
        weight, kind, 0, *state, torch.zeros(n, dtype=torch.int32, device=device), slot.to(device), accumulator
    )  # fmt: skip
    world = world_of(device, 0.37)
    parts = [slice(0, 5), slice(rows - 5, rows)]
    smalls = [_part(entry, part) for part in parts]
    table = Table([entry], 0)
    table.bind([grad])
    fused_step(table, world.control, world.hyper, world.bias)
    assert not bool(torch.isnan(accumulator).any())
    twin = world.twin()
    for part, small in zip(parts, smalls, strict=True):
        small.bind([grad[part].cpu()])
        fused_step_reference(small, twin.control, twin.hyper, twin.bias)
        want = small.entries[0]
        for got, expected in ((weight, want.weight), (accumulator, want.accumulator)):
            assert torch.equal(bits(got[part]), bits(expected))
        for got, expected in zip(state, _state(small), strict=True):
            if kind == "column":
                assert torch.equal(bits(got[part]), bits(expected))
            elif part.start:
                assert torch.equal(bits(got), bits(expected))
    state[0].fill_(3.0)
    weight.zero_()
    write_masters(table, world.control)
    assert int(weight.count_nonzero()) == state[0].numel()
    assert bool((weight.index_select(entry.axis, torch.tensor(channels, device=device)) == 3).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "cols"), [("column", 2049), ("row", 2048)], ids=["column", "row"])
def test_a_compact_state_beyond_int32(kind, cols):
    """C8: all channels of 2**20 + 1 rows selected, of which several programs update a tile."""
    check_a_state(kind, 2**20 + 1, cols, "cuda")


@pytest.mark.parametrize(("kind", "cols"), [("column", 41), ("row", 136)], ids=["column", "row"])
def test_the_ends_of_a_small_state(kind, cols, device):
    check_a_state(kind, 37, cols, device)


def check_a_state(kind: str, rows: int, cols: int, device: str) -> None:
    """Step without an accumulator and write_masters where all is selected, the first and the last rows compared."""
    grad = torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_()
    weight, n = torch.zeros_like(grad), cols if kind == "column" else rows
    state = [torch.rand(rows, cols, device=device) for _ in range(3)]
    slot, start = torch.arange(n, dtype=torch.int32), torch.zeros(n, dtype=torch.int32)
    entry = Entry(weight, kind, 0, *state, start.to(device), slot.to(device), None)
    parts, smalls = [slice(0, 3), slice(rows - 3, rows)], []
    for part in parts:
        few = slice(None) if kind == "column" else slice(0, 3)
        tensors = [tensor[part].cpu().clone() for tensor in (weight, *state)]
        smalls.append(Table([Entry(tensors[0], kind, 0, *tensors[1:], start[few], slot[few], None)], 0))
    world, table = world_of(device, 0.37), Table([entry], 0)
    table.bind([grad])
    fused_step(table, world.control, world.hyper, world.bias)
    twin = world.twin()
    for part, small in zip(parts, smalls, strict=True):
        small.bind([grad[part].cpu()])
        fused_step_reference(small, twin.control, twin.hyper, twin.bias)
        for got, want in zip((weight, *state), (small.entries[0].weight, *_state(small)), strict=True):
            assert torch.equal(bits(got[part]), bits(want))
    state[0].fill_(3.0)
    write_masters(table, world.control)
    assert bool((weight == 3).all())


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "cols"), [("column", 2049), ("row", 2048)], ids=["column", "row"])
def test_draws_beyond_int32(kind, cols):
    check_the_draws(kind, 2**20 + 1, cols, "cuda")


@pytest.mark.parametrize(("kind", "cols"), [("column", 41), ("row", 40), ("row", 136)], ids=str)
def test_draws_of_a_small_matrix(kind, cols, device):
    check_the_draws(kind, 37, cols, device)


def check_the_draws(kind: str, rows: int, cols: int, device: str) -> None:
    """Without fp32 masters: first and last rows are their step in fp32, rounded by the draws of their places."""
    channels = torch.tensor([cols - 1, 0, cols // 2] if kind == "column" else [rows - 1, rows - 3])
    n, key = channels.numel(), {"seed": 2**40 + 3, "step": 77}
    state = [torch.rand((rows, n) if kind == "column" else (n, cols), device=device) for _ in range(3)]
    slot = torch.full((cols if kind == "column" else rows,), -1, dtype=torch.int32)
    slot[channels] = torch.arange(n, dtype=torch.int32)
    weight = torch.zeros(rows, cols, dtype=torch.bfloat16, device=device)
    start, grad = torch.zeros(n, dtype=torch.int32, device=device), torch.empty_like(weight).normal_()
    entry = Entry(weight, kind, 0, state[0].bfloat16(), *state[1:], start, slot.to(device), None, stream=2**31)
    parts = [slice(0, 5), slice(rows - 5, rows)][kind == "row" :]
    smalls = [_part(replace(entry, master=entry.master.float()), part) for part in parts]
    world, table = world_of(device, 0.37), Table([entry], 0)
    table.bind([grad])
    fused_step(table, world.control, world.hyper, world.bias, **key)
    twin = world.twin()
    for part, small in zip(parts, smalls, strict=True):
        small.bind([grad[part].cpu()])
        fused_step_reference(small, twin.control, twin.hyper, twin.bias)
        r = torch.arange(part.start, part.stop)[:, None] if kind == "column" else channels[:, None]
        place = r * cols + (channels if kind == "column" else torch.arange(cols))
        expected = round_at_reference(_state(small)[0], place, stream=entry.stream, **key)
        assert torch.equal(bits(entry.master[part] if kind == "column" else entry.master), bits(expected))
        written = weight[part][:, channels.to(device)] if kind == "column" else weight[channels.to(device)]
        assert torch.equal(bits(written), bits(expected))


def _part(entry: Entry, rows: slice) -> Table:
    """Some rows of a large entry, on the CPU."""
    kept = {"weight", "accumulator", *(() if entry.kind == "row" else ("master", "exp_avg", "exp_avg_sq"))}
    kept |= {"slot"} if entry.kind == "row" else set()
    tensors = {name: value for name, value in vars(entry).items() if isinstance(value, torch.Tensor)}
    small = {name: (value[rows] if name in kept else value).cpu().clone() for name, value in tensors.items()}
    return Table([replace(entry, **small)], 0)


def _state(table: Table) -> tuple[torch.Tensor, ...]:
    entry = table.entries[0]
    return entry.master, entry.exp_avg, entry.exp_avg_sq
