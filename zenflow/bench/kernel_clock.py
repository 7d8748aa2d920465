"""Times of a call, and of a copy of as many bytes in the same run.

On a GPU the second-level cache is flushed before every call (`triton.testing.do_bench`), and what needs nothing of the
host while it runs is timed as a CUDA graph: its launches' time is the host's, not the kernel's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

QUANTILES = (0.2, 0.5, 0.8)
COPY_LIMIT = 4 << 30  # bytes read and written by the longest copy; a longer one is as fast
COPY_STEP = 32  # bytes read and written: a vector of 16 bytes a side


@dataclass(frozen=True)
class Times:
    """Milliseconds of a call; `captured` if it was timed as a graph, so that the host's launches are not in them."""

    p20: float
    p50: float
    p80: float
    captured: bool = False


class Clock:
    """Times calls on one device; `warm_up_ms` and `measure_ms` are how long each is repeated."""

    def __init__(self, device: torch.device, warm_up_ms: float = 25, measure_ms: float = 100) -> None:
        self.device, self.warm_up_ms, self.measure_ms = device, warm_up_ms, measure_ms
        self._copies: dict[int, float] = {}

    def time(self, run: Callable[[], Any], captured: bool) -> Times:
        """Of `run()`, if `captured` as a graph where it can be one; whatever it raises comes from its first call."""
        run()
        if self.device.type != "cuda":
            return self._wall(run)
        import triton.testing

        graph = _graph_of(run, self.device) if captured else None
        timed = run if graph is None else graph.replay
        times = triton.testing.do_bench(timed, self.warm_up_ms, self.measure_ms, quantiles=list(QUANTILES))
        return Times(*times, captured=graph is not None)

    def copy_ms(self, n_bytes: int) -> float:
        """Median ms of a copy of whole vectors that reads and writes `n_bytes` in all, measured once a number.

        Of the faster of a captured and an eager one: no kernel is compared with a slow path of the driver's, which has
        some for graphs' nodes of 2**30 bytes and for odd sizes.
        """
        measured = min(max(1, -(-n_bytes // COPY_STEP)) * COPY_STEP, COPY_LIMIT)
        if measured not in self._copies:
            source = torch.zeros(measured // 2, dtype=torch.uint8, device=self.device)
            target = torch.empty_like(source)
            both = (self.time(lambda: target.copy_(source), captured).p50 for captured in (True, False))
            self._copies[measured] = min(both)
        return self._copies[measured] * max(1.0, n_bytes / measured)

    def copies(self) -> dict[int, float]:
        """Bytes read and written -> median ms, of every copy so far."""
        return dict(sorted(self._copies.items()))

    def _wall(self, run: Callable[[], Any]) -> Times:
        times: list[float] = []
        deadline = time.perf_counter() + 1e-3 * self.measure_ms
        while len(times) < 5 or time.perf_counter() < deadline:
            started = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - started))
        times.sort()
        return Times(*(times[math.ceil(share * len(times)) - 1] for share in QUANTILES))


def _graph_of(run: Callable[[], Any], device: torch.device) -> torch.cuda.CUDAGraph | None:
    """None if something in `run()` cannot be captured, a question to the device for example."""
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None
    return graph
