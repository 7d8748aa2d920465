"""Deadlines: whether a process ends in time, and calls that must not hang; and what a process holds."""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")


def ends_within(pid: int, seconds: float) -> bool:
    """Whether a process, which need not be our child, ends in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()  # unlike select, at home with descriptors above 1023
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(1000 * seconds))
    finally:
        os.close(descriptor)


def wait_until_stopped(pid: int) -> None:
    """SIGSTOP has been sent, and takes effect a moment later."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        os.sched_yield()


def within(seconds: float, call: Callable[..., Result], *args: Any) -> Result:
    """What `call(*args)` returns or raises, in a thread of its own; the test fails if it takes longer, or for ever."""
    outcome: Future[Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(call(*args))
        except BaseException as error:
            outcome.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        pytest.fail(f"still running after {seconds} seconds")
    return outcome.result()


def shared_mappings() -> int:
    """How many anonymous files (memfd) this process maps."""
    return sum("memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def shared_descriptors() -> int:
    """How many descriptors of anonymous files this process holds."""
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return sum("memfd:" in link for link in links)


def shared_bytes() -> int:
    """Bytes of shared memory that this process has in its mappings, whoever keeps these."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssShmem:\s+(\d+) kB", status)[1]) * 1024
