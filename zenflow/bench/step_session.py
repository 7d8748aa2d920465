"""A run of `zenflow-bench step`: its children, the rows they gave so far, and the files that show them.

The files are written anew after each contestant, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from zenflow.bench import picture, tables
from zenflow.bench.children import run_job
from zenflow.bench.figures import Row, compare, without_ratios
from zenflow.bench.registry import CONTESTANTS, TRACED_WINDOWS, Job
from zenflow.bench.session import Session
from zenflow.trace_view import describe_file, render


class StepSession(Session):
    """The rows so far, and the folder that shows them."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.contestants: list[Row] = []  # of the step table, before anything is compared
        self.more: list[Row] = []
        self._children = 0
        self._overlaps: list[str] = []  # what the traces show, as text

    def run(self, job: Job) -> dict:
        """The child's result; a line of progress."""
        self._children += 1
        result = run_job(job, self.log(f"{self._children:02}-{_file_name(job)}"), self.args.timeout)
        told = result["error"] if "error" in result else f"{result['mean_ms']:,.1f} ms a step"
        self.say(f"{job.shape} {job.label}: {told}")
        return result

    def run_traced(self, job: Job) -> dict:
        """The same; if `--trace` asks for it and the trainer can, with a trace, its picture and what it shows."""
        if not self.args.trace or not CONTESTANTS[job.trainer].traces:
            return self.run(job)
        path = self.folder.absolute() / "traces" / f"{_file_name(job)}.json"
        path.parent.mkdir(exist_ok=True)
        result = self.run(replace(job, trace=str(path), command=self.facts["command"]))
        if "error" not in result:
            self._overlaps.append(f"### {job.label}\n\n```\n{describe_file(path)}\n```")
            try:
                render(path, path.with_suffix(".png"))
            except ImportError as error:
                self.say(f"no picture of the trace: {error}")
        return result

    def log(self, name: str) -> Path:
        """Where a child's own words go."""
        return self.folder / "logs" / f"{name}.log"

    def add(self, row: Row) -> None:
        """One more row of the further tables, in the files at once."""
        self.more.append(row)
        self.save()

    @property
    def rows(self) -> list[Row]:
        """All rows as they may be shown: without ratios unless the tests are green."""
        rows = [*compare(self.contestants), *self.more]
        return rows if self.proof.green else without_ratios(rows)

    def save(self) -> str:
        """Write step.csv, step.md and step.png; the text of step.md."""
        rows, args = self.rows, self.args
        job = f"Qwen2.5 {args.shape}'s shape, batch {args.batch} x {args.length}, bf16, clip {args.clip:g}"
        job += ", activation checkpointing" if args.checkpointing else ""
        heading = self.heading(f"Step times: {job}", "RATIOS")
        text = tables.report(rows, heading)
        if self._overlaps:
            text += f"\n## Traces\n\n{TRACED_WINDOWS} windows after the timed ones; files and pictures in traces/.\n\n"
            text += "\n\n".join(self._overlaps) + "\n"
        (self.folder / "step.md").write_text(text, encoding="utf-8")
        tables.write_csv(rows, self.facts, self.folder / "step.csv")
        self._draw(rows)
        return text

    def _draw(self, rows: Sequence[Row]) -> None:
        shown = [row for row in rows if row["table"] == "step" and "error" not in row]
        floors = [row["mean_ms"] for row in shown if row["trainer"] == "floor"]
        if not floors:
            return
        title = f"{self.args.shape}, batch {self.args.batch} x {self.args.length}, {shown[0]['device']}"
        try:
            picture.save_picture(shown, sum(floors) / len(floors), title, self.folder / "step.png")
        except ImportError as error:
            self.say(f"no step.png: {error}")


def _file_name(job: Job) -> str:
    return "".join(letter if letter.isalnum() or letter in ".=-" else "_" for letter in job.label)
