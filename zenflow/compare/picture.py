"""The picture of a comparison: step times, the held-out loss over steps and over time, and the four criteria."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from zenflow.compare.criteria import MET, MISSED, OPEN
from zenflow.compare.curve import Run
from zenflow.compare.judge import Judgement, span

COLORS = {"a": "#9aa5b1", "b": "#1d4ed8"}
STATES = {MET: "#15803d", MISSED: "#c2410c", OPEN: "#a16207"}
COLUMNS = 130
WIDEST = 1.0  # of a's value: an interval beyond it is cut off, with an arrowhead, so that the others can be read
ROW = 3.4  # inches


def save_picture(judgement: Judgement, runs: Sequence[Run], sides: dict[str, str], path: Path) -> None:
    """Write a PNG. Needs matplotlib; errors: ImportError without it."""
    from matplotlib.figure import Figure

    bars = max(ROW, 0.9 + 0.2 * len(runs))
    figure = Figure(figsize=(11, ROW + bars + 0.6), layout="constrained")
    (steps, times), (system, evidence) = figure.subplots(2, 2, height_ratios=[ROW, bars])
    for run in runs:
        style = {"color": COLORS[run.side], "marker": "o", "markersize": 3, "linewidth": 1.4, "alpha": 0.8}
        steps.plot([point.step for point in run.curve], [point.loss for point in run.curve], **style)
        times.plot([point.seconds for point in run.curve], [point.loss for point in run.curve], **style)
    steps.set_xlabel("step")
    times.set_xlabel("seconds of training")
    steps.set_ylabel("held-out loss, each seed")
    times.set_ylabel("held-out loss, each seed")
    _draw_steps(system, runs)
    _draw_criteria(evidence, judgement)
    for axis in (steps, times, system, evidence):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    words = "\n".join(fill(f"{side}: {words}", COLUMNS, break_on_hyphens=False) for side, words in sides.items())
    figure.suptitle(f"{judgement.verdict}\n{words}", x=0.01, ha="left", fontsize=11)
    for side in sides:
        steps.plot([], [], color=COLORS[side], marker="o", label=side)
    steps.legend(frameon=False)
    figure.savefig(path, dpi=120)


def _draw_steps(axis, runs: Sequence[Run]) -> None:
    """A mean step of each run, the waiting in it in red, in the order in which they ran."""
    ordered = sorted(runs, key=lambda run: run.place)
    labels = [f"{run.place}: {run.side}, seed {run.seed}" for run in ordered]
    working = [1e3 * (run.mean - run.idle) for run in ordered]
    axis.barh(labels, working, color=[COLORS[run.side] for run in ordered])
    axis.barh(labels, [1e3 * run.idle for run in ordered], left=working, color=STATES[MISSED], label="waiting")
    axis.invert_yaxis()
    axis.set_xlabel("ms of a mean step, runs in their order")
    axis.legend(frameon=False, loc="lower right", bbox_to_anchor=(1.0, 0.98))


def _draw_criteria(axis, judgement: Judgement) -> None:
    """Each interval in percent, cut at `WIDEST`; its limit as a tick with an arrow to where it has to lie."""
    for place, item in enumerate(judgement.criteria):
        found, color = item.difference, STATES[item.state]
        low, high = _cut(found.low), _cut(found.high)
        axis.plot([low, high], [place, place], color=color, linewidth=3, solid_capstyle="butt")
        for end, shown in ((found.low, low), (found.high, high)):
            if 100 * end != shown:
                axis.plot([shown], [place], ">" if end > 0 else "<", color=color, markersize=9)
        if abs(found.mean) <= WIDEST:
            axis.plot([100 * found.mean], [place], "o", color=color)
        axis.annotate(
            "", (100 * item.limit, place + 0.3), (40 if item.above else -40, 0), textcoords="offset points",
            arrowprops={"arrowstyle": "<-", "color": "#374151"},
        )  # fmt: skip
        axis.plot([100 * item.limit] * 2, [place - 0.3, place + 0.3], color="#374151", linewidth=1)
    labels = [f"{item.name}: {item.state}\n{span(item)}" for item in judgement.criteria]
    axis.set_yticks(range(len(labels)), labels, fontsize=9)
    axis.margins(x=0.25, y=0.15)
    axis.locator_params(axis="x", nbins=6)
    axis.invert_yaxis()
    axis.set_xlabel("b against a (%): 95% intervals; arrows: where they have to lie", fontsize=9)


def _cut(end: float) -> float:
    return 100 * max(-WIDEST, min(WIDEST, end))
