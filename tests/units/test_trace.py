"""Traces: what is in the file, and the device's clock on the host's."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.units.timing import CPU, CUDA, SLEEP_CYCLES, events_of
from zenflow import trace
from zenflow.trace import Tracer, span
from zenflow.trace_view import TRACKS, spans_of


def written(tracer: Tracer, folder: Path) -> dict:
    tracer.write(folder / "trace.json")
    assert os.listdir(folder) == ["trace.json"]
    return json.loads((folder / "trace.json").read_text(encoding="utf-8"))


# The file


def test_the_file_is_what_chrome_and_perfetto_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/venv/bin/zenflow-train", "trace=trace.json"])
    tracer = Tracer(CPU)
    tracer.host_span("trainer", "step", 7_001_000, 9_003_500, step=3)
    tracer.host_span("CPU optimizer", "bucket 0", 6_000_000, 6_500_000)
    tracer.host_span("a track of its own", "x", 5_000_000, 5_000_000)
    with tracer.span("GPU compute", "forward", None, window=1):
        pass
    tracer.counter("ring", {"occupancy": 0.5})
    document = written(tracer, tmp_path)
    assert document["otherData"]["command"] == "zenflow-train trace=trace.json"
    assert {"versions", "device", "clock"} <= set(document["otherData"])
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


# A real device


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
