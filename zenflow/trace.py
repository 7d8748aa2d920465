"""A timeline of a run, on request, as a Chrome trace (ui.perfetto.dev shows it), and what it proves about overlap.

GPU intervals lie between two timing events; the device's clock is aligned with the host's at the start and again when
the trace is written. All times are CLOCK_MONOTONIC, which the trainer and the CPU process share. A span of the track
"GPU compute" covers gaps inside it; a wait inside one is a span named "stall" of its own. A `window` argument tells
`render` where windows begin. `python -m zenflow.trace trace.json [out.png]` prints the summary and draws.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from zenflow.command_line import command_line
from zenflow.disk import replacing
from zenflow.telemetry import DeviceClock
from zenflow.trace_view import TRACKS, main, overlap_summary, render

__all__ = ["Tracer", "overlap_summary", "render", "span"]
_NOTHING = nullcontext()


class _DeviceTime:
    """Marks of a GPU's clock as CLOCK_MONOTONIC nanoseconds."""

    TRIES = 5
    REACH = 1.0  # seconds from the nearest base: `elapsed_time` is an fp32 number of milliseconds
    TRUSTED = 0.1  # seconds between two alignments from which they tell the two clocks' speeds apart

    def __init__(self, device: torch.device) -> None:
        self.clock, self._device = DeviceClock(device), device
        self._base, self._origin = self._align()
        self._base_seconds, self._speed = 0.0, 1.0

    def _align(self) -> tuple[Any, int]:
        """A mark and the host's time at it: the tightest of a few synchronised events."""
        torch.cuda.synchronize(self._device)
        best = None
        for _ in range(self.TRIES):
            start = time.perf_counter_ns()
            mark = self.clock.mark()
            self.clock.wait(mark)
            taken = time.perf_counter_ns() - start
            if best is None or taken < best[0]:
                best = taken, mark, start + taken // 2
        assert best is not None
        return best[1], best[2]

    def seconds(self, mark: Any) -> float:
        """Device seconds since the first alignment; the mark, which must be reached, is given back."""
        distance = self.clock.between(self._base, mark)
        if abs(distance) < self.REACH:
            self.clock.give_back(mark)
            return self._base_seconds + distance
        self.clock.give_back(self._base)
        self._base, self._base_seconds = mark, self._base_seconds + distance
        return self._base_seconds

    def align_again(self) -> None:
        """Wait for the device and learn how fast its clock runs beside the host's."""
        mark, now = self._align()
        seconds = self.seconds(mark)
        if seconds >= self.TRUSTED:
            self._speed = (now - self._origin) / (seconds * 1e9)

    def nanoseconds(self, seconds: float) -> float:
        return self._origin + seconds * 1e9 * self._speed


