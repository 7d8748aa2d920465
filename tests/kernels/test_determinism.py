"""The same bits in every one of 20 runs on a GPU, of every op in every layout; interpreted, in three."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.building import bits
from zenflow.bench.kernel_ops import OPS
from zenflow.bench.kernel_problem import Problem
from zenflow.bench.kernel_tune import outputs_of

RUNS = {"cuda": 20, "cpu": 3}  # the interpreter runs one program after another
CASES = [(name, layout) for name, op in OPS.items() for layout in op.layouts]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_every_run_gives_the_same_bits(name, layout, device):
    """Interpreted, a matrix of one tile; on a GPU, of hundreds, whose programs end in any order."""
    rows, cols = (1031, 2048) if device == "cuda" else (11, 24)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    problem = Problem(rows, cols, dtype, layout, 0.1, torch.device(device))
    first = [bits(tensor) for tensor in outputs_of(OPS[name].build(problem))]
    assert first and any(tensor.numel() for tensor in first)
    for _ in range(RUNS[device] - 1):
        again = outputs_of(OPS[name].build(problem))
        assert all(torch.equal(bits(tensor), want) for tensor, want in zip(again, first, strict=True))
