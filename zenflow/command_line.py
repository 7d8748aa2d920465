"""The command that this process runs, as records keep it: the words that are typed, and no machine's folder."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

# Of an absolute path all but its last name, also behind `setting=` and in a list.
_FOLDERS = re.compile(r"(?<![\w./:~-])/(?:[^/\s,'\"\[\]]+/)+")


def command_line(arguments: Sequence[str] | None = None) -> str:
    """`zenflow-train experiment=glue`, however that command was started; `python train.py ...` of a user's script.

    arguments: `sys.argv`, or one like it. Folders of absolute paths become `...`.
    """
    script, *words = arguments or sys.argv
    return as_typed([*_program(Path(script)), *words])


def as_typed(words: Sequence[str]) -> str:
    """The words for a shell, without the folders of absolute paths."""
    return shlex.join(_FOLDERS.sub(".../", word) for word in words)


def _program(script: Path) -> list[str]:
    """Which command a script is: of this project by its name, whether installed or run as a module."""
    folder = script.parent
    if script.name == "__main__.py":
        return [f"zenflow-{folder.name}"] if folder.parent.name == "zenflow" else ["python", "-m", folder.name]
    if script.suffix == ".py":
        ours = folder.name in ("experiments", "zenflow_experiments")
        return [f"zenflow-{script.stem}"] if ours else ["python", script.name]
    return ["python", "-c", "..."] if script.name == "-c" else [script.name or "python"]
