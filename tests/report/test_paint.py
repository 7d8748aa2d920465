"""Colours: which settings have them, in what order, and that no curve or point is without a name."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.text import Text

from tests.report.test_pictures import base, cell, study_of
from zenflow.report import curves, pareto, scores
from zenflow.report.look import BASELINE, MOST_NAMES, PALETTE
from zenflow.report.paint import DASHES, paint

DRAWN = {
    "steps": lambda study: curves.draw(study, over_seconds=False),
    "seconds": lambda study: curves.draw(study, over_seconds=True),
    "scores": scores.draw,
    "pareto": pareto.draw,
}
OFFLOADED, NO_MASTERS = {"offload": True}, {"masters": False}


def scored(final: float) -> dict:
    return {"scores": {"accuracy": {0: 0.5, 4: 1 / final}}}


def setting(k: float, u: int, loss: float, **more) -> dict:
    return cell(k, u, loss, **scored(loss), **more)


def references(same: float = 2.0) -> list[dict]:
    """AdamW, two that have its losses unless `same` says otherwise, and one that is far off."""
    synchronous = {"engine__overlap_step": False, "seconds": 3.0}
    return [
        base(2.0, seconds=0.5, **scored(2.0)),
        base(same, engine=OFFLOADED, seconds=2.0, **scored(same)),
        base(3.0, engine=NO_MASTERS, **scored(3.0)),
        setting(0.0, 1, same, **synchronous),
    ]


def lightness(color: str) -> float:
    red, green, blue = to_rgb(color)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ablation_of_u(tmp_path):
    late = [setting(0.1, u, 2.0 + u / 40, seconds=1 + 1 / u) for u in (1, 2, 4, 8, 16)]
    prompt = [setting(0.1, u, loss, engine__overlap_step=False) for u, loss in ((1, 2.0), (16, 2.5))]
    return study_of(tmp_path, *references(), *late, *prompt)


def test_what_the_sweep_varied_has_colours_in_the_order_of_its_number(tmp_path):
    looks = paint(ablation_of_u(tmp_path))
    late = [looks[f"zenflow, U {u}, overlap_step true"] for u in (1, 2, 4, 8, 16)]
    shades = [lightness(look.color) for look in late]
    assert shades == sorted(set(shades)) and shades[0] > 0.1 and shades[-1] < 0.7, "neither black nor pale"
    assert {look.dashes for look in late} == {"-"} and {look.marker for look in late} == {"o"}
    for u, look in ((1, late[0]), (16, late[-1])):
        prompt = looks[f"zenflow, U {u}, overlap_step false"]
        assert prompt.color == look.color and prompt.dashes == DASHES[1] and prompt.marker != look.marker
    assert looks["adamw"].color == BASELINE
    assert looks["adamw_bf16"].color in PALETTE and looks["adamw_bf16"].marker not in ("o", "s")
    assert {"adamw_offload", "zero_offload"}.isdisjoint(looks), "which have AdamW's losses"


@pytest.mark.parametrize(
    ("key", "values"),
    [("update_interval", [2, 4, 10, 30, 100]), ("topk_ratio", [0.05, 0.1, 0.5]), ("weight_prediction", [0, 0.5, 1])],
)
def test_the_order_is_that_of_numbers(tmp_path, key, values):
    cells = [cell(0.1, 4, 3.0 - place / 10, **{f"engine__{key}": each}) for place, each in enumerate(values)]
    study = study_of(tmp_path, base(2.0), *reversed(cells))
    looks = paint(study)
    by_value = {each.values[f"engine.{key}"]: looks[each.name] for each in study.settings if each.name != "adamw"}
    shades = [lightness(by_value[value].color) for value in values]
    assert shades == sorted(set(shades)) and {look.dashes for look in by_value.values()} == {"-"}


def test_two_values_or_words_have_colours_of_no_order(tmp_path):
    cells = [cell(0.1, u, 2.0 + u, optimizer__schedule=word) for u in (2, 4) for word in ("linear", "cosine")]
    looks = paint(study_of(tmp_path, base(2.0, optimizer__schedule="linear"), *cells))
    assert [look.color for look in looks.values()] == [*PALETTE[:4], BASELINE]
    assert len({look.marker for look in looks.values() if look.color != BASELINE}) == 4


def test_what_has_the_baseline_s_losses_has_a_colour_that_nobody_needs(tmp_path):
    study = study_of(tmp_path, *references(), setting(0.1, 4, 2.5))
    assert len(paint(study)) == len(study.settings) == 5


def test_of_words_more_than_there_are_colours_the_best_have_them(tmp_path):
    words = [f"s{place}" for place in range(7)]
    cells = [setting(0.1, 4, 2.7 - place / 10, optimizer__schedule=word) for place, word in enumerate(words)]
    same = setting(0.1, 4, 2.0, optimizer__schedule="same")
    first, *others = references()
    others = [other | {"optimizer__schedule": "s0"} for other in others]
    study = study_of(tmp_path, first | {"optimizer__schedule": "s0"}, *others, *cells, same)
    expected = {"adamw, schedule s0", *(f"zenflow, schedule {word}" for word in words[1:])}
    assert set(paint(study)) == expected


def test_of_three_values_many_kinds_turn_colours_and_patterns_round(tmp_path):
    shares = itertools.product((True, False), (0, 1))
    kinds = [{"engine__stagger": stagger, "engine__weight_prediction": share} for stagger, share in shares]
    cells = [setting(0.1, u, 2.1 + u / 40, **kind) for u in (2, 4, 8) for kind in kinds]
    study = study_of(tmp_path, *references(), *cells)
    looks = paint(study)
    own = [(each.values["engine.update_interval"], looks[each.name]) for each in study.settings if "U" in each.name]
    assert len({(look.color, look.dashes, look.marker) for _, look in own}) == len(own) == 12
    assert {u: {look.dashes for other, look in own if other == u} for u in (2, 4, 8)} == {
        u: {dashes} for u, dashes in zip((2, 4, 8), DASHES, strict=True)
    }
    colors = {look.color for _, look in own}
    assert len(colors) == 4 and looks["adamw_bf16"].color not in colors


def test_one_value_has_one_colour_whatever_the_engine(tmp_path):
    rates = (1e-4, 2e-4, 5e-4)
    zenflow = [cell(0.1, 4, 2.5 + rate, optimizer__lr=rate) for rate in rates]
    adamw = [base(loss, optimizer__lr=rate) for rate, loss in zip(rates, (2.2, 2.0, 2.3), strict=True)]
    looks = paint(study_of(tmp_path, *adamw, *zenflow))
    assert looks["adamw, lr 0.0002"].color == BASELINE and len(looks) == 6
    for rate in ("0.0001", "0.0005"):
        one, other = looks[f"adamw, lr {rate}"], looks[f"zenflow, lr {rate}"]
        assert one.color == other.color and one.dashes != other.dashes and one.marker != other.marker


def test_a_curve_on_the_baseline_shares_its_name(tmp_path):
    study = ablation_of_u(tmp_path)
    _, figure = curves.draw(study, over_seconds=False)
    (shared,) = (text for text in figure.axes[-1].texts if text.get_text().startswith("adamw\n"))
    assert shared.get_color() == BASELINE
    assert sorted(shared.get_text().replace(",\n", ", ").split("\n")) == [
        "= adamw_offload",
        "= zenflow, U 1, overlap_step false",
        "= zero_offload",
        "adamw",
    ]
    assert "=: the same curve, to rounding" in figure.get_supxlabel()
    _, figure = curves.draw(study, over_seconds=True)  # at other times
    assert {"adamw", "adamw_offload", "zero_offload"} <= {text.get_text() for text in figure.axes[-1].texts}
    assert "same curve" not in figure.get_supxlabel()


def some(tmp_path, count: int, kind: str):
    """A study of so many settings, of which the first four are references."""
    own = range(max(1, count - 4))
    if kind == "numbers":
        cells = [setting(0.1, 2 + place, 2.1 + place / 50, seconds=1 + place / 9) for place in own]
    else:
        words = {place: {"engine__importance": f"word_{place}"} for place in own}
        cells = [setting(0.1, 4, 2.1 + place / 50, seconds=1 + place / 9, **words[place]) for place in own]
    return study_of(tmp_path, *references(2.0)[: min(4, count - 1)], *cells)


@pytest.mark.parametrize("kind", ["numbers", "words"])
@pytest.mark.parametrize("count", [2, 3, 5, 11, 20])
def test_every_curve_and_point_has_a_name_that_lies_on_no_other(tmp_path, count, kind):
    study = some(tmp_path, count, kind)
    assert len(study.settings) == count
    labels, looks = {setting.label for setting in study.settings}, paint(study)
    for which, draw in DRAWN.items():
        title, figure = draw(study)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        names = [text for text in figure.axes[-1].texts if text.get_text()]
        words = [name.get_text().replace(",\n", ", ").split("\n") for name in names]
        told = [word.removeprefix("= ") for group in words for word in group]
        short = {label.removeprefix("zenflow, ") for label in labels} if which == "pareto" else labels
        assert len(told) == count and set(told) == short, title
        boxes = [Text.get_window_extent(name, renderer) for name in names]
        assert not [pair for pair in itertools.combinations(boxes, 2) if pair[0].overlaps(pair[1])], title
        grey = {each.label for each in study.settings if each.name not in looks}
        sizes = {name.get_fontsize() for name, group in zip(names, words, strict=True) if group[0] in grey}
        assert sizes <= {6.5} and (not sizes or max(name.get_fontsize() for name in names) == 8), title


def test_of_too_many_curves_grey_ones_are_counted(tmp_path):
    study = some(tmp_path, MOST_NAMES + 1, "words")
    _, figure = curves.draw(study, over_seconds=False)
    assert len(figure.axes[-1].texts) == len(PALETTE) + 1
    assert f"grey: {MOST_NAMES + 1 - len(PALETTE) - 1} more settings" in figure.get_supxlabel()


def test_a_name_with_room_stands_beside_its_line_s_end(tmp_path):
    """Also where no other reader of the axes' limits has had them settled."""
    for over_seconds in (False, True):
        study = study_of(tmp_path / str(over_seconds), base(2.0), setting(0.1, 4, 1.9), setting(0.1, 8, 2.6))
        _, figure = curves.draw(study, over_seconds)
        figure.draw_without_rendering()
        axis = figure.axes[-1]
        for text in axis.texts:
            _, end = axis.transAxes.inverted().transform(axis.transData.transform(text.xy))
            assert text.xyann[1] == pytest.approx(end, abs=0.03), text.get_text()


def test_a_line_to_a_point_s_name_goes_through_no_other_name(tmp_path):
    """Points that touch: most of their names lie at some distance."""
    cells = [setting(0.1, 2 + place, 2.4 + place / 200, seconds=1 + place / 500) for place in range(9)]
    _, figure = pareto.draw(study_of(tmp_path, base(2.0, seconds=0.5, **scored(2.0)), *cells))
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    notes = figure.axes[0].texts
    names = [Text.get_window_extent(note, renderer) for note in notes if note.get_text()]
    lines = [note for note in notes if not note.get_text()]
    assert len(lines) > 4
    for line in lines:
        line.update_positions(renderer)
        path = line.arrow_patch.get_transform().transform_path(line.arrow_patch.get_path())
        inner = [name.padded(-4) for name in names]  # a line begins at its own name's corner
        assert not [name for name in inner if path.intersects_bbox(name, filled=False)]
