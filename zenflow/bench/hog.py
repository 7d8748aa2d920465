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

from zenflow.bench.children import module_command, started
from zenflow.bench.own_pass import OwnPass
from zenflow.bench.processes import die_with_parent

MATRICES = 8  # 1.9 GB: far beyond any cache


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
    work = OwnPass(settings["matrices"], settings["threads"])
    print("ready", flush=True)
    windows, start = 0, time.perf_counter()
    while not end.is_set() or not windows:
        work.window()
        windows += 1
    print(windows * work.window_bytes / (time.perf_counter() - start) / 1e9, flush=True)
    return 0
