"""What the interpreter accepts and a compiler does not: every form of the step's kernels is compiled.

For an NVIDIA GPU, which need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from zenflow_kernels import cards, dispatch, fused_step, norm
from zenflow_kernels.dispatch import triton

from tests.kernels.building import Spec, make_world

TYPES = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
SPECS = [
    Spec("column", 4, 1536, 70), Spec("column", 4, 640, 70, folds=False),
    Spec("row", 8, 640, 3), Spec("row", 8, 24, 3), Spec("row", 8, 640, 3, folds=False), Spec("whole", 1, 1000),
]  # fmt: skip
IN_FP32, STOCHASTIC = SPECS[:3], [replace(spec, stochastic=True) for spec in (*SPECS[:3], SPECS[-1])]


class Compiled:
    """Stands for a kernel: a launch compiles it for these arguments, once, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.forms: set[str] = set()

    def __getitem__(self, grid: tuple[int]) -> Any:
        return self.launch

    def launch(self, *args: Any, **options: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
        fixed = {param.name for param in self.kernel.params if param.is_constexpr}
        fixed |= {name for name, value in given.items() if value is None}
        form = str([(name, given[name]) for name in names if name in fixed])
        if form in self.forms:
            return
        self.forms.add(form)
        signature = {
            name: "constexpr" if name in fixed else TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for name, value in given.items()
        }
        constants = {(names.index(name),): given[name] for name in fixed}
        source = triton.compiler.ASTSource(self.kernel, signature, constants)
        target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
        triton.compile(source, target=target, options=options)


def compile_all() -> dict[str, int]:
    """How many forms of each kernel were compiled, with the default constants, in three tables."""
    step = {name: Compiled(getattr(fused_step, name)) for name in ("_step_kernel", "_write_kernel", "positions_kernel")}
    norms = {"_partial_norms_kernel": Compiled(norm._partial_norms_kernel)}
    launching = patch.object(dispatch, "_interpreting", True)
    with launching, patch.multiple(fused_step, **step), patch.multiple(norm, **norms), cards.ignored():
        for specs, dtype in ((SPECS, torch.bfloat16), (IN_FP32, torch.float32), (STOCHASTIC, torch.bfloat16)):
            world = make_world(specs, "cpu", dtype, acc_dtype=dtype, step_tile=32768, norm_tile=32768)
            norm.partial_norms(world.table, world.partials)
            fused_step.fused_step(world.table, world.control, world.hyper, world.bias)
            fused_step.write_masters(world.table, world.control)
    return {name: len(kernel.forms) for name, kernel in (step | norms).items()}


def test_every_form_of_the_steps_kernels_can_be_compiled(tmp_path):
    """In a process of its own, whose kernels are not interpreted."""
    given = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    code = "import json; from tests.kernels.test_compiles import compile_all; print(json.dumps(compile_all()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **given}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    # Columns and rows have one form of writing each, whether they are folded or not.
    expected = {
        "_step_kernel": 6 + 3 + 4,
        "_write_kernel": 3 + 2 + 3,
        "positions_kernel": 2,
        "_partial_norms_kernel": 2,
    }
    assert json.loads(done.stdout) == expected
