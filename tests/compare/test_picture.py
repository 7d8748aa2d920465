"""What the picture of a comparison shows: no interval is cut without a sign, and many runs have room."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.compare.making import judged, run
from zenflow.compare.picture import save_picture

SIDES = {"a": "engine=zero_offload", "b": "engine=zenflow"}


@pytest.fixture
def drawn(tmp_path, monkeypatch):
    """`drawn(judgement, runs)`: the figure."""
    figures, save = [], Figure.savefig

    def keep(figure: Figure, *where: object, **how: object) -> None:
        figures.append(figure)
        save(figure, *where, **how)

    monkeypatch.setattr(Figure, "savefig", keep)

    def draw(judgement, runs) -> Figure:
        save_picture(judgement, runs, SIDES, tmp_path / "compare.png")
        assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
        return figures[-1]

    return draw


def test_an_interval_that_is_cut_has_an_arrowhead_and_its_figures(drawn):
    runs = [run(side, seed) for seed in range(3) for side in "ab"]
    evidence = drawn(judged(speeds=(3.5, 3.6, 3.55)), runs).axes[3]
    labels = [label.get_text() for label in evidence.get_yticklabels()]
    assert labels[0].startswith("tokens a second: met\n+255.0% (+242.")
    markers = {line.get_marker(): line.get_xdata()[0] for line in evidence.lines if line.get_marker() in "<>"}
    assert markers == {">": 100.0}
    assert len([line for line in evidence.lines if line.get_marker() == "o"]) == 3


def test_an_interval_of_one_seed_is_everything(drawn):
    evidence = drawn(judged((1.5,), (0.0,), (2.0,)), [run(side, 0) for side in "ab"]).axes[3]
    assert [line.get_marker() for line in evidence.lines].count(">") == 4
    # A gain in tokens a second has a least value, which is where the picture ends.
    assert [line.get_marker() for line in evidence.lines].count("<") == 3


def test_every_run_has_a_label_that_covers_no_other(drawn):
    runs = [run(side, seed, place=1 + 2 * seed + (side == "b")) for seed in range(15) for side in "ab"]
    figure = drawn(judged(), runs)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    boxes = [label.get_window_extent(renderer) for label in figure.axes[2].get_yticklabels()]
    assert len(boxes) == 30
    assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])]
