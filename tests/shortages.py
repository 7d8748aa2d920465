"""Disks that fill up, descriptors and addresses that run out, by the limits that the kernel holds this process to."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path


@contextmanager
def _limited(kind: int, limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes, as at a disk's end: writes fail with EFBIG (Python ignores SIGXFSZ)."""
    with _limited(resource.RLIMIT_FSIZE, size):
        yield


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process can open `count` more descriptors."""
    with _limited(resource.RLIMIT_NOFILE, limit_for("self", count)):
        yield


def mapped() -> int:
    """Bytes of all mappings of this process."""
    return resource.getpagesize() * int(Path("/proc/self/statm").read_text().split()[0])


@contextmanager
def addresses_left(nbytes: int) -> Iterator[None]:
    """This process can map `nbytes` more (`ulimit -v`); no thread can be started meanwhile."""
    with _limited(resource.RLIMIT_AS, mapped() + nbytes):
        yield


def limit_for(pid: int | str, count: int) -> int:
    """The limit under which a process can open `count` more descriptors: it is on their numbers."""
    taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    return next(islice((number for number in range(1 << 20) if number not in taken), count, None))
