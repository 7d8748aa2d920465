from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import experiments.train
from tests.commands import Outcome, runner

if TYPE_CHECKING:
    from tests.wandb_file import Kept


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Callable[..., Outcome]:
    """`command("debug=smoke", ...)`: zenflow-train with these, its outputs in a fresh folder or the given one."""
    return runner(experiments.train.main, "zenflow-train", tmp_path, monkeypatch, capsys)


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
