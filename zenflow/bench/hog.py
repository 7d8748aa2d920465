"""A process that keeps the host's memory as busy as the CPU optimizer does: its pass, over and over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from zenflow import native
from zenflow.bench.children import module_command, started
from zenflow.bench.processes import die_with_parent
from zenflow.cpu_pass import Arrays, Plan, SegmentPass, make_lanes, plan_update
from zenflow.geometry import lay_out
from zenflow.ring import SegmentMemory

BYTES_A_PARAMETER = 28
SIDE = 4096
MATRICES = 8  # 2.1 GB: far beyond any cache
ONE_IN_BF16 = 0x3F80
HYPER = np.array([[1e-5, 0.9, 0.999, 1e-8, 0.01]])  # lr, beta1, beta2, eps, weight decay


@dataclass
class Hog:
    """What the process achieved, once it has ended: GB/s, counting 28 bytes a parameter."""

    gb_per_s: list[float] = field(default_factory=list)


@contextmanager
def hog(cores: Sequence[int], threads: int, log: Path, matrices: int = MATRICES) -> Iterator[Hog]:
    """The memory is busy inside this block. RuntimeError, with what the process printed, if it fails."""
    result = Hog()
    command = [*module_command(), "_hog", json.dumps({"cores": list(cores), "threads": threads, "matrices": matrices})]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w", encoding="utf-8") as errors,
        started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        if not child.stdout.readline():
            raise RuntimeError(_failure(log))
        yield result
        answer, _ = child.communicate(timeout=60)
        if child.returncode != 0:
            raise RuntimeError(_failure(log))
        result.gb_per_s.append(float(answer))


def _failure(log: Path) -> str:
    last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return f"the memory hog failed: {''.join(last)}"


def main(text: str) -> int:
    """The process itself: says `ready`, works until its standard input ends, and prints its GB/s."""
    die_with_parent()
    settings = json.loads(text)
    os.sched_setaffinity(0, settings["cores"])
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    work, buckets, parameters = _pass(settings["matrices"], settings["threads"])
    print("ready", flush=True)
    windows, start = 0, time.perf_counter()
    while not end.is_set() or not windows:
        for bucket in range(buckets):
            work.run(bucket)
        windows += 1
    seconds = time.perf_counter() - start
    print(windows * parameters * BYTES_A_PARAMETER / seconds / 1e9, flush=True)
    return 0


def _pass(matrices: int, threads: int) -> tuple[SegmentPass, int, int]:
    """The CPU optimizer's pass over bf16 weights of its own, its number of buckets, and of parameters."""
    segment = lay_out(
        0, [(SIDE, SIDE, 0)] * matrices, channel_dim="column", weight_dtype="bfloat16", ring_dtype="bfloat16",
        max_steps=1, n_groups=1, bucket_bytes=64 << 20,
    )  # fmt: skip
    memory = SegmentMemory.create(segment, threads)
    # Numbers of ordinary size: subnormal ones would be slow as arithmetic.
    for array, value in ((memory.master, 0.5), (memory.exp_avg, 1e-3), (memory.exp_avg_sq, 1e-3)):
        array[:] = value
    memory.ring.view(np.uint16)[:] = ONE_IN_BF16
    flat = memory.master, memory.exp_avg, memory.exp_avg_sq, memory.ring, memory.shadow
    pieces = [bucket.pieces for bucket in segment.buckets]
    work = SegmentPass(
        Arrays(*flat, "bfloat16", "bfloat16"), segment.matrices, pieces, threads=threads, library=native.load()
    )
    plan = Plan(plan_update(HYPER, np.zeros(SIDE, dtype=np.int32), "linear"), make_lanes([0], [1.0], [1.0]))
    for matrix in range(matrices):
        work.set_plan(matrix, plan)
    return work, len(pieces), segment.numel
