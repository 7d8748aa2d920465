"""How all pictures look: sizes for a page of a paper, colours that colour-blind readers tell apart, and labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
GREY_LINE = {"color": "#b0b6bf", "linewidth": 0.9, "zorder": 1}
NAME_SIZE, QUIET_SIZE = 8, 6.5  # points, of names in a colour and in grey
MOST_NAMES = 24  # settings, up to which those in grey have names, too
# Okabe and Ito's colours, without the yellow that white paper swallows.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
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
# Where a point's name may stand: points of distance, then right and up of it; of places as good, the first is taken.
SIDES = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
BETWEEN = tuple((right * one, up * (1.5 - one)) for one in (1, 0.5) for right, up in SIDES[4:])
CANDIDATES = [
    *((distance, right, up) for distance in (7, 14, 22) for right, up in SIDES),
    *((distance, right, up) for distance in (32, 44, 60, 80, 105) for right, up in (*SIDES, *BETWEEN)),
]
PADDING = 2  # pixels around a name
WEIGHT = 10  # of what a name hides of points and names, its line of names, and the axes' edge of it: times thin lines
FAR = 1  # square pixels of a thin line that a name may cover, rather than stand a point further off
MARKER = 5  # points from its middle to its edge, and some air
LINE_PARTS = 6  # boxes that stand for the line from a point to its name
LINE_HEIGHT = 0.075  # of a line of a coloured name at the lines' ends, as a share of a row's axes
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
    """A setting's label in lines that are about so wide, broken between its parts; of several labels line by line."""
    done = []
    for whole in label.split("\n"):
        lines = [""]
        for part in whole.split(", "):
            if lines[-1] and len(lines[-1]) + len(part) > width:
                lines.append("")
            lines[-1] += f"{part}, "
        done.append("\n".join(lines).removesuffix(", ").replace(", \n", ",\n"))
    return "\n".join(done)


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


@dataclass(frozen=True)
class Tag:
    """A name and the point that it belongs to. color: None for a smaller name in grey. No name: a point without one."""

    name: str
    x: float
    y: float
    color: str | None

    @property
    def text(self) -> dict[str, Any]:
        """How the name is written."""
        return {"color": self.color or FAINT, "fontsize": NAME_SIZE if self.color else QUIET_SIZE}

    @property
    def line(self) -> dict[str, Any]:
        """How the line from the point to the name is drawn."""
        return {"arrowstyle": "-", "color": self.color or QUIET, "linewidth": 0.6 if self.color else 0.4, "shrinkB": 3}


def _lines_height(tag: Tag) -> float:
    """Of a name at a line's end, in heights of a coloured line of text."""
    return (1 + in_lines(tag.name).count("\n")) * tag.text["fontsize"] / NAME_SIZE


def rows_height(tags: Sequence[Tag], height: float) -> float:
    """What a row of so many inches must have for all of the names at its lines' ends, one above the other."""
    return height * max(1.0, LINE_HEIGHT * sum(map(_lines_height, tags)))


