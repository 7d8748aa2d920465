"""A command that shares zenflow-train's settings, run in this process: quicker than a new one, and the same code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

SMOKE = ("debug=smoke", "threads=1")


@dataclass
class Outcome:
    """How a command ended: its exit code, what it printed, and the folder that was given to it."""

    code: int
    out: str
    err: str
    folder: Path

    def json(self, name: str) -> dict[str, Any]:
        return json.loads((self.folder / name).read_text(), parse_constant=pytest.fail)


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
