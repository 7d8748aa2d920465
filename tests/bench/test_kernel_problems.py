"""What `zenflow-bench kernels` measures: the bytes by hand, sizes, and the shapes of whole models."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zenflow_kernels.control import FOLD_ADD, FOLD_OVERWRITE

from zenflow.bench.kernel_model import model_ops, parameter_problems, parameter_shapes
from zenflow.bench.kernel_ops import OPS, step_moved
from zenflow.bench.kernel_problem import SECTOR, Problem, make_problem

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("ratio", [0.02, 0.1, 0.5, 1.0])
def test_sectors_are_those_that_hold_a_selected_element(dtype, ratio):
    """Counted byte by byte in a small matrix."""
    problem = Problem(3, 96, dtype, "columns", ratio, CPU)
    chosen = torch.zeros(3, 96, dtype=torch.bool)
    chosen[:, problem.index()] = True
    sectors = chosen.repeat_interleave(dtype.itemsize, dim=1).view(-1, SECTOR)  # a flag a byte
    touched, full = int(sectors.any(1).sum()), int(sectors.all(1).sum())
    must = problem.n * 3 * dtype.itemsize
    assert (problem.read_scattered().must, problem.read_scattered().bus) == (must, SECTOR * touched)
    assert (problem.write_scattered().must, problem.write_scattered().bus) == (must, SECTOR * (2 * touched - full))
    rows = replace(problem, layout="rows")
    assert rows.write_scattered().bus == rows.write_scattered().must == rows.n * 96 * dtype.itemsize


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 16), (torch.float32, 8)], ids=["bf16", "fp32"])
def test_at_random_a_sector_is_touched_as_often_as_chance_says(dtype, width):
    problem = Problem(1, 1 << 16, dtype, "columns", 0.1, CPU)
    touched = problem.read_scattered().bus / (problem.numel * dtype.itemsize)
    assert touched == pytest.approx(1 - 0.9**width, rel=0.02)


def test_what_a_step_moves_by_hand():
    """bf16, 1,000 x 1,000, a tenth selected: the formulas of kernels/README.md."""
    columns = Problem(1000, 1000, torch.bfloat16, "columns", 0.1, CPU)
    state = 24 * 100_000 + 2 * 100_000
    assert step_moved(columns, fold=FOLD_OVERWRITE).must == 4_000_000 + state
    assert step_moved(columns, fold=FOLD_ADD).must == 6_000_000 + state
    assert step_moved(columns, fold=None).must == 200_000 + state
    assert OPS["fused_step_stochastic"].moved(columns).must == 6_000_000 + state - 400_000
    rows = replace(columns, layout="rows")
    assert step_moved(rows, fold=FOLD_ADD).must == 4_000_000 + 1_800_000 + state == step_moved(rows, fold=FOLD_ADD).bus
    whole = replace(columns, layout="whole", dtype=torch.float32)
    assert OPS["fused_step_whole"].moved(whole).must == 32_000_000
    assert OPS["stochastic_rounding"].moved(whole).bus == 6_000_000
    assert OPS["fused_step_stochastic"].moved(replace(whole, dtype=torch.bfloat16)).must == 22_000_000


@pytest.mark.parametrize(
    ("numel", "shape"),
    [
        (1 << 26, (8192, 8192)),
        (1 << 28, (16384, 16384)),
        (1 << 27, (16384, 8192)),
        (1, (1, 1)),
        (1_000_003, (1953, 512)),
    ],
)
def test_a_size_becomes_the_squarest_matrix(numel, shape):
    problem = make_problem(numel, torch.float32, "columns", 0.1, CPU)
    assert (problem.rows, problem.cols) == shape


def test_two_builds_hold_the_same_numbers():
    problem = make_problem(1 << 10, torch.bfloat16, "columns", 0.1, CPU)
    one, other = (OPS["fused_step"].build(problem) for _ in range(2))
    one.reference.run()
    assert not all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))
    other.reference.run()
    assert all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))


@pytest.mark.parametrize(("shape", "numel"), [("0.5B", 494_032_768), ("1.5B", 1_543_714_304), ("3B", 3_085_938_688)])
def test_a_models_shapes_add_up(shape, numel):
    """The published numbers of parameters, and the one that is a single element."""
    sizes = [torch.Size(size).numel() for size in parameter_shapes(shape)]
    assert sum(sizes) == numel + 1 and min(sizes) == 1 and len(sizes) > 250
    problems = parameter_problems(shape, torch.bfloat16, "columns", 0.1, CPU)
    assert {problem.layout for problem in problems if problem.numel >= 1 << 20} == {"columns"}
    assert {problem.layout for problem in problems if problem.rows == 1} == {"whole"}


def test_the_whole_models_ops_move_the_sum():
    problems = parameter_problems("tiny", torch.float32, "rows", 0.1, CPU)
    ops = {op.name: op for op in model_ops(problems)}
    weights = 4 * sum(problem.numel for problem in problems)
    assert ops["partial_norms"].moved.must == weights + 8 * len(problems)  # none is longer than a tile
    assert ops["fused_step"].moved.must > ops["fused_step_first"].moved.must > 2 * weights
    for op in ops.values():
        op.call.run()
