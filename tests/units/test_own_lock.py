"""Locks end with the process that took them, whatever it has forked: data loaders' workers may outlive a trainer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from zenflow import folder_lock
from zenflow.checkpoint_folder import LEFTOVER, _scratch, load, save
from zenflow.disk import opened
from zenflow.folder_lock import locked
from zenflow.own_lock import OwnLock
from zenflow.training.errors import InputError
from zenflow.training.metrics_file import MetricsFile


def lock_folder(folder: Path) -> Any:
    with opened(folder) as descriptor:
        taken = locked(descriptor, folder)
        taken.__enter__()
    return taken


def begin_checkpoint(folder: Path) -> Any:
    taken = _scratch(folder)
    taken.__enter__()
    return taken


TAKING: dict[str, Callable[[Path], Any]] = {
    "metrics of a new run": MetricsFile.create,
    "metrics of a resumed run": lambda folder: MetricsFile.take_up(folder, 0, 0),
    "a folder": lock_folder,
    "a checkpoint that is written": begin_checkpoint,
}


@contextmanager
def orphan(prepare: Callable[[], Any]) -> Iterator[None]:
    """A process that lives on, forked by one that had called `prepare` and was killed then."""
    (hear, tell), (wait, go) = os.pipe(), os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            held = prepare()
            if os.fork() == 0:
                os.close(go)
                os.write(tell, b"1")
                os.read(wait, 1)
                os._exit(0)
            os.read(wait, 1)
            os._exit(held is None)
        finally:
            os._exit(1)
    os.close(wait)
    os.close(tell)
    try:
        assert os.read(hear, 1) == b"1"  # the child is there
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        yield
    finally:
        os.close(go)
        assert os.read(hear, 1) == b""  # and it was until now
        os.close(hear)


@pytest.mark.parametrize("take", TAKING.values(), ids=TAKING)
def test_a_child_of_a_killed_process_keeps_nothing_locked(
    take: Callable[[Path], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "WAIT_SECONDS", 0.1)
    with orphan(lambda: take(tmp_path)):
        MetricsFile.take_up(tmp_path, 0, 0).close()
        save(tmp_path / "saved", {"x": 1})
        assert list(tmp_path.glob(f".*{LEFTOVER}")) == []
    assert load(tmp_path / "saved") == {"x": 1}


def test_what_a_child_closes_or_its_end_takes_no_lock_from_its_parent(tmp_path: Path) -> None:
    with closing(MetricsFile.create(tmp_path)) as mine:
        child = os.fork()
        if child == 0:
            mine.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        with pytest.raises(InputError, match="Another process trains"):
            MetricsFile.take_up(tmp_path, 0, 0)
        mine.write({"step": 1})
    MetricsFile.take_up(tmp_path, 12, 1).close()


def test_a_child_that_locks_something_itself_keeps_it_when_it_closes_what_it_inherited(tmp_path: Path) -> None:
    inherited = OwnLock(tmp_path)
    child = os.fork()
    if child == 0:
        own = OwnLock(tmp_path)  # it gets the number that has become free
        inherited.close()
        os._exit(0 if own.descriptor >= 0 and own.take() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert inherited.take()
    inherited.close()
    inherited.close()


def test_closing_ends_a_lock_that_a_child_has_not_let_go_of_yet(tmp_path: Path) -> None:
    mine = MetricsFile.create(tmp_path)
    childs = os.dup(mine._lock.descriptor)  # the same open file, as after a fork
    try:
        mine.close()
        MetricsFile.take_up(tmp_path, 0, 0).close()
    finally:
        os.close(childs)
