"""What the engine takes of the machine: memory on the device and on the host, cores, descriptors, compilations."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zenflow_kernels.dispatch import triton

from tests.engine.driving import Builder, environment, feed, make_gradients, make_parameters
from zenflow import ZenFlow, cores
from zenflow.config import ZenFlowConfig

MIB = 1 << 20
BUILDS = 20


def run_script(script: str, timeout: float = 120, within: Sequence[str] = ()) -> str:
    """What a script in a process of its own prints; within: a command that runs the one behind it."""
    done = subprocess.run(
        [*within, sys.executable, "-c", script], env=environment(), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gpu", "host"])
def test_a9_an_upload_needs_no_second_copy_on_the_device(rule: str, build: Builder) -> None:
    """A9: 100M parameters. Beyond what stays, a step and the uploads under backward take at most one bucket."""
    parameters = [nn.Parameter(torch.randn(2500, 4000, device="cuda", dtype=torch.bfloat16)) for _ in range(10)]
    settings = {"topk_ratio": 0.1, "update_interval": 2, "select_interval": 1000, "accumulate_on": rule}
    engine = build(parameters, lr=0.01, **settings, worker_threads="auto")
    grads = [torch.randn_like(parameter) for parameter in parameters]
    bucket = ZenFlowConfig().bucket_bytes
    ordinary, peaks = 0, []
    for number in range(1, 13):
        engine.zero_grad()
        engine._pipeline.wait_for_worker()
        torch.cuda.synchronize()
        first = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.backward(parameters, [grad.clone() for grad in grads])
        in_transit = engine._pipeline.uploads.in_transit
        torch.cuda.synchronize()
        backward_peak = torch.cuda.max_memory_allocated() - first
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        engine.step()
        torch.cuda.synchronize()
        step_peak = torch.cuda.max_memory_allocated() - before
        if number in (5, 7):
            assert not in_transit
            ordinary = max(ordinary, backward_peak)
        if number > 6 and number % 2 == 0:
            assert in_transit
            peaks.append(backward_peak - ordinary)
        if number > 1:  # the first step selects
            peaks.append(step_peak)
    assert max(peaks) <= bucket


# `taskset -c CORES PROGRAM...`, where there is no taskset, too.
TASKSET = (
    "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(','))); os.execv(sys.argv[2], sys.argv[2:])"
)
A10 = """
import json, os, threading, torch
from zenflow import ZenFlow
weight = torch.nn.Parameter(torch.ones(64, 96))
engine = ZenFlow([weight], lr=0.1, topk_ratio=0.3, update_interval=1, min_deferred_numel=0, core_binding=True)
for _ in range(4):
    weight.grad = torch.ones(64, 96)
    engine.step()
engine.flush()
masks = lambda pid: [sorted(os.sched_getaffinity(int(task))) for task in os.listdir(f"/proc/{pid}/task")]
found = dict(trainer=masks(os.getpid()), worker=masks(engine.stats().worker_pid), own=sorted(os.sched_getaffinity(0)))
engine.close()
print(json.dumps(found | dict(after=sorted(os.sched_getaffinity(0)))))
"""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a10_trainer_and_worker_stay_within_the_mask(count: int) -> None:
    """A10: `taskset -c 3,5,9`, or as many of the cores that there are: every thread of both is within them, none of the
    trainer's on a core of the worker's; one core is shared."""
    allowed = [core[0] for core in cores.physical_cores()]
    if len(allowed) < count:
        pytest.skip(f"needs {count} cores")
    mask = {3, 5, 9} if count == 3 and {3, 5, 9} <= set(allowed) else set(allowed[:: len(allowed) // count][:count])
    found = json.loads(run_script(A10, within=[sys.executable, "-c", TASKSET, ",".join(map(str, mask))]))
    trainer, worker = (set().union(*found[name]) for name in ("trainer", "worker"))
    assert trainer and worker and trainer | worker == mask
    assert found["own"] in found["trainer"]
    assert found["after"] == sorted(mask), "close() gives the cores back"
    assert trainer & worker == (mask if count == 1 else set())


@pytest.mark.parametrize(("quota", "threads"), [("200000 100000", 1), ("max 100000", 12)], ids=["two", "unlimited"])
def test_e13_the_worker_keeps_the_quota(
    quota: str, threads: int, build: Builder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """E13: cgroup `cpu.max` of 2 CPUs on a host of 16 cores: at most 2 worker threads, one core being the trainer's."""
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "cpu.max").write_text(quota + "\n")
    monkeypatch.setattr(cores, "physical_cores", lambda: [(cpu,) for cpu in range(16)])
    monkeypatch.setattr(cores, "cpu_quota", partial(cores.cpu_quota, tmp_path, "0::/job"))
    parameters = make_parameters([(64, 96)])
    engine = build(parameters, worker_threads="auto", core_binding=False, update_interval=1, overlap_step=False)
    feed(parameters, make_gradients([(64, 96)], steps=1)[0])
    engine.step()
    assert engine.stats().windows == 1 and engine.stats().worker_threads == threads


