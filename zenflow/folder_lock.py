"""One process at a time in a folder, by `flock`: waited for with an end, because whoever holds it may be stopped."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zenflow.own_lock import OwnLock

WAIT_SECONDS = 60.0  # who holds it removes what killed processes have left, and makes a folder
POLL_SECONDS = 20e-3
log = logging.getLogger("zenflow")


class FolderBusyError(TimeoutError):
    """Another process has kept a folder locked for too long: says which, and what can be done."""


@contextmanager
def locked(descriptor: int, folder: Path) -> Iterator[None]:
    """Hold `folder`, open as `descriptor`, inside the block; a line in the log names whom it waits for.

    FolderBusyError after WAIT_SECONDS seconds. Where a file system knows no locks, nothing happens.
    """
    lock = OwnLock(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
    try:
        _take(lock, folder)
        yield
    finally:
        lock.close()


def _take(lock: OwnLock, folder: Path) -> None:
    end, told = time.monotonic() + WAIT_SECONDS, False
    while not _is_taken(lock):
        if time.monotonic() >= end:
            raise FolderBusyError(
                errno.ETIMEDOUT,
                f"{holder(lock.descriptor)} has kept this folder locked for {WAIT_SECONDS:g} seconds; continue it "
                "(kill -CONT) or end it, or use another folder",
                str(folder),
            )
        if not told:
            log.warning("waiting for %s, which has locked %s", holder(lock.descriptor), folder)
            told = True
        time.sleep(POLL_SECONDS)


def _is_taken(lock: OwnLock) -> bool:
    """True where a file system knows no locks, too."""
    try:
        return lock.take()
    except OSError:
        return True


def holder(descriptor: int) -> str:
    """The process that has locked an open file, in words; /proc does not know those of other machines."""
    file = os.fstat(descriptor)
    place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        locks = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        pid = next(int(words[4]) for words in locks if words[1] == "FLOCK" and words[5] == place)
        name = Path(f"/proc/{pid}/comm").read_text().strip()
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, StopIteration, ValueError, IndexError):
        return "another process"
    return f"process {pid} ({name}{', stopped' if state in 'Tt' else ''})"
