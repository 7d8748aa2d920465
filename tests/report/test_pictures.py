"""What the pictures show: cells, fronts, curves of differences, and labels that do not overlap."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from tests.report.making import make
from zenflow.report import breakdown, curves, heat_map, pareto, scores
from zenflow.report.look import MOST_NAMES, in_lines, plain_ticks
from zenflow.report.pictures import STEMS, draw
from zenflow.report.runs import read
from zenflow.report.study import Study, studies


def study_of(folder: Path, *runs: dict) -> Study:
    """Runs with their `losses` and changes of the configuration."""
    made = [
        make(folder / str(place), run.pop("losses"), run.pop("seconds", 1.0), **run) for place, run in enumerate(runs)
    ]
    (study,) = studies([read(path) for path in made], [], {})
    return study


def cell(k: float, u: int, loss: float, **more) -> dict:
    return {"losses": {0: 4.0, 4: loss}, "engine__topk_ratio": k, "engine__update_interval": u, **more}


def base(loss: float, **more) -> dict:
    return {"losses": {0: 4.0, 4: loss}, "engine": {}} | more


def texts(figure) -> list[str]:
    return [text.get_text() for axis in figure.axes for text in axis.texts]


class TestHeatMap:
    def test_a_cell_is_the_difference_of_means_and_a_hole_is_marked(self, tmp_path):
        seeds = [cell(0.1, 2, 2.2, seed=0), cell(0.1, 2, 2.4, seed=1)]
        study = study_of(tmp_path, base(2.0), *seeds, cell(0.1, 8, 3.0), cell(0.5, 2, 1.9))
        (grid,) = heat_map.grids(study)
        assert (grid.ks, grid.us) == ([0.1, 0.5], [2, 8])
        assert {place: setting and setting.name for place, setting in grid.cells.items()} == {
            (0.1, 2): "zenflow, k 0.1, U 2",
            (0.1, 8): "zenflow, k 0.1, U 8",
            (0.5, 2): "zenflow, k 0.5, U 2",
            (0.5, 8): None,
        }
        title, figure = heat_map.draw(study, over_seconds=False)
        assert title == "Validation loss against AdamW after 4 steps: tiny on stdlib"
        assert texts(figure) == ["+15.00%", "+50.00%", "-5.00%", "no run"]

    def test_equal_seconds_have_their_own(self, tmp_path):
        """After the 4 s of the shortest run a run of 8 s is half way to its last loss."""
        slow = [cell(k, u, 2.0, seconds=2.0) for k in (0.1, 0.5) for u in (2, 4)]
        _, figure = heat_map.draw(study_of(tmp_path, base(2.0), *slow), over_seconds=True)
        assert texts(figure) == ["+50.00%"] * 4

    def test_without_a_baseline_a_cell_is_the_loss(self, tmp_path):
        study = study_of(tmp_path, *(cell(k, u, k + u) for k in (0.25, 0.5) for u in (2, 4)))
        title, figure = heat_map.draw(study, over_seconds=False)
        assert texts(figure) == ["2.2500", "4.2500", "2.5000", "4.5000"] and "against" not in title

    def test_other_settings_that_differ_get_their_own_panels(self, tmp_path):
        cells = [cell(k, u, 2.0, optimizer__lr=lr) for lr in (0.1, 0.2) for k in (0.1, 0.5) for u in (2, 4)]
        study = study_of(tmp_path, *cells, cell(0.1, 2, 2.0, optimizer__lr=0.3))
        assert [grid.name for grid in heat_map.grids(study)] == ["lr 0.1", "lr 0.2"]

    @pytest.mark.parametrize(
        "places", [[(0.1, 2)], [(0.1, 2), (0.1, 4)], [(0.1, 2), (0.5, 2)]], ids=["one", "U alone", "k alone"]
    )
    def test_without_both_there_is_none(self, tmp_path, places):
        study = study_of(tmp_path, base(2.0), *(cell(k, u, 2.0) for k, u in places))
        assert heat_map.draw(study, over_seconds=False) is None


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(1, 1)], [0]),
        ([(1, 1), (2, 2), (3, 3)], [2, 1, 0]),
        ([(1, 3), (2, 2), (3, 1)], [2]),
        ([(3, 2), (3, 1), (1, 1)], [1]),
        ([(2, 1), (2, 1), (1, 0)], [0, 1, 2]),
    ],
    ids=["one", "all", "one beats all", "ties in one", "equal points"],
)
def test_the_front_is_what_no_other_beats(points, expected):
    assert pareto.front(points) == expected
    for index, (speed, loss) in enumerate(points):
        beaten = any(s >= speed and v <= loss and (s, v) != (speed, loss) for s, v in points)
        assert (index in expected) == (not beaten)


def test_points_names_do_not_overlap(tmp_path):
    """Twelve settings, most of whose points lie within a few pixels of one another."""
    cells = [cell(k, u, 2.0 + k * u / 50, seconds=1 + k / 20) for k in (0.1, 0.2, 0.4, 0.8) for u in (2, 4, 8)][:-1]
    _, figure = pareto.draw(study_of(tmp_path, base(2.0, seconds=0.5), *cells))
    figure.draw_without_rendering()
    names = [text for text in figure.axes[0].texts if text.get_text()]
    assert len(names) == 12
    boxes = [name.get_window_extent(figure.canvas.get_renderer()) for name in names]
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]


LONG = {"engine__upload": "step", "engine__accumulate_on": "host", "optimizer__lr": 1e-4}


def test_long_names_keep_to_their_pictures(tmp_path):
    """Everything that is written lies in its picture, and nothing of it on anything else that is."""
    cells = [cell(k, u, 2.0 + k * u / 50, seconds=1 + k / 20) for k in (0.1, 0.2, 0.4) for u in (2, 4)]
    study = study_of(tmp_path, base(2.0, seconds=0.5), *cells, *(cell(0.1, u, 1.5 + u, **LONG) for u in (2, 4)))
    assert study.usual == "accumulate_on gpu, upload backward, lr 0.002"
    for draw_one in (pareto.draw, breakdown.draw, lambda study: curves.draw(study, over_seconds=False)):
        title, figure = draw_one(study)
        renderer, whole = FigureCanvasAgg(figure).get_renderer(), figure.bbox
        figure.draw_without_rendering()
        written = [text for axis in figure.axes for text in axis.texts if text.get_text()]
        written += [label for axis in figure.axes for label in axis.get_yticklabels() if label.get_visible()]
        boxes = [Text.get_window_extent(text, renderer) for text in written]  # an annotation's has its line in it
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 for box in boxes), title
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])], title
        assert all(axis.get_window_extent(renderer).width > 0.35 * whole.width for axis in figure.axes), title
        notes = " ".join([figure.get_supxlabel(), *(axis.get_title(loc="left") for axis in figure.axes)])
        assert study.usual in notes.replace("\n", " "), title


def test_a_name_that_fits_nowhere_leaves_the_axes_as_they_are(tmp_path):
    """Points would no longer lie where the other names were put."""
    widths = []
    for folder, word in (("short", "a"), ("long", 90 * "a")):
        cells = [cell(0.1, 4, 2.0, optimizer__schedule=schedule) for schedule in ("linear", word)]
        _, figure = pareto.draw(study_of(tmp_path / folder, base(2.0, seconds=0.5), *cells))
        figure.draw_without_rendering()
        widths.append(figure.axes[0].get_position().width)
    assert widths[0] == pytest.approx(widths[1], abs=0.02) and widths[0] > 0.8


@pytest.mark.parametrize(
    ("label", "lines"),
    [
        ("adamw", "adamw"),
        ("zenflow, k 0.1, U 4", "zenflow, k 0.1, U 4"),
        ("zenflow, k 0.1, U 4, accumulate_on host", "zenflow, k 0.1, U 4,\naccumulate_on host"),
        ("a_word_that_is_longer_than_a_line_can_be, U 4", "a_word_that_is_longer_than_a_line_can_be,\nU 4"),
        ("adamw\n= zenflow, k 0.1, U 4, overlap_step false", "adamw\n= zenflow, k 0.1, U 4,\noverlap_step false"),
    ],
)
def test_labels_break_between_their_parts(label, lines):
    assert in_lines(label) == lines


@pytest.mark.parametrize(("value", "written"), [(2.5, "2.5"), (12500.0, "12,500"), (0.0, "0"), (3e7, "30,000,000")])
def test_a_tick_is_written_as_it_is(value, written):
    assert plain_ticks(value) == written


def test_of_many_points_those_have_names_that_stand_out_or_are_on_the_front(tmp_path):
    cells = [cell(0.1, 4, 2.1 + place / 10, optimizer__schedule=f"s{place}") for place in range(MOST_NAMES)]
    fast = cell(0.1, 4, 3.9, seconds=0.25, optimizer__schedule="fast")
    _, figure = pareto.draw(study_of(tmp_path, base(2.0, seconds=0.5, optimizer__schedule="s0"), *cells, fast))
    names = {text for text in texts(figure) if text}
    assert names == {"adamw, schedule s0", "schedule fast", *(f"schedule s{place}" for place in range(6))}
    grey = MOST_NAMES + 2 - len(names)
    assert f"grey without a name: {grey} more settings" in figure.get_supxlabel().replace("\n", " ")


def test_a_point_keeps_zenflow_s_name_where_a_sweep_calls_others_of_its_engines_otherwise(tmp_path):
    for names in (("zenflow", "stagger"), ("zenflow", "adamw")):
        runs = [
            cell(0.1, 4, 2.0 + lr, optimizer__lr=lr, job=[f"engine={name}", f"optimizer.lr={lr}"], engine__upload=name)
            if name != "adamw"
            else base(2.0 + lr, optimizer__lr=lr, job=[f"engine={name}", f"optimizer.lr={lr}"])
            for name in names
            for lr in (0.1, 0.2)
        ]
        _, figure = pareto.draw(study_of(tmp_path / names[1], *runs))
        written = {text.replace("\n", " ") for text in texts(figure) if text}
        short = "" if names[1] == "adamw" else "zenflow, "
        assert written == {f"{short}lr 0.1", f"{short}lr 0.2", f"{names[1]}, lr 0.1", f"{names[1]}, lr 0.2"}


def test_bars_add_up_to_the_step(tmp_path):
    study = study_of(tmp_path, base(2.0), cell(0.1, 2, 2.0, seconds=2.0))
    _, figure = breakdown.draw(study)
    (axis,) = figure.axes
    rows = {0: [], 1: []}
    for bar in axis.patches:
        if bar.get_height() > 0.5:
            rows[round(bar.get_y() + bar.get_height() / 2)].append(bar.get_width())
    assert rows[0] == [1000.0]
    assert len(rows[1]) == 4 and sum(rows[1]) == pytest.approx(2000.0)
    assert [label.get_text() for label in axis.get_yticklabels()] == ["adamw", "zenflow"]
    assert texts(figure) == ["1,000", "2,000"]


def test_a_bar_s_figure_has_as_many_decimals_as_the_longest_needs(tmp_path):
    _, figure = breakdown.draw(study_of(tmp_path, base(2.0, seconds=0.024), cell(0.1, 2, 2.0, seconds=0.0255)))
    assert texts(figure) == ["24.0", "25.5"]


def test_every_score_has_a_panel_with_the_settings_that_have_it(tmp_path):
    both = {"accuracy": {0: 0.5, 4: 0.75}, "f1": {0: 0.25, 4: 0.5}}
    study = study_of(
        tmp_path,
        base(2.0, scores=both),
        base(2.0, scores=both | {"accuracy": {0: 0.5, 4: 0.25}}, seed=1),
        cell(0.1, 2, 2.0, scores={"f1": {0: 0.0, 4: 1.0}}),
        cell(0.1, 4, 2.0),
    )
    title, figure = scores.draw(study)
    assert title == "Scores on the held-out samples: tiny on stdlib"
    shown = {axis.get_ylabel(): [line.get_ydata().tolist() for line in axis.lines] for axis in figure.axes}
    assert shown == {"validation accuracy": [[0.5, 0.5]], "validation f1": [[0.25, 0.5], [0.0, 1.0]]}
    assert set(texts(figure)) >= {"adamw", "zenflow, U 2"}
    assert scores.draw(study_of(tmp_path / "none", base(2.0))) is None


def test_every_picture_is_png_and_svg_and_the_same_twice(tmp_path):
    scored = base(2.0, scores={"accuracy": {0: 0.5, 4: 0.75}})
    study = study_of(tmp_path / "runs", scored, *(cell(k, u, 2.0) for k in (0.1, 0.5) for u in (2, 4)))
    contents = []
    for _ in range(2):
        drawn = draw(study, tmp_path, "-2")
        assert [path.name for _, path in drawn] == [f"{stem}-2.png" for stem in STEMS]
        assert all(title.endswith(study.title) for title, _ in drawn)
        contents.append([path.with_suffix(end).read_bytes() for _, path in drawn for end in (".png", ".svg")])
    assert contents[0] == contents[1]
    assert all(data.startswith((b"\x89PNG", b"<?xml")) for data in contents[0])
    suffixes = [path.suffix for path in tmp_path.iterdir() if path.is_file()]
    assert sorted(suffixes) == [".png"] * len(STEMS) + [".svg"] * len(STEMS)


def test_names_that_are_no_text_or_look_like_formulae_are_drawn(tmp_path):
    changes = [(r"a$x_{$", "gpu"), ("b\udcff", "host")]
    runs = [
        {"losses": {0: 4.0, 4: 2.0}, "job": [f"engine={name}"], "engine__accumulate_on": place}
        for name, place in changes
    ]
    study = study_of(tmp_path, *(run | {"data__kind": "file", "data__path": "c\ud800/$x_{$"} for run in runs))
    assert draw(study, tmp_path, "")
    assert [setting.label for setting in study.settings] == [r"a$x_{$", r"b\udcff"]
