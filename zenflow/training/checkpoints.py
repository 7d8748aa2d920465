"""A run's checkpoints: RUN/checkpoints/step_00000N, written while training goes on, and found again.

Each is a folder of `zenflow.checkpoint_folder`, whole or absent.
"""

from __future__ import annotations

import logging
import re
import shlex
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Self

from zenflow.background_save import BackgroundSave
from zenflow.checkpoint_folder import CheckpointError, Manifest, load, read_manifest, remove, remove_leftovers
from zenflow.disk import sync
from zenflow.signals import Stopped, StopRequest
from zenflow.training.errors import InputError, said

log = logging.getLogger(__name__)
FOLDER = "checkpoints"
BY_CLOCK = "by_clock"  # in a checkpoint's configuration: whether nobody has asked for it
_NAME = re.compile(r"step_(\d{8,})")
_PLAIN = re.compile(r"[\w./-]+")  # words that mean themselves to a shell and to Hydra


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that has been read and verified."""

    folder: Path
    state: dict[str, Any]
    manifest: Manifest


def run_of(place: Path) -> Path:
    """The folder of the run that `place` is, or is a checkpoint of."""
    return place.parent.parent if place.parent.name == FOLDER else place


def step_of(folder: Path) -> int | None:
    """The step after which a checkpoint was made; None for a folder of another name."""
    found = _NAME.fullmatch(folder.name)
    return None if found is None else int(found[1])


def folder_of(run: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps lies."""
    return run / FOLDER / f"step_{step:08}"


def all_of(run: Path) -> list[Path]:
    """A run's checkpoints, damaged ones too, the latest first."""
    if not (run / FOLDER).is_dir():
        return []
    return sorted((path for path in (run / FOLDER).iterdir() if step_of(path) is not None), key=step_of, reverse=True)


def read_latest(place: Path) -> Checkpoint:
    """Of a run the latest whole checkpoint, with a warning for each damaged one after it; or the one at `place`.

    Errors: InputError if there is none that can be read.
    """
    chosen = [place] if place.parent.name == FOLDER else all_of(place)
    if not chosen:
        raise InputError(
            f"{place} holds no checkpoint; give a run's folder with {FOLDER}/step_... in it, or one of these."
        )
    first: Exception | None = None
    for folder in chosen:
        try:
            return Checkpoint(folder, load(folder), read_manifest(folder))
        except (CheckpointError, OSError) as error:
            first = first or error
            if folder is not chosen[-1]:
                log.warning("%s; the checkpoint before it is tried: what came after that is done again", error)
    raise InputError(f"{'No checkpoint can be read: ' if len(chosen) > 1 else ''}{first}.") from first


def forget_after(run: Path, step: int) -> None:
    """Remove a run's checkpoints of later steps: it goes on from this one, and makes them anew."""
    for folder in all_of(run):
        if step_of(folder) > step:
            log.warning("%s is removed: the run goes on after step %d", folder, step)
            remove(folder)


def forget_by_clock(run: Path) -> None:
    """Remove what the clock has saved of a run that has come to its end, whichever of its processes did it."""
    for folder in all_of(run):
        with suppress(CheckpointError, OSError):  # a damaged one does not say whose it is
            if read_manifest(folder).configuration.get(BY_CLOCK, False):
                remove(folder)
    remove_leftovers(run / FOLDER)
    with suppress(OSError):  # where others are left
        (run / FOLDER).rmdir()


def command_for(run: Path) -> str:
    """What continues a run, to be pasted into a shell."""
    text = str(run)
    if not _PLAIN.fullmatch(text):
        # To Hydra a backslash is one, except before a quote.
        quoted = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + found[2].replace("'", "\\'"), text)
        return "zenflow-train " + shlex.quote(f"resume='{quoted}'")
    return f"zenflow-train resume={text}"


def add_command(error: BaseException, run: Path) -> None:
    """Give an error that ended a run a note that says how to go on from what is saved, if anything is."""
    if kept := all_of(run):
        error.add_note(f"What is saved goes on from {kept[0].name}:\n{command_for(run)}")


