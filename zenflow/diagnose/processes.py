"""CPU time of processes, as /proc tells it; without torch."""

from __future__ import annotations

import os
from pathlib import Path

PROC = Path("/proc")


def cpu_seconds(pid: int, proc: Path = PROC) -> float | None:
    """Seconds of CPU, user and system, of all threads of a process so far; None if it is gone. Steps of 10 ms."""
    try:
        fields = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
