"""Quality against speed: every setting a point, and the front of those that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zenflow.report.look import BASELINE, FAINT, INK, PALETTE, QUIET, entitle, is_wide, label_points, page, seeds_note
from zenflow.report.settings import ZENFLOW
from zenflow.report.study import Setting, Study


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (speed, loss) that no other equals or beats in both and beats in one; fastest first."""
    ordered = sorted(range(len(points)), key=lambda index: (-points[index][0], points[index][1]))
    best, kept = float("inf"), []
    for index in ordered:
        if points[index][1] < best or (kept and points[index] == points[kept[-1]]):
            best = points[index][1]
            kept.append(index)
    return kept


def draw(study: Study) -> tuple[str, Any]:
    """(title, figure): tokens a second to the right, validation loss at equal steps (the final one if none) upwards."""
    name = "final_loss" if study.step is None else "loss_at_equal_steps"
    when = "at the end" if study.step is None else f"after {study.step:,} steps"
    title = f"Quality against speed: {study.title}"
    points = [(setting.mean("tokens_per_second"), setting.mean(name)) for setting in study.settings]
    figure, axes = page(4.2, width=6.0)
    axis = axes[0, 0]
    best = front(points)
    corners = [points[index] for index in reversed(best)]
    axis.step(*zip(*corners, strict=True), where="pre", color=PALETTE[0], linewidth=1.4, alpha=0.55, zorder=1)
    labels, bars = [], []
    for index, (setting, (speed, loss)) in enumerate(zip(study.settings, points, strict=True)):
        bars.append((setting.spreads["tokens_per_second"].std or 0.0, setting.spreads[name].std or 0.0))
        color = BASELINE if setting is study.baseline else PALETTE[0] if index in best else QUIET
        axis.errorbar(
            speed,
            loss,
            xerr=bars[-1][0] or None,
            yerr=bars[-1][1] or None,
            fmt="D" if setting is study.baseline else "o",
            color=color,
            markersize=5.5,
            elinewidth=0.8,
            zorder=3,
        )
        labels.append((_short(setting), speed, loss, INK if index in best or setting is study.baseline else FAINT))
    if is_wide([speed for speed, _ in points]):
        axis.set_xscale("log")
    axis.margins(0.16, 0.14)
    axis.set(xlabel="speed (tokens/s)", ylabel=f"validation loss {when}")
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    notes = [f"line: the front, which no other setting beats in both; better is right and down{_unnamed(study)}"]
    entitle(figure, title, notes + seeds_note(study, "bars"))
    label_points(axis, labels, bars)
    return title, figure


def _short(setting: Setting) -> str:
    """Without the engine where there is more to say: most points of a sweep are ZenFlow's."""
    return setting.name.removeprefix(f"{ZENFLOW}, ")


def _unnamed(study: Study) -> str:
    shortened = any(_short(setting) != setting.name for setting in study.settings)
    return "; without an engine's name: ZenFlow" if shortened else ""
