"""A folder that another process has locked: it is named, waited for, and not for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from zenflow import checkpoint_folder, folder_lock
from zenflow.checkpoint_folder import load, save
from zenflow.disk import opened
from zenflow.folder_lock import FolderBusyError, holder, locked


@contextmanager
def stopped_holder(folder: Path) -> Iterator[int]:
    """The id of a process that has locked a folder and was stopped."""
    pid = os.fork()
    if pid == 0:
        try:
            fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_EX)
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    try:
        os.waitpid(pid, os.WUNTRACED)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_stopped_process_is_named_and_not_waited_for_without_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.1)
    with stopped_holder(tmp_path) as pid:
        with pytest.raises(FolderBusyError) as refusal:
            save(tmp_path / "saved", {"x": 1})
        assert list(tmp_path.iterdir()) == []
    error = refusal.value
    assert (error.errno, error.filename) == (errno.ETIMEDOUT, str(tmp_path))
    assert error.strerror.startswith(f"process {pid} (") and ", stopped) has kept this folder locked" in error.strerror
    assert "kill -CONT" in error.strerror
    assert [record.getMessage() for record in caplog.records if record.name == "zenflow"] == [
        f"waiting for {error.strerror.partition(' has kept')[0]}, which has locked {tmp_path}"
    ]
    save(tmp_path / "saved", {"x": 1})
    assert load(tmp_path / "saved") == {"x": 1}


def test_a_process_that_goes_on_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with stopped_holder(tmp_path) as pid:
        monkeypatch.setattr(folder_lock.time, "sleep", lambda seconds: os.kill(pid, signal.SIGCONT))
        save(tmp_path / "saved", {"x": 1})
    assert load(tmp_path / "saved") == {"x": 1}


def test_a_process_that_was_forked_meanwhile_keeps_nothing_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As data loaders are, while a checkpoint is written beside the training: it inherits the descriptors."""
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.1)
    remove, forked, (hear, tell) = checkpoint_folder.remove_leftovers, [], os.pipe()

    def fork(folder: Path) -> None:
        remove(folder)
        if not forked:
            forked.append(os.fork())
            if forked[0] == 0:
                os.close(tell)
                os.read(hear, 1)
                os._exit(0)

    monkeypatch.setattr(checkpoint_folder, "remove_leftovers", fork)
    try:
        for number in range(2):
            save(tmp_path / f"{number}", {"x": number})
    finally:
        os.close(tell)
        os.waitpid(forked[0], 0)
        os.close(hear)
    assert [load(tmp_path / f"{number}")["x"] for number in range(2)] == [0, 1]


def test_where_there_are_no_locks_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("zenflow.own_lock.fcntl.flock", refuse)
    save(tmp_path / "saved", {"x": 1})
    assert load(tmp_path / "saved") == {"x": 1}


def test_a_holder_that_proc_does_not_know_has_no_name(tmp_path: Path) -> None:
    with opened(tmp_path) as descriptor:
        assert holder(descriptor) == "another process"
        with locked(descriptor, tmp_path):
            assert holder(descriptor).startswith(f"process {os.getpid()} (")
