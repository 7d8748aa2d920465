"""A hand-fed worker, and an independent simulation of what it must compute, in numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from zenflow.client import WorkerClient
from zenflow.geometry import Matrix, Segment, lay_out
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings

GROUPS = 2
MAX_STEPS = 4
LARGEST = np.finfo(np.float32).max
# lr, beta1, beta2, eps and weight decay of a window's steps.
STEPS = np.array([[1e-2, 0.9, 0.99, 1e-8, 0.1], [3e-3, 0.9, 0.99, 1e-8, 0.1], [7e-3, 0.9, 0.99, 1e-8, 0.1]])
MIXED_STEPS = STEPS + [[0, 0, 0, 0, 0], [0, -0.4, 0, 0, 0.1], [0, 0, 0.009, 1e-6, 0]]


def make_segment(
    index: int = 0,
    shapes: tuple[tuple[int, int, int], ...] = ((37, 19, 0), (5, 301, 1), (64, 1, 0)),
    *,
    channel_dim: str = "column",
    weight_dtype: str = "bfloat16",
    ring_dtype: str = "bfloat16",
    bucket_bytes: int = 1 << 20,
    keeps_steps: bool = False,
    predicted: bool = False,
) -> Segment:
    return lay_out(
        index, shapes, channel_dim=channel_dim, weight_dtype=weight_dtype, ring_dtype=ring_dtype,
        max_steps=MAX_STEPS, n_groups=GROUPS, bucket_bytes=bucket_bytes,
        keeps_steps=keeps_steps, predicted=predicted,
    )  # fmt: skip


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the uint16 bits of a 16-bit type, by torch, or as their own."""
    if dtype == "float32":
        return np.ascontiguousarray(values).view(np.uint32)
    return torch.from_numpy(values).to(getattr(torch, dtype)).view(torch.uint16).numpy()


