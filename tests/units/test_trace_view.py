"""What a trace shows: right sums of what ran under what, the picture, and the command."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.units.timing import CPU, events_of
from zenflow.trace import Tracer, overlap_summary, render
from zenflow.trace_view import TEXT, _clip, _length, _union, _without, describe, draw, main, read_events, spans_of

ROOT = Path(__file__).resolve().parents[2]

# The summary


def test_the_summary_of_known_intervals() -> None:
    """Busy 0-100, 110-200 and 300-400 (in two spans that overlap); a stall 350-360 inside."""
    events = events_of(
        ("GPU compute", "forward", 0, 100),
        ("GPU compute", "step", 110, 200),
        ("GPU compute", "forward", 300, 370),
        ("GPU compute", "step", 340, 400),
        ("GPU compute", "stall", 350, 360),
        ("upload", "0", 10, 20),
        ("upload", "1", 15, 35),
        ("copy to ring", "0", 190, 230),
        ("CPU optimizer", "bucket 0", 90, 120),
        ("CPU optimizer", "bucket 1", 340, 420),
        ("trainer", "step", 0, 1000),
    )
    summary = overlap_summary(events)
    assert summary["compute"] == pytest.approx(
        {
            "seconds": 400e-6,
            "busy_seconds": 280e-6,
            "idle_seconds": 120e-6,
            "idle_share": 0.3,
            "longest_idle_seconds": 100e-6,
            "stalls": 1,
            "stall_seconds": 10e-6,
        }
    )
    tracks = summary["tracks"]
    assert list(tracks) == ["upload", "copy to ring", "CPU optimizer"]
    for name, busy, under in (("upload", 25, 25), ("copy to ring", 40, 10), ("CPU optimizer", 110, 20 + 50)):
        assert tracks[name] == pytest.approx(
            {"busy_seconds": busy / 1e6, "under_compute_seconds": under / 1e6, "under_compute_share": under / busy}
        )
    text = describe(summary)
    assert "idle 0.12 ms (30.00%), at most 0.10 ms at once; stalls 1, 0.01 ms" in text
    assert "busy 0.04 ms, 25.0% of it under GPU compute" in text


def test_full_overlap_is_a_hundred_percent_and_no_idle_time() -> None:
    summary = overlap_summary(
        events_of(("GPU compute", "a", 0, 50), ("GPU compute", "b", 50, 99), ("CPU optimizer", "0", 1, 98))
    )
    assert summary["compute"]["idle_seconds"] == 0
    assert summary["compute"]["idle_share"] == 0
    assert summary["tracks"]["CPU optimizer"]["under_compute_share"] == 1
    assert summary["tracks"]["upload"] == {
        "busy_seconds": 0,
        "under_compute_seconds": 0,
        "under_compute_share": None,
    }


def test_a_stall_at_the_edge_counts_as_idle() -> None:
    summary = overlap_summary(events_of(("GPU compute", "stall", 0, 30), ("GPU compute", "step", 30, 40)))
    assert summary["compute"]["idle_share"] == pytest.approx(0.75)


def test_a_trace_without_compute_proves_nothing() -> None:
    with pytest.raises(ValueError, match="GPU compute"):
        overlap_summary(events_of(("trainer", "x", 0, 1)))


def test_intervals_against_points() -> None:
    """Union, difference and clipping agree with sets of unit cells, for random intervals, empty ones included."""

    def cells(intervals):
        return {cell for start, stop in intervals for cell in range(start, stop)}

    choose = random.Random(0)
    for _ in range(499):
        first, second = (
            _union([tuple(sorted(choose.choices(range(31), k=2))) for _ in range(choose.randrange(7))])
            for _ in range(2)
        )
        left = _without(first, second)
        assert cells(left) == cells(first) - cells(second)
        assert _length(left) == len(cells(left))
        assert all(a[1] < b[0] for a, b in itertools.pairwise(first))
        assert cells(_clip(first, (7, 23))) == cells(first) & set(range(7, 23))


# The picture and the command


def small_trace(path: Path, windows: int = 3, numbered: bool = True) -> None:
    tracer, now = Tracer(CPU), 10**9
    for window in range(windows):
        mark = {"window": window} if numbered else {}
        tracer.host_span("GPU compute", "step", now, now + 40_000_000, **mark)
        tracer.host_span("GPU compute", "stall", now + 30_000_000, now + 31_000_000, **mark)
        tracer.host_span("CPU optimizer", "bucket 0", now + 5_000_000, now + 60_000_000, **mark)
        tracer.host_span("another", "x", now, now + 1000)
        now += 41_000_000
    tracer.write(path)


@pytest.mark.parametrize(
    ("windows", "numbered"), [(1, True), (2, True), (5, True), (3, False)], ids=["1", "2", "5", "unnumbered"]
)
def test_a_picture_comes_out(tmp_path: Path, windows: int, numbered: bool) -> None:
    pytest.importorskip("matplotlib")
    small_trace(tmp_path / "t.json", windows, numbered)
    render(tmp_path / "t.json", tmp_path / "t.png")
    assert (tmp_path / "t.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def stalled(*stalls: tuple[int, int]) -> list[dict]:
    """Two windows, the first dark and the second light: a step of 100 ms with these stalls (ms) in each."""
    tracer = Tracer(CPU)
    for window in (0, 1):
        begin = 10**9 + window * 100_000_000
        tracer.host_span("GPU compute", "optimizer step", begin, begin + 100_000_000, window=window)
        for start, stop in stalls:
            tracer.host_span("GPU compute", "stall", begin + start * 10**6, begin + stop * 10**6, window=window)
        tracer.host_span("CPU optimizer", "bucket 0", begin, begin + 100_000_000, window=window)
    return tracer._events()


@pytest.mark.parametrize(
    ("stalls", "middles"),
    [
        ([], [50, 150]),
        ([(4, 100)], []),
        ([(0, 50)], [75, 175]),
        ([(40, 100)], [20, 120]),
        ([(10, 20), (70, 71)], [45, 145]),
        ([(20, 80)], [10, 110]),
        ([(18, 90)], [9, 109]),
        ([(17, 84)], []),
    ],
    ids=["none", "all but the start", "first half", "the rest", "two", "middle", "just room", "no room beside it"],
)
def test_a_name_is_where_no_stall_covers_it_or_not_there(stalls, middles) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    events = stalled(*stalls)
    figure = draw(events)
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    (axis,) = figure.axes
    names = [text for text in axis.texts if text.get_text() == "optimizer step"]
    assert [text.get_position()[0] for text in names] == pytest.approx(middles)
    assert {text.get_color() for text in names} == ({"white", TEXT} if middles else set())
    boxes = [text.get_window_extent(renderer).transformed(axis.transData.inverted()) for text in names]
    begin = min(span["ts"] for span in spans_of(events)["GPU compute"])
    waits = [(span["ts"] - begin) / 1e3 for span in spans_of(events)["GPU compute"] if span["name"] == "stall"]
    ends = [
        (span["ts"] + span["dur"] - begin) / 1e3 for span in spans_of(events)["GPU compute"] if span["name"] == "stall"
    ]
    for box in boxes:
        assert not [stall for stall in zip(waits, ends, strict=True) if box.x0 < stall[1] and stall[0] < box.x1]
    assert sum(text.get_text() == "bucket 0" for text in axis.texts) == 2, "other tracks are drawn over nothing"


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    small_trace(tmp_path / "t.json")
    with pytest.raises(ImportError, match="plot"):
        render(tmp_path / "t.json", tmp_path / "t.png")
    with pytest.raises(SystemExit, match="plot"):
        main([str(tmp_path / "t.json")])
    assert "stalls 3, 3.00 ms" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"other": []}', "\u00e4"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.json is no trace"):
        read_events(tmp_path / "t.json")


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_the_command_says_how_to_use_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        main(arguments)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small_trace(tmp_path / "t.json")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-m", "zenflow.trace", "t.json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stalls 3, 3.00 ms" in done.stdout
    assert (tmp_path / "t.png").is_file()
