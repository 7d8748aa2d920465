"""What people see while a command runs. Nobody need be there: a run whose terminal, pipe or disk is gone goes on."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)
_begin = ""  # of every line


@contextmanager
def lines_of_job(number: int | None) -> Iterator[None]:
    """What is logged and shown inside the block begins each line with the job's number; None: no job of a sweep.

    Hydra lists the jobs by these numbers, and several may write to one terminal at a time.
    """
    global _begin
    before, _begin = _begin, "" if number is None else f"#{number} "
    try:
        yield
    finally:
        _begin = before


class LineFormatter(logging.Formatter):
    """Log lines for people (conf/hydra/job_logging): those of `lines_of_job` are told apart."""

    def format(self, record: logging.LogRecord) -> str:
        return as_of_job(super().format(record))


def as_of_job(text: str) -> str:
    """`text` with the job's number, inside `lines_of_job`, at the beginning of each line."""
    return "\n".join(f"{_begin}{line}" for line in text.split("\n"))


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
        print(as_of_job(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except OSError as error:
        log.warning("the result cannot be printed (%s)", error.strerror)
        # What could not be written would be tried once more at the process's end, and change its exit code.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
