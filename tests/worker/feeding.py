"""A hand-fed worker, and an independent simulation of what it must compute, in numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from zenflow.client import WorkerClient
from zenflow.geometry import Matrix, Segment, lay_out
from zenflow.ring import SegmentMemory, WorkerSettings

GROUPS = 2
MAX_STEPS = 4


def make_segment(
    index: int = 0,
    shapes: tuple[tuple[int, int, int], ...] = ((37, 19, 0), (5, 301, 1), (64, 1, 0)),
    *,
    channel_dim: str = "column",
    weight_dtype: str = "bfloat16",
    ring_dtype: str = "bfloat16",
    bucket_bytes: int = 1 << 20,
) -> Segment:
    return lay_out(
        index, shapes, channel_dim=channel_dim, weight_dtype=weight_dtype, ring_dtype=ring_dtype,
        max_steps=MAX_STEPS, n_groups=GROUPS, bucket_bytes=bucket_bytes,
    )  # fmt: skip


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the uint16 bits of a 16-bit type, by torch."""
    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint16).numpy()


def quantize(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


@dataclass
class Window:
    """What the trainer knows of one window: hyper `[n, GROUPS, 5]`, present `[n, matrices]`, finite `[n]`, sums."""

    hyper: np.ndarray
    present: list[np.ndarray]
    finite: np.ndarray
    sums: list[list[np.ndarray]]


@dataclass
class SimulatedMatrix:
    """One matrix in numpy, which rounds every single operation correctly; written from the README's formulas."""

    matrix: Matrix
    weight_dtype: str
    master: np.ndarray
    exp_avg: np.ndarray = field(init=False)
    exp_avg_sq: np.ndarray = field(init=False)
    t: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avg, self.exp_avg_sq = np.zeros_like(self.master), np.zeros_like(self.master)
        self.t = np.zeros(self.matrix.channels, dtype=np.int64)

    def window(self, steps: np.ndarray, total: np.ndarray, lr_scale: str | float) -> None:
        """steps: the counted steps' `[n, 5]`; total: the sum of the gradients, float32 `[rows, cols]`."""
        n = len(steps)
        if n == 0:
            return
        f32 = np.float32
        lr, beta1, beta2, eps, decay_rate = (float(x) for x in steps[-1])
        decay = 1 - lr * decay_rate
        if lr_scale == "linear":
            lr, decay = lr * n, float(np.prod([1 - s[0] * s[4] for s in steps.tolist()]))
        elif lr_scale != "none":
            lr *= lr_scale
        self.t += 1
        first = np.array([1 / (1 - beta1 ** int(t)) for t in self.t]).astype(f32)
        second = np.array([1 / (1 - beta2 ** int(t)) ** 0.5 for t in self.t]).astype(f32)
        shape = (1, -1) if self.matrix.channel_dim == "column" else (-1, 1)
        step_size, scale = (f32(lr) * first).reshape(shape), second.reshape(shape)
        grad = total / f32(n)
        self.exp_avg = f32(beta1) * self.exp_avg + f32(1 - beta1) * grad
        self.exp_avg_sq = f32(beta2) * self.exp_avg_sq + f32(1 - beta2) * (grad * grad)
        denominator = np.sqrt(self.exp_avg_sq) * scale + f32(eps)
        self.master = self.master * f32(decay) - step_size * (self.exp_avg / denominator)


class Trainer:
    """Feeds a worker by hand, as the engine would, and simulates beside it."""

    def __init__(
        self, *segments: Segment, settings: WorkerSettings | None = None, threads: int = 1, seed: int = 0
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.settings = settings or WorkerSettings()
        self.client = WorkerClient(settings=self.settings, cores=sorted(os.sched_getaffinity(0)), threads=threads)
        self.memories: list[SegmentMemory] = []
        self.simulated: list[list[SimulatedMatrix]] = []
        self.seq = self.window_number = 0
        try:
            for segment in segments:
                self.add(segment)
        except BaseException:
            self.close()
            raise

    def add(self, segment: Segment) -> None:
        memory = SegmentMemory.create(segment)
        self.memories.append(memory)
        self.simulated.append([])
        for matrix in segment.matrices:
            weights = quantize(self.normal(matrix.rows, matrix.cols), segment.weight_dtype)
            memory.master[matrix.offset : matrix.offset + matrix.numel] = weights.ravel()
            self.simulated[-1].append(SimulatedMatrix(matrix, segment.weight_dtype, weights.copy()))
        if memory.shadow is not None:
            memory.shadow[:] = to_bits(memory.master, segment.weight_dtype)
        self.client.attach(segment, memory)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32)

    def make_window(self, n_steps: int = MAX_STEPS, lr: float = 1e-2, beta1: float = 0.9) -> Window:
        """Random gradients with tiny and zero ones among them, a different lr in every step and group."""
        hyper = np.empty((n_steps, GROUPS, 5))
        hyper[:] = lr, beta1, 0.99, 1e-8, 0.1
        hyper[:, :, 0] *= 1 + np.arange(n_steps * GROUPS).reshape(n_steps, GROUPS) / 7
        sums = [
            [
                quantize(self.normal(x.rows, x.cols) * self.normal(1, x.cols) ** 9, memory.segment.ring_dtype)
                for x in memory.segment.matrices
            ]
            for memory in self.memories
        ]
        present = [np.ones((n_steps, len(memory.segment.matrices)), dtype=bool) for memory in self.memories]
        return Window(hyper, present, np.ones(n_steps, dtype=bool), sums)

    def fill(self, window: Window) -> None:
        """Everything of a window but the ready words."""
        self.window_number += 1
        for seq, (memory, bucket) in enumerate(self.slots(), start=self.seq + 1):
            number = self.memories.index(memory)
            self.fill_slot(
                memory, bucket, seq, window.hyper, window.present[number], window.finite, window.sums[number]
            )

    def fill_slot(
        self,
        memory: SegmentMemory,
        bucket: int,
        seq: int,
        hyper: np.ndarray,
        present: np.ndarray,
        finite: np.ndarray,
        sums: list[np.ndarray],
    ) -> None:
        """One slot and its payload, but its ready word."""
        segment = memory.segment
        words = memory.ring.view(np.float32 if segment.ring_dtype == "float32" else np.uint16)
        for piece in segment.buckets[bucket].pieces:
            rows = sums[piece.matrix][piece.row_start : piece.row_stop]
            payload = rows if segment.ring_dtype == "float32" else to_bits(rows, "bfloat16")
            words[piece.offset : piece.offset + rows.size] = payload.ravel()
        memory.write_slot(bucket, seq, self.window_number, len(hyper), hyper, present)
        log = memory.slots[bucket].device_log
        log[:] = -1
        log[:2].view(np.uint64)[0] = log[-2:].view(np.uint64)[0] = self.window_number
        log[2 : 2 + 4 * len(finite) : 4] = finite

    def slots(self) -> Iterator[tuple[SegmentMemory, int]]:
        return ((memory, bucket.index) for memory in self.memories for bucket in memory.segment.buckets)

    def publish(self) -> int:
        for memory, bucket in self.slots():
            self.seq += 1
            memory.publish(bucket, self.seq)
        return self.seq

    def run(self, window: Window) -> None:
        """Send a window, wait for it, simulate it."""
        self.fill(window)
        self.client.wait_done(self.publish())
        for matrices, present, sums in zip(self.simulated, window.present, window.sums, strict=True):
            for number, (simulated, total) in enumerate(zip(matrices, sums, strict=True)):
                counted = present[:, number] & window.finite
                simulated.window(window.hyper[counted, simulated.matrix.group], total, self.settings.deferred_lr_scale)

    def bits(self) -> list[np.ndarray]:
        """Every bit of every result, in an order that does not depend on buckets."""
        result = []
        for memory in self.memories:
            for matrix in memory.segment.matrices:
                span = slice(matrix.offset, matrix.offset + matrix.numel)
                result += [x[span].view(np.uint32).copy() for x in (memory.master, memory.exp_avg, memory.exp_avg_sq)]
                if memory.shadow is not None:
                    result.append(memory.shadow[span].copy())
            result.append(memory.channel_step.copy())
        return result

    def simulated_bits(self) -> list[np.ndarray]:
        result = []
        for memory, matrices in zip(self.memories, self.simulated, strict=True):
            for x in matrices:
                result += [y.astype(np.float32).ravel().view(np.uint32) for y in (x.master, x.exp_avg, x.exp_avg_sq)]
                if memory.shadow is not None:
                    result.append(to_bits(x.master, x.weight_dtype).ravel())
            result.append(np.concatenate([x.t for x in matrices]).astype(np.int32))
        return result

    def check(self) -> None:
        for found, expected in zip(self.bits(), self.simulated_bits(), strict=True):
            np.testing.assert_array_equal(found, expected)

    def close(self) -> None:
        self.client.close()
        for memory in self.memories:
            memory.close()
