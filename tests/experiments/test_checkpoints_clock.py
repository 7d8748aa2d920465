"""A run that asks for no checkpoints is saved by the clock all the same, until it has come to its end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.experiments.interrupted import TINY, ZENFLOW, make_text, told
from zenflow.training.checkpoints import Keeper, all_of, step_of
from zenflow.training.loop import Loop


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *make_text(tmp_path / "text.txt"))


@pytest.fixture
def minutes(monkeypatch) -> None:
    """A clock of its own for checkpoints: every step takes a minute."""
    now, stepping = [0.0], Loop._step

    def stepped(loop: Loop, number: int) -> None:
        stepping(loop, number)
        now[0] += 60

    monkeypatch.setattr(Loop, "_step", stepped)
    monkeypatch.setattr("zenflow.training.checkpoints.monotonic", lambda: now[0])
    save = Keeper._save

    def saved(keeper: Keeper, step: int, **how: bool) -> None:  # so that none is still running when the next is due
        save(keeper, step, **how)
        keeper._settle()

    monkeypatch.setattr(Keeper, "_save", saved)


def test_a_run_is_saved_by_the_clock_until_it_has_come_to_its_end(command, words, minutes):
    run = command(*words, *ZENFLOW, "checkpoint_minutes=5")
    assert run.code == 0
    assert re.findall(r"INFO\] - checkpoint .*step_0*(\d+)", run.out) == ["5", "10"]
    assert all_of(run.folder) == []


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
    resumed = command(f"resume={run.folder}", folder=run.folder)
    assert resumed.code == 0 and told(resumed) == told(whole)


@pytest.mark.parametrize("word", ["checkpoint_every=12", "checkpoint_minutes=null", "checkpoint_minutes=30"])
def test_the_clock_saves_nothing_where_steps_do_or_it_is_not_due(command, words, minutes, word):
    run = command(*words, "engine=adamw", "checkpoint_minutes=1", word)
    assert [step_of(path) for path in all_of(run.folder)] == ([12] if word == "checkpoint_every=12" else [])
    assert run.out.count("INFO] - checkpoint ") == (word == "checkpoint_every=12")