TWO = """
import json, os, threading, torch
from zenflow import ZenFlow
def engine():
    return ZenFlow([torch.nn.Parameter(torch.ones(64, 96))], min_deferred_numel=0, core_binding=True)
def now():
    return [sorted(os.sched_getaffinity(0)), torch.get_num_threads()]
torch.set_num_threads(2)
seen = [now()]
one, other = engine(), engine()
seen.append(now())
workers = [sorted(os.sched_getaffinity(each.stats().worker_pid)) for each in (one, other)]
for each in {order}:
    each.close()
    seen.append(now())
print(json.dumps(dict(seen=seen, workers=workers)))
"""


@pytest.mark.parametrize("order", ["(one, other)", "(other, one)"])
def test_two_optimizers_share_the_cores_and_the_last_to_close_gives_them_back(order: str) -> None:
    """As in a GAN, or where the next optimizer is built before the old one is closed."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core, trainer and worker share it")
    found = json.loads(run_script(TWO.format(order=order)))
    before, bound, half, after = found["seen"]
    assert found["workers"][0] == found["workers"][1] and not set(bound[0]) & set(found["workers"][0])
    assert half == bound and after == before


def compilations() -> dict[str, dict[str, int]]:
    """How often Triton made each kernel: in the first 12 of 64 steps of two dtypes, and in all of them."""
    counted: Counter[str] = Counter()
    early: Counter[str] = Counter()

    def count(*, fn: Any, **_: Any) -> None:
        counted[fn.name] += 1

    triton.knobs.runtime.jit_post_compile_hook = count
    shapes = [(512, 768), (512, 768)]  # one class of launches
    for dtype in (torch.bfloat16, torch.float32):
        parameters = make_parameters(shapes, dtype, "cuda")
        settings = {"topk_ratio": 0.1, "update_interval": 4, "select_interval": 8, "max_grad_norm": 1.0}
        with ZenFlow(parameters, **settings) as engine:
            before = counted.copy()
            for number, grads in enumerate(make_gradients(shapes, dtype, 64), start=1):
                for group in engine.param_groups:
                    group["lr"], group["betas"] = 0.01 / number, (0.9, 0.99 + number * 1e-5)
                feed(parameters, grads)
                engine.step()
                if number == 12:
                    early += counted - before
    return {"early": dict(early), "all": dict(counted)}


@pytest.mark.gpu
def test_d12_each_kernel_is_compiled_once_for_each_dtype() -> None:
    """D12: 64 steps with two rates of selection, in a process of its own, so that nothing is compiled before."""
    script = "import json; from tests.engine.test_resources import compilations; print(json.dumps(compilations()))"
    found = json.loads(run_script(script, timeout=600))
    assert found["all"] == found["early"], "later steps compile nothing"
    assert found["all"]["_partial_norms_kernel"] == 2
    assert {name: count for name, count in found["all"].items() if count > 2} == {}


def resources() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text().splitlines()
    (resident,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "mappings": Path("/proc/self/maps").read_text().count("memfd:"),
        "device": torch.cuda.memory_allocated() if torch.cuda.is_available() else 0,
        "resident": resident,
    }


@pytest.mark.parametrize("rule", ["gpu", "host"])
def test_e9_twenty_builds_leave_nothing(rule: str, device: str) -> None:
    """E9: memory, descriptors and threads after 20 builds as after the first three, steps and uploads included."""
    shapes = [(512, 1024), (256, 1024)]
    stream = make_gradients(shapes, torch.float32, 4)

    def once() -> None:
        parameters = make_parameters(shapes, torch.float32, device)
        settings = {"topk_ratio": 0.1, "update_interval": 1, "accumulate_on": rule}
        engine = ZenFlow(parameters, lr=0.01, **settings)
        for grads in stream:
            engine.zero_grad()
            torch.autograd.backward(parameters, [grad.to(device, copy=True) for grad in grads])
            engine.step()
        engine.close()

    for _ in range(3):
        once()
    before = resources()
    for _ in range(BUILDS):
        once()
    after = resources()
    # One build takes 18 MiB of host memory and more: a leak of it would be 360.
    assert after.pop("resident") - before.pop("resident") < 32 * MIB
    assert after == before


E1 = """
import errno, json, os, torch
from zenflow import ZenFlow

