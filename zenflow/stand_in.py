"""What takes a dead worker's place until all that waits for its results has gone on.

Streams wait for `done` before they copy a result into the weights, and once it is released they copy what there is. In
a lane that is a shadow, too, that is a gradient, or a result half written over it; in the one of two shadows that does
not hold what is visible it is a prediction of long ago. So what is visible is put there first: slot by slot, in their
order and behind their payload, which only comes once the last upload from its place has ended. The one shadow of its
own that a bucket has without predictions holds what is visible as it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from zenflow import native
from zenflow.header import Header

if TYPE_CHECKING:
    from zenflow.uploading import Sent

LOOK_SECONDS = 1e-3
PATIENCE_SECONDS = 30.0  # for a payload that does not come, as after an error of the device


class StandIn:
    """Knows the slots that the worker may not have finished; `take_over` runs in the thread that watches the worker."""

    def __init__(self, header: Header) -> None:
        self._header = header
        self._slots: deque[Sent] = deque()
        self._lock = threading.Lock()

    def add(self, sent: Sent) -> None:
        """A slot whose payload and `ready` are on their way, before its upload is queued."""
        with self._lock:
            self._drop_finished()
            self._slots.append(sent)

    def take_over(self, stopped: threading.Event) -> None:
        """Pass over what the dead worker has left, `done` rising with it, until nothing is left or it is `stopped`."""
        while (sent := self._next()) is not None:
            segment = sent.storage.segment
            if segment.in_place or segment.predicted:
                if not _arrives(sent, stopped):
                    return
                sent.storage.put_back(sent.bucket, sent.turn)
            native.store_release(self._header.done_address, sent.seq)

    def _next(self) -> Sent | None:
        with self._lock:
            self._drop_finished()
            return self._slots[0] if self._slots else None

    def _drop_finished(self) -> None:
        while self._slots and self._slots[0].seq <= self._header.done:
            self._slots.popleft()


def _arrives(sent: Sent, stopped: threading.Event) -> bool:
    """Wait for a slot's payload, behind which come its `ready`, which may be lost, and its window's last word."""
    deadline, memory = time.monotonic() + PATIENCE_SECONDS, sent.storage.memory
    while memory.ready(sent.bucket.index, sent.turn) != sent.seq and memory.sent(sent.turn) < sent.seq:
        if time.monotonic() > deadline or stopped.wait(LOOK_SECONDS):
            return False
    return True