class Tracer:
    """Collects intervals from `began_ns` until `write`. Both wait for the device, tracing itself never does.

    `about`: what the file tells beside the device, the clock and versions; the command as it is typed.
    """

    def __init__(self, device: torch.device) -> None:
        assert "CLOCK_MONOTONIC" in time.get_clock_info("perf_counter").implementation
        self.about = {"command": command_line()}
        self.began_ns = time.perf_counter_ns()
        self._device = device
        self._device_time = _DeviceTime(device) if device.type == "cuda" else None
        self._host: list[dict[str, Any]] = []  # finished events, `track` in place of `tid`
        self._open: deque[tuple[dict[str, Any], Any, Any]] = deque()  # GPU spans and their marks
        self._spans: list[tuple[dict[str, Any], float, float]] = []  # GPU spans in device seconds

    @contextmanager
    def span(self, track: str, name: str, stream: torch.cuda.Stream | None, **args: Any) -> Iterator[None]:
        """The time that the block's work takes on `stream` (None: the current one); on a CPU device, the block's own.

        A wait that the stream queues inside the block is in the span, one that it queued before is not. A block that
        raises leaves no span.
        """
        if self._device_time is None:
            start = time.perf_counter_ns()
            yield
            self.host_span(track, name, start, time.perf_counter_ns(), **args)
            return
        clock = self._device_time.clock
        begin = clock.mark(stream)
        try:
            yield
        except BaseException:
            clock.give_back(begin)
            raise
        self._open.append(({"name": name, "ph": "X", "track": track, "args": args}, begin, clock.mark(stream)))
        while self._open and clock.reached(self._open[0][2]):
            self._close_oldest()

    def host_span(self, track: str, name: str, start_ns: int, stop_ns: int, **args: Any) -> None:
        """An interval that was measured elsewhere, in CLOCK_MONOTONIC nanoseconds."""
        times = {"ts": _microseconds(start_ns), "dur": _microseconds(max(0, stop_ns - start_ns))}
        self._host.append({"name": name, "ph": "X", **times, "track": track, "args": args})

    def counter(self, name: str, values: dict[str, float]) -> None:
        """Values from now on, drawn as a graph of their own."""
        ts = _microseconds(time.perf_counter_ns())
        self._host.append({"name": name, "ph": "C", "ts": ts, "track": None, "args": dict(values)})

    def write(self, path: str | os.PathLike[str]) -> None:
        """Wait for the device and write all that was traced so far. A reader never sees half a file."""
        path = Path(path)
        document = {"traceEvents": self._events(), "displayTimeUnit": "ms", "otherData": self._about()}
        with replacing(path) as partial:
            partial.write_text(json.dumps(document, allow_nan=False), encoding="utf-8")

    def _close_oldest(self) -> None:
        assert self._device_time is not None
        event, begin, end = self._open.popleft()
        start = self._device_time.seconds(begin)
        self._spans.append((event, start, self._device_time.seconds(end)))

    def _events(self) -> list[dict[str, Any]]:
        timed = list(self._host)
        if self._device_time is not None:
            self._device_time.align_again()  # waits, so that every span is over
            while self._open:
                self._close_oldest()
            for event, *seconds in self._spans:
                start, stop = (_microseconds(self._device_time.nanoseconds(second)) for second in seconds)
                timed.append({**event, "ts": start, "dur": round(max(0.0, stop - start), 3)})
        used = dict.fromkeys(event["track"] for event in timed if event["track"] is not None)
        tracks = [*TRACKS, *(track for track in used if track not in TRACKS)]
        ids = {None: 0} | {track: number for number, track in enumerate(tracks, start=1)}
        process = {"ph": "M", "pid": os.getpid()}
        events = [{**process, "name": "process_name", "tid": 0, "args": {"name": "ZenFlow"}}]
        for track in tracks:
            if track in used:
                place = {**process, "tid": ids[track]}
                events.append({**place, "name": "thread_name", "args": {"name": track}})
                events.append({**place, "name": "thread_sort_index", "args": {"sort_index": ids[track]}})
        for event in sorted(timed, key=lambda event: (event["ts"], -event.get("dur", 0.0))):
            fields = {key: value for key, value in event.items() if key != "track"}
            events.append({**fields, "pid": os.getpid(), "tid": ids[event["track"]]})
        return events

    def _about(self) -> dict[str, Any]:
        versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
        for package in ("triton", "zenflow-triton"):
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                versions[package] = None
        device = torch.cuda.get_device_name(self._device) if self._device_time is not None else platform.machine()
        return {**self.about, "clock": "CLOCK_MONOTONIC", "device": device, "versions": versions}


def span(
    tracer: Tracer | None, track: str, name: str, stream: torch.cuda.Stream | None, **args: Any
) -> AbstractContextManager[None]:
    """`tracer.span`, or nothing where nobody traces."""
    return _NOTHING if tracer is None else tracer.span(track, name, stream, **args)


def _microseconds(ns: float) -> float:
    return round(ns / 1e3, 3)


if __name__ == "__main__":
    main(sys.argv[1:])
