from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import experiments.train
from tests.commands import Outcome, runner
from tests.experiments.interrupted import TINY, ZENFLOW, make_text
from zenflow.training.checkpoints import folder_of

if TYPE_CHECKING:
    from tests.wandb_file import Kept


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Callable[..., Outcome]:
    """`command("debug=smoke", ...)`: zenflow-train with these, its outputs in a fresh folder or the given one."""
    return runner(experiments.train.main, "zenflow-train", tmp_path, monkeypatch, capsys)


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory) -> Path:
    """A folder for the run of `saved`."""
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def saved(command, kept_run, tmp_path) -> Outcome:
    """A run of 8 steps that was killed after the last, saved after 4 and 6: a copy of one."""
    if not (kept_run / "run").exists():
        words = (*TINY, *make_text(kept_run / "text.txt"), *ZENFLOW, "steps=8", "evaluate_every=4")
        command(*words, "checkpoint_every=2", "keep_checkpoints=3", folder=kept_run / "run")
    shutil.copytree(kept_run / "run", tmp_path / "saved")
    shutil.rmtree(folder_of(tmp_path / "saved", 8))
    (tmp_path / "saved" / "summary.json").unlink()
    return Outcome(0, "", "", tmp_path / "saved")


@pytest.fixture
def kept() -> Iterator[Callable[[Path], Kept]]:
    """What is in a run's folder once wandb's own process has ended, which still writes when the run has finished.

    Skips where wandb is missing, which is no part of an engine's machine.
    """
    wandb = pytest.importorskip("wandb")
    from tests.wandb_file import Kept

    def read_kept(folder: Path, kind: str = "offline-run") -> Kept:
        wandb.teardown()
        return Kept(folder, kind)

    yield read_kept
    wandb.teardown()
