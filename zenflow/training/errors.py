"""The error of a run that cannot start as asked, and what a log says of errors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class InputError(ValueError):
    """Something the user gave cannot be used: one sentence naming the value and what is allowed."""


def said(error: BaseException) -> str:
    """What it says; Python's own MemoryError says nothing."""
    return str(error) or ("the host has no memory left" if isinstance(error, MemoryError) else repr(error))


@contextmanager
def errors_logged(log: logging.Logger, what: str, folder: Path, *, part_of_sweep: bool) -> Iterator[None]:
    """Errors go on after they are in the log: an InputError of a sweep's job as its sentence, others with a traceback.

    An InputError of a run alone is not logged: its command prints it.
    """
    try:
        yield
    except InputError as error:
        if part_of_sweep:
            log.error("%s", error)
        raise
    except Exception:
        log.exception("the %s in %s failed", what, folder)
        raise


def require_free(folder: Path, outputs: tuple[str, ...]) -> None:
    """InputError if one of these files is in `folder` already."""
    if present := [name for name in outputs if (folder / name).exists()]:
        raise InputError(f"{folder} already holds {present[0]}; give another folder as hydra.run.dir.")
