"""How all pictures look: sizes for a page of a paper, colours that colour-blind readers tell apart, and labels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.text import Annotation
from matplotlib.ticker import LogLocator, NullFormatter
from matplotlib.transforms import Bbox

from zenflow.report.study import Study

WIDTH = 7.0  # inches: both columns of a page
INK, FAINT, QUIET, GRID = "#222222", "#565c66", "#8a8f98", "#e3e5e8"
BASELINE = "#000000"
GREY_LINE = {"color": "#c3c8cf", "linewidth": 0.9, "zorder": 1}
# Okabe and Ito's colours, without the yellow that white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
MARKERS = ("o", "s", "^", "D", "v", "P")
STYLE = {
    "font.size": 9,
    "text.parse_math": False,  # a $ in a name is one
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.color": INK,
    "ytick.color": INK,
    "text.color": INK,
    "hatch.linewidth": 0.6,
    "hatch.color": QUIET,
    "savefig.dpi": 200,
    "svg.hashsalt": "zenflow-report",
}
# Where a point's name may stand: points of distance, then right and up of it; the first free place is taken.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
CANDIDATES = [(distance, right, up) for distance in (7, 14, 22, 32, 44, 60) for right, up in SIDES]
PADDING = 2  # pixels around a name
OUT_WEIGHS = 10  # times what a name covers
LINE_HEIGHT = 0.075  # of a line of text at the lines' ends, as a share of a row's axes
WIDE_RATIO = 10  # of the largest to the smallest value, from which an axis is logarithmic


def page(height: float, rows: int = 1, columns: int = 1, width: float = WIDTH) -> tuple[Figure, Any]:
    """A figure of so many inches, and its axes as a 2-d array."""
    figure = Figure(figsize=(min(width, WIDTH), height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def is_wide(values: Sequence[float], ratio: float = WIDE_RATIO) -> bool:
    """Whether positive values span so much that a linear axis would hide the small ones."""
    return min(values) > 0 and max(values) / min(values) >= ratio


def plain_log(axis: Axes) -> None:
    """A logarithmic y axis with a few ticks that are written as plain numbers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(plain_ticks)
    axis.yaxis.set_minor_formatter(NullFormatter())


def plain_ticks(value: float, _: Any = None) -> str:
    """12500.0 as 12,500, and 2.5 as it is: a tick is never rounded to another number."""
    return f"{value:,.12g}"


def paint(study: Study) -> dict[str, tuple[str, str]]:
    """Colour and marker of the settings that stand out, by name: the baseline, each engine's best, then the best.

    Best by the loss at equal steps, in all pictures, so that a setting has one colour. The others, if there are more
    than there are colours, are drawn in grey and without a name.
    """
    figure_name = "final_loss" if study.step is None else "loss_at_equal_steps"
    others = [setting for setting in study.settings if setting is not study.baseline]
    ranked = sorted(others, key=lambda setting: setting.mean(figure_name))
    leaders = {setting.values["engine"]: setting for setting in reversed(ranked)}
    best = [*leaders.values(), *(setting for setting in ranked if setting not in leaders.values())][: len(PALETTE)]
    chosen = [setting for setting in others if setting in best]  # in the study's order: colours stay from run to run
    looks = {setting.name: pair for setting, pair in zip(chosen, zip(PALETTE, MARKERS, strict=True), strict=False)}
    return looks | ({} if study.baseline is None else {study.baseline.name: (BASELINE, "o")})


def entitle(figure: Figure, title: str, notes: Sequence[str] = ()) -> None:
    """The title above and the notes below, at the left, in lines that fit the figure's width."""
    width = figure.get_figwidth()
    fits = int(width * 12.5)
    parts = [title] if len(title) <= fits else title.split(": ", 1)
    text = "\n".join(fill(part, fits, break_on_hyphens=False) for part in parts)
    figure.suptitle(text, x=0.01, ha="left", fontweight="bold", fontsize=10)
    if notes:
        text = fill("; ".join(notes), int(width * 17.5))
        figure.supxlabel(text, x=0.01, ha="left", fontsize=7.5, color=FAINT)


def usual_note(study: Study) -> list[str]:
    """What goes without saying in the labels."""
    return [f"where a label does not say otherwise: {study.usual}"] if study.usual else []


def in_lines(label: str, width: int = 30) -> str:
    """A setting's label in lines that are about so wide, broken between its parts."""
    lines = [""]
    for part in label.split(", "):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += f"{part}, "
    return "\n".join(lines).removesuffix(", ").replace(", \n", ",\n")


def seeds_note(study: Study, what: str) -> list[str]:
    """What a band or a bar is, where there are several seeds."""
    counts = {len(setting.runs) for setting in study.settings}
    if max(counts) == 1:
        return []
    count = f"{max(counts)} seeds" if len(counts) == 1 else f"up to {max(counts)} seeds"
    return [f"{what}: ± 1 standard deviation over {count}"]


def halo(width: float = 2.5) -> list[Any]:
    """A white rim that keeps a label readable over lines."""
    return [withStroke(linewidth=width, foreground="white")]


def rows_height(names: Sequence[str], height: float) -> float:
    """What a row of so many inches must have for all of the names at its lines' ends, one above the other."""
    return height * max(1.0, LINE_HEIGHT * sum(1 + in_lines(name).count("\n") for name in names))


