"""What the host does around the kernels on a GPU: how often it compiles them, that it never waits for them, that it
finds the right device; and what NVIDIA's sanitizer says of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from zenflow_kernels import cards
from zenflow_kernels.close_step import close_step
from zenflow_kernels.dispatch import triton
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.importance import IMPORTANCES, channel_scores
from zenflow_kernels.norm import partial_norms
from zenflow_kernels.numerics import pack_hyper
from zenflow_kernels.running_scores import RunningScores
from zenflow_kernels.scatter import scatter_channels_
from zenflow_kernels.stochastic_rounding import round_stochastically
from zenflow_kernels.topk import select_channels

from tests.kernels.building import Spec, World, bits, make_world

# Each a class of `fused_step` of its own.
SPECS = [
    Spec("column", 640, 768, 70), Spec("row", 64, 128, 9), Spec("whole", 1, 1000), Spec("row", 64, 640, 9),
    Spec("column", 40, 640, 70, folds=False), Spec("row", 64, 640, 9, folds=False),
]  # fmt: skip
KINDS = {spec.kind for spec in SPECS}
STOCHASTIC = [replace(spec, stochastic=True) for spec in SPECS]  # in bf16
EMPTY = [Spec("column", 9, 0, 0), Spec("row", 0, 128, 0), Spec("whole", 0, 7)]
STEPS = 64

# Compilations of each kernel: once for all dtypes, or in each dtype once a class.
ONCE = {
    "positions_kernel": 2,  # with the factors of a step, and without
    "_close_step_kernel": 1,
    "_select_kernel": 1,
    "_add_runs_kernel": 1,
    "_round_kernel": 1,
    "_keep_scores_kernel": len(IMPORTANCES),
}
A_DTYPE = {
    "_partial_norms_kernel": 1,
    "_step_kernel": len(SPECS),
    "_write_kernel": len(KINDS),
    "_runs_kernel": 2 * len(IMPORTANCES),
    "_gather_kernel": 2,
    "_scatter_kernel": 2,
}


def make(specs: list[Spec], dtype: torch.dtype, device: str = "cuda") -> World:
    return make_world(specs, device, dtype, step_tile=32768, norm_tile=32768)


def gradients(specs: list[Spec], dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
    return [torch.randn(spec.rows, spec.cols, device=device).to(dtype) for spec in specs]


def scalars(world: World, number: int) -> dict[str, torch.Tensor]:
    """What a step finds on the device; learning rate, betas and the bias table's length differ at every step."""
    hypers = [pack_hyper(1e-3 / (number + 1), 0.9, 0.99 + number * 1e-5, 1e-8, 0.01 * number) for _ in range(2)]
    device = world.hyper.device
    return {
        "hyper": torch.tensor(hypers, device=device),
        "bias": world.bias[:, : number + 2].contiguous(),
        "present": torch.ones_like(world.control.count),
        "partials": world.partials,
        "scale": torch.tensor([2.0 + number], device=device),
        "found": torch.zeros(1, device=device),
    }


def run_every_op(
    world: World, grads: list[torch.Tensor], given: dict[str, torch.Tensor], number: int
) -> list[torch.Tensor]:
    """Every op of the package that works on the device, once; what they return."""
    made = []
    table, control = world.table, world.control
    table.bind(grads)
    partial_norms(table, given["partials"])
    close_step(
        control, given["partials"], given["present"], window=number, position=number % 4, max_grad_norm=1.0 + number,
        grad_scale=given["scale"], found_inf=given["found"],
    )  # fmt: skip
    for importance, rate in zip(IMPORTANCES, (None, 0.1 + 0.01 * number), strict=True):
        running = RunningScores(table, importance, rate)
        running.add(control)
        made += [scores for scores in running.scores if scores is not None]
    fused_step(table, control, given["hyper"], given["bias"], seed=2**63 + number, step=2**31 + number)
    write_masters(table, control, cohort=number % 3)
    weight = table.entries[0].weight
    for channel_dim in ("column", "row"):
        for importance in IMPORTANCES:
            scores = channel_scores(grads[0], channel_dim, importance)
            chosen = select_channels(scores, min(7, *weight.shape))
            made += [scores, chosen]
        part = gather_channels(weight, chosen, channel_dim, validate=False)
        scatter_channels_(weight, chosen, part, channel_dim, validate=False)
        made.append(part)
    for seed in (number, 2**63 + number):
        made.append(round_stochastically(table.entries[0].exp_avg, seed=seed, step=2**31 + number, stream=number))
    return made


