from __future__ import annotations

from collections.abc import Callable

import pytest

import experiments.train
from tests.commands import Outcome, runner


@pytest.fixture
def command(tmp_path, monkeypatch, capsys) -> Callable[..., Outcome]:
    """`command("debug=smoke", ...)`: zenflow-train with these, its outputs in a fresh folder or the given one."""
    return runner(experiments.train.main, "zenflow-train", tmp_path, monkeypatch, capsys)
