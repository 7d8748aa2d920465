"""The two pictures of the kernels: GB/s over bytes beneath a copy's, and each row's share of a copy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from pathlib import Path
from string import ascii_uppercase
from textwrap import fill
from typing import Any

from zenflow.bench.figures import Row
from zenflow.bench.kernel_clock import COPY_LIMIT
from zenflow.bench.kernel_tables import COMPILED, KNOWN, LAUNCHES, OURS, REFERENCE
from zenflow.bench.picture import FLOOR, REST, STALL

SHADES = {  # of one colour for ops of one kind; their letters tell them apart without colours
    "fused_step": "#172f7a",
    "fused_step_first": "#1d4ed8",
    "fused_step_alone": "#3f86f5",
    "fused_step_whole": "#5aa9e6",
    "fused_step_stochastic": "#8ec5f0",
    "write_masters": "#c2410c",
    "gather_channels": "#e69f00",
    "scatter_channels": "#f2c14e",
    "partial_norms": "#064e3b",
    "channel_scores": "#0f766e",
    "running_scores": "#35b39f",
    "stochastic_rounding": "#a4578a",
    "close_step": "#6b7280",
    "select_channels": "#6b7280",
}
SHAPES = {"columns": "o", "rows": "s", "whole": "D"}
FAINT_SHAPES = {COMPILED: "+", KNOWN: "x"}
LOOKS = {  # marker, its size in points, colour; drawn in this order, so that no smaller one is hidden
    OURS: ("o", 6.8, REST),
    COMPILED: ("D", 4.8, "#0f766e"),
    KNOWN: ("^", 5.4, STALL),
    REFERENCE: ("s", 4.0, FLOOR),
}
MEANINGS = {REFERENCE: "torch", KNOWN: "known kernel", COMPILED: "torch.compile", OURS: "ours"}
COPY_LINE = {"color": "#111827", "linewidth": 0.9}
GOAL_LINE = {"color": "#111827", "linewidth": 0.7, "linestyle": (0, (4, 3))}
ROOF, ROOF_LINE = "a copy", {"color": "#111827", "linewidth": 1.3}
GAP = 100  # times the bytes: what lies below such a gap would stretch the axes, and is left to the other picture
GOAL = 90  # percent of a copy
ROW, BETWEEN = 0.145, 0.35  # inches a row; rows between two ops
NO_FIGURE = "none"


def who(row: Row) -> str:
    """The contestant's kind: whatever is neither ours nor torch's own is a well-known kernel."""
    return row["contestant"] if row["contestant"] in (OURS, REFERENCE, COMPILED) else KNOWN


def foremost(rows: Iterable[Row]) -> str:
    """Whose figures a picture is about: ours, or torch's on a machine where ours does not run."""
    return OURS if any(row["contestant"] == OURS for row in rows) else REFERENCE


def out_of_reach(rows: Sequence[Row]) -> set[tuple[int, str]]:
    """Size and op where one moves so few bytes beside others of its size that axes with it would show nothing else."""
    found = set()
    for numel in {row["numel"] for row in rows}:
        members = [row for row in rows if row["numel"] == numel]
        moved = sorted({row["bytes"] for row in members})
        least = max((above for below, above in pairwise(moved) if above > GAP * below), default=0)
        found |= {(numel, row["op"]) for row in members if row["bytes"] < least}
    return found


def save_roofline(rows: Sequence[Row], copies: dict[int, float], title: str, path: Path) -> None:
    """Write a PNG of the ops' rows, none with an error: GB/s over bytes, the copy's (`copies`: bytes -> ms) above them.

    Needs matplotlib; errors: ImportError without it.
    """
    from matplotlib import rc_context

    from zenflow.report.look import STYLE, entitle, page

    small = out_of_reach(rows)
    near = [row for row in rows if (row["numel"], row["op"]) not in small]
    main = foremost(near)
    shown = [row for row in near if who(row) in (main, *FAINT_SHAPES)]
    sizes = list(dict.fromkeys(row["numel"] for row in shown))
    with rc_context(STYLE):
        figure, axes = page(1.9 + (3.9 if len(sizes) == 1 else 3.4) * len(sizes), len(sizes))
        panels = {numel: [row for row in shown if row["numel"] == numel] for numel in sizes}
        for axis, (numel, members) in zip(axes[:, 0], panels.items(), strict=True):
            _draw_points(axis, members)
            _limit(axis, members, copies)
            _draw_copies(axis, copies)
            axis.set(title=f"{numel:,} elements", ylabel="GB/s, by the median")
        axis.set_xlabel("bytes that the job must move")
        _explain_roofline(figure, shown, main, [op for op in SHADES if any(op == name for _, name in small)])
        entitle(figure, f"Bandwidth of the kernels, beneath that of a copy of as many bytes: {title}")
        for axis, members in zip(axes[:, 0], panels.values(), strict=True):
            _write_letters(axis, members)
        figure.savefig(path)


