"""The check that nothing is left in /dev/shm tells this process's entries from those of others."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import ends_within
from tests.shared_entries import SHARED, left_since, shared_entries

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="there is no /dev/shm")


@pytest.fixture
def entry() -> Iterator[Path]:
    path = SHARED / f"zenflow-test-{os.getpid()}-entry"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def stranger(entry: Path) -> Iterator[int]:
    """A process that holds the entry open and comes from nobody here: the shell that started it has ended."""
    script = f"exec 3>{entry}; sleep 600 >/dev/null & echo $!"
    pid = int(subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout)
    yield pid
    with suppress(ProcessLookupError):  # a test may have ended it
        os.kill(pid, signal.SIGKILL)


def test_what_this_process_or_its_child_leaves_is_found(entry: Path) -> None:
    before = shared_entries()
    assert left_since(before) & {entry.name} == set()
    with entry.open("w") as file, subprocess.Popen(["sleep", "600"], stdout=file) as child:
        file.close()
        found = left_since(before)
        child.kill()
    assert entry.name in found
    assert entry.name in left_since(before, seconds=0.1)


def test_what_another_process_holds_is_its_own_until_it_ends(entry: Path, stranger: int) -> None:
    before = shared_entries() - {entry.name}
    assert entry.exists() and entry.name not in left_since(before)
    os.kill(stranger, signal.SIGSTOP)
    assert entry.name not in left_since(before)
    os.kill(stranger, signal.SIGKILL)
    assert ends_within(stranger, 5)
    assert entry.name in left_since(before)


def test_a_folder_with_the_id_of_another_process_is_that_ones(stranger: int) -> None:
    before = shared_entries()
    theirs, mine = (SHARED / f"folder_{pid}_of_a_test" for pid in (stranger, os.getpid()))
    counted = SHARED / f"folder_{os.getpid()}_{stranger}"  # a counter, which happens to be that id
    for folder in (theirs, mine, counted):
        folder.mkdir()
    try:
        assert left_since(before) & {theirs.name, mine.name, counted.name} == {mine.name, counted.name}
    finally:
        for folder in (theirs, mine, counted):
            folder.rmdir()
