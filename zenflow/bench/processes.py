"""Processes as /proc tells of them: who descends from whom, and the host memory that they take."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let this process be killed when the one that started it ends, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def family(pid: int) -> list[int]:
    """`pid` and its living descendants."""
    parents = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def host_bytes(pid: int | None = None) -> int:
    """Resident bytes of a process (default: this one) and its descendants; pages that they share count once."""
    return sum(_resident(member) for member in family(os.getpid() if pid is None else pid))


def used_bytes() -> int:
    """Bytes of this machine's memory that nobody could take: also pinned memory that no process is charged for."""
    text = (PROC / "meminfo").read_text()
    total, available = (int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) for name in ("MemTotal", "MemAvailable"))
    return 1024 * (total - available)


def _resident(pid: int) -> int:
    for name, field in (("smaps_rollup", "Pss"), ("status", "VmRSS")):
        with suppress(OSError):
            if found := re.search(rf"^{field}:\s+(\d+) kB", (PROC / str(pid) / name).read_text(), flags=re.M):
                return 1024 * int(found[1])
    return 0
