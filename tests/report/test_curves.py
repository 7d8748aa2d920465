"""Loss curves: their axes, differences to the baseline, and names at the lines' ends."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.report.test_pictures import base, cell, study_of
from zenflow.report import curves, scores
from zenflow.report.figures import Curve, validation_line
from zenflow.report.look import PALETTE, spread_out


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0.5], [0.5]),
        ([0.2, 0.8], [0.2, 0.8]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.4, 0.5, 0.5], [0.4 - 1 / 30, 0.4 + 2 / 30, 0.4 + 5 / 30]),
        ([0.0, 0.0], [0.0, 0.1]),
        ([1.0, 1.0, 1.0], [0.8, 0.9, 1.0]),
    ],
)
def test_labels_move_apart_and_stay_inside(heights, expected):
    assert spread_out(heights, [0.1] * len(heights), 0.1) == pytest.approx(expected)


def test_differences_are_taken_at_every_point_of_either_line():
    first = Curve(np.array([0, 2, 4]), np.array([4.0, 2.0, 2.0]), None)
    second = Curve(np.array([0, 3, 5]), np.array([4.0, 3.0, 1.0]), np.array([0.0, 0.3, 0.3]))
    lines = [curves.Named("base", first, None, is_base=True), curves.Named("other", second, None, is_base=False)]
    same, found = curves.differences(lines)
    assert set(same.curve.mean.tolist()) == {0.0} and same.curve.x.tolist() == [0, 2, 4]
    assert found.curve.x.tolist() == [0, 2, 3, 4]
    assert found.curve.mean == pytest.approx([0.0, 100 * (10 / 3 / 2 - 1), 50.0, 0.0])
    assert found.curve.std == pytest.approx([0.0, 10.0, 15.0, 15.0])


@pytest.mark.parametrize(("seeds", "std"), [((0, 1), 0.0), ((0, 2), 100 * 2**0.5 / 3)], ids=["same", "other"])
def test_a_band_of_differences_leaves_out_what_the_seeds_share(tmp_path, seeds, std):
    """Both are at 2 and 4 after four steps: seed by seed they do not differ."""
    bases = [base(loss, seed=seed) for loss, seed in ((2.0, 0), (4.0, 1))]
    others = [cell(0.1, 4, loss, seed=seed) for loss, seed in zip((2.0, 4.0), seeds, strict=True)]
    study = study_of(tmp_path, *bases, *others)
    lines = curves.named_curves(study, lambda run: validation_line(run, False))
    _, other = curves.differences(lines)
    assert other.curve.mean.tolist() == [0.0, 0.0] and other.curve.std == pytest.approx([0.0, std])


def test_a_wide_range_of_losses_makes_a_logarithmic_axis(tmp_path):
    study = study_of(tmp_path, {"losses": {0: 8.0, 2: 1.0, 4: 0.1}}, {"losses": {0: 8.0, 2: 2.0, 4: 1.0}, "engine": {}})
    _, figure = curves.draw(study, over_seconds=False)
    assert [axis.get_yscale() for axis in figure.axes] == ["linear", "log", "linear"]


@pytest.mark.parametrize(("last", "scale"), [(0.51, "linear"), (0.5, "log")])
def test_the_start_of_a_long_run_does_not_flatten_its_end(tmp_path, last, scale):
    """A fall to a quarter; a difference of 0 to 40 per cent and scores that rise as much stay as they are."""
    other = {"losses": {0: 2.0, 2: 1.0, 4: 0.7}, "train": lambda step: 2.0, "scores": {"f1": {0: 0.1, 2: 0.5, 4: 0.9}}}
    study = study_of(tmp_path, base(last, losses={0: 2.0, 4: last}, train=lambda step: 2.0), other)
    for over_seconds in (False, True):
        _, figure = curves.draw(study, over_seconds)
        assert [axis.get_yscale() for axis in figure.axes] == ["linear", scale, "linear"]
    _, figure = scores.draw(study)
    assert figure.axes[0].get_yscale() == "linear"


def test_differences_over_time_begin_where_both_have_been_evaluated(tmp_path):
    """AdamW after 2 s, ZenFlow's seeds after 3 and 4 s: before that it would seem far worse than it is."""
    fast = base(0.5, losses={0: 8.0, 1: 1.0, 4: 0.5}, seconds=2.0)
    slow = [
        {"losses": {0: 8.0, 1: 1.0 + seed, 4: 0.5}, "seconds": [3.0 + seed, 1.0, 1.0, 1.0], "seed": seed}
        for seed in (0, 1)
    ]
    _, figure = curves.draw(study_of(tmp_path, fast, *slow), over_seconds=True)
    found = {line.get_color(): line.get_xydata().tolist() for line in figure.axes[2].lines}
    assert found["#000000"] == [[2.0, 0.0], [8.0, 0.0]]
    # At 4 s the seeds are at 5/6 and 2 and AdamW at 5/6; at 6 s at 0.5, 1 and 2/3.
    assert found[PALETTE[0]] == [[4.0, pytest.approx(70.0)], [6.0, pytest.approx(12.5)]]
    assert "from where both have been evaluated" in figure.get_supxlabel().replace("\n", " ")
    _, figure = curves.draw(study_of(tmp_path / "steps", base(0.5), cell(0.1, 4, 0.7)), over_seconds=False)
    assert all(line.get_xdata()[0] == 0 for line in figure.axes[2].lines)


