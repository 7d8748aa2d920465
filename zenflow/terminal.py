"""What people see while a command runs. Nobody need be there: a run whose terminal, pipe or disk is gone goes on."""

from __future__ import annotations

import logging
import os
import sys

log = logging.getLogger(__name__)


def counted(number_of: int, what: str) -> str:
    """1 thread, 2,000 threads."""
    return f"{number_of:,} {what}{'' if number_of == 1 else 's'}"


def is_watched() -> bool:
    """Whether messages go to a terminal, where a bar can move."""
    return sys.stderr is not None and sys.stderr.isatty()


def show(text: str) -> None:
    """Print what has been written to a file, too; the log tells if that cannot be done.

    A character that the terminal's encoding lacks is printed as \\u201c.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        log.warning("the result cannot be printed (%s)", error.strerror)
        # What could not be written would be tried once more at the process's end, and change its exit code.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