class Keeper:
    """Saves a run and keeps the last `keep` checkpoints; ends it on a signal.

    It is saved every `every` steps; if that is None, every `minutes`, for the case that it is killed: these checkpoints
    are for `forget_by_clock`. If both are None, on a signal alone. After a save that failed the next is due as ever.

    `gather(step)` makes the whole state, a copy on the CPU, of which a thread then writes the files; `last=True` tells
    it that the run ends there. Where the disk is full or fails, or there is no memory for the copy, training goes on
    with the checkpoints that there are. A context: at its end the last one is there.
    """

    def __init__(
        self,
        run: Path,
        every: int | None,
        minutes: float | None,
        keep: int,
        gather: Callable[..., dict[str, Any]],
        configuration: dict[str, Any],
        request: StopRequest,
    ) -> None:
        self._run, self._every, self._keep = run, every, keep
        self._minutes = minutes if every is None else None
        self._since = monotonic()
        self._gather, self._configuration, self._request = gather, configuration, request
        self._saving: BackgroundSave | None = None

    @property
    def stopping(self) -> bool:
        """Whether a signal asks for the run's end."""
        return self._request.number is not None

    def step_ended(self, step: int) -> None:
        """`step` steps have been made: save if it is time. Stopped, after saving, if a signal came."""
        if self._saving is not None and self._saving.done:
            self._settle()
        if self.stopping:
            self._stop(step)
        if step and self._is_due(step):
            self._since = monotonic()
            try:
                self._save(step)
            except (OSError, MemoryError) as error:
                self._tell(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()

    def _is_due(self, step: int) -> bool:
        if self._every is not None:
            return step % self._every == 0
        return self._minutes is not None and self._saving is None and monotonic() - self._since >= 60 * self._minutes

    def _save(self, step: int, *, last: bool = False) -> None:
        """Begin to save, unless it has been done; waits for the save before, if that is still running."""
        self._settle()
        folder = folder_of(self._run, step)
        if folder.exists():
            return
        state = self._gather(step, last=last)
        if not folder.parent.is_dir():
            folder.parent.mkdir()
            sync(self._run)
        configuration = self._configuration | {BY_CLOCK: self._every is None and not last}
        self._saving = BackgroundSave(folder, state, configuration=configuration)

    def _settle(self) -> bool:
        """Wait for the save that is running, and remove what is too old; whether that save was one."""
        saving, self._saving = self._saving, None
        if saving is None:
            return True
        try:
            saving.wait()
        except (OSError, MemoryError) as error:
            self._tell(error)
            return False
        log.info("checkpoint %s", saving.folder)
        for old in all_of(self._run)[self._keep :]:
            with suppress(OSError):
                remove(old)
        return True

    def _tell(self, error: OSError | MemoryError) -> None:
        latest = next((folder.name for folder in all_of(self._run)), "none")
        log.error("NOT SAVED: %s. Training goes on; the latest checkpoint is %s", said(error), latest)

    def _stop(self, step: int) -> None:
        assert self._request.number is not None
        name = signal.Signals(self._request.number).name
        if step == 0:
            raise Stopped(self._request.number, f"interrupted by {name} before the first step; nothing is lost")
        try:
            self._save(step, last=True)
            saved = self._settle()
        except Exception as error:  # the disk, or a CPU process that the same signal has ended
            log.error("NOT SAVED: %s", said(error))
            saved = False
        raise Stopped(self._request.number, f"interrupted by {name} after step {step:,}, {self._outlook(saved)}")

    def _outlook(self, saved: bool) -> str:
        """What becomes of a run that was stopped."""
        if saved:
            return f"which is saved; this goes on from there:\n{command_for(self._run)}"
        if kept := all_of(self._run):
            return f"which could NOT be saved; this goes on from {kept[0].name}:\n{command_for(self._run)}"
        return "which could NOT be saved, and there is no checkpoint"
