"""The picture of a diagnosis: a mean step as one bar, and under it what the verdict rests on."""

from __future__ import annotations

from pathlib import Path
from textwrap import fill

from zenflow.diagnose.result import Result

PARTS = (
    ("data", "waiting for data", "#a16207", "white"),
    ("compute", "forward and backward", "#9aa5b1", "black"),
    ("optimizer", "optimizer", "#1d4ed8", "white"),
    ("stall", "waiting for CPU or PCIe", "#c2410c", "white"),
)
LABEL_FROM = 0.06  # of the bar: a narrower part has no room for its figure
COLUMNS = 130


def save_picture(result: Result, path: Path) -> None:
    """Write a PNG. Needs matplotlib; errors: ImportError without it."""
    from matplotlib.figure import Figure

    figures, measured, verdict = result.figures, result.measured, result.verdict
    paragraphs = [verdict.reason, verdict.next, *verdict.remarks]
    words = "\n".join(fill(text, COLUMNS, break_on_hyphens=False) for text in paragraphs)
    figure = Figure(figsize=(9.5, 2.7 + 0.2 * (1 + words.count("\n"))), layout="constrained")
    axis, below = figure.subplots(2, 1, height_ratios=[1.6, 0.3 + 0.2 * (1 + words.count("\n"))])
    left = 0.0
    for name, label, color, ink in PARTS:
        milliseconds = 1e3 * (getattr(figures, name) or 0.0)
        has_room = milliseconds > LABEL_FROM * 1e3 * figures.mean
        told = label if has_room else f"{label}: {milliseconds:.1f} ms"
        axis.barh([0], [milliseconds], left=left, color=color, label=told)
        if has_room:
            axis.text(
                left + milliseconds / 2, 0, f"{milliseconds:.1f} ms\n{milliseconds / (1e3 * figures.mean):.0%}",
                ha="center", va="center", color=ink, fontsize=9,
            )  # fmt: skip
        left += milliseconds
    axis.set_xlim(0, 1e3 * figures.mean)
    axis.set_yticks([])
    axis.set_xlabel(f"ms of a mean step (median {1e3 * figures.median:.1f}, p95 {1e3 * figures.p95:.1f})")
    axis.set_title(
        f"{verdict.kind}: {measured.engine} on {measured.device}, {figures.steps} steps",
        loc="left",
        fontsize=11,
        pad=26,
    )
    axis.legend(frameon=False, ncols=4, loc="lower left", bbox_to_anchor=(-0.01, 0.98), fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)
    below.axis("off")
    below.text(0, 1, words, va="top", fontsize=9, linespacing=1.35, transform=below.transAxes)
    figure.savefig(path, dpi=120)
