from __future__ import annotations

import os
import subprocess
import sys
import weakref

import pytest
import torch
from zenflow_kernels import fused_step as step_module
from zenflow_kernels.control import FOLD_ADD, FOLD_OVERWRITE
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.numerics import HYPER
from zenflow_kernels.scatter import scatter_channels_
from zenflow_kernels.step_reference import fused_step_reference, write_masters_reference
from zenflow_kernels.table import Entry, Table

from tests.kernels.building import HYPERS, Padded, Spec, World, assert_equal, bits, decide, make_world

TABLES = {
    "column": [
        Spec("column", 7, 13, 3),
        Spec("column", 3, 700, 70, group=1),
        Spec("column", 1, 1, 1),
        Spec("column", 5, 16, 16),
        Spec("column", 11, 31, 0),
        Spec("column", 6, 24, 5, group=1, shift=1),
    ],
    "row": [
        Spec("row", 13, 7, 3),
        Spec("row", 5, 517, 2, group=1),
        Spec("row", 1, 1, 1),
        Spec("row", 31, 8, 31),
        Spec("row", 9, 16, 0),
    ],
    "whole": [Spec("whole", 3, 11), Spec("whole", 1, 1000, group=1), Spec("whole", 1, 1), Spec("whole", 2, 5, shift=3)],
    "unfolded": [
        Spec("column", 7, 33, 5, folds=False),
        Spec("row", 7, 33, 5, folds=False),
        Spec("row", 7, 33, 2),
        Spec("column", 2, 601, 600, folds=False),
        Spec("row", 3, 601, 2, folds=False),
    ],
    "mixed": [Spec("column", 4, 64, 6), Spec("whole", 1, 5), Spec("row", 0, 128, 0), Spec("column", 128, 0, 0)],
}
SCALES = {"plain": (1.0, 1.0), "clipped": (1.0, 0.37), "unscaled": (2.0**-16, 0.37)}


def run_both(world: World) -> None:
    twin, grads = world.twin(), list(world.table.grads)
    fused_step(world.table, world.control, world.hyper, world.bias)
    fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias)
    assert_equal(world, twin)
    world.table.bind(grads)


@pytest.mark.parametrize("specs", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("offset", [0, 1, 2])
def test_step_equals_the_reference_bit_for_bit(specs, offset, device, dtype):
    world = make_world(specs, device, dtype, acc_dtype=torch.float32 if offset else torch.bfloat16, seed=offset)
    decide(world, offset, list(SCALES.values())[offset])
    run_both(world)


@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES.keys())
def test_unaligned_gradients_and_scales(scales, device, dtype):
    world = make_world([Spec("column", 9, 64, 7, shift=1), Spec("row", 9, 32, 4, shift=3)], device, dtype)
    decide(world, 1, scales)
    assert not world.table.grads_aligned
    run_both(world)


@pytest.mark.parametrize("kind", ["column", "row", "whole"])
def test_denormal_inputs_keep_their_bits(kind, device):
    world = make_world([Spec(kind, 24, 40, 7)], device, torch.float32)
    decide(world, 0, (1.0, 0.5))
    world.control.fold.fill_(FOLD_ADD)
    for name, tensor in world.state().items():
        if tensor.is_floating_point():
            tensor.mul_(1e-42 if name.endswith("exp_avg_sq") else 1e-39)
    world.table.grads[0].mul_(1e-39)
    tiny = world.table.grads[0].abs()
    assert bool(((tiny > 0) & (tiny < torch.finfo(torch.float32).tiny)).any())
    run_both(world)


def test_a_denormal_divides_and_has_a_root(device):
    """eps 0 and one step from zero moments: p moves by lr * m / (sqrt(v) * scale), both denormal."""
    world = make_world([Spec("whole", 1, 64)], device, torch.float32)
    decide(world, 1, (1.0, 1.0))
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.hyper[:, HYPER.index("eps")] = 0
    entry = world.table.entries[0]
    entry.exp_avg.fill_(1e-40)
    entry.exp_avg_sq.fill_(1e-40)
    world.table.grads[0].zero_()
    run_both(world)
    assert bool(torch.isfinite(entry.master).all())


def test_without_a_decision_only_weights_are_written(device, dtype):
    world = make_world(TABLES["mixed"] + TABLES["row"], device, dtype)
    world.control.advance.fill_(3)
    before = {name: bits(tensor).clone() for name, tensor in world.state().items()}
    world.table.bind([None] * len(world.table.entries))
    fused_step(world.table, world.control, world.hyper, world.bias)
    after = world.state()
    for name in after:
        assert name.endswith("weight") or torch.equal(bits(after[name]), before[name]), name
    twin = world.twin()
    write_masters_reference(twin.table, twin.control)
    assert_equal(world, twin)


