"""metrics.jsonl of a run: one writer at a time, whole lines, and a place up to which a checkpoint vouches for it."""

from __future__ import annotations

import json
import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

from zenflow.disk import room_for
from zenflow.own_lock import OwnLock
from zenflow.training.errors import InputError

NAME = "metrics.jsonl"
log = logging.getLogger(__name__)


class MetricsFile:
    """Lines are in the file as soon as they are written; the lock on it says that a process trains in this folder.

    `lines` are those from before; what was written after them is cut away by `cut`: a run that goes on tells it again.
    Where the disk is full or fails, lines are kept until it takes them: no training ends for them.
    """

    def __init__(
        self, path: Path, file: BinaryIO, lock: OwnLock, end: int = 0, lines: list[dict[str, Any]] | None = None
    ) -> None:
        self._path, self._file, self._lock, self._end = path, file, lock, end
        self.lines = lines or []
        self._kept = bytearray()  # what the disk has not taken

    @classmethod
    def create(cls, folder: Path) -> Self:
        """The file of a run that begins. FileExistsError if there is one."""
        file = open(folder / NAME, "xb", buffering=0)  # noqa: SIM115 (closed by `close`)
        return cls(folder / NAME, file, _lock(file, folder))

    @classmethod
    def take_up(cls, folder: Path, end: int, step: int) -> Self:
        """The file of a run that goes on after `step` steps, of which its first `end` bytes tell; nothing is cut yet.

        Errors: InputError if another process writes it, or if it is not what it was.
        """
        try:
            file = os.fdopen(os.open(folder / NAME, os.O_RDWR | (0 if end else os.O_CREAT), 0o666), "r+b", buffering=0)
        except OSError as error:
            raise InputError(f"{folder / NAME} cannot be opened ({error.strerror}); resume goes on with it.") from error
        lock = _lock(file, folder)
        try:
            with open(folder / NAME, "rb") as before:
                lines = _told(before.read(end), folder / NAME, end, step)
            return cls(folder / NAME, file, lock, end, lines)
        except BaseException:
            file.close()
            lock.close()
            raise

    def cut(self) -> None:
        """Drop what comes after `lines`."""
        self._file.truncate(self._end)
        self._file.seek(self._end)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; the first that the disk does not take is told of in the log."""
        told = bool(self._kept)
        self._kept += json.dumps(line).encode() + b"\n"
        try:
            self._put()
        except OSError as error:
            if not told:
                log.error("NOT WRITTEN: %s. Training goes on; lines are kept until the disk takes them", error)

    def bring_down(self) -> int:
        """Bring all lines down to the disk; the bytes that they take. OSError, or DiskFullError, if it refuses."""
        self._put()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def finish(self) -> None:
        """DiskFullError, or another OSError, if there are lines that the disk does not take even now."""
        self._put()

    def close(self) -> None:
        """Let go of file and lock, once; lines that the disk does not take even now are lost, and the log says so."""
        try:
            self._put()
        except OSError as error:
            log.error("%d lines are missing in %s: %s", self._kept.count(b"\n"), self._path, error)
            self._kept.clear()
        self._file.close()
        self._lock.close()

    def _put(self) -> None:
        with room_for(self._path, len(self._kept)):
            while self._kept:
                del self._kept[: self._file.write(self._kept)]


def is_evaluation(line: dict[str, Any]) -> bool:
    """Whether a line is an evaluation's, and not a step's."""
    return "validation_loss" in line


def _told(content: bytes, path: Path, end: int, step: int) -> list[dict[str, Any]]:
    """The lines of exactly the first `step` steps, and of evaluations."""
    try:
        lines = [json.loads(text) for text in content.splitlines()]
        steps = [line["step"] for line in lines if not is_evaluation(line)]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged within its first {end:,} bytes, which hold {step:,} steps.") from error
    if len(content) != end or steps != list(range(1, step + 1)):
        raise InputError(
            f"{path} has {len(steps):,} steps in its first {len(content):,} bytes; the checkpoint was made with "
            f"{step:,} in {end:,}."
        )
    return lines


def _lock(file: BinaryIO, folder: Path) -> OwnLock:
    """The lock that says that this process trains in the folder; InputError, with the file closed, if another does."""
    with ExitStack() as undo:
        undo.callback(file.close)
        lock = OwnLock(folder / NAME, os.O_RDWR)
        undo.callback(lock.close)
        with suppress(OSError):  # a file system without locks
            if not lock.take():
                raise InputError(f"Another process trains in {folder}; wait until it has ended, or end it.")
        undo.pop_all()
    return lock
