"""The share k against the window's length U: how far each cell's validation loss lies from the baseline's."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from zenflow.report import settings
from zenflow.report.look import INK, entitle, page
from zenflow.report.names import field_names
from zenflow.report.settings import ZENFLOW
from zenflow.report.study import Setting, Study
from zenflow.report.tables import difference, time_words
from zenflow.terminal import counted

K, U = "engine.topk_ratio", "engine.update_interval"
PANELS_A_ROW = 2
LEAST_LIMIT = 1.0  # percent at the ends of the colours: smaller differences shall look small


@dataclass(frozen=True)
class Grid:
    """Settings that differ in k and U alone: `cells` by (k, U), None where there is no run. `name` says which."""

    name: str
    ks: list[float]
    us: list[float]
    cells: dict[tuple[float, float], Setting | None]


def grids(study: Study) -> list[Grid]:
    """The grids of at least two k by two U, in the study's order."""
    together: dict[Hashable, list[Setting]] = {}
    for setting in study.settings:
        if setting.values["engine"] == ZENFLOW:
            rest = {name: value for name, value in setting.values.items() if name not in (K, U)}
            together.setdefault(settings.key(rest), []).append(setting)
    groups = [group for group in together.values() if _is_grid(group)]
    rests = [{name: value for name, value in group[0].values.items() if name not in (K, U)} for group in groups]
    keys = settings.differing(rests) if len(rests) > 1 else []
    names = [str(name) for name in field_names(rests, keys)] if keys else [""] * len(rests)
    return [_grid(name, group) for name, group in zip(names, groups, strict=True)]


def _is_grid(group: Sequence[Setting]) -> bool:
    return all(len({setting.values[name] for setting in group}) > 1 for name in (K, U))


def _grid(name: str, group: Sequence[Setting]) -> Grid:
    by_place = {(setting.values[K], setting.values[U]): setting for setting in group}
    ks, us = (sorted({place[axis] for place in by_place}) for axis in (0, 1))
    return Grid(name, ks, us, {(k, u): by_place.get((k, u)) for k in ks for u in us})


def draw(study: Study, over_seconds: bool) -> tuple[str, Any] | None:
    """(title, figure) at equal steps or at equal training time; None where there is no grid or nothing to be equal."""
    found = grids(study)
    if not found or (study.step is None and not over_seconds):
        return None
    at = f"{time_words(study.seconds)} of training" if over_seconds else counted(study.step, "step")
    against = "" if study.baseline is None else f" against {study.base_name}"
    title = f"Validation loss{against} after {at}: {study.title}"
    values = [_value(setting, study, over_seconds) for grid in found for setting in grid.cells.values() if setting]
    columns = min(len(found), PANELS_A_ROW)
    rows = -(-len(found) // columns)
    tallest = max(len(grid.ks) for grid in found)
    figure, axes = page(rows * (1.1 + 0.42 * tallest) + 0.5, rows, columns, width=3.6 * columns + 0.9)
    limit = max(LEAST_LIMIT, *map(abs, values))
    look = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    if study.baseline is None:
        look = {"cmap": "cividis", "vmin": min(values), "vmax": max(values)}
    for axis, grid in zip(axes.flat, found, strict=False):
        image = _panel(axis, grid, study, over_seconds, look)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    label = "validation loss" if study.baseline is None else f"loss above {study.base_name} (%)"
    figure.colorbar(image, ax=axes, label=label, shrink=0.9, pad=0.02).outline.set_visible(False)
    entitle(figure, title)
    return title, figure


def _value(setting: Setting, study: Study, over_seconds: bool) -> float:
    """Percent above the baseline; the loss itself without one."""
    if study.baseline is not None:
        return setting.vs_seconds if over_seconds else setting.vs_steps
    return setting.mean("loss_at_equal_seconds" if over_seconds else "loss_at_equal_steps")


def _panel(axis: Axes, grid: Grid, study: Study, over_seconds: bool, look: dict[str, Any]) -> Any:
    """One grid: a number in every cell, a hatched one where there is no run."""
    cells = [[grid.cells[k, u] for u in grid.us] for k in grid.ks]
    values = [[float("nan") if cell is None else _value(cell, study, over_seconds) for cell in row] for row in cells]
    image = axis.imshow(values, aspect="auto", origin="lower", **look)
    for y, row in enumerate(cells):
        for x, cell in enumerate(row):
            if cell is None:
                axis.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor="white", hatch="////", linewidth=0))
                text, color = "no run", INK
            else:
                value = values[y][x]
                text = f"{value:.4f}" if study.baseline is None else difference(value)
                color = _readable(image.cmap(image.norm(value)))
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1} if cell is None else None
            axis.text(x, y, text, ha="center", va="center", color=color, fontsize=8.5, bbox=box)
    axis.set_xticks(range(len(grid.us)), [f"{u}" for u in grid.us])
    axis.set_yticks(range(len(grid.ks)), [f"{k:g}" for k in grid.ks])
    axis.set(xlabel="update_interval U (steps)", ylabel="topk_ratio k (share)")
    axis.grid(False)
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    if grid.name:
        axis.set_title(grid.name, fontweight="normal", fontsize=9)
    return image


def _readable(rgba: Sequence[float]) -> str:
    """Ink on light cells, white on dark ones."""
    return INK if 0.299 * rgba[0] + 0.587 * rgba[1] + 0.114 * rgba[2] > 0.5 else "white"
