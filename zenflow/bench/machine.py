"""What a result was measured on: hardware, versions, sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from zenflow.cores import physical_cores

PACKAGES = ("torch", "triton", "transformers", "torchao", "deepspeed")


@cache
def facts() -> dict[str, str]:
    """Column names and values, read once; an unknown one is an empty string."""
    gpu, _, driver = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).partition(", ")
    return {
        "gpu": gpu,
        "driver": driver,
        **{name: _version(name) for name in PACKAGES},
        "cpu": _cpu_model(),
        "cores": f"{len(physical_cores())} ({len(os.sched_getaffinity(0))} logical)",
        "commit": _commit(),
        "sources": digest()[:12],
        # A limit that was meant for something else holds back trainers whose CPU part runs on these threads.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", ""),
    }


def source_root() -> Path | None:
    """The source tree that this package is run from, or None for an installed one: there are no tests beside it."""
    root = Path(find_spec("zenflow").origin).parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "tests").is_dir() else None


def digest() -> str:
    """SHA-256 over the sources of the package, its kernels and its tests: equal for the same code, git or not."""
    root = source_root()
    if root is None:
        folders = [Path(find_spec(name).origin).parent for name in ("zenflow", "zenflow_kernels")]
    else:
        folders = [root / name for name in ("zenflow", "kernels", "tests")]
    total = hashlib.sha256()
    for folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c")):
            total.update(f"{folder.name}/{path.relative_to(folder)}\0".encode())
            total.update(path.read_bytes() + b"\0")
    return total.hexdigest()


def _commit() -> str:
    """The commit, with `+changes` if tracked files differ from it."""
    root = source_root()
    if root is None or not (commit := _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])):
        return ""
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return commit + ("+changes" if changed else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), flags=re.M):
            return found[1]
    return ""


def _output(command: list[str]) -> str:
    """The first line that it prints; empty if there is no such program, or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""
