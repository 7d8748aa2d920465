"""The table at a sweep's end: a line a job, whatever became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from zenflow.bench.tables import Column, markdown, number
from zenflow.report.figures import run_figures
from zenflow.report.files import write
from zenflow.report.runs import Run, read
from zenflow.terminal import show
from zenflow.training.sweep import Job, jobs

COLUMNS = (
    Column("job", "job"),
    Column("settings", "settings"),
    Column("validation loss", "final_loss", number(4)),
    Column("mean step ms", "step_ms", number(2)),
    Column("status", "status"),
)
SUMMARY = "summary.txt"


def summarise_sweep(folder: Path) -> None:
    """Print the table of all jobs below a sweep's folder and leave it there as summary.txt; nothing if none began."""
    rows = [_row(job) for job in jobs(folder)]
    if not rows:
        return
    text = f"{markdown(rows, COLUMNS)}\n\nMeans over seeds and pictures: zenflow-report {folder}"
    write(folder / SUMMARY, f"{text}\n")
    show(text)


def _row(job: Job) -> dict[str, Any]:
    run = read(job.folder)
    row: dict[str, Any] = {"job": str(job.number), "settings": " ".join(job.overrides) or "-"}
    if isinstance(run, Run):
        return row | run_figures(run) | {"status": "whole"}
    return row | {"status": run.reason}