def quantize(values: np.ndarray, dtype: str) -> np.ndarray:
    return torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values as the bytes of a ring."""
    return to_bits(values, dtype).ravel().view(np.uint8)


@dataclass
class Window:
    """What the trainer knows of one window: hyper `[n, GROUPS, 5]`, present `[n, matrices]`, finite `[n]`.

    grads, a list a segment, fp32: sums `[rows, cols]`, or raw gradients `[n, rows, cols]` where the ring keeps steps,
    whose factors are clip and inv_scale, float32 `[n]`. predict: its results are to be shown as predictions.
    """

    hyper: np.ndarray
    present: list[np.ndarray]
    finite: np.ndarray
    grads: list[list[np.ndarray]]
    clip: np.ndarray
    inv_scale: np.ndarray
    predict: bool = False


@dataclass
class SimulatedMatrix:
    """One matrix in numpy, which rounds every single operation correctly; written from the README's formulas.

    shown: what is in its shadows before it is rounded, of two the older first.
    """

    matrix: Matrix
    weight_dtype: str
    master: np.ndarray
    shown: list[np.ndarray] = field(default_factory=list)
    exp_avg: np.ndarray = field(init=False)
    exp_avg_sq: np.ndarray = field(init=False)
    t: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avg, self.exp_avg_sq = np.zeros_like(self.master), np.zeros_like(self.master)
        self.t = np.zeros(self.matrix.channels, dtype=np.int64)

    def show(self, old: np.ndarray, factor: float) -> None:
        """Write to the shadow that is due, with so many times the change from `old` added."""
        if self.shown:
            factor = np.float32(factor)
            shown = self.master + factor * (self.master - old) if factor else self.master
            self.shown = [*self.shown[1:], shown]

    def replay(self, steps: np.ndarray, grads: list[np.ndarray]) -> None:
        """One update a counted step: `[n, 5]`, and effective gradients, float32 `[rows, cols]`."""
        for step, grad in zip(steps, grads, strict=True):
            lr, beta1, beta2, eps, decay_rate = (float(x) for x in step)
            self._update(grad, lr, beta1, beta2, eps, 1 - lr * decay_rate)

    def window(self, steps: np.ndarray, total: np.ndarray, lr_scale: str | float) -> None:
        """steps: the counted steps' `[n, 5]`; total: the sum of the gradients, float32 `[rows, cols]`."""
        n = len(steps)
        if n == 0:
            return
        lr, beta1, beta2, eps, decay_rate = (float(x) for x in steps[-1])
        decay = 1 - lr * decay_rate
        if lr_scale == "linear":
            lr, decay = lr * n, float(np.prod([1 - s[0] * s[4] for s in steps.tolist()]))
        elif lr_scale != "none":
            lr *= lr_scale
        self._update(np.clip(total / np.float32(n), -LARGEST, LARGEST), lr, beta1, beta2, eps, decay)

    def _update(self, grad: np.ndarray, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> None:
        f32 = np.float32
        self.t += 1
        first = np.array([1 / (1 - beta1 ** int(t)) for t in self.t]).astype(f32)
        second = np.array([1 / (1 - beta2 ** int(t)) ** 0.5 for t in self.t]).astype(f32)
        shape = (1, -1) if self.matrix.channel_dim == "column" else (-1, 1)
        step_size, scale = (f32(lr) * first).reshape(shape), second.reshape(shape)
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
            shown = [weights.copy() for _ in range(segment.shadows)]
            self.simulated[-1].append(SimulatedMatrix(matrix, segment.weight_dtype, weights.copy(), shown))
        if memory.shadow is not None:
            rounded = to_bits(memory.master, segment.weight_dtype)
            memory.shadow.view(rounded.dtype).reshape(segment.shadows, -1)[:] = rounded
        self.client.attach(segment, memory)

    def normal(self, *shape: int) -> np.ndarray:
        return self.random.standard_normal(shape, dtype=np.float32)

    def make_window(self, n_steps: int = MAX_STEPS, lr: float = 1e-2, beta1: float = 0.9) -> Window:
        """Random gradients with tiny and zero ones among them, a different lr in every step and group."""
        hyper = np.empty((n_steps, GROUPS, 5))
        hyper[:] = lr, beta1, 0.99, 1e-8, 0.1
        hyper[:, :, 0] *= 1 + np.arange(n_steps * GROUPS).reshape(n_steps, GROUPS) / 7
        grads = [
            [self._gradient(memory.segment, x, n_steps) for x in memory.segment.matrices] for memory in self.memories
        ]
        present = [np.ones((n_steps, len(memory.segment.matrices)), dtype=bool) for memory in self.memories]
        clip = self.random.random(n_steps, dtype=np.float32)
        inv_scale = np.float32(2) ** -self.random.integers(0, 9, n_steps).astype(np.float32) / np.float32(3)
        return Window(hyper, present, np.ones(n_steps, dtype=bool), grads, clip, inv_scale)

    def _gradient(self, segment: Segment, matrix: Matrix, n_steps: int) -> np.ndarray:
        shape = (n_steps, matrix.rows, matrix.cols) if segment.keeps_steps else (matrix.rows, matrix.cols)
        return quantize(self.normal(*shape) * self.normal(1, matrix.cols).clip(-2.5, 2.5) ** 9, segment.ring_dtype)

    def fill(self, window: Window) -> None:
        """Everything of a window but the ready words."""
        self.window_number += 1
        for seq, (memory, bucket) in enumerate(self.slots(), start=self.seq + 1):
            self.fill_slot(memory, bucket, seq, window)

    def fill_slot(self, memory: SegmentMemory, bucket: int, seq: int, window: Window, first: int = 0) -> int:
        """One slot and its payload, but its ready word; its turn. `first`: the place of the window's first step."""
        number, n_steps = self.memories.index(memory), len(window.hyper)
        turn = memory.turn(bucket)
        for piece in memory.segment.buckets[bucket].pieces:
            grad = window.grads[number][piece.matrix]
            if not memory.segment.keeps_steps:
                lane = memory.segment.lane(turn, 0)
                self._fill_lane(memory, lane, piece.offset, grad[piece.row_start : piece.row_stop])
                continue
            counted = window.present[number][:, piece.matrix] & window.finite
            for step in range(MAX_STEPS):
                # A lane that no counted step has written holds rubbish, at worst NaN.
                rows = grad[step] if step < n_steps and counted[step] else np.full_like(grad[0], np.nan)
                lane = turn * MAX_STEPS + (first + step) % MAX_STEPS
                self._fill_lane(memory, lane, piece.offset, rows[piece.row_start : piece.row_stop])
        words = window.hyper, window.present[number]
        kinds = {"first": first, "predict": window.predict}
        assert memory.write_slot(bucket, seq, self.window_number, n_steps, *words, **kinds) == turn
        if bucket == 0:
            log = memory.slot_record(turn, bucket).device_log
            log[:] = -1
            log[:2].view(np.uint64)[0] = log[-2:].view(np.uint64)[0] = self.window_number
            places = (first + np.arange(n_steps)) % MAX_STEPS
            clip, inv_scale = window.clip.view(np.int32), window.inv_scale.view(np.int32)
            log[2:-2].reshape(-1, 4)[places] = np.transpose([window.finite, clip, inv_scale, np.zeros(n_steps)])
        return turn

    @staticmethod
    def _fill_lane(memory: SegmentMemory, lane: int, offset: int, rows: np.ndarray) -> None:
        segment = memory.segment
        payload = encode(rows, segment.ring_dtype)
        start = (lane * segment.numel + offset) * payload.size // rows.size
        memory.ring[start : start + payload.size] = payload

    def slots(self) -> Iterator[tuple[SegmentMemory, int]]:
        return ((memory, bucket.index) for memory in self.memories for bucket in memory.segment.buckets)

    def publish(self) -> int:
        for memory, bucket in self.slots():
            self.seq += 1
            memory.publish(bucket, memory.turn(bucket) ^ 1, self.seq)
            if bucket == memory.segment.buckets[-1].index:
                memory.end_window(memory.turn(bucket) ^ 1, self.seq)
        return self.seq

    def run(self, window: Window) -> None:
        """Send a window, wait for it, simulate it."""
        self.fill(window)
        self.client.wait_done(self.publish())
        self.simulate(window)

    def send_one(self, number: int, window: Window, first: int = 0) -> int:
        """The window of one segment alone, ready words and all; the last number. `first`: its first step's place."""
        memory = self.memories[number]
        self.window_number += 1
        for bucket in memory.segment.buckets:
            self.seq += 1
            memory.publish(bucket.index, self.fill_slot(memory, bucket.index, self.seq, window, first), self.seq)
        self.simulate(window, only=number)
        return self.seq

    def simulate(self, window: Window, only: int | None = None) -> None:
        """What the worker does with a window; `only`: in this segment."""
        for place, (memory, matrices, present, grads) in enumerate(
            zip(self.memories, self.simulated, window.present, window.grads, strict=True)
        ):
            if only not in (None, place):
                continue
            for number, (simulated, grad) in enumerate(zip(matrices, grads, strict=True)):
                counted, old = present[:, number] & window.finite, simulated.master
                self._update(simulated, window, grad, counted, memory.segment.keeps_steps)
                simulated.show(old, self.settings.weight_prediction if window.predict and counted.any() else 0.0)

    def _update(
        self, simulated: SimulatedMatrix, window: Window, grad: np.ndarray, counted: np.ndarray, keeps_steps: bool
    ) -> None:
        steps = window.hyper[counted, simulated.matrix.group]
        if not keeps_steps:
            simulated.window(steps, grad, self.settings.deferred_lr_scale)
            return
        effective = [(grad[i] * window.inv_scale[i]) * window.clip[i] for i in np.flatnonzero(counted)]
        if self.settings.deferred_rule == "replay":
            simulated.replay(steps, effective)
        elif effective:
            total = effective[0]
            for other in effective[1:]:
                total = total + other
            simulated.window(steps, total, self.settings.deferred_lr_scale)

    def history(self) -> list[np.ndarray]:
        """Checked windows with jumps of t, as after a migration or a resume, and betas that change midway; the bits."""
        for number, beta1 in enumerate((0.9, 0.9, 0.5)):
            self.run(self.make_window(beta1=beta1))
            if number == 0:
                self.memories[0].channel_step[::3] += 41
                for simulated in self.simulated[0]:
                    start = simulated.matrix.step_offset
                    simulated.t[:] = self.memories[0].channel_step[start : start + simulated.matrix.channels]
        self.check()
        return self.bits()

    def bits(self) -> list[np.ndarray]:
        """Every bit of every result, in an order that does not depend on buckets."""
        result = []
        for memory in self.memories:
            for matrix in memory.segment.matrices:
                span = slice(matrix.offset, matrix.offset + matrix.numel)
                result += [x[span].view(np.uint32).copy() for x in (memory.master, memory.exp_avg, memory.exp_avg_sq)]
                # Of two shadows the older first: that which the next window takes.
                shadows = [memory.shadow_of(memory.turn(0) ^ turn) for turn in range(memory.segment.shadows)]
                result += [shadow[span].view(f"u{shadow.itemsize}").copy() for shadow in shadows]
            result.append(memory.channel_step.copy())
        return result

    def simulated_bits(self) -> list[np.ndarray]:
        result = []
        for matrices in self.simulated:
            for x in matrices:
                result += [y.astype(np.float32).ravel().view(np.uint32) for y in (x.master, x.exp_avg, x.exp_avg_sq)]
                result += [to_bits(shown, x.weight_dtype).ravel() for shown in x.shown]
            result.append(np.concatenate([x.t for x in matrices]).astype(np.int32))
        return result

    def check(self) -> None:
        for found, expected in zip(self.bits(), self.simulated_bits(), strict=True):
            np.testing.assert_array_equal(found, expected)

    def run_predicted(self) -> None:
        """Five checked windows, predicted but for the fourth; in the third, matrix 1 has no counted step."""
        for number, n_steps in enumerate((MAX_STEPS, 1, 3, MAX_STEPS, 2)):
            window = self.make_window(n_steps)
            window.predict = number != 3
            for present in window.present:
                present[:, 1] = number != 2
            self.run(window)
            self.check()

    def close(self) -> None:
        self.client.close()
        for memory in self.memories:
            memory.close()
