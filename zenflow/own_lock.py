"""Locks of one process (`flock`), in which children that are forked meanwhile have no part.

A lock belongs to an open file, and a forked child has it open, too: it would keep the lock after this process's end,
as a data loader's worker does that outlives its trainer. So every lock has a descriptor of its own, which a child
closes before it does anything else. (One that is forked behind Python's back does not.)
"""

from __future__ import annotations

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path

_guard = threading.RLock()  # nobody forks while `_held` and the open descriptors disagree
_held: set[OwnLock] = set()


class OwnLock:
    """A descriptor of a file or folder, to be locked for this process alone; `close` ends the lock.

    flags: as for `os.open`; dir_fd: an open folder to which `path` is relative. OSError if it cannot be opened.
    """

    def __init__(self, path: str | Path, flags: int = os.O_RDONLY, dir_fd: int | None = None) -> None:
        with _guard:
            self.descriptor = os.open(path, flags, dir_fd=dir_fd)
            _held.add(self)

    def take(self) -> bool:
        """Lock it, without waiting; False if another process has. OSError where a file system knows no locks."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Let go, once; nothing in a child, which has let go already."""
        with _guard:
            if self in _held:
                with suppress(OSError):  # to close it would not do: a child may not have come to close its own yet
                    fcntl.flock(self.descriptor, fcntl.LOCK_UN)
                self._let_go()
                _held.discard(self)

    def _let_go(self) -> None:
        os.close(self.descriptor)
        self.descriptor = -1


def _begin_as_a_child() -> None:
    for lock in _held:
        lock._let_go()
    _held.clear()
    _guard.release()


os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_begin_as_a_child)
