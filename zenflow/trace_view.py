"""What a trace shows: how much of the copies and of the CPU's work ran under the GPU's, as figures and as a picture.

It needs neither torch nor a GPU: a trace is read from its file, or as the list of events in it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

COMPUTE, TRANSFERS = "GPU compute", ("upload", "copy to ring", "CPU optimizer")
TRACKS = (COMPUTE, *TRANSFERS, "trainer")  # in this order from the top; others follow
STALL = "stall"
# Okabe and Ito's colours, which all kinds of colour vision tell apart; the last is for time in which the GPU idles.
COLORS = dict(zip(TRACKS, ("#0072B2", "#56B4E9", "#E69F00", "#009E73", "#999999"), strict=True))
IDLE_COLOR, OTHER, TEXT, SOFT = "#D55E00", "#CC79A7", "#1f2933", "#6b7280"
TEXT_WIDTH = 176  # letters in the picture's width
Interval = tuple[float, float]


def read_events(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The events of a trace file. Errors: ValueError if it is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{os.fspath(path)} is no trace: expected a JSON object with traceEvents") from error


def spans_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The intervals (ph X) of each named track."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name" and e["ph"] == "M"}
    spans: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in events:
        if event["ph"] == "X":
            spans[names[event["pid"], event["tid"]]].append(event)
    return spans


def overlap_summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What ran under what, in seconds and shares from 0 to 1. Errors: ValueError without a span of "GPU compute".

    `compute`: from its first span to its last (`seconds`), the time in which no span or a stall was there (`idle_*`),
    and the stalls by themselves. `tracks`: of each transfer track and of the CPU optimizer, wherever it was in the
    trace, the time in which it was busy and how much of that "GPU compute" was busy too (None if it never was).
    """
    spans = spans_of(events)
    busy, idle, stalls = _compute(spans)
    idle_us, total_us = _length(idle), _length(busy) + _length(idle)
    compute = {
        "seconds": total_us / 1e6,
        "busy_seconds": _length(busy) / 1e6,
        "idle_seconds": idle_us / 1e6,
        "idle_share": idle_us / total_us if total_us else 0.0,
        "longest_idle_seconds": max((stop - start for start, stop in idle), default=0.0) / 1e6,
        "stalls": len(stalls),
        "stall_seconds": _length(_union(stalls)) / 1e6,
    }
    tracks = {}
    for name in TRANSFERS:
        own = _union(_intervals(spans.get(name, [])))
        length, under = _length(own), _length(own) - _length(_without(own, busy))
        tracks[name] = {
            "busy_seconds": length / 1e6,
            "under_compute_seconds": under / 1e6,
            "under_compute_share": under / length if length else None,
        }
    return {"compute": compute, "tracks": tracks}


def _compute(spans: dict[str, list[dict[str, Any]]]) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """When "GPU compute" was busy and when idle (each disjoint, ascending), and its stalls; microseconds."""
    own = spans.get(COMPUTE, [])
    if not own:
        raise ValueError(f"the trace has no span of {COMPUTE!r}")
    stalls = _intervals([span for span in own if span["name"] == STALL])
    everything = _union(_intervals(own))
    busy, whole = _without(everything, _union(stalls)), (everything[0][0], everything[-1][1])
    return busy, _without([whole], busy), stalls


def _intervals(spans: list[dict[str, Any]]) -> list[Interval]:
    return [(span["ts"], span["ts"] + span["dur"]) for span in spans]


def _length(intervals: list[Interval]) -> float:
    return sum(stop - start for start, stop in intervals)


