"""How fast the CPU optimizer's pass goes over memory, and how fast memory is: STREAM's triad beside it.

Both work on the kind of memory that training uses (memfd, populated) and tell GB/s by the bytes that the program asks
for: reads for ownership of what is only written are not counted. Needs the compiled pass, not torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from zenflow import native
from zenflow.arena import Arena
from zenflow.cpu_pass import Arrays, Plan, SegmentPass, make_lanes, plan_update
from zenflow.geometry import ITEM_BYTES, lay_out
from zenflow.ring import SegmentMemory

REPEATS = 9
CHANNELS = 4096
HYPER = np.array([[1e-5, 0.9, 0.999, 1e-8, 0.01]] * 4)


def triad(threads: int, n_bytes: int = 1 << 30, streaming: bool | None = None) -> float:
    """GB/s of `a[i] = b[i] + s * c[i]`, fp32, 12 bytes an element, the best of several runs.

    n_bytes: of each of the three arrays, a multiple of 64; several times the caches, of which a server has 300 MB.
    streaming: whether stores go past the caches, None for the faster way. RuntimeError without the compiled pass.
    """
    if n_bytes < 64 or n_bytes % 64:
        raise ValueError(f"n_bytes must be a positive multiple of 64, got {n_bytes}")
    library, arenas = _library(), [Arena.create("zenflow-triad", n_bytes) for _ in range(3)]
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

    n_parameters: rounded down to whole matrices of 4096 x 4096, at least one; they take 16 bytes each. per_channel: a t
    of its own for every channel, or one for all. RuntimeError without the compiled pass.
    """
    shapes = [(CHANNELS, CHANNELS, 0)] * max(1, n_parameters // CHANNELS**2)
    segment = lay_out(
        0, shapes, channel_dim="column", weight_dtype=dtype, ring_dtype=dtype,
        max_steps=len(HYPER), n_groups=1, bucket_bytes=64 << 20,
    )  # fmt: skip
    library, memory = _library(), SegmentMemory.create(segment, threads)
    _fill(memory)
    arrays = Arrays(
        memory.master, memory.exp_avg, memory.exp_avg_sq, memory.ring, memory.shadow,
        dtype, None if memory.shadow is None else dtype,
    )  # fmt: skip
    pieces = [bucket.pieces for bucket in segment.buckets]
    work = SegmentPass(arrays, segment.matrices, pieces, threads=threads, library=library)
    t = np.arange(CHANNELS if per_channel else 1, dtype=np.int32)
    for matrix in range(len(shapes)):
        work.set_plan(matrix, Plan(plan_update(HYPER, t, "linear"), make_lanes([0], [1.0], [1.0])))

    def window() -> None:
        for bucket in range(len(pieces)):
            work.run(bucket)

    item = ITEM_BYTES[dtype]
    moved = (24 + item + (0 if memory.shadow is None else item)) * segment.numel
    seconds = _best_seconds(window)
    memory.close()
    return moved / seconds / 1e9


def _fill(memory: SegmentMemory) -> None:
    """Numbers of ordinary size: subnormal ones would be measured as arithmetic."""
    row = np.random.default_rng(0).standard_normal(CHANNELS, dtype=np.float32)
    memory.master.reshape(-1, CHANNELS)[:] = row
    memory.exp_avg_sq.reshape(-1, CHANNELS)[:] = row**2
    if memory.segment.ring_dtype == "bfloat16":
        bits = row.view(np.uint32) >> 16
    else:
        bits = row.astype(memory.segment.ring_dtype)
    ring = memory.ring.view({"bfloat16": np.uint16}.get(memory.segment.ring_dtype, memory.segment.ring_dtype))
    ring.reshape(-1, CHANNELS)[:] = bits


def _best_seconds(run: Callable[[], object]) -> float:
    run()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def _library() -> native.Native:
    library = native.load()
    if library is None:
        raise RuntimeError("the pass cannot be measured without a C compiler, or with ZENFLOW_NATIVE=0")
    return library
