"""Signals and child processes: a handler that raises must not leave a child behind, or a lock held.

`subprocess` loses a child that it was starting when a handler raises, and `Popen.wait` can keep its lock for ever, so
that the next wait for the same child never returns.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

HELD = (signal.SIGINT, signal.SIGTERM)
SLICE_SECONDS = 0.1


@contextmanager
def signals_held() -> Iterator[None]:
    """Python's handlers of SIGINT and SIGTERM run after this block instead of inside it.

    Outside the main thread nothing is held: handlers never run there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received = []
    before = {}
    try:
        for number in HELD:
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, lambda *arguments: received.append(arguments))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number, frame in received:
            before[number](number, frame)


def wait_for(process: subprocess.Popen, seconds: float | None = None) -> int:
    """The exit code, as `process.wait(seconds)` gives it; signals are handled meanwhile, a moment late.

    subprocess.TimeoutExpired after `seconds` (None: never).
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while True:
        left = SLICE_SECONDS if deadline is None else min(SLICE_SECONDS, deadline - time.monotonic())
        try:
            with signals_held():
                return process.wait(max(0.0, left))
        except subprocess.TimeoutExpired:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(process.args, seconds) from None