def test_without_a_later_evaluation_differences_are_over_all_there_is(tmp_path):
    _, figure = curves.draw(study_of(tmp_path, base(2.0), cell(0.1, 4, 3.0, seconds=2.0)), over_seconds=True)
    assert figure.axes[2].lines[0].get_xdata().tolist() == [0.0, 4.0]


def test_names_at_the_ends_of_lines_do_not_lie_on_one_another(tmp_path):
    """Eight names, most of several lines, which need more than a row's height, at ends that nearly coincide."""
    words = ("one_schedule_with_a_name", "two_schedule_with_a_name", "three_schedule_with_a_name")
    more = {"optimizer__decay_of_the_weights": "none_at_all", "optimizer__something_else": "whatever"}
    cells = [
        cell(0.1, u, 2.5 + u / 1000 + place / 3000, optimizer__schedule=word, **more)
        for place, word in enumerate(words)
        for u in (2, 4)
    ]
    study = study_of(tmp_path, base(2.4), *cells, cell(0.1, 2, 2.5))
    _, figure = curves.draw(study, over_seconds=False)
    figure.draw_without_rendering()
    renderer = FigureCanvasAgg(figure).get_renderer()
    axis = figure.axes[-1]
    boxes = [Text.get_window_extent(text, renderer) for text in axis.texts]
    assert len(boxes) == 8 and sum(text.get_text().count("\n") + 1 for text in axis.texts) > 15
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
    inside = axis.get_window_extent(renderer)
    assert all(inside.y0 - 0.05 * inside.height < box.y0 and box.y1 < inside.y1 + 0.05 * inside.height for box in boxes)


@pytest.mark.parametrize(
    ("heights", "sizes", "expected"),
    [
        ([0.5, 0.5], [0.3, 0.1], [0.4, 0.6]),
        ([0.1, 0.5, 0.9], [0.3, 0.1, 0.1], [0.1, 0.5, 0.9]),
        ([0.5, 0.5, 0.5], [0.1, 0.3, 0.1], [0.3, 0.5, 0.7]),
        ([0.9, 1.0], [0.4, 0.2], [0.7, 1.0]),
        ([0.0, 1.0], [0.2, 0.4], [0.0, 0.9]),
        ([0.0, 1.0], [0.4, 0.2], [0.1, 1.0]),
    ],
)
def test_larger_labels_need_more_room(heights, sizes, expected):
    assert spread_out(heights, sizes, min(sizes)) == pytest.approx(expected)
