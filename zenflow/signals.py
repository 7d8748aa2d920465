"""Signals: a handler that raises must not leave a child behind, or a lock held; and a stop between two steps.

`subprocess` loses a child that it was starting when a handler raises, and `Popen.wait` can keep its lock for ever, so
that the next wait for the same child never returns.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SLICE_SECONDS = 0.1


@contextmanager
def signals_held() -> Iterator[None]:
    """Python's handlers of SIGINT, SIGTERM and SIGHUP run after this block instead of inside it.

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


class StopRequest:
    """A context in whose block SIGINT, SIGTERM and SIGHUP only set `number`, for a loop that looks at it between steps.

    SIGHUP stays ignored where it is, as under nohup. A second signal ends the process at once, as if it had no
    handlers: the first one gives them all back to the system. After the block the handlers are those from before,
    whatever came. Outside the main thread nothing is caught: handlers never run there.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that came
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                before = signal.getsignal(number)
                # None is a handler that Python has not set and cannot put back.
                if before is not None and (number, before) != (signal.SIGHUP, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _: FrameType | None) -> None:
        for each in self._before:
            signal.signal(each, signal.SIG_DFL)
        if self.number is not None:  # the second, too, came while `signals_held`
            os.kill(os.getpid(), number)
        self.number = number


class Stopped(KeyboardInterrupt):
    """Signal `number` ended the work in good order; the message is for people."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.number = number


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a process that this ended, as shells have it: 128 and the signal's number."""
    return 128 + (interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT)
