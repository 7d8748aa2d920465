"""No ratio without green tests: the tests that a measurement rests on, run in a child before it.

A green run is remembered beside the results for a day. It counts for the same sources (by digest, with or without git),
the same test paths and the same GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zenflow.bench.children import environment
from zenflow.bench.machine import digest, facts, source_root

DEFAULT_TESTS = ("tests/engine/test_invariants.py",)
KERNEL_TESTS = ("tests/kernels",)
REMEMBERED_SECONDS = 24 * 3600
TIMEOUT_SECONDS = 900


@dataclass(frozen=True)
class Proof:
    """`green`: the tests passed; `red`: they ran and did not; neither: there are none to run. `reason` says it."""

    green: bool
    red: bool
    reason: str


def prove(paths: Sequence[str], memory: Path) -> Proof:
    """Run the tests at `paths` (relative to the source tree) unless `memory`, a JSON file, has a green run of them."""
    root = source_root()
    if root is None:
        return Proof(False, False, "no tests lie beside this zenflow (installed from a wheel); run from a source tree")
    if lost := [path for path in paths if not (root / path.partition("::")[0]).exists()]:
        return Proof(False, False, f"{lost[0]} is not in the source tree, so nothing was tested")
    subject = {"sources": digest(), "paths": list(paths), "gpu": facts()["gpu"]}
    if (seconds := _remembered(memory, subject)) is not None:
        return Proof(True, False, f"{' '.join(paths)}: green {seconds / 60:.0f} minutes ago on the same sources")
    return _run(root, paths, memory, subject)


def _run(root: Path, paths: Sequence[str], memory: Path, subject: dict) -> Proof:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *paths]
    # With PYTEST_ADDOPTS="-n 14" there are many at once, each with threads for tensors that have no use for them.
    env = {"OMP_NUM_THREADS": "1", **environment()}
    try:
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        return Proof(False, True, f"{' '.join(paths)}: not finished after {TIMEOUT_SECONDS} s")
    if "No module named pytest" in done.stderr:
        return Proof(False, False, "pytest is not installed, so nothing was tested")
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    said = f"{' '.join(paths)}: {''.join(last).strip('= ')}"
    # All skipped is exit code 0 too.
    if done.returncode != 0 or " passed" not in said:
        return Proof(False, True, said)
    memory.parent.mkdir(parents=True, exist_ok=True)
    memory.write_text(json.dumps({"time": time.time(), **subject}), encoding="utf-8")
    return Proof(True, False, said)


def _remembered(memory: Path, subject: dict) -> float | None:
    """Age in seconds of the green run that `memory` holds, if it is of this subject and young enough."""
    try:
        record = json.loads(memory.read_text(encoding="utf-8"))
        age = time.time() - record.pop("time")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None
    return age if record == subject and 0 <= age < REMEMBERED_SECONDS else None