def _union(intervals: list[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, ascending."""
    result: list[Interval] = []
    for start, stop in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(result[-1][1], stop)
        else:
            result.append((start, stop))
    return result


def _without(first: list[Interval], second: list[Interval]) -> list[Interval]:
    """The points of `first` that are not in `second`; both disjoint and ascending, as is the result."""
    result, place = [], 0
    for start, stop in first:
        while place < len(second) and second[place][1] <= start:
            place += 1
        for taken in second[place:]:
            if taken[0] >= stop:
                break
            if taken[0] > start:
                result.append((start, taken[0]))
            start = max(start, taken[1])
        if start < stop:
            result.append((start, stop))
    return result


def describe(summary: dict[str, Any]) -> str:
    """The summary for people, one line a track."""
    c = summary["compute"]
    lines = [
        f"{COMPUTE:<14} busy {_time(c['busy_seconds'])} of {_time(c['seconds'])}; idle {_time(c['idle_seconds'])} "
        f"({c['idle_share']:.2%}), at most {_time(c['longest_idle_seconds'])} at once; "
        f"stalls {c['stalls']}, {_time(c['stall_seconds'])}"
    ]
    for name, track in summary["tracks"].items():
        share = track["under_compute_share"]
        under = "" if share is None else f", {share:.1%} of it under GPU compute"
        lines.append(f"{name:<14} busy {_time(track['busy_seconds'])}{under}")
    return "\n".join(lines)


def describe_file(path: str | os.PathLike[str]) -> str:
    """What the trace in a file shows, for people. Errors: ValueError if it is none."""
    return describe(overlap_summary(read_events(path)))


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 10 else f"{seconds * 1e3:.2f} ms"


def render(path_json: str | os.PathLike[str], path_png: str | os.PathLike[str]) -> None:
    """Draw two windows from the trace's middle (one, if there is one; all of a trace that names none) as a PNG.

    Windows are drawn dark and light in turn, on every track whose spans have a `window`. Errors: ImportError without
    matplotlib (the extra `plot`), ValueError for what is no trace.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("drawing a trace needs matplotlib: pip install 'zenflow-triton[plot]'") from error
    draw(read_events(path_json)).savefig(path_png, dpi=150)


def draw(events: list[dict[str, Any]]) -> Any:
    """The picture that `render` writes, a `matplotlib.figure.Figure`, from what `read_events` gives."""
    from matplotlib.figure import Figure

    spans = spans_of(events)
    busy, idle, stalls = _compute(spans)
    windows, view = _choose(spans[COMPUTE])
    waits = _clip(idle, view)
    figure = Figure(figsize=(12, 1.5 + 0.6 * len(spans)), layout="constrained")
    axis = figure.subplots()
    axis.set_xlim(0, (view[1] - view[0]) / 1e3)
    axis.set_ylim(len(spans) - 0.5, -1.0)
    axis.set_yticks([])
    axis.set_xlabel("milliseconds", color=SOFT)
    axis.tick_params(axis="x", colors=SOFT)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color(SOFT)
    for lane, (name, own) in enumerate(spans.items()):
        _name_lane(axis, lane, name, _clip(_union(_intervals(own)), view), busy)
        for span in own:
            if name != COMPUTE or span["name"] != STALL:
                color = COLORS.get(name, OTHER)
                shade = _lighter(color) if span["args"].get("window", 0) % 2 else color
                covered = waits if name == COMPUTE else []
                _bar(axis, lane, span["name"], _clip(_intervals([span]), view), covered, view, shade)
    _draw_waits(axis, list(spans).index(COMPUTE), waits, _union(stalls), view)
    for number, begin in windows:
        axis.axvline((begin - view[0]) / 1e3, color=TEXT, linewidth=0.8)
        axis.text((begin - view[0]) / 1e3, -0.78, f" window {number}", color=TEXT, fontsize=9)
    title = f"GPU compute idle for {_time(_length(waits) / 1e6)} of {_time((view[1] - view[0]) / 1e6)}"
    axis.set_title(title, loc="left", fontsize=12, color=TEXT)
    if windows:
        axis.set_title("light and dark: windows in turn", loc="right", fontsize=9, color=SOFT)
    return figure


def _choose(spans: list[dict[str, Any]]) -> tuple[list[tuple[int, float]], Interval]:
    """Windows to draw (number and begin), and from when to when: to the begin of the next window, if there is one."""
    windows: dict[int, list[Interval]] = {}
    for span in spans:
        if "window" in span["args"]:
            windows.setdefault(span["args"]["window"], []).extend(_intervals([span]))
    if not windows:
        own = _intervals(spans)
        return [], (min(start for start, _ in own), max(stop for _, stop in own))
    begins = sorted((min(start for start, _ in own), number) for number, own in windows.items())
    first = max(0, (len(begins) - 2) // 2)
    shown, after = begins[first : first + 2], begins[first + 2 : first + 3]
    stop = after[0][0] if after else max(stop for _, stop in windows[shown[-1][1]])
    return [(number, begin) for begin, number in shown], (shown[0][0], stop)


def _clip(intervals: list[Interval], view: Interval) -> list[Interval]:
    inside = [(max(start, view[0]), min(stop, view[1])) for start, stop in intervals]
    return [(start, stop) for start, stop in inside if start < stop]


def _name_lane(axis, lane: int, name: str, own: list[Interval], busy: list[Interval]) -> None:
    """The track's name and its figure, left of its bars; `own` is what it did in the picture."""
    length = _length(own if name != COMPUTE else _without(own, _without(own, busy)))
    figure = _time(length / 1e6)
    if name in TRANSFERS and length:
        figure += f", {1 - _length(_without(own, busy)) / length:.0%} under compute"
    place = {"transform": axis.get_yaxis_transform(), "ha": "right", "va": "center"}
    axis.text(-0.01, lane - 0.15, name, fontsize=10, color=TEXT, **place)
    axis.text(-0.01, lane + 0.17, figure, fontsize=8, color=SOFT, **place)


def _bar(
    axis, lane: int, name: str, place: list[Interval], covered: list[Interval], view: Interval, color: str
) -> None:
    """One span, with its name in the widest part of it that nothing covers, if it fits there."""
    for start, stop in place:
        left, width = (start - view[0]) / 1e3, (stop - start) / 1e3
        axis.broken_barh([(left, width)], (lane - 0.32, 0.64), facecolors=color, edgecolors="white", linewidth=0.4)
        free = max(_without([(start, stop)], covered), key=lambda part: part[1] - part[0], default=(start, start))
        if (free[1] - free[0]) / (view[1] - view[0]) * TEXT_WIDTH > len(name) + 1:
            middle = ((free[0] + free[1]) / 2 - view[0]) / 1e3
            axis.text(middle, lane, name, ha="center", va="center", fontsize=7.5, color=_ink(color), clip_on=True)


def _draw_waits(axis, lane: int, waits: list[Interval], stalls: list[Interval], view: Interval) -> None:
    """Where GPU compute idled: on its own lane, and as a tint on the others, which shows what it waited for."""
    for start, stop in waits:
        left, width, share = (start - view[0]) / 1e3, (stop - start) / 1e3, (stop - start) / (view[1] - view[0])
        axis.axvspan(left, left + width, color=IDLE_COLOR, alpha=0.12, linewidth=0)
        wide = {"facecolors": "white", "edgecolors": IDLE_COLOR, "hatch": "//////", "linewidth": 0.8}
        narrow = {"facecolors": IDLE_COLOR, "linewidth": 0}  # a border would make it look longer than it was
        axis.broken_barh([(left, width)], (lane - 0.32, 0.64), **(wide if share > 0.005 else narrow))
        if share > 0.003:
            kind = "stall" if _length(_without([(start, stop)], stalls)) < (stop - start) / 2 else "idle"
            label = f"{kind} {_time(width / 1e3)}"
            axis.text(left + width, lane - 0.38, label, ha="right", va="bottom", fontsize=8, color=IDLE_COLOR)


def _channels(color: str) -> list[int]:
    return [int(color[place : place + 2], 16) for place in (1, 3, 5)]


def _lighter(color: str) -> str:
    return "#" + "".join(f"{round(255 - 0.6 * (255 - value)):02x}" for value in _channels(color))


def _ink(color: str) -> str:
    """White or dark, whichever reads better on `color`."""
    red, green, blue = _channels(color)
    return TEXT if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else "white"


def main(arguments: list[str]) -> None:
    """`trace.json [out.png]`: print the summary, draw the picture (beside the trace, if nothing else is said)."""
    if len(arguments) not in (1, 2):
        sys.exit("usage: python -m zenflow.trace trace.json [out.png]")
    picture = Path(arguments[1]) if len(arguments) == 2 else Path(arguments[0]).with_suffix(".png")
    try:
        print(describe_file(arguments[0]))
        render(arguments[0], picture)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"zenflow.trace: {error}")
    print(f"picture: {picture}")
