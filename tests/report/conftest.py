"""The report's command, run in this process."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from zenflow.report.command import main


@dataclass
class Report:
    """What a command left and printed; `code` is 1 and `error` its sentence where it exited."""

    code: int
    error: str
    printed: str
    folder: Path

    @property
    def text(self) -> str:
        return (self.folder / "report.md").read_text(encoding="utf-8")

    def rows(self, name: str) -> list[dict[str, str]]:
        with open(self.folder / f"{name}.csv", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))

    def setting(self, name: str) -> dict[str, str]:
        (row,) = (row for row in self.rows("groups") if row["setting"] == name)
        return row

    def pictures(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.png"))


@pytest.fixture
def report(tmp_path, capsys) -> Callable[..., Report]:
    def run(*words: object) -> Report:
        out, error = tmp_path / "out", ""
        try:
            code = main([*map(str, words), "--out", str(out)])
        except SystemExit as end:
            code, error = (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
        printed = capsys.readouterr()
        return Report(code, error + printed.err, printed.out, out)

    return run


@pytest.fixture
def no_pictures(monkeypatch) -> None:
    """As where matplotlib is not installed; quicker, too."""
    monkeypatch.setattr("zenflow.report.command.find_spec", lambda name: None)
