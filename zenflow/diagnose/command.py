"""The end of a command that shares zenflow-train's settings and errors, under its own name."""

from __future__ import annotations

import sys
from collections.abc import Callable

from zenflow.training.schema import run_command

TRAIN = "zenflow-train: "


def run_as(name: str, job: Callable[[], None]) -> None:
    """`run_command`, whose one-sentence errors begin with `name`."""
    try:
        run_command(job)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.exit(f"{name}: {end.code.removeprefix(TRAIN)}")
        raise
