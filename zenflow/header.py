"""The counters and the last words of one worker, in shared memory."""

from __future__ import annotations

import time

import numpy as np

from zenflow import native
from zenflow.arena import Arena

MAGIC, VERSION = 0x5A454E464C4F5721, 4
TEXT_BYTES = 8192


class Header:
    """Counters and the error text of one worker, in an arena of its own."""

    # done and the worker's own counters lie on separate cache lines: the trainer polls the first.
    DTYPE = np.dtype(
        {
            "names": ["magic", "version", "done", "heartbeat", "busy_ns", "threads", "failed", "text_bytes", "text"],
            "formats": ["u8"] * 8 + [f"V{TEXT_BYTES}"],
            "offsets": [0, 8, 64, 128, 136, 144, 192, 200, 256],
            "itemsize": 256 + TEXT_BYTES,
        }
    )

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._words = {name: self._view(arena, name) for name in self.DTYPE.names if name != "text"}
        self._done = self.done_address
        self._text = arena.array(np.uint8, self.DTYPE.fields["text"][1], TEXT_BYTES)
        self._last: tuple[int, float, str | None] = (0, 0.0, None)

    @classmethod
    def _view(cls, arena: Arena, name: str) -> np.ndarray:
        return arena.array(np.uint64, cls.DTYPE.fields[name][1], 1)

    @classmethod
    def create(cls) -> Header:
        """A new header, all counters 0."""
        header = cls(Arena.create("zenflow-header", cls.DTYPE.itemsize))
        header._words["magic"][0], header._words["version"][0] = MAGIC, VERSION
        return header

    @classmethod
    def attach(cls, fd: int) -> Header:
        """The header behind a received descriptor, which it takes over; RuntimeError if it is another version's."""
        header = cls(Arena.attach(fd, cls.DTYPE.itemsize))
        found = int(header._words["magic"][0]), int(header._words["version"][0])
        if found != (MAGIC, VERSION):
            raise RuntimeError(f"not a header of this version: magic and version {found}, expected {(MAGIC, VERSION)}")
        return header

    @property
    def done(self) -> int:
        """Slots fully processed since the worker started (acquire)."""
        return native.load_acquire(self._done) if self._words else self._last[0]

    @property
    def done_address(self) -> int:
        """Of the word that `done` reads, for streams that wait for it and for whoever releases them."""
        return self.arena.address + self.DTYPE.fields["done"][1]

    @property
    def busy_seconds(self) -> float:
        """Time that the worker has spent in processing slots."""
        return int(self._words["busy_ns"][0]) / 1e9 if self._words else self._last[1]

    @property
    def threads(self) -> int:
        """Threads of the worker's latest pass; 0 before the first, and after `close()`."""
        return int(self._words["threads"][0]) if self._words else 0

    @threads.setter
    def threads(self, threads: int) -> None:
        self._words["threads"][0] = threads

    @property
    def heartbeat(self) -> float:
        """`time.monotonic()` of the worker's last sign of life; 0 before the first."""
        return int(self._words["heartbeat"][0]) / 1e9 if self._words else 0.0

    @property
    def error(self) -> str | None:
        """The worker's traceback, if it has failed."""
        if not self._words:
            return self._last[2]
        if not native.load_acquire(self._words["failed"].ctypes.data):
            return None
        return bytes(self._text[: int(self._words["text_bytes"][0])]).decode(errors="replace")

    def beat(self) -> None:
        """A sign of life."""
        self._words["heartbeat"][0] = time.monotonic_ns()

    def finish(self, seq: int, busy_ns: int) -> None:
        """The slot `seq` is processed (release)."""
        self._words["busy_ns"][0] += np.uint64(busy_ns)
        native.store_release(self._done, seq)

    def fail(self, text: str) -> None:
        """Leave a traceback (its end, if it is too long) for the trainer."""
        data = np.frombuffer(text.encode()[-TEXT_BYTES:], dtype=np.uint8)
        self._text[: data.size] = data
        self._words["text_bytes"][0] = data.size
        native.store_release(self._words["failed"].ctypes.data, 1)

    def close(self) -> None:
        """Release the memory; `done`, `busy_seconds` and `error` keep their last values."""
        if self._words:
            self._last = self.done, self.busy_seconds, self.error
        self._words, self._text = {}, np.empty(0, dtype=np.uint8)
        self.arena.close()
