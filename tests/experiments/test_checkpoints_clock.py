"""A run that asks for no checkpoints is saved by the clock all the same, until it has come to its end."""

from __future__ import annotations

import errno
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.experiments.interrupted import TINY, ZENFLOW, goes_on, make_text, signal_after, told, write_late
from zenflow.training import run as run_module
from zenflow.training.checkpoints import Keeper, all_of, step_of
from zenflow.training.loop import Loop
from zenflow.training.metrics_file import MetricsFile


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *make_text(tmp_path / "text.txt"))


@pytest.fixture
def clock(monkeypatch) -> None:
    """One of its own for checkpoints: every step takes a minute."""
    now, stepping = [0.0], Loop._step

    def stepped(loop: Loop, number: int) -> None:
        stepping(loop, number)
        now[0] += 60

    monkeypatch.setattr(Loop, "_step", stepped)
    monkeypatch.setattr("zenflow.training.checkpoints.monotonic", lambda: now[0])


@pytest.fixture
def minutes(clock, monkeypatch) -> None:
    """And no save is still running when the next is due."""
    save = Keeper._save

    def saved(keeper: Keeper, step: int, **how: bool) -> None:
        save(keeper, step, **how)
        keeper._settle()

    monkeypatch.setattr(Keeper, "_save", saved)


def test_a_run_is_saved_by_the_clock_until_it_has_come_to_its_end(command, words, minutes):
    run = command(*words, *ZENFLOW, "checkpoint_minutes=5")
    assert run.code == 0
    assert re.findall(r"INFO\] - checkpoint .*step_0*(\d+)", run.out) == ["5", "10"]
    assert not (run.folder / "checkpoints").exists()


def test_what_the_clock_has_saved_outlives_an_error(command, words, minutes, monkeypatch, tmp_path):
    whole = command(*words, *ZENFLOW, folder=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stepping = Loop._step

        def stepped(loop: Loop, number: int) -> None:
            if number == 8:
                raise ArithmeticError("a loss that nobody expected")
            stepping(loop, number)

        patch.setattr(Loop, "_step", stepped)
        run = command(*words, *ZENFLOW, "checkpoint_minutes=3")
    assert run.code == 1 and [step_of(path) for path in all_of(run.folder)] == [6, 3]
    assert "What is saved goes on from step_00000006" in run.out
    resumed = goes_on(command, run.folder, "checkpoint_minutes=null")  # which saves no more
    assert resumed.code == 0 and told(resumed) == told(whole)
    assert all_of(run.folder) == []


@pytest.mark.parametrize("what", ["metrics", "summary"])
def test_what_the_clock_has_saved_is_there_until_the_results_are(command, words, minutes, what, monkeypatch, tmp_path):
    """The disk is full when nothing is left to do but to write them down."""
    whole, write = command(*words, *ZENFLOW, folder=tmp_path / "whole"), run_module._write_whole

    def written(path: Path, value: dict[str, Any]) -> None:
        if path.name == "summary.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, value)

    def fail(file: MetricsFile) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(file._path))

    with monkeypatch.context() as patch:
        patch.setattr(*{
            "metrics": (MetricsFile, "finish", fail), "summary": (run_module, "_write_whole", written)
        }[what])  # fmt: skip
        run = command(*words, *ZENFLOW, "checkpoint_minutes=5")
    assert run.code == 1 and [step_of(path) for path in all_of(run.folder)] == [10, 5]
    assert "What is saved goes on from step_00000010" in run.out
    resumed = goes_on(command, run.folder)
    assert resumed.code == 0 and told(resumed) == told(whole)
    assert all_of(run.folder) == []


def test_what_a_signal_has_saved_outlives_the_end(command, words, minutes, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", Loop._step)
        signal_after(7, signal.SIGTERM)
        run = command(*words, *ZENFLOW, "checkpoint_minutes=5")
    assert run.code == 143 and [step_of(path) for path in all_of(run.folder)] == [7, 5]
    assert goes_on(command, run.folder).code == 0
    assert [step_of(path) for path in all_of(run.folder)] == [7]


@pytest.mark.parametrize("what", ["disk", "memory"])
def test_after_a_failure_the_next_save_is_due_as_ever(command, words, minutes, what, monkeypatch):
    def full(path: Path, needed: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(*{
        "disk": ("zenflow.checkpoint_folder.check_room", full),
        "memory": ("zenflow.training.run_state.available_memory", lambda: 1000),
    }[what])  # fmt: skip
    run = command(*words, *ZENFLOW, "checkpoint_minutes=5")
    assert run.code == 0 and run.out.count("NOT SAVED") == 2
    assert not (run.folder / "checkpoints").exists()


def test_a_save_that_is_due_while_one_is_written_holds_no_training_up(command, words, clock, monkeypatch):
    """The file of step 2 is not written before step 7 has been made."""
    write_late(monkeypatch, 7)
    run = command(*words, *ZENFLOW, "checkpoint_minutes=2")
    assert run.code == 0
    assert [int(step) for step in re.findall(r"INFO\] - checkpoint .*step_0*(\d+)", run.out)][0] == 2
    assert not re.search(r"step_0000000[3-6]", run.out)


@pytest.mark.parametrize("word", ["checkpoint_every=12", "checkpoint_minutes=null", "checkpoint_minutes=30"])
def test_the_clock_saves_nothing_where_steps_do_or_it_is_not_due(command, words, minutes, word):
    run = command(*words, "engine=adamw", "checkpoint_minutes=1", word)
    assert run.code == 0
    assert [step_of(path) for path in all_of(run.folder)] == ([12] if word == "checkpoint_every=12" else [])
    assert run.out.count("INFO] - checkpoint ") == (word == "checkpoint_every=12")


def test_a_kill_while_they_are_removed_leaves_a_finished_run(command, words, minutes, monkeypatch):
    def killed(folder: Path, **_: object) -> None:
        if (folder / "manifest.json").exists():
            (folder / "manifest.json").unlink()
            raise SystemExit(137)

    settings = (*words, *ZENFLOW, "checkpoint_minutes=7")
    with monkeypatch.context() as patch:
        patch.setattr("zenflow.checkpoint_folder.shutil.rmtree", killed)
        run = command(*settings)
    assert run.code == 137 and (run.folder / "summary.json").exists()
    again = command(*settings, "resume=auto")
    assert again.code == 0 and "is finished" in again.out
    assert not (run.folder / "checkpoints").exists()


def test_a_kill_after_the_results_leaves_what_the_next_call_removes(command, words, minutes, monkeypatch):
    settings = (*words, *ZENFLOW, "checkpoint_minutes=7")
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "forget_by_clock", lambda run: None)
        run = command(*settings)
    assert [step_of(path) for path in all_of(run.folder)] == [7]
    assert command(*settings, "resume=auto").code == 0
    assert not (run.folder / "checkpoints").exists()