def is_full(nbytes):
    with open("/dev/shm/probe", "wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            return error.errno == errno.ENOSPC
    return False

full = is_full(200 << 20)
os.unlink("/dev/shm/probe")
weight = torch.nn.Parameter(torch.ones(1024, 1024))
settings = dict(topk_ratio=0.1, update_interval=25, full_warm_up_rounds=0, overlap_step=False)
settings |= dict(accumulate_on="host", deferred_rule="replay")
with ZenFlow([weight], lr=0.1, weight_decay=0, worker_threads=1, **settings) as engine:
    ring = engine._pipeline.storages[0].segment.lanes * weight.nbytes
    for _ in range(25):
        weight.grad = torch.ones_like(weight)
        engine.step()
    used = os.listdir("/dev/shm")
print(json.dumps([full, ring, used, os.listdir("/dev/shm"), weight.unique().tolist()]))
"""


def test_e1_a_ring_of_200_mb_beside_64_mb_of_dev_shm() -> None:
    """E1, word for word: a /dev/shm of 64 MB, in which 200 MB find no room, over this process's own."""
    mount = [
        "unshare",
        "--mount",
        "--map-root-user",
        "sh",
        "-ec",
        'mount -t tmpfs -o size=64m none /dev/shm; exec "$@"',
        "sh",
    ]
    if shutil.which("unshare") is None or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("needs a mount namespace of its own")
    full, ring, used, left, weights = json.loads(run_script(E1, within=mount))
    assert full and ring == 200 * MIB
    assert used == left == []
    # Constant gradients: AdamW moves each weight by lr in each of the 25 steps.
    assert weights == [pytest.approx(1 - 25 * 0.1, rel=1e-5)]


E11 = """
import json, os, torch
from pathlib import Path
from zenflow import ZenFlow

def proportional(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

def run(rows, steps):
    weight = torch.nn.Parameter(torch.ones(rows, 1152, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    before = proportional(os.getpid())
    engine = ZenFlow(
        [weight], lr=0.1, topk_ratio=0.1, update_interval=steps, accumulate_on="host", deferred_rule="replay",
        full_warm_up_rounds=0, overlap_step=False, worker_threads=2,
    )
    engine.step()
    engine.flush()
    after = proportional(os.getpid()) + proportional(engine.stats().worker_pid)
    engine.close()
    return engine._pipeline.storages[0].segment.lanes * weight.nbytes, after - before

run(8, 2)  # what torch loads at the first use of things is no part of the growth
print(json.dumps(run(1024, 250)))
"""


def test_e11_a_ring_is_in_memory_once() -> None:
    """E11: a ring of 1.1 GiB, mapped and touched by both processes, costs the host at most 1.2 GiB with all the rest:
    shares of the pages, of trainer and worker together."""
    ring, growth = json.loads(run_script(E11))
    gib = 1 << 30
    assert 1.09 * gib < ring < 1.11 * gib
    assert ring <= growth < 1.2 * gib