def label_ends(axis: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names at the right of the axes, for lines that end at (x, y): (name, x, y, colour), moved apart where needed.

    The limits of the axes must not change any more, nor much their height; it is that of `rows_height`.
    """
    line_height = LINE_HEIGHT / rows_height([name for name, *_ in ends], 1.0)
    places = []
    for name, x, y, color in ends:
        place = axis.transAxes.inverted().transform(axis.transData.transform((x, y)))[1]
        places.append((place, in_lines(name), x, y, color))
    places.sort(key=lambda place: place[0])
    sizes = [line_height * (1 + name.count("\n")) for _, name, *_ in places]
    heights = spread_out([place[0] for place in places], sizes, line_height)
    for height, (_, name, x, y, color) in zip(heights, places, strict=True):
        axis.annotate(
            name,
            (x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            color=color,
            va="center",
            fontsize=8,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def spread_out(heights: Sequence[float], sizes: Sequence[float], over: float) -> list[float]:
    """Ascending middles of things of these sizes, moved as little as they must be not to overlap.

    If they can, they lie between 0 and 1, with at most half of `over` outside.
    """
    if not sizes:
        return []
    gaps = [0.0, *((one + other) / 2 for one, other in pairwise(sizes))]
    above = [float(total) for total in np.cumsum(gaps)]  # how far each lies above the first where all touch
    groups: list[tuple[float, int]] = []  # the first one's place and the count of things that touch
    for height, distance in zip(heights, above, strict=True):
        groups.append((height - distance, 1))
        while len(groups) > 1 and groups[-1][0] < groups[-2][0]:
            (low, some), (high, more) = groups[-2:]
            groups[-2:] = [((low * some + high * more) / (some + more), some + more)]
    free = [place for place, count in groups for _ in range(count)]
    low, high = (sizes[0] - over) / 2, 1 - (sizes[-1] - over) / 2 - above[-1]
    return [max(min(place, high), low) + distance for place, distance in zip(free, above, strict=True)]


def label_points(
    axis: Axes,
    points: Sequence[tuple[str, float, float, str]],
    bars: Sequence[tuple[float, float]],
    border: Sequence[tuple[float, float]] = (),
) -> None:
    """Names beside points (name, x, y, colour), each where it covers no point, no bar, no border and no earlier name.

    `bars`: how far each point's error bars reach in x and y. `border`: the corners of a line along the axes. The axes
    must have their limits. A name that is not right beside its point gets a line to it; an empty one is not drawn. With
    no free place within the axes it covers as little as it can.
    """
    figure = axis.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # the layout
    inside = axis.get_window_extent(renderer)
    taken = [box for point, bar in zip(points, bars, strict=True) for box in _cross(axis, *point[1:3], *bar)]
    corners = axis.transData.transform(border) if border else []
    taken += [
        Bbox.from_extents(*np.minimum(one, other) - 1, *np.maximum(one, other) + 1) for one, other in pairwise(corners)
    ]
    for name, x, y, color in (point for point in points if point[0]):
        text = axis.annotate(
            in_lines(name, 24), (x, y), (0, 0), textcoords="offset points", color=color, fontsize=8, linespacing=1.0
        )
        text.set_path_effects(halo())
        text.set_in_layout(False)  # it lies in the axes, which would move
        tried = []
        for distance, right, up in CANDIDATES:
            _put(text, distance, right, up)
            box = text.get_window_extent(renderer).padded(PADDING)
            tried.append((_outside(inside, box) + sum(_overlap(box, other) for other in taken), distance, right, up))
            if not tried[-1][0]:
                break
        _, distance, right, up = min(tried, key=lambda place: place[0])
        _put(text, distance, right, up)
        taken.append(text.get_window_extent(renderer).padded(PADDING))
        if distance > CANDIDATES[0][0] or (right and up):
            axis.annotate(
                "",
                (x, y),
                (right * distance, up * distance),
                textcoords="offset points",
                arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
            )


def _cross(axis: Axes, x: float, y: float, across: float, upwards: float) -> list[Bbox]:
    """The boxes of a point's marker and of its two bars, in pixels."""
    corners = axis.transData.transform([(x - across, y - upwards), (x, y), (x + across, y + upwards)])
    (left, bottom), (x, y), (right, top) = corners
    marker, thin = 5 * axis.figure.dpi / 72, 1.0
    return [
        Bbox.from_extents(x - marker, y - marker, x + marker, y + marker),
        Bbox.from_extents(left, y - thin, right, y + thin),
        Bbox.from_extents(x - thin, bottom, x + thin, top),
    ]


def _put(text: Annotation, distance: float, right: int, up: int) -> None:
    text.set(position=(right * distance, up * distance))
    text.set(ha=("center", "left", "right")[right], va=("center", "bottom", "top")[up])


def _overlap(one: Bbox, other: Bbox) -> float:
    """In square pixels."""
    common = Bbox.intersection(one, other)
    return 0.0 if common is None else common.width * common.height


def _outside(outer: Bbox, inner: Bbox) -> float:
    """What of `inner` is not in `outer`, which weighs more than what is covered."""
    return OUT_WEIGHS * (inner.width * inner.height - _overlap(outer, inner))
