"""The picture of a study: how the squared norm gathers in few channels, and what becomes of a selection."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zenflow.locality.figures import Row, curves, survival_rows
from zenflow.locality.study import CURVE, DIMS, Study

LEGEND_HEIGHT = 28  # percent of the axis, above 100


def save_picture(study: Study, rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG. Needs matplotlib; errors: ImportError without it."""
    from matplotlib import rc_context

    from zenflow.report.look import PALETTE, STYLE, entitle, page

    with rc_context(STYLE):
        figure, axes = page(3.4, 1, 2)
        gathered, later = axes[0]
        survival = survival_rows(study, rows)
        for dim, color in zip(DIMS, PALETTE, strict=False):
            _gathering(gathered, curves(study)[dim], dim, color)
            _survival(later, [row for row in survival if row["dim"] == dim], dim, color)
        _finish_gathering(gathered, study)
        _finish_survival(later, study, sorted({row["lag"] for row in survival}))
        notes = ["lines: medians over the matrices", "bands: from the 10th to the 90th percentile"]
        entitle(figure, title, notes)
        figure.savefig(path)


def _gathering(axis: Any, values: np.ndarray, dim: str, color: str) -> None:
    low, median, high = np.percentile(values, (10, 50, 90), axis=0)
    axis.plot(100 * CURVE, 100 * median, color=color, linewidth=1.8, label=f"{dim}s")
    axis.fill_between(100 * CURVE, 100 * low, 100 * high, color=color, alpha=0.15, linewidth=0)


def _finish_gathering(axis: Any, study: Study) -> None:
    from zenflow.report.look import QUIET

    axis.plot(100 * CURVE, 100 * CURVE, color=QUIET, linewidth=1, linestyle=":", label="all channels alike")
    for share in study.settings.shares:
        axis.axvline(100 * share, color=QUIET, linewidth=0.6)
    axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set(xlim=(100 * CURVE[0], 100), ylim=(0, 100))
    axis.set(xlabel="top channels (% of a matrix's)", ylabel="share of the squared gradient norm (%)")
    axis.legend(facecolor="white", edgecolor="none", framealpha=1, fontsize=8, loc="upper left")


def _survival(axis: Any, rows: Sequence[Row], dim: str, color: str) -> None:
    lags = [row["lag"] for row in rows]
    low, median, high, held = ([100 * row[name] for row in rows] for name in ("p10", "median", "p90", "held_median"))
    axis.plot(lags, median, color=color, linewidth=1.8, marker="o", markersize=4, label=f"{dim}s, selected again")
    axis.fill_between(lags, low, high, color=color, alpha=0.15, linewidth=0)
    axis.plot(lags, held, color=color, linewidth=1.2, linestyle="--", label=f"{dim}s, norm held")


def _finish_survival(axis: Any, study: Study, lags: Sequence[int]) -> None:
    from matplotlib.ticker import NullLocator

    from zenflow.report.look import QUIET

    chance = 100 * study.settings.topk_ratio
    axis.axhline(chance, color=QUIET, linewidth=1, linestyle=":", label="chosen blindly")
    axis.set_xscale("log", base=2)
    axis.set_xticks(lags, [f"{lag:,}" for lag in lags])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set(ylim=(0, 100 + LEGEND_HEIGHT), xlabel=f"steps after selecting {chance:.3g}% of the channels")
    axis.set(yticks=range(0, 101, 20), ylabel="share (%)")
    box = {"facecolor": "white", "edgecolor": "none", "framealpha": 1}  # the grid ends below it
    axis.legend(**box, fontsize=7.5, loc="upper left", ncols=2, handlelength=1.6, columnspacing=1.0)
