"""A process that keeps the host's memory as busy as the CPU optimizer does: passes of AdamW, over and over.

torch's fused AdamW on fp32 moves 28 bytes an element, as the CPU optimizer's pass does, at the memory's limit.
"""

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

from zenflow.bench.children import module_command, started

BYTES_AN_ELEMENT = 28
ELEMENTS = 2**27  # 2.1 GB: far beyond any cache


@dataclass
class Hog:
    """What the process achieved, once it has ended: GB/s, counting 28 bytes an element."""

    gb_per_s: list[float] = field(default_factory=list)


@contextmanager
def hog(cores: Sequence[int], threads: int, log: Path, elements: int = ELEMENTS) -> Iterator[Hog]:
    """The memory is busy inside this block."""
    result = Hog()
    command = [*module_command(), "_hog", json.dumps({"cores": list(cores), "threads": threads, "elements": elements})]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(log, "w", encoding="utf-8") as errors,
        started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as child,
    ):
        if not child.stdout.readline():
            raise RuntimeError(f"the memory hog did not start: {log.read_text(encoding='utf-8').strip()[-500:]}")
        yield result
        answer, _ = child.communicate(timeout=60)
        result.gb_per_s.append(float(answer))


def main(text: str) -> int:
    """The process itself: says `ready`, works until its standard input ends, and prints its GB/s."""
    settings = json.loads(text)
    os.sched_setaffinity(0, settings["cores"])
    end = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), end.set()), daemon=True).start()
    import torch

    torch.set_num_threads(settings["threads"])
    arrays = [[torch.full((settings["elements"],), value)] for value in (0.5, 1e-3, 0.0, 1.0)]
    steps = [torch.tensor(1.0)]
    hyper = {"lr": 1e-5, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    passes = 0
    while not end.is_set() or not passes:
        torch._fused_adamw_(*arrays, [], steps, **hyper, amsgrad=False, maximize=False)
        if not passes:  # the first one waits for memory and threads
            print("ready", flush=True)
            start = time.perf_counter()
        passes += 1
    seconds = time.perf_counter() - start
    print((passes - 1) * settings["elements"] * BYTES_AN_ELEMENT / seconds / 1e9, flush=True)
    return 0
