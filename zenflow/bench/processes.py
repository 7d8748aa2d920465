"""Host memory of a process and all below it, as /proc tells it."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


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
