"""zenflow-train, or a command that shares its settings, run in this process: quicker than a new one, the same code."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    "OMP_NUM_THREADS": "1",
}  # of a new one
SMOKE = ("debug=smoke", "threads=1")
BRIEF = (*SMOKE, "plot=false", "steps=4", "evaluate_every=null")


@dataclass
class Outcome:
    """How a command ended: its exit code, what it printed, and the folder that was given to it."""

    code: int
    out: str
    err: str
    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(), parse_constant=pytest.fail)

    def config(self, job: str = "") -> dict[str, Any]:
        return json.loads((self.folder / job / "config.json").read_text())

    def summary(self, job: str = "") -> dict[str, Any]:
        return json.loads((self.folder / job / "summary.json").read_text())

    def metrics(self, job: str = "") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / job / "metrics.jsonl").read_text().splitlines()]


def runner(main: Callable[[], None], name: str, tmp_path, monkeypatch, capsys) -> Callable[..., Outcome]:
    """`run("debug=smoke", ...)`: the command with these, its outputs in a fresh folder or the given one."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.chdir(tmp_path)
    root, before, threads = logging.getLogger(), list(logging.getLogger().handlers), torch.get_num_threads()

    def run(*arguments: str, folder: Path = tmp_path / "out" / "run") -> Outcome:
        where = [f"hydra.run.dir={folder}", f"hydra.sweep.dir={folder}"]
        monkeypatch.setattr(sys, "argv", [name, *arguments, *where])
        code, message = 0, ""
        try:
            main()
        except SystemExit as end:
            code, message = (end.code, "") if isinstance(end.code, int) else (1, str(end.code))
        finally:
            torch.set_num_threads(threads)
            for handler in set(root.handlers) - set(before):
                root.removeHandler(handler)
                handler.close()
        printed = capsys.readouterr()
        return Outcome(code, printed.out, printed.err + message, folder)

    return run