def test_empty_parameters_launch_nothing_and_ask_nothing(device, monkeypatch):
    """D6; and the references read the decision on the host, which would wait for a GPU at every step."""
    for name in ("_step_kernel", "_write_kernel", "fused_step_reference", "write_masters_reference"):
        monkeypatch.setattr(step_module, name, None)
    monkeypatch.setattr(step_module, "positions_kernel", None)
    specs = [Spec("row", 0, 128, 0), Spec("row", 9, 0, 2), Spec("column", 9, 0, 0), Spec("column", 0, 9, 2)]
    world = make_world([*specs, Spec("whole", 0, 7)], device, torch.float32)
    decide(world, 1, SCALES["plain"])
    fused_step(world.table, world.control, world.hyper, world.bias)
    write_masters(world.table, world.control)
    world.pad.check()


@pytest.mark.parametrize("specs", TABLES.values(), ids=TABLES.keys())
def test_write_masters_equals_the_reference(specs, device, dtype):
    world = make_world(specs, device, dtype)
    twin = world.twin()
    write_masters(world.table, world.control)
    write_masters_reference(twin.table, twin.control)
    assert_equal(world, twin)


@pytest.mark.parametrize("cohort", [1, 2, 3])
def test_write_masters_leaves_other_cohorts_alone(cohort, device, dtype):
    specs = [TABLES["column"][0], TABLES["row"][0], TABLES["whole"][0], TABLES["column"][0]]
    world = make_world(specs, device, dtype)
    cohorts = [2, 1, 1, 2]
    world.control.cohort[world.table.first :][: len(specs)] = torch.tensor(cohorts, dtype=torch.int32)
    before, twin, everything = [entry.weight.clone() for entry in world.table.entries], world.twin(), world.twin()
    write_masters(world.table, world.control, cohort=cohort)
    write_masters_reference(twin.table, twin.control, cohort=cohort)
    write_masters(everything.table, everything.control)
    assert_equal(world, twin)
    for entry, full, old, its in zip(world.table.entries, everything.table.entries, before, cohorts, strict=True):
        assert not torch.equal(bits(full.weight), bits(old))
        assert torch.equal(bits(entry.weight), bits(full.weight if its == cohort else old))


def test_same_bits_twice(device, dtype):
    results = []
    for _ in range(2):
        world = make_world([TABLES["column"][0], TABLES["row"][0], TABLES["whole"][0]], device, dtype)
        decide(world, 1, SCALES["clipped"])
        fused_step(world.table, world.control, world.hyper, world.bias)
        results.append({name: bits(tensor) for name, tensor in world.state().items()})
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


@pytest.mark.parametrize("kind", ["column", "row"])
def test_tile_size_and_neighbours_change_no_bit(kind, device):
    spec = Spec(kind, 12, 48, 5)
    alone = make_world([spec], device, torch.float32, first=1, step_tile=4096)
    entries = [*make_world([Spec("whole", 1, 3)], device, torch.float32).table.entries]
    for tile in (1000, 48, 20):
        world = make_world([spec], device, torch.float32, first=1)
        table = Table([*world.table.entries, *entries], 1, step_tile=tile)
        table.bind([*world.table.grads, torch.zeros(1, 3, device=device)])
        world.table = table
        decide(world, 0, SCALES["clipped"])
        fused_step(table, world.control, world.hyper, world.bias)
        results = bits(table.entries[0].master), bits(table.entries[0].accumulator)
        if tile == 1000:
            decide(alone, 0, SCALES["clipped"])
            fused_step(alone.table, alone.control, alone.hyper, alone.bias)
        expected = alone.table.entries[0]
        assert torch.equal(results[0], bits(expected.master)) and torch.equal(results[1], bits(expected.accumulator))


def test_before_the_first_selection_nothing_is_selected(device):
    specs = [Spec("column", 6, 40, 4), Spec("row", 10, 8, 2), Spec("row", 3, 300, 2)]
    unfolded = [Spec("column", 6, 40, 4, folds=False), Spec("row", 3, 300, 2, folds=False)]
    world = make_world(specs + unfolded, device, torch.float32)
    for entry in world.table.entries:
        entry.slot.fill_(-1)
    decide(world, 1, (1.0, 1.0))
    world.control.fold.fill_(FOLD_OVERWRITE)
    masters = [bits(entry.master).clone() for entry in world.table.entries]
    weights = [bits(entry.weight).clone() for entry in world.table.entries]
    run_both(world)
    write_masters(world.table, world.control)
    assert all(torch.equal(bits(e.weight), old) for e, old in zip(world.table.entries, weights, strict=True))
    for entry, grad, master in zip(world.table.entries, world.table.grads, masters, strict=True):
        assert entry.accumulator is None or torch.equal(bits(entry.accumulator), bits(grad))
        assert torch.equal(bits(entry.master), master)


def test_a_later_selection_is_read_from_slot(device):
    world = make_world([Spec("column", 6, 40, 4)], device, torch.float32)
    decide(world, 2, (1.0, 1.0))
    run_both(world)
    entry = world.table.entries[0]
    entry.slot.copy_(entry.slot.roll(7))
    decide(world, 2, (1.0, 1.0))
    run_both(world)


