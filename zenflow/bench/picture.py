"""The picture of the step times: one bar a trainer, split into floor, stall and the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zenflow.bench.figures import Row

FLOOR, REST, STALL = "#9aa5b1", "#1d4ed8", "#c2410c"


def split(row: Row) -> tuple[float, float, float]:
    """ms a step of the floor, the rest and the stall; they add up to the mean. A missing stall counts as rest."""
    base = min(row["mean_ms"], row["floor_ms"])
    stall = min(row["stall_ms"] or 0.0, row["mean_ms"] - base)
    return base, row["mean_ms"] - base - stall, stall


def save_picture(rows: Sequence[Row], floor_ms: float, title: str, path: Path) -> None:
    """Write a PNG of the rows without error, a line at `floor_ms`. Needs matplotlib; errors: ImportError without it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.42 * len(rows)), layout="constrained")
    axis = figure.subplots()
    labels = [row["label"] for row in rows]
    left = [0.0] * len(rows)
    parts = zip(*(split(row) for row in rows), strict=True)
    for values, name, color in zip(parts, ("floor", "rest", "stall"), (FLOOR, REST, STALL), strict=True):
        axis.barh(labels, values, left=left, label=name, color=color)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for place, row in enumerate(rows):
        axis.annotate(f" {row['mean_ms']:,.0f}", (row["mean_ms"], place), va="center", fontsize=9)
    axis.axvline(floor_ms, color=FLOOR, linewidth=0.8, linestyle="--")
    axis.margins(x=0.1)
    axis.invert_yaxis()
    axis.set_xlabel("ms a step, mean over whole windows")
    axis.set_title(title, loc="left", fontsize=11)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(path, dpi=120)
