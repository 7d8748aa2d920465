"""The CPU optimizer's pass over memory of its own, for what measures it or keeps the memory as busy as it does."""

from __future__ import annotations

import numpy as np

from zenflow import native
from zenflow.cpu_pass import Arrays, Plan, SegmentPass, make_lanes, plan_update
from zenflow.geometry import ITEM_BYTES, lay_out
from zenflow.ring import SegmentMemory

SIDE = 4096  # of each matrix
BUCKET_BYTES = 64 << 20
HYPER = np.array([[1e-5, 0.9, 0.999, 1e-8, 0.01]] * 4)  # lr, beta1, beta2, eps, weight decay of a window's steps


class OwnPass:
    """The pass with one gradient a window over `matrices` of 4096 x 4096, in the kind of memory that training uses.

    dtype: of weights and ring. per_channel: a t of its own for every channel, or one for all. `window_bytes`: what a
    window must read and write, 28 bytes a parameter for 16-bit types. RuntimeError without the compiled pass.
    """

    def __init__(self, matrices: int, threads: int, dtype: str = "bfloat16", per_channel: bool = True) -> None:
        segment = lay_out(
            0, [(SIDE, SIDE, 0)] * matrices, channel_dim="column", weight_dtype=dtype, ring_dtype=dtype,
            max_steps=len(HYPER), n_groups=1, bucket_bytes=BUCKET_BYTES,
        )  # fmt: skip
        library = compiled()
        self._memory = memory = SegmentMemory.create(segment, threads)
        _fill(memory)
        arrays = Arrays(
            memory.master, memory.exp_avg, memory.exp_avg_sq, memory.ring, memory.shadow,
            dtype, None if memory.shadow is None else dtype,
        )  # fmt: skip
        pieces = [bucket.pieces for bucket in segment.buckets]
        self._buckets = len(pieces)
        self._pass = SegmentPass(arrays, segment.matrices, pieces, threads=threads, library=library)
        t = np.arange(SIDE if per_channel else 1, dtype=np.int32)
        for matrix in range(matrices):
            self._pass.set_plan(matrix, Plan(plan_update(HYPER, t, "linear"), make_lanes([0], [1.0], [1.0])))
        item = ITEM_BYTES[dtype]
        self.window_bytes = (24 + item + (0 if memory.shadow is None else item)) * segment.numel

    def window(self) -> None:
        """Every bucket once."""
        for bucket in range(self._buckets):
            self._pass.run(bucket)

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


def compiled() -> native.Native:
    """The compiled library; RuntimeError without it."""
    library = native.load()
    if library is None:
        raise RuntimeError("the pass cannot be measured without a C compiler, or with ZENFLOW_NATIVE=0")
    return library


def _fill(memory: SegmentMemory) -> None:
    """Numbers of ordinary size: subnormal ones would be measured as arithmetic."""
    row = np.random.default_rng(0).standard_normal(SIDE, dtype=np.float32)
    memory.master.reshape(-1, SIDE)[:] = row
    memory.exp_avg_sq.reshape(-1, SIDE)[:] = row**2
    if memory.segment.ring_dtype == "bfloat16":
        bits = row.view(np.uint32) >> 16
    else:
        bits = row.astype(memory.segment.ring_dtype)
    ring = memory.ring.view({"bfloat16": np.uint16}.get(memory.segment.ring_dtype, memory.segment.ring_dtype))
    ring.reshape(-1, SIDE)[:] = bits
