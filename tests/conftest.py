"""What every test shares: Triton's interpreter where there is no GPU, and a check that nothing is left behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.processes import ends_within
from tests.shared_entries import left_since, shared_entries

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Triton reads it when a kernel is defined, so it must be set before zenflow_kernels is imported.
    os.environ["TRITON_INTERPRET"] = "1"

# So a shell starts a job in the background, and nohup; children, which tests interrupt, would inherit it.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

HELPERS = (b"resource_tracker", b"forkserver")  # multiprocessing's own, which live as long as the interpreter


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if HAS_CUDA:
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Modules and test items stay until the end: the garbage collector need not go through them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


def _children() -> dict[int, bytes]:
    """Command lines of the running children of this process, by id."""
    children = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and not any(helper in command for helper in HELPERS):
            children[int(entry.name)] = command
    return children


@pytest.fixture(scope="session", autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    children, entries = _children(), shared_entries()
    yield
    left = {pid: command for pid, command in _children().items() if pid not in children and not ends_within(pid, 5)}
    assert not left, f"child processes outlive the tests: {left}"
    # Another process that has just ended may have an entry for a moment.
    assert left_since(entries, seconds=10) == set(), "new entries in /dev/shm"
