"""What a test leaves in /dev/shm, which is everybody's: other processes make and remove entries there, too."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

SHARED = Path("/dev/shm")


def shared_entries() -> set[str]:
    """The names of all entries."""
    return set(os.listdir(SHARED)) if SHARED.is_dir() else set()


def left_since(before: set[str], seconds: float = 0.0) -> set[str]:
    """New entries that are still there after so many seconds, less those of other living processes.

    An entry is another's if a process outside this one's tree maps it, holds it open or has given it its id: the first
    number of its name. What follows are counters, and every counter is some process's id.
    """
    deadline = time.monotonic() + seconds
    while (left := shared_entries() - before) and (left := left - _of_others(left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _of_others(entries: set[str]) -> set[str]:
    living = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    others = {pid for pid in living if not _is_ours(pid)}
    named = {entry for entry in entries if _maker(entry) in others}
    return named.union(*map(_held_by, others)) & entries


def _maker(entry: str) -> int | None:
    """The process whose id an entry's name has, as torch's `torch_123_456_1` and joblib's have it."""
    return next((int(word) for word in re.split(r"[-_.]", entry) if word.isdecimal()), None)


def _is_ours(pid: int) -> bool:
    """Whether it is this process or comes from it."""
    while pid not in (0, os.getpid()):
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid != 0


def _held_by(pid: int) -> set[str]:
    """The entries that a process maps or holds open; none if it has ended, or is not ours to look into."""
    try:
        paths = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
        paths += [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return set()
    return {path.removeprefix(f"{SHARED}/").split("/")[0] for path in paths if path.startswith(f"{SHARED}/")}
