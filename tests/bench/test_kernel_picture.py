"""What the pictures of the kernels show: every row, once, where it belongs; nothing is lost, hidden or cut off."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from zenflow.bench.kernel_clock import COPY_LIMIT
from zenflow.bench.kernel_ops import OPS
from zenflow.bench.kernel_picture import LOOKS, ROOF, SHADES, save_roofline, save_shares
from zenflow.bench.kernel_tables import COMPILED, LAUNCHES, OURS, REFERENCE
from zenflow.bench.kernels import DTYPES

SIZES = (1 << 26, 1 << 28)
SMALL = {"close_step": 16416, "select_channels": 38976}
COPIES = {1 << place: (1 << place) / 4e9 + 4e-3 for place in range(14, 33)}  # bytes -> ms


def row(op: str, layout: str, dtype: str, contestant: str = OURS, share: float = 0.5, **more) -> dict:
    """A row of the first table as a run writes it; its bytes and rate are of the order of a real one's."""
    numel = more.get("numel", SIZES[0])
    width = (2 if dtype == "bf16" else 4) * (1 + list(SHADES).index(op))
    moved = SMALL.get(op, numel * width // 4)
    described = {"table": "op", "op": op, "layout": layout, "dtype": dtype, "contestant": contestant, "note": ""}
    return described | {"numel": numel, "bytes": moved, "gb_per_s": 4000 * share, "bus_share": share} | more


def failed(op: str, layout: str, dtype: str, contestant: str = OURS, **more) -> dict:
    whole = row(op, layout, dtype, contestant, **more) | {"error": "RuntimeError: no"}
    return {name: value for name, value in whole.items() if name not in ("gb_per_s", "bus_share")}


def everything(numel: int = SIZES[0]) -> list[dict]:
    """As many rows as a run of all ops has, all shares different."""
    shares = itertools.count(40)
    made = []
    for dtype, (name, op) in itertools.product(DTYPES, OPS.items()):
        for layout in op.layouts if DTYPES[dtype] in op.dtypes else ():
            for contestant in (OURS, REFERENCE, COMPILED, *([op.known] if op.known else [])):
                made.append(row(name, layout, dtype, contestant, next(shares) / 250, numel=numel))
    return made


def model(op: str, layout: str, dtype: str, share: float) -> dict:
    made = row(op, layout, dtype, OURS, share) | {"table": "model", "shape": "3B", "parameters": 435}
    return {name: value for name, value in made.items() if name != "note"}


def drawn(save, *arguments) -> Figure:
    """The figure that would be saved, laid out."""
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
        save(*arguments, "NVIDIA H200", Path("picture.png"))
    (figure,) = figures
    figure.draw_without_rendering()
    return figure


@pytest.fixture(scope="module")
def roofline() -> Figure:
    return drawn(save_roofline, everything(), COPIES)


@pytest.fixture(scope="module")
def shares() -> Figure:
    return drawn(save_shares, everything())


def points(axis) -> dict[str, tuple[float, float]]:
    """What lies where, by its label: op, layout, dtype and contestant; never two under one label."""
    named = [line for line in axis.lines if not line.get_label().startswith("_") and line.get_label() != ROOF]
    found = {line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in named}
    assert len(found) == len(named)
    return found


def label(row: dict) -> str:
    return f"{row['op']} {row['layout']} {row['dtype']} {row['contestant']}"


def words(figure: Figure) -> Iterator[Text]:
    """All text but that of ticks beyond an axis's end, which are not drawn."""
    beyond = set()
    for axis in (one for axes in figure.axes for one in (axes.xaxis, axes.yaxis)):
        low, high = sorted(axis.get_view_interval())
        ticks = (*axis.get_major_ticks(), *axis.get_minor_ticks())
        beyond |= {tick.label1 for tick in ticks if not low <= tick.get_loc() <= high}
    return (
        text for text in figure.findobj(Text) if text not in beyond and text.get_visible() and text.get_text().strip()
    )


def legend(figure: Figure) -> list[str]:
    (only,) = figure.legends
    return [text.get_text() for text in only.get_texts() if text.get_text().strip()]


def notes(figure: Figure) -> str:
    return figure.legends[0].get_title().get_text().replace("\n", " ")


def check_that_all_can_be_read(figure: Figure) -> None:
    """No word leaves the page, and none covers another."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    boxes = {text: text.get_window_extent(renderer) for text in words(figure)}
    page = figure.bbox.padded(1)
    out = [text.get_text() for text, box in boxes.items() if not (page.x0 <= box.x0 and box.x1 <= page.x1)]
    out += [text.get_text() for text, box in boxes.items() if not (page.y0 <= box.y0 and box.y1 <= page.y1)]
    assert not out
    shrunk = {text: box.padded(-1) for text, box in boxes.items()}
    pairs = itertools.combinations(shrunk.items(), 2)
    assert not [(one.get_text(), other.get_text()) for (one, a), (other, b) in pairs if a.overlaps(b)]


def test_every_op_has_a_shade():
    assert set(SHADES) == set(OPS)


class TestRoofline:
    def test_every_row_is_where_it_belongs_and_small_ones_are_named(self, roofline):
        (axis,) = roofline.axes
        expected = [row for row in everything() if row["op"] not in SMALL and row["contestant"] != REFERENCE]
        assert points(axis) == {label(row): (row["bytes"], row["gb_per_s"]) for row in expected}
        assert "close_step, select_channels; see shares.png" in notes(roofline)
        (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
        assert all(left < x < right and low < y < high for x, y in points(axis).values())
        assert left > max(SMALL.values()) * 100
        assert axis.get_title(loc="left") == "67,108,864 elements"

    def test_op_layout_and_dtype_are_told_apart_and_explained(self, roofline):
        lines = {line.get_label(): line for line in roofline.axes[0].lines}
        looks = {
            (lines[name].get_marker(), lines[name].get_markerfacecolor() == "white")
            for name in (f"fused_step {layout} {dtype} triton" for layout in ("columns", "rows") for dtype in DTYPES)
        }
        assert looks == {("o", False), ("o", True), ("s", False), ("s", True)}
        said = legend(roofline)
        letters = dict(text.split("  ")[::-1] for text in said if "  " in text)
        assert letters.keys() == OPS.keys() - SMALL.keys() and len(set(letters.values())) == len(letters)
        assert {"a copy", "columns", "rows", "whole", "ours, bf16", "ours, fp32", "torch.compile"} < set(said)
        beside = sorted(text.get_text() for text in roofline.axes[0].texts if text.get_text())
        ours = [row for row in everything() if row["contestant"] == OURS and row["op"] not in SMALL]
        assert beside == sorted(letters[row["op"]] for row in ours)

    def test_all_can_be_read(self, roofline):
        check_that_all_can_be_read(roofline)

    def test_each_size_has_its_own_axes(self):
        rows = [each for numel in SIZES for each in everything(numel)]
        figure = drawn(save_roofline, rows, COPIES)
        assert [axis.get_title(loc="left") for axis in figure.axes] == ["67,108,864 elements", "268,435,456 elements"]
        for axis, numel in zip(figure.axes, SIZES, strict=True):
            ours = {label(row): row["bytes"] for row in rows if row["numel"] == numel and row["op"] not in SMALL}
            assert {name: x for name, (x, _) in points(axis).items()}.items() <= ours.items()
            assert len(points(axis)) == len([name for name in ours if not name.endswith(" torch")])
        check_that_all_can_be_read(figure)

    @pytest.mark.parametrize("longest", [COPY_LIMIT, COPY_LIMIT // 2])
    def test_the_roof_goes_on_only_beyond_the_longest_copy_of_all(self, longest):
        large = row("fused_step", "rows", "bf16", bytes=3 * COPY_LIMIT)
        copies = {moved: ms for moved, ms in COPIES.items() if moved <= longest}
        (axis,) = drawn(save_roofline, [large], copies).axes
        roof = next(line for line in axis.lines if line.get_label() == ROOF)
        rate = longest / copies[longest] / 1e6
        assert roof.get_ydata()[-1] == pytest.approx(rate)
        end = axis.get_xlim()[1] if longest == COPY_LIMIT else longest
        assert roof.get_xdata()[-1] == pytest.approx(end)

    def test_a_small_op_alone_is_drawn(self):
        figure = drawn(save_roofline, [row("close_step", "whole", "bf16")], COPIES)
        assert list(points(figure.axes[0])) == ["close_step whole bf16 triton"]
        assert notes(figure) == ""
        check_that_all_can_be_read(figure)

    def test_with_ours_for_a_small_op_alone_the_others_are_drawn(self):
        rows = [row("close_step", "whole", "bf16"), row("fused_step", "rows", "bf16", REFERENCE)]
        figure = drawn(save_roofline, rows, COPIES)
        assert list(points(figure.axes[0])) == ["fused_step rows bf16 torch"]
        assert "close_step; see shares.png" in notes(figure)

    def test_without_ours_it_is_about_torch(self):
        rows = [row("fused_step", "rows", "bf16", REFERENCE), row("partial_norms", "whole", "bf16", "vector_norm")]
        figure = drawn(save_roofline, rows, COPIES)
        assert set(points(figure.axes[0])) == {label(row) for row in rows}
        assert "torch, bf16" in legend(figure) and "known kernel" in legend(figure)


class TestShares:
    def test_every_row_has_a_line_and_every_contestant_a_dot(self, shares):
        rows = everything()
        assert [axis.get_title(loc="left") for axis in shares.axes] == ["bf16", "fp32"]
        heights = {}
        for axis, dtype in zip(shares.axes, DTYPES, strict=True):
            there = {label(row): row for row in rows if row["dtype"] == dtype}
            found = points(axis)
            assert {name: x for name, (x, _) in found.items()} == pytest.approx(
                {name: 100 * row["bus_share"] for name, row in there.items()}
            )
            for name, (_, y) in found.items():
                heights.setdefault((there[name]["op"], there[name]["layout"]), set()).add(y)
        assert all(len(places) == 1 for places in heights.values())
        lines = [(name, layout) for name, op in OPS.items() for layout in op.layouts]
        assert sorted(heights, key=lambda key: heights[key]) == lines
        named = [text.get_text() for text in shares.axes[0].get_yticklabels()]
        assert named == [layout for _, layout in lines]
        beside = [text.get_text() for text in shares.axes[0].texts if text.get_text() in OPS]
        assert beside == list(OPS)

    def test_ours_is_written_and_marked(self):
        rows = [
            row("gather_channels", "columns", "bf16", share=0.899),
            row("gather_channels", "rows", "bf16", share=0.9),
            row("scatter_channels", "rows", "bf16", share=1.076, note=f"something, {LAUNCHES}"),
            row("scatter_channels", "rows", "bf16", REFERENCE, share=0.3),
        ]
        figure = drawn(save_shares, rows)
        written = {text.get_text(): text.get_fontweight() for text in figure.axes[0].texts if "%" in text.get_text()}
        assert written == {"89.9%": "normal", "90.0%": "bold", "107.6%*": "bold"}
        hollow = [line.get_label() for line in figure.axes[0].lines if line.get_markerfacecolor() == "white"]
        assert hollow == ["scatter_channels rows bf16 triton"]
        assert f"hollow and *: {LAUNCHES}" in notes(figure)
        assert figure.axes[0].get_xlim()[1] > 107.6

    def test_the_known_kernels_are_named(self, shares):
        said = notes(shares)
        assert "torch.linalg.vector_norm for partial_norms and channel_scores" in said
        assert "rounding to nearest for stochastic_rounding" in said

    def test_a_row_with_an_error_stays(self):
        rows = [
            failed("fused_step", "columns", "bf16"),
            row("fused_step", "columns", "bf16", COMPILED, share=0.4),
            failed("fused_step", "rows", "bf16", COMPILED),
            row("fused_step", "rows", "bf16", share=0.7),
            failed("partial_norms", "whole", "fp32"),
        ]
        figure = drawn(save_shares, rows)
        bf16, fp32 = figure.axes
        assert {name: x for name, (x, _) in points(bf16).items()} == pytest.approx(
            {"fused_step columns bf16 torch.compile": 40, "fused_step rows bf16 triton": 70}
        )
        assert [text.get_text() for text in bf16.texts if text.get_text() in ("none", "70.0%")] == ["none", "70.0%"]
        assert not points(fp32) and [text.get_text() for text in fp32.texts] == ["none"]
        assert "none: not measured" in notes(figure)
        assert [text.get_text() for text in bf16.get_yticklabels()] == ["columns", "rows", "whole"]

    def test_sizes_and_the_model_have_a_heading_each(self):
        rows = [each for numel in SIZES for each in everything(numel)]
        rows += [
            model(op, layout, "bf16", 0.6) for layout in ("columns", "rows") for op in ("fused_step", "close_step")
        ]
        rows += [row("fused_step", "rows", "bf16") | {"table": "tune", "constants": "BLOCK=64"}]
        figure = drawn(save_shares, rows)
        headings = [text.get_text() for text in figure.axes[0].texts if text.get_fontsize() == 8]
        assert headings == ["67,108,864 elements", "268,435,456 elements", "A whole model, 3B, one launch a class"]
        labels = [text.get_text() for text in figure.axes[0].get_yticklabels()]
        assert len(labels) == 2 * sum(len(op.layouts) for op in OPS.values()) + 4
        assert labels[-4:] == ["columns", "rows", "columns", "rows"]
        check_that_all_can_be_read(figure)

    @pytest.mark.parametrize("layouts", [("columns",), ("columns", "rows")])
    def test_few_rows_can_be_read(self, layouts):
        contestants = (OURS, REFERENCE, COMPILED, "torch.index_copy_")
        rows = [row("write_masters", layout, "bf16", who) for layout in layouts for who in contestants]
        figure = drawn(save_shares, rows)
        assert len(figure.axes) == 1
        assert legend(figure) == ["ours", "torch.compile", "known kernel", "torch", "90% of a copy", "a copy"]
        check_that_all_can_be_read(figure)

    def test_all_can_be_read(self, shares):
        check_that_all_can_be_read(shares)

    def test_equal_shares_hide_no_dot(self):
        contestants = (OURS, REFERENCE, COMPILED, "torch.index_copy_")
        rows = [row("write_masters", "rows", "bf16", contestant) for contestant in contestants]
        (axis,) = drawn(save_shares, rows).axes
        sizes = [line.get_markersize() for line in axis.lines if not line.get_label().startswith("_")]
        assert len(sizes) == len(LOOKS) and sizes[0] == max(sizes)
        assert sizes[-1] == min(sizes)