def _name(row: Row) -> str:
    return " ".join(row[field] for field in ("op", "layout", "dtype", "contestant"))


def _letter(op: str) -> str:
    return ascii_uppercase[list(SHADES).index(op)]


def _draw_points(axis: Any, rows: Sequence[Row]) -> None:
    for row in rows:
        color = SHADES[row["op"]]
        if who(row) in FAINT_SHAPES:
            look = {"marker": FAINT_SHAPES[who(row)], "markersize": 4.5, "alpha": 0.5, "zorder": 2}
        else:
            inside = "white" if row["dtype"] == "fp32" else color
            look = {"marker": SHAPES[row["layout"]], "markersize": 5.5, "mfc": inside, "zorder": 3}
        axis.plot(row["bytes"], row["gb_per_s"], color=color, linestyle="", label=_name(row), **look)


def _limit(axis: Any, rows: Sequence[Row], copies: dict[int, float]) -> None:
    """The region with data alone: the copies of what is not there lie outside."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    from zenflow.report.look import plain_log

    plain_log(axis)
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    least, most = _a_decade(row["bytes"] for row in rows)
    beside = [moved / ms / 1e6 for moved, ms in copies.items() if least <= moved <= most]
    axis.set(xlim=(least, most), ylim=_a_decade([*beside, *(row["gb_per_s"] for row in rows)]))


def _draw_copies(axis: Any, copies: dict[int, float]) -> None:
    """The roof, to the right edge where the longest copy stands for all that are longer."""
    rates = {moved: moved / ms / 1e6 for moved, ms in copies.items()}
    if COPY_LIMIT in rates:
        rates[max(COPY_LIMIT, ceil(axis.get_xlim()[1]))] = rates[COPY_LIMIT]
    axis.plot(list(rates), list(rates.values()), label=ROOF, **ROOF_LINE)


def _write_letters(axis: Any, rows: Sequence[Row]) -> None:
    """Each op's letter beside its points, where it covers neither a point nor the roof."""
    from zenflow.report.look import INK, Tag, label_points

    letters = ["" if who(row) in FAINT_SHAPES else _letter(row["op"]) for row in rows]
    tags = [Tag(name, row["bytes"], row["gb_per_s"], INK) for name, row in zip(letters, rows, strict=True)]
    roof = next(line for line in axis.lines if line.get_label() == ROOF)
    label_points(axis, tags, [(0.0, 0.0)] * len(tags), list(zip(*roof.get_data(), strict=True)))


def _a_decade(values: Iterable[float]) -> tuple[float, float]:
    """Limits around the values, that far apart at least, so that an axis has ticks."""
    ordered = sorted(values)
    margin = max(1.25, (10 * ordered[0] / ordered[-1]) ** 0.5)
    return ordered[0] / margin, ordered[-1] * margin


