"""How fast the CPU optimizer's pass goes over memory, and how fast memory is: STREAM's triad beside it.

Both work on the kind of memory that training uses (memfd, populated) and tell GB/s by the bytes that the program asks
for: reads for ownership of what is only written are not counted. Needs the compiled pass, not torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zenflow.arena import Arena
from zenflow.bench.own_pass import SIDE, OwnPass, compiled

REPEATS = 9


def triad(threads: int, n_bytes: int = 1 << 30, streaming: bool | None = None) -> float:
    """GB/s of `a[i] = b[i] + s * c[i]`, fp32, 12 bytes an element, the best of several runs.

    n_bytes: of each of the three arrays, a multiple of 64; several times the caches, of which a server has 300 MB.
    streaming: whether stores go past the caches, None for the faster way. RuntimeError without the compiled pass.
    """
    if n_bytes < 64 or n_bytes % 64:
        raise ValueError(f"n_bytes must be a positive multiple of 64, got {n_bytes}")
    library, arenas = compiled(), [Arena.create("zenflow-triad", n_bytes) for _ in range(3)]
    for number, arena in enumerate(arenas):
        arena.populate(threads)
        arena.array(np.float32, 0, n_bytes // 4)[:] = number
    addresses, n = [arena.address for arena in arenas], n_bytes // 4
    ways = (False, True) if streaming is None else (streaming,)
    best = max(12 * n / _best_seconds(lambda: library.triad(*addresses, n, way, threads)) for way in ways)  # noqa: B023
    for arena in arenas:
        arena.close()
    return best / 1e9


def pass_bandwidth(
    threads: int, n_parameters: int = 1 << 27, dtype: str = "bfloat16", per_channel: bool = True
) -> float:
    """GB/s of the pass with one gradient a window, ring and weights of `dtype`: 28 bytes a parameter for 16-bit types.

    n_parameters: rounded down to whole matrices of 4096 x 4096, at least one; they take 14 bytes each. per_channel: a t
    of its own for every channel, or one for all. RuntimeError without the compiled pass.
    """
    work = OwnPass(max(1, n_parameters // SIDE**2), threads, dtype, per_channel)
    seconds = _best_seconds(work.window)
    work.close()
    return work.window_bytes / seconds / 1e9


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)