def label_ends(axis: Axes, tags: Sequence[Tag]) -> None:
    """Names at the right of the axes, for lines that end at the tags' points, moved apart where needed.

    The limits of the axes must not change any more, nor much their height; it is that of `rows_height`.
    """
    axis.autoscale_view()  # the limits are settled only where someone reads them
    line_height = LINE_HEIGHT / rows_height(tags, 1.0)
    to_axes = axis.transData + axis.transAxes.inverted()
    placed = sorted(((to_axes.transform((tag.x, tag.y))[1], tag) for tag in tags), key=lambda place: place[0])
    heights = spread_out([at for at, _ in placed], [line_height * _lines_height(tag) for _, tag in placed], line_height)
    for height, (_, tag) in zip(heights, placed, strict=True):
        axis.annotate(
            in_lines(tag.name),
            (tag.x, tag.y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            annotation_clip=False,
            arrowprops=tag.line | {"alpha": 0.6, "shrinkA": 2, "relpos": (0, 0.5), "patchA": None},
            **tag.text,
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
    axis: Axes, tags: Sequence[Tag], bars: Sequence[tuple[float, float]], border: Sequence[tuple[float, float]] = ()
) -> None:
    """Names beside points, each where it covers no point, no bar, no border and no earlier name; the grey ones last.

    `bars`: how far each point's error bars reach in x and y. `border`: the corners of a line along the axes. The axes
    must have their limits. A name that is not right beside its point gets a line to it; an empty one is not drawn. With
    no free place nearby it covers as little as it can, and its line crosses as little, names least of all.
    """
    figure = axis.figure
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()  # the layout
    inside = axis.get_window_extent(renderer)
    crosses = [_cross(axis, tag.x, tag.y, *bar) for tag, bar in zip(tags, bars, strict=True)]
    points = _extents([marker for marker, *_ in crosses])
    lines = [bar for _, *both in crosses for bar in both]
    corners = axis.transData.transform(border) if border else []
    lines += [_between(one, other) for one, other in pairwise(corners)]
    names: list[Bbox] = []
    for tag in sorted((tag for tag in tags if tag.name), key=lambda tag: tag.color is None):
        point = (tag.x, tag.y)
        text = axis.annotate(in_lines(tag.name, 24), point, (0, 0), textcoords="offset points", **tag.text)
        text.set(linespacing=1.0, path_effects=halo())
        text.set_in_layout(False)  # it lies in the axes, which would move
        tried, thin, written, edge = [], _extents(lines), _extents(names), _extents([inside])
        for distance, right, up in CANDIDATES:
            _put(text, distance, right, up)
            box = text.get_window_extent(renderer).padded(PADDING)
            line = _line(axis, point, distance, right, up)
            outside = box.width * box.height - _overlap([box], edge)
            hidden = outside + _overlap([box], points) + _overlap([box], written) + _overlap(line, written)
            crossed = _overlap([box], thin) + _overlap(line, points) + _overlap(line, thin)
            cost = WEIGHT * hidden + crossed + (FAR * distance if line else 0)
            tried.append((cost, distance, right, up, box, line))
            if not cost:
                break
        _, distance, right, up, box, line = min(tried, key=lambda place: place[0])
        _put(text, distance, right, up)
        names.append(box)
        lines += line
        if line:
            end = (right * distance, up * distance)
            axis.annotate("", point, end, textcoords="offset points", arrowprops=tag.line | {"shrinkA": 0})


def _line(axis: Axes, point: tuple[float, float], distance: float, right: float, up: float) -> list[Bbox]:
    """The boxes along the line from a point to its name, in pixels; none where the name is right beside it."""
    if distance <= CANDIDATES[0][0] and not (right and up):
        return []
    start, pixels = axis.transData.transform(point), axis.figure.dpi / 72
    stops = [start + np.array((right, up)) * at * pixels for at in np.linspace(MARKER + 1, distance, LINE_PARTS + 1)]
    return [_between(one, other) for one, other in pairwise(stops)]


def _between(one: Any, other: Any) -> Bbox:
    """The box of two corners, at least two pixels wide."""
    return Bbox.from_extents(*np.minimum(one, other) - 1, *np.maximum(one, other) + 1)


def _cross(axis: Axes, x: float, y: float, across: float, upwards: float) -> list[Bbox]:
    """The boxes of a point's marker and of its two bars, in pixels."""
    corners = axis.transData.transform([(x - across, y - upwards), (x, y), (x + across, y + upwards)])
    (left, bottom), (x, y), (right, top) = corners
    marker, thin = MARKER * axis.figure.dpi / 72, 1.0
    return [
        Bbox.from_extents(x - marker, y - marker, x + marker, y + marker),
        Bbox.from_extents(left, y - thin, right, y + thin),
        Bbox.from_extents(x - thin, bottom, x + thin, top),
    ]


def _put(text: Annotation, distance: float, right: float, up: float) -> None:
    text.set(position=(right * distance, up * distance))
    text.set(ha=("center", "left", "right")[int(np.sign(right))], va=("center", "bottom", "top")[int(np.sign(up))])


def _extents(boxes: Sequence[Bbox]) -> np.ndarray:
    """Left, bottom, right and top, [boxes, 4]."""
    return np.array([box.extents for box in boxes]).reshape(-1, 4)


def _overlap(boxes: Sequence[Bbox], others: np.ndarray) -> float:
    """What boxes have in common with others [n, 4], one by one, in square pixels."""
    each = _extents(boxes)[:, None]
    sides = np.minimum(each[..., 2:], others[:, 2:]) - np.maximum(each[..., :2], others[:, :2])
    return float(np.clip(sides, 0, None).prod(axis=-1).sum())