def _explain_roofline(figure: Any, rows: Sequence[Row], main: str, small: Sequence[str]) -> None:
    """At the left the ops with their letters, at the right what shapes, filling and faint signs mean."""
    from matplotlib.lines import Line2D

    def sign(label: str, marker: str, color: str = "#6b7280", inside: str | None = None, **style: Any) -> Any:
        return Line2D([], [], linestyle="", marker=marker, color=color, mfc=inside or color, label=label, **style)

    ops = [op for op in SHADES if any(row["op"] == op for row in rows)]
    dtypes = {row["dtype"]: "white" if row["dtype"] == "fp32" else None for row in rows}
    kinds = [Line2D([], [], label=ROOF, **ROOF_LINE)]
    kinds += [sign(layout, SHAPES[layout]) for layout in SHAPES if any(row["layout"] == layout for row in rows)]
    kinds += [sign(f"{MEANINGS[main]}, {dtype}", "o", inside=inside) for dtype, inside in dtypes.items()]
    kinds += [
        sign(MEANINGS[kind], marker, alpha=0.6)
        for kind, marker in FAINT_SHAPES.items()
        if any(who(row) == kind for row in rows)
    ]
    height = max(2, ceil(len(ops) / 3))
    columns = _in_columns([sign(f"{_letter(op)}  {op}", "o", SHADES[op]) for op in ops], height)
    columns += _in_columns(kinds, height)
    notes = [f"not here, as they move next to nothing: {', '.join(small)}; see shares.png"] if small else []
    _legend(figure, columns, len(columns) // height, notes)


def _in_columns(signs: Sequence[Any], height: int) -> list[Any]:
    """Signs that fill whole columns of a legend, the last with signs of nothing."""
    from matplotlib.lines import Line2D

    return [*signs, *(Line2D([], [], linestyle="", label=" ") for _ in range(-len(signs) % height))]


def _legend(figure: Any, signs: Sequence[Any], columns: int, notes: Sequence[str]) -> None:
    """Below the axes, the notes above the signs: a text at the figure's foot would share its place with a legend."""
    from zenflow.report.look import FAINT

    look = {"frameon": False, "fontsize": 7.5, "handletextpad": 0.4, "columnspacing": 1.2, "borderaxespad": 0.2}
    look |= {"title": fill("; ".join(notes), int(17.5 * figure.get_figwidth())), "title_fontsize": 7.5}
    legend = figure.legend(handles=signs, loc="outside lower left", ncols=columns, alignment="left", **look)
    legend.get_title().set_color(FAINT)


def save_shares(rows: Sequence[Row], title: str, path: Path) -> None:
    """Write a PNG of the ops' and the model's rows: what each contestant is of a copy of what the bus carries at best.

    A row an op, layout and size, a column a dtype; rows with an error stay, without their dots. Needs matplotlib;
    errors: ImportError without it.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    from zenflow.report.look import STYLE, entitle, page

    shown = [row for row in rows if row["table"] in ("op", "model")]
    main, dtypes = foremost(shown), list(dict.fromkeys(row["dtype"] for row in shown))
    grid = _grid(shown)
    most = max([100.0, *(100 * row["bus_share"] for row in shown if row.get("bus_share"))])
    with rc_context(STYLE | {"axes.grid": False, "axes.spines.left": False}):
        figure, axes = page(1.6 + ROW * grid.bottom, 1, len(dtypes))
        for axis, dtype in zip(axes[0], dtypes, strict=True):
            _draw_rows(axis, grid, [row for row in shown if row["dtype"] == dtype], main)
            axis.set(xlim=(-1, 1.04 * most), ylim=(grid.bottom, -0.2), title=dtype)
            axis.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
            axis.set_xlabel("% of a copy")
        _name_rows(axes[0, 0], grid)
        for axis in axes[0, 1:]:
            axis.set_yticks([])
        _explain_shares(figure, shown, main)
        entitle(figure, f"Share of a copy of the bytes that the bus carries at best: {title}")
        figure.savefig(path)


@dataclass(frozen=True)
class Grid:
    """How far from the top, in rows: each row by (section, op, layout), each section's heading, and the bottom."""

    rows: dict[tuple[str, str, str], float]
    headings: dict[str, float]
    bottom: float


def _key(row: Row) -> tuple[str, str, str]:
    model = row["table"] == "model"
    section = f"A whole model, {row['shape']}, one launch a class" if model else f"{row['numel']:,} elements"
    return section, row["op"], row["layout"]


def _grid(rows: Sequence[Row]) -> Grid:
    """Sections, within them ops, within them layouts, each in the order in which it was met first."""
    sections: dict[str, dict[str, dict[str, None]]] = {}
    for section, op, layout in map(_key, rows):
        sections.setdefault(section, {}).setdefault(op, {})[layout] = None
    places, headings, here = {}, {}, 0.5
    for section, ops in sections.items():
        headings[section], here = here, here + 1.2
        for op, layouts in ops.items():
            places |= {(section, op, layout): here + place for place, layout in enumerate(layouts)}
            here += len(layouts) + BETWEEN
        here += BETWEEN
    return Grid(places, headings, here - 2 * BETWEEN)


def _draw_rows(axis: Any, grid: Grid, rows: Sequence[Row], main: str) -> None:
    """The dots of one dtype, hollow where launches are in the time; the foremost one's figure at the right."""
    from zenflow.report.look import FAINT, GRID

    style = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    style |= {"color": REST if main == OURS else FAINT}
    axis.axvline(100, zorder=1, **COPY_LINE)
    axis.axvline(GOAL, zorder=1, **GOAL_LINE)
    mine = {_key(row): row for row in rows if row["contestant"] == main and row.get("bus_share")}
    for key in dict.fromkeys(map(_key, rows)):
        axis.axhline(grid.rows[key], color=GRID, linewidth=0.6, zorder=0)
        percent = 100 * mine[key]["bus_share"] if key in mine else 0.0
        figure = f"{percent:.1f}%{'*' if _launches(mine[key]) else ''}" if key in mine else NO_FIGURE
        style |= {"fontweight": "bold" if percent >= GOAL else "normal"}
        axis.annotate(figure, (1, grid.rows[key]), (34, 0), ha="right", va="center_baseline", fontsize=7, **style)
    for kind, (marker, size, color) in LOOKS.items():
        for row in rows:
            if who(row) == kind and row.get("bus_share"):
                rim, inside = (color, "white") if _launches(row) else ("white", color)
                look = {"mec": rim, "mfc": inside, "mew": 0.9 if _launches(row) else 0.4, "markersize": size}
                place = grid.rows[_key(row)]
                axis.plot(100 * row["bus_share"], place, marker, label=_name(row), zorder=3, clip_on=False, **look)


def _name_rows(axis: Any, grid: Grid) -> None:
    """Layouts at the axis, ops left of them, once each, and the headings."""
    axis.set_yticks(list(grid.rows.values()), [layout for _, _, layout in grid.rows], fontsize=7)
    axis.tick_params(axis="y", length=0)
    style = {"xycoords": axis.get_yaxis_transform(), "textcoords": "offset points", "annotation_clip": False}
    named = set()
    for (section, op, _), place in grid.rows.items():
        if (section, op) not in named:
            named.add((section, op))
            axis.annotate(op, (0, place), (-44, 0), ha="right", va="center_baseline", fontsize=7.5, **style)
    for section, place in grid.headings.items():
        axis.annotate(section, (0, place), (-3, 0), ha="right", va="center", fontsize=8, fontweight="bold", **style)


def _launches(row: Row) -> bool:
    return LAUNCHES in row.get("note", "")


def _explain_shares(figure: Any, rows: Sequence[Row], main: str) -> None:
    from matplotlib.lines import Line2D

    there = {who(row) for row in rows}
    signs = [
        Line2D([], [], linestyle="", marker=marker, markersize=size, color=color, label=MEANINGS[kind])
        for kind, (marker, size, color) in LOOKS.items()
        if kind in there
    ]
    signs += [Line2D([], [], label=f"{GOAL}% of a copy", **GOAL_LINE), Line2D([], [], label="a copy", **COPY_LINE)]
    _legend(figure, signs, len(signs), _notes(rows, main))


def _notes(rows: Sequence[Row], main: str) -> list[str]:
    """What the figures at the right are, what marks mean, and which the well-known kernels are."""
    notes = [f"figures: {MEANINGS[main]}, bold from {GOAL}%"]
    if any(_launches(row) for row in rows):
        notes.append(f"hollow and *: {LAUNCHES}")
    if any("error" in row for row in rows):
        notes.append(f"{NO_FIGURE}: not measured, see kernels.md")
    known: dict[str, dict[str, None]] = {}
    for row in rows:
        if who(row) == KNOWN:
            known.setdefault(row["contestant"], {})[row["op"]] = None
    listed = ", ".join(f"{name} for {' and '.join(ops)}" for name, ops in known.items())
    return [*notes, f"known kernels: {listed}"] if known else notes