def compilations(device: str = "cuda") -> Counter[str]:
    """How often Triton made each kernel, from its disk cache or anew, in many steps of two dtypes.

    With the defaults: those of a card may differ between classes that have the same otherwise.
    """
    counted: Counter[str] = Counter()

    def count(*, fn: Any, **_: Any) -> None:
        counted[fn.name] += 1

    triton.knobs.runtime.jit_post_compile_hook = count
    for specs, dtype in ((SPECS, torch.bfloat16), (SPECS, torch.float32), (STOCHASTIC, torch.bfloat16)):
        world = make(specs, dtype, device)
        for number in range(STEPS):
            with cards.ignored():
                run_every_op(world, gradients(specs, dtype, device), scalars(world, number), number)
    return counted


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_changing_steps_compile_each_kernel_once_a_class():
    """D12: in a process of its own, so that no other test has compiled anything before."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    code = "import json; from tests.kernels.test_launches import compilations; print(json.dumps(compilations()))"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    # A third dtype, of masters, for those that read or write them.
    times = {name: 3 if name in ("_step_kernel", "_write_kernel") else 2 for name in A_DTYPE}
    assert json.loads(done.stdout) == ONCE | {name: times[name] * count for name, count in A_DTYPE.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("specs", [SPECS, EMPTY], ids=["parameters", "empty parameters"])
def test_no_op_waits_for_the_device(specs, dtype):
    world = make(specs, dtype)
    grads = gradients(specs, dtype)
    given = [scalars(world, number) for number in range(5)]
    run_every_op(world, grads, given[0], 0)
    with refusing_to_wait():
        for number in range(1, 5):
            run_every_op(world, grads, given[number], number)
    assert world.control.skipped.item() == 0
    assert world.control.count.tolist() == [1] * world.control.count.numel()


@pytest.mark.gpu
def test_every_op_on_another_gpu_leaves_the_current_device_alone(dtype):
    """D11: the same bits as on the first one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for device in ("cuda:0", "cuda:1"):
        world = make(SPECS, dtype, device)
        grads = [grad.to(device) for grad in _fixed_gradients(dtype)]
        given = {name: tensor.to(device) for name, tensor in scalars(world, 1).items()}
        made = run_every_op(world, grads, given, 1)
        assert torch.cuda.current_device() == 0 and {str(tensor.device) for tensor in made} == {device}
        results.append([*made, *world.state().values()])
    assert all(torch.equal(bits(one), bits(other)) for one, other in zip(*results, strict=True))


def _fixed_gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(spec.rows, spec.cols, generator=generator).to(dtype) for spec in SPECS]


# Odd sides, several tiles, channels of every kind, short and long rows, and what is empty.
ODD = [
    Spec("column", 67, 131, 13), Spec("row", 131, 67, 13), Spec("whole", 1, 4099), Spec("column", 3, 1, 1),
    Spec("row", 31, 517, 13), Spec("column", 67, 131, 13, folds=False), Spec("row", 31, 1031, 5, folds=False), *EMPTY,
]  # fmt: skip


def once(device: str = "cuda") -> None:
    """Every op on small odd sizes, in both dtypes; fails if something outside the tensors was written."""
    stochastic = [replace(spec, stochastic=True) for spec in ODD]
    for specs, dtype in ((ODD, torch.bfloat16), (ODD, torch.float32), (stochastic, torch.bfloat16)):
        world = make_world(specs, device, dtype, step_tile=1024, norm_tile=1024)
        for number in range(2):
            run_every_op(world, gradients(specs, dtype, device), scalars(world, number), number)
        world.pad.check()


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_the_sanitizer_finds_nothing(tool):
    """Every tensor in an allocation of its own, so that an access beyond one is seen."""
    places = [os.environ.get("PATH", ""), os.path.join(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "bin")]
    sanitizer = shutil.which("compute-sanitizer", path=os.pathsep.join(places))
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    program = [sys.executable, "-c", "from tests.kernels.test_launches import once; once(); print('done')"]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", *program]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0 and "done" in done.stdout, done.stdout[-4000:] + done.stderr[-4000:]
