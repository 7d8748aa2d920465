"""Figures as text: aligned Markdown tables for the terminal and step.md, and one CSV with a row a measurement."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zenflow.bench.figures import Row

Format = Callable[[Any], str]


def number(digits: int) -> Format:
    """A number with so many digits after the point."""
    return lambda value: f"{value:,.{digits}f}"


def share(value: float) -> str:
    """0.5 as 50.0%."""
    return f"{value:.1%}"


@dataclass(frozen=True)
class Column:
    """A column of a table: the row's `field` under `title`, in its `form`."""

    title: str
    field: str
    form: Format = str


REMARK = Column("remark", "note")
LEGEND = """\
mean: wall time over whole windows; median and p95: from a step's end to the next one's. Floor: forward and backward
alone in the same process, before the trainer is there and, where it leaves the model as it was, after; where there is
none, the mean of the floors' own rows. Stall removed: 1 - (mean - floor) / (mean - floor of sync); by clock: 1 - stall
/ stall of sync. M: 2 bytes a parameter.
B/p: bytes a parameter; host: shared memory that the engine counts; processes and machine: growth over the floor's.
Threads: of the worker in its last window. Launching: forward and backward alone at batch 1 x 16, when the device waits
for the host, measured as the floor is."""

STEP = (
    Column("trainer", "label"),
    Column("mean ms", "mean_ms", number(1)),
    Column("x floor", "ratio", number(3)),
    Column("floor ms", "floor_ms", number(1)),
    Column("launching ms", "launch_ms", number(1)),
    Column("median", "median_ms", number(1)),
    Column("p95", "p95_ms", number(1)),
    Column("stall ms", "stall_ms", number(2)),
    Column("host wait ms", "host_wait_ms", number(2)),
    Column("stall removed", "stall_removed", share),
    Column("by clock", "stall_removed_clock", share),
    Column("to host M", "to_host_m", number(3)),
    Column("to GPU M", "to_device_m", number(3)),
    Column("GPU B/p over floor", "gpu_bytes_over_floor", number(2)),
    Column("host B/p", "host_bytes_a_parameter", number(2)),
    Column("processes B/p", "process_bytes_over_floor", number(2)),
    Column("machine B/p", "machine_bytes_over_floor", number(2)),
    Column("worker ms/window", "worker_ms_a_window", number(1)),
    Column("threads", "worker_threads", number(0)),
    Column("tokens/s", "tokens_a_second", number(0)),
    Column("first loss", "loss_first", number(3)),
    Column("last loss", "loss_last", number(3)),
    REMARK,
)
SELECTION = (
    Column("trainer", "label"),
    Column("ordinary step ms", "ordinary_ms", number(1)),
    Column("first step ms", "first_step_ms", number(0)),
    Column("first selection ms", "first_exchange_ms", number(0)),
    Column("extra ms a selection", "extra_ms", number(1)),
    Column("selecting step, extra ms", "selecting_step_ms", number(1)),
    Column("exchange ms", "exchange_ms", number(1)),
    Column("ms a step at 100", "a_step_at_100_ms", number(2)),
    Column("at 1,000", "a_step_at_1000_ms", number(3)),
    REMARK,
)
GROWTH = (
    Column("shape", "shape"),
    Column("trainer", "label"),
    Column("worker cores", "worker_cores"),
    Column("mean ms", "mean_ms", number(1)),
    Column("x floor", "ratio", number(3)),
    Column("floor ms", "floor_ms", number(1)),
    Column("stall ms", "stall_ms", number(2)),
    Column("worker ms/window", "worker_ms_a_window", number(1)),
    Column("window ms", "window_ms", number(1)),
    Column("GPU B/p over floor", "gpu_bytes_over_floor", number(2)),
    Column("tokens/s", "tokens_a_second", number(0)),
    REMARK,
)
CONTENTION = (
    Column("floor", "label"),
    Column("trainer cores", "trainer_cores"),
    Column("mean ms", "mean_ms", number(1)),
    Column("x alone", "ratio", number(3)),
    Column("p95", "p95_ms", number(1)),
    Column("launching ms", "launch_ms", number(1)),
    Column("launching x alone", "launch_ratio", number(3)),
    Column("hog GB/s", "hog_gb_per_s", number(1)),
    Column("copies GB/s", "copied_gb_per_s", number(1)),
    REMARK,
)
TABLES = {
    "step": ("Step time", STEP),
    "selection": ("Selections", SELECTION),
    "growth": ("Growth: model size and worker cores", GROWTH),
    "contention": ("The floor, and launching alone, beside a memory hog and beside copies", CONTENTION),
}


def markdown(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """One table, padded: words to the left, figures to the right. The last column says why a row has no figures."""
    columns = [column for column in columns if any(_cell(row, column) not in ("", "-") for row in rows)]
    titles = [column.title for column in columns]
    body = [[_cell(row, column) for column in columns] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(titles, *body, strict=True)]
    pads = [str.ljust if column.form is str else str.rjust for column in columns]
    rules = [
        "-" * width if pad is str.ljust else "-" * (width - 1) + ":" for width, pad in zip(widths, pads, strict=True)
    ]
    lines = [
        [pad(cell, width) for cell, width, pad in zip(line, widths, pads, strict=True)] for line in (titles, *body)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rules, *lines[1:]))


def report(
    rows: Sequence[Row],
    heading: Sequence[str],
    tables: Mapping[str, tuple[str, Sequence[Column]]] = TABLES,
    legend: str = LEGEND,
) -> str:
    """All tables that have rows, the heading's lines above them, what the words mean below."""
    parts = ["\n".join(heading)]
    for name, (title, columns) in tables.items():
        if chosen := [row for row in rows if row["table"] == name]:
            parts.append(f"## {title}\n\n{markdown(chosen, columns)}")
    return "\n\n".join([*parts, legend]) + "\n"


def write_csv(rows: Sequence[Row], facts: dict[str, str], path: Path) -> None:
    """One line a row, with every figure and, in each, what it was measured on."""
    fields = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*fields, *facts])
        writer.writeheader()
        writer.writerows(row | facts for row in rows)


def _cell(row: Row, column: Column) -> str:
    value = row.get(column.field)
    if column is REMARK:
        return row.get("error") or value or ""
    return "-" if value is None else column.form(value)
