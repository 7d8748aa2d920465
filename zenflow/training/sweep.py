"""A run as one job of a sweep: a note in its folder that says which one it is, and what wandb calls it."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow.training.schema import TrackingConfig

NOTE = "job.json"


@dataclass(frozen=True)
class Job:
    """Job `number` of the sweep called `sweep`, and those of its settings that the sweep varies."""

    folder: Path
    sweep: str
    number: int
    overrides: tuple[str, ...]  # as engine.topk_ratio=0.1

    def leave_note(self) -> None:
        """Write it into the job's folder, unless there is one already."""
        note = {"sweep": self.sweep, "job": self.number, "overrides": list(self.overrides)}
        with suppress(FileExistsError), open(self.folder / NOTE, "x", encoding="utf-8") as file:
            json.dump(note, file, indent=2)

    def name_run(self, tracking: TrackingConfig) -> None:
        """Group and name, where none are given, and the varied settings as tags."""
        tracking.group = tracking.group or self.sweep
        tracking.name = tracking.name or " ".join([str(self.number), *self.overrides])
        tracking.tags = list(dict.fromkeys([*tracking.tags, *self.overrides]))


def jobs(sweep: Path) -> list[Job]:
    """The jobs that have left a note below the sweep's folder, by their number."""
    found = [_read(path) for path in sweep.rglob(NOTE)]
    return sorted((job for job in found if job is not None), key=lambda job: job.number)


def overrides_of(run: Path) -> tuple[str, ...] | None:
    """What a run's sweep varied for it; None if it was no job of a sweep, or its note cannot be read."""
    job = _read(run / NOTE)
    return None if job is None else job.overrides


def _read(note: Path) -> Job | None:
    """None for a file that is no such note: other programs have files of this name, too."""
    try:
        values: dict[str, Any] = json.loads(note.read_text(encoding="utf-8"))
        return Job(note.parent, str(values["sweep"]), int(values["job"]), tuple(map(str, values["overrides"])))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
