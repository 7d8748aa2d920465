"""What the tests of clocks and traces share."""

from __future__ import annotations

import torch

from zenflow.trace import Tracer

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SLEEP_CYCLES = 40_000_000  # about 20 to 40 ms, whatever the clock


def events_of(*spans: tuple[str, str, int, int]) -> list[dict]:
    """Events as a trace has them, of (track, name, start, stop) in microseconds."""
    tracer = Tracer(CPU)
    for track, name, start, stop in spans:
        tracer.host_span(track, name, start * 1000, stop * 1000)
    return tracer._events()