def test_gradients_are_let_go_of(device):
    world = make_world([Spec("column", 2, 8, 1)], device, torch.float32)
    decide(world, 2, (1.0, 1.0))
    grad = torch.zeros(2, 8, device=device)
    held = weakref.ref(grad)
    world.table.bind([grad])
    del grad
    assert held() is not None
    fused_step(world.table, world.control, world.hyper, world.bias)
    assert held() is None


def test_a_4d_gradient_is_its_matrix(device):
    world = make_world([Spec("column", 8, 60, 6)], device, torch.float32)
    decide(world, 2, (1.0, 1.0))
    world.table.bind([world.table.grads[0].view(8, 4, 5, 3)])
    run_both(world)


def test_the_last_row_of_the_bias_table_serves_every_later_step(device):
    world = make_world([Spec("column", 2, 8, 3), Spec("whole", 1, 4)], device, torch.float32)
    decide(world, 1, (1.0, 1.0))
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.control.advance.fill_(2**30)
    run_both(world)


def test_a_step_follows_adamw_by_hand(device):
    pad = Padded(device)
    p, g = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.5, -0.25, 4.0]])
    slot = pad.hold(torch.tensor([-1, 0, -1], dtype=torch.int32))
    zeros = [pad.hold(torch.zeros(1, 1)) for _ in range(2)]
    start, acc = pad.hold(torch.zeros(1, dtype=torch.int32)), pad.hold(torch.full((1, 3), 9.0))
    entry = Entry(pad.hold(p), "column", 0, pad.hold(p[:, 1:2]), *zeros, start, slot, acc)
    world = make_world([Spec("whole", 1, 1)], device, torch.float32, first=0)
    table = Table([entry], 0)
    table.bind([g.to(device)])
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.control.advance.fill_(1)
    world.control.inv_scale.fill_(1)
    world.control.clip.fill_(1)
    fused_step(table, world.control, world.hyper, world.bias)
    lr, decay = HYPERS[0][0], HYPERS[0][4]
    assert entry.weight.cpu()[0].tolist()[::2] == [1.0, 3.0]
    # The first AdamW step is one learning rate against the gradient's sign, after the decay.
    assert entry.weight[0, 1].item() == pytest.approx(2 * (1 - lr * decay) + lr, abs=1e-6)
    assert entry.accumulator.cpu()[0].tolist() == [0.5, 0.0, 4.0]


def test_two_hundred_thousand_channels_in_one_row(device):
    """D15: step, gather and scatter."""
    world = make_world([Spec("column", 1, 200_000, 20_000)], device, torch.float32, step_tile=32768, norm_tile=32768)
    decide(world, 2, SCALES["clipped"])
    run_both(world)
    weight = world.table.entries[0].weight
    index = torch.arange(0, 200_000, 17, device=device)
    part = gather_channels(weight, index, "column")
    assert torch.equal(bits(part), bits(weight[:, ::17]))
    scatter_channels_(weight, index, torch.full_like(part, 7.0), "column")
    assert torch.equal((weight == 7).nonzero()[:, 1], index)
    world.pad.check()


COLD = """
import os, sys, torch
from tests.kernels.building import Spec, bits, make_world
from zenflow_kernels.fused_step import fused_step
from zenflow_kernels.step_reference import fused_step_reference
world = make_world([Spec("column", 64, 256, 25), Spec("whole", 1, 77)], "cuda", torch.bfloat16)
world.control.fold.fill_(2)
world.control.advance.fill_(1)
world.control.inv_scale.fill_(1)
world.control.clip.fill_(0.5)
twin = world.twin()
fused_step(world.table, world.control, world.hyper, world.bias)
fused_step_reference(twin.table, twin.control, twin.hyper, twin.bias)
state, expected = world.state(), twin.state()
assert all(torch.equal(bits(state[name]), bits(expected[name])) for name in state)
"""


@pytest.mark.gpu
def test_the_first_call_with_a_cold_cache_steps_once(tmp_path):
    """D1: a kernel that works in place is not tried out on its state."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COLD], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_large_table_on_the_gpu(dtype):
    specs = [
        Spec("column", 1536, 8960, 896),
        Spec("column", 8960, 1536, 154, group=1),
        Spec("row", 2048, 1537, 205),
        Spec("row", 33, 100_003, 3, group=1),
        Spec("column", 3, 200_000, 20_000),
        Spec("whole", 1, 1_000_003),
    ]
    world = make_world(specs, "cuda", dtype, acc_dtype=dtype, step_tile=32768, norm_tile=32768)
    for offset in range(3):
        decide(world, offset, list(SCALES.values())[offset])
        run_both(world)


def test_factor_tables_of_another_shape_are_refused():
    world = make_world([Spec("whole", 1, 4)], "cpu", torch.float32)
    with pytest.raises(ValueError, match="hyper"):
        fused_step(world.table, world.control, world.hyper[:, :7], world.bias)
    with pytest.raises(ValueError, match="bias"):
        fused_step(world.table, world.control, world.hyper, world.bias.double())
