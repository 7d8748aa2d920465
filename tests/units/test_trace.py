"""Traces: what is in the file, right sums of what ran under what, and the device's clock on the host's."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from zenflow import trace
from zenflow.trace import Tracer, overlap_summary, render, span
from zenflow.trace_view import TRACKS, _clip, _length, _union, _without, describe, read_events, spans_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROOT = Path(__file__).resolve().parents[2]


def written(tracer: Tracer, folder: Path) -> dict:
    tracer.write(folder / "trace.json")
    assert os.listdir(folder) == ["trace.json"]
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


def events_of(*spans: tuple[str, str, int, int]) -> list[dict]:
    """Events as a trace has them, of (track, name, start, stop) in microseconds."""
    tracer = Tracer(CPU)
    for track, name, start, stop in spans:
        tracer.host_span(track, name, start * 1000, stop * 1000)
    return tracer._events()


# The file


def test_the_file_is_what_chrome_and_perfetto_read(tmp_path: Path) -> None:
    tracer = Tracer(CPU)
    tracer.host_span("trainer", "step", 7_001_000, 9_003_500, step=3)
    tracer.host_span("a track of its own", "x", 5_000_000, 5_000_000)
    with tracer.span("GPU compute", "forward", None, window=1):
        pass
    tracer.instant("CPU optimizer", "selection", ns=6_000_000, moved=2)
    tracer.counter("ring", {"occupancy": 0.5})
    document = written(tracer, tmp_path)
    assert {"command", "versions", "device", "clock"} <= set(document["otherData"])
    assert document["otherData"]["versions"]["torch"] == torch.__version__
    events = document["traceEvents"]
    meta = list(itertools.takewhile(lambda event: event["ph"] == "M", events))
    timed = events[len(meta) :]
    assert {event["pid"] for event in events} == {os.getpid()}
    assert all(isinstance(event["tid"], int) and isinstance(event["name"], str) for event in events)
    assert "M" not in {event["ph"] for event in timed}
    assert [event["ts"] for event in timed] == sorted(event["ts"] for event in timed)
    assert all(event["dur"] >= 0 for event in timed if event["ph"] == "X")
    assert "track" not in set().union(*events)
    names = {event["tid"]: event["args"]["name"] for event in meta if event["name"] == "thread_name"}
    assert names == {1: "GPU compute", 4: "CPU optimizer", 5: "trainer", 6: "a track of its own"}
    assert {event["tid"]: event["args"]["sort_index"] for event in meta if event["name"] == "thread_sort_index"} == {
        number: number for number in names
    }
    assert [event["args"] for event in meta if event["name"] == "process_name"] == [{"name": "ZenFlow"}]
    shape = {"pid": os.getpid(), "tid": 5, "ph": "X"}
    assert {**shape, "name": "step", "ts": 7001.0, "dur": 2002.5, "args": {"step": 3}} in timed
    instant = {"pid": os.getpid(), "tid": 4, "ph": "i", "s": "t", "name": "selection", "ts": 6000.0}
    assert {**instant, "args": {"moved": 2}} in timed
    (counter,) = (event for event in timed if event["ph"] == "C")
    assert (counter["name"], counter["args"]) == ("ring", {"occupancy": 0.5})


def test_tracks_are_in_one_order_whatever_comes_first() -> None:
    for seed in range(5):
        tracks = random.Random(seed).sample(TRACKS, len(TRACKS))
        events = events_of(*((track, "x", place, place + 1) for place, track in enumerate(tracks)))
        assert list(spans_of(events)) == list(TRACKS)


def test_an_enclosing_span_comes_before_what_it_encloses() -> None:
    events = events_of(("trainer", "inner", 5, 6), ("trainer", "outer", 5, 9))
    assert [event["name"] for event in events if event["ph"] == "X"] == ["outer", "inner"]


def test_an_interval_measured_backwards_has_no_length() -> None:
    (only,) = spans_of(events_of(("trainer", "x", 9, 5)))["trainer"]
    assert (only["ts"], only["dur"]) == (9, 0)


def test_spans_on_the_cpu_are_on_the_host_clock(tmp_path: Path) -> None:
    tracer = Tracer(CPU)
    start = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with tracer.span("GPU compute", "forward", None):
        torch.ones(101).sum()
    stop = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    with pytest.raises(KeyError), tracer.span("GPU compute", "broken off", None):
        raise KeyError
    (only,) = spans_of(written(tracer, tmp_path)["traceEvents"])["GPU compute"]
    assert start / 1e3 - 0.001 <= only["ts"] <= only["ts"] + only["dur"] <= stop / 1e3 + 0.001
    assert only["dur"] > 0


def test_without_a_tracer_a_span_does_nothing() -> None:
    tracer = Tracer(CPU)
    for target in (None, tracer, None):
        with span(target, "upload", "bucket 0", None, window=2), span(target, "GPU compute", "stall", None):
            pass
    spans = spans_of(tracer._events())
    assert {track: [(one["name"], one["args"]) for one in own] for track, own in spans.items()} == {
        "GPU compute": [("stall", {})],
        "upload": [("bucket 0", {"window": 2})],
    }


def test_writing_twice_writes_everything_again(tmp_path: Path) -> None:
    tracer = Tracer(CPU)
    tracer.host_span("trainer", "a", 1000, 2000)
    first = written(tracer, tmp_path)["traceEvents"]
    tracer.host_span("trainer", "b", 3000, 4000)
    second = written(tracer, tmp_path)["traceEvents"]
    assert second[: len(first)] == first
    assert [event["name"] for event in second[len(first) :]] == ["b"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    tracer = Tracer(CPU)
    written(tracer, tmp_path)
    before = (tmp_path / "trace.json").read_bytes()
    tracer.counter("loss", {"value": float("nan")})  # no JSON
    with pytest.raises(ValueError, match="JSON"):
        tracer.write(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_bytes() == before
    assert os.listdir(tmp_path) == ["trace.json"]


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


# The device's clock, on a device that the test plays


class Device:
    """A clock with its own origin and speed that is read in fp32 milliseconds, and reaches marks when it is told to."""

    now = 5_000_000_000_000  # the host's, in ns; every reading takes 1 us
    speed, reaches = 1.0, True

    def __init__(self, device: torch.device) -> None:
        self.free: list[list] = []

    @classmethod
    def read(cls) -> int:
        cls.now += 1000
        return cls.now

    def mark(self, stream=None) -> list:
        mark = self.free.pop() if self.free else []
        mark[:] = [(self.now - 1_234_567) * self.speed]
        return mark

    def reached(self, mark: list) -> bool:
        return self.reaches

    def wait(self, mark: list) -> None:
        pass

    def between(self, first: list, last: list) -> float:
        assert not any(mark is free for mark in (first, last) for free in self.free), "used after it was given back"
        return float(np.float32((last[0] - first[0]) / 1e6)) / 1e3

    def give_back(self, mark: list) -> None:
        assert not any(mark is free for free in self.free), "given back twice"
        self.free.append(mark)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> type[Device]:
    played = type("Played", (Device,), {})
    monkeypatch.setattr(trace, "DeviceClock", played)
    monkeypatch.setattr(trace, "time", SimpleNamespace(perf_counter_ns=played.read, get_clock_info=time.get_clock_info))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "played")
    return played


@pytest.mark.parametrize("speed", [1.0, 1 + 3e-5, 1 - 2e-4])
def test_a_long_trace_stays_aligned(device: type[Device], tmp_path: Path, speed: float) -> None:
    """20 minutes in fp32 milliseconds would be off by 60 us, and a clock that drifts by 200 ppm by 240 ms."""
    device.speed = speed
    tracer, expected = Tracer(CUDA), []
    for number in range(1200):
        start = device.now
        with tracer.span("GPU compute", "step", None, step=number):
            device.now += 7_654_321
        expected.append((start / 1e3, 7654.321))
        device.now += 1_000_000_007 if number % 7 else 345
    spans = spans_of(written(tracer, tmp_path)["traceEvents"])["GPU compute"]
    assert [one["args"]["step"] for one in spans] == list(range(1200))
    for one, (start, length) in zip(spans, expected, strict=True):
        assert one["ts"] == pytest.approx(start, abs=10.0)
        assert one["dur"] == pytest.approx(length, abs=1.0)


def test_a_short_trace_does_not_guess_the_speed(device: type[Device]) -> None:
    tracer = Tracer(CUDA)
    with tracer.span("GPU compute", "step", None):
        device.now += 1_000_000
    device.now += 9000  # a wrong reading of the second alignment
    tracer._events()
    assert tracer._device_time._speed == 1.0


def test_spans_are_resolved_late_and_their_events_used_again(device: type[Device]) -> None:
    tracer = Tracer(CUDA)
    device.reaches = False
    for _ in range(11):
        with tracer.span("upload", "0", None):
            device.now += 5000
    assert len(tracer._open) == 11
    with pytest.raises(KeyError), tracer.span("upload", "broken off", None):
        raise KeyError
    device.reaches = True
    for _ in range(31):
        with tracer.span("upload", "0", None):
            device.now += 5000
    assert not tracer._open
    clock = tracer._device_time.clock
    assert len(clock.free) <= 2 * 12 + 2 * tracer._device_time.TRIES
    durations = [one["dur"] for one in spans_of(tracer._events())["upload"]]
    assert durations == pytest.approx([5.0] * 42, abs=0.1)


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


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    small_trace(tmp_path / "t.json")
    with pytest.raises(ImportError, match="plot"):
        render(tmp_path / "t.json", tmp_path / "t.png")
    with pytest.raises(SystemExit, match="plot"):
        trace.main([str(tmp_path / "t.json")])
    assert "stalls 3, 3.00 ms" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"other": []}', "\u00e4"])
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=r"t\.json is no trace"):
        read_events(tmp_path / "t.json")


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_the_command_says_how_to_use_it(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="usage"):
        trace.main(arguments)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small_trace(tmp_path / "t.json")
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-m", "zenflow.trace", "t.json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "stalls 3, 3.00 ms" in done.stdout
    assert (tmp_path / "t.png").is_file()


# A real device

SLEEP_CYCLES = 40_000_000  # about 20 to 40 ms, whatever the clock


@pytest.fixture
def forbidden_synchronisation():
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_span_is_the_time_on_its_stream(tmp_path: Path, forbidden_synchronisation) -> None:
    """Two streams sleep, one behind the other; the host goes on, and afterwards knows when it was."""
    other = torch.cuda.Stream()
    torch.cuda._sleep(SLEEP_CYCLES)  # wakes the device
    tracer = Tracer(CUDA)
    start = time.perf_counter_ns()
    forbidden_synchronisation()
    with tracer.span("GPU compute", "step", None, step=1):
        torch.cuda._sleep(SLEEP_CYCLES)
    other.wait_stream(torch.cuda.current_stream())
    with tracer.span("upload", "0", other), torch.cuda.stream(other):
        torch.cuda._sleep(SLEEP_CYCLES)
    queued = time.perf_counter_ns()
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    stop = time.perf_counter_ns()
    spans = spans_of(written(tracer, tmp_path)["traceEvents"])
    (compute,), (upload,) = spans["GPU compute"], spans["upload"]
    assert compute["dur"] > 1000
    assert upload["ts"] >= compute["ts"] + compute["dur"] - 10, "the wait that was queued before a span is not in it"
    assert upload["dur"] == pytest.approx(compute["dur"], rel=0.5)
    assert start / 1e3 - 200 < compute["ts"]
    assert upload["ts"] + upload["dur"] == pytest.approx(stop / 1e3, abs=2000)
    assert (queued - start) / 1e3 < compute["dur"], "the host waited"
    assert (stop - start) / 1e3 == pytest.approx(2 * compute["dur"], rel=0.5)
