from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from zenflow_kernels.control import StepControl
from zenflow_kernels.fused_step import write_masters
from zenflow_kernels.table import Entry, Table

from tests.kernels import conftest
from tests.kernels.conftest import CANARIES, bf16_sum_and_order


def run(code: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)


NO_TRITON = """
import importlib, pkgutil, sys
sys.modules["triton"] = None
import torch
import zenflow_kernels
names = [module.name for module in pkgutil.iter_modules(zenflow_kernels.__path__)]
assert {"fused_step", "topk"} <= set(names)
modules = {name: importlib.import_module(f"zenflow_kernels.{name}") for name in names}
assert modules["topk"].select_channels(torch.tensor([1.0, 3.0, 2.0]), 2).tolist() == [1, 2]
assert modules["importance"].channel_scores(torch.ones(2, 3), "column", "square").tolist() == [2.0] * 3
"""

LIGHT_MODULES = """
import sys
import zenflow_kernels
assert "torch" not in sys.modules
import zenflow_kernels.control, zenflow_kernels.numerics
assert "triton" not in sys.modules and "zenflow_kernels.table" not in sys.modules
"""


@pytest.mark.parametrize("code", [NO_TRITON, LIGHT_MODULES], ids=["without triton", "light modules alone"])
def test_imports(code):
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_interpreted_needs_the_environment_variable():
    done = run("from zenflow_kernels import dispatch\nwith dispatch.interpreted(): pass", TRITON_INTERPRET="0")
    assert "TRITON_INTERPRET=1" in done.stderr and done.returncode != 0


@pytest.mark.parametrize(("a", "b", "total"), CANARIES)
def test_bf16_is_upcast_summed_and_rounded_to_even(a, b, total, device):
    """D8."""
    assert bf16_sum_and_order(a, b, device) == (total, a < b)


def test_a_canary_that_fails_is_the_reason_why_bf16_is_left_out(device, monkeypatch):
    """D8: of the interpreter's faults the first, with what it gave; none where all are right."""
    assert device == "cuda" or conftest._bf16_fault.__wrapped__() is None
    truncated = {2.5: (4.5, False), -5.0: (-7.0, True), 128.0: (128.0, False), 129.0: (129.0, False)}
    monkeypatch.setattr(conftest, "bf16_sum_and_order", lambda a, b, device: truncated[a])
    assert "129.0 + 0.5 and 129.0 < 0.5 give (129.0, False)" in conftest._bf16_fault.__wrapped__()
    monkeypatch.setitem(truncated, -5.0, (-7.0, False))
    assert "-5.0 + -2.0 and -5.0 < -2.0 give (-7.0, False)" in conftest._bf16_fault.__wrapped__()


def test_the_patched_cast_rounds_as_torch_does(device):
    gen = torch.Generator().manual_seed(0)
    patterns = torch.randint(-(2**31), 2**31, (4096,), generator=gen, dtype=torch.int64).to(torch.int32)
    x = patterns.view(torch.float32)
    x = x[torch.isfinite(x)][:4000].contiguous()
    zeros = torch.zeros_like(x)
    weight = torch.full((1, x.numel()), float("nan"), dtype=torch.bfloat16, device=device)
    state = [tensor.view(1, -1).to(device) for tensor in (x, zeros, zeros)]
    start = torch.zeros(1, dtype=torch.int32, device=device)
    write_masters(Table([Entry(weight, "whole", 0, *state, start, None, None)], 0), StepControl.create(1, 1, device))
    assert torch.equal(weight.cpu().view(torch.int16), x.bfloat16().view(1, -1).view(torch.int16))
