"""One segment on both sides: its flat storage on the device, and torch tensors over the bytes that the worker maps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.cpu_pass import round_to
from zenflow.driver import stream_words
from zenflow.geometry import Bucket, Segment, lay_out_for
from zenflow.matrices import DTYPE_NAMES, Newcomer, matrix_shape
from zenflow.pins import Pins
from zenflow.ring import SegmentMemory

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_CHUNK = 1 << 22  # elements that are rounded at once


class SegmentStorage:
    """One segment: flat weights and accumulator on `device`, and torch views of its shared memory.

    cohort: of all its matrices, see `window.py`.

    `weights` `[numel]` and `accumulator` `[numel]` (None where the worker sums the gradients) are on the device; `ring`
    `[lanes * numel]` and `shadows` `[numel]` are their counterparts on the host, `state` the worker's master and
    moments, fp32 `[numel]` each, `channel_step` int32 `[n_channels]`. There is one shadow, for fp32 weights the master
    itself, or two by turn where results are predicted; if the segment is `in_place`, they are the ring's lanes.
    `shows_prediction`: some that are visible may be. `logs`, `slots` and `ends` are by turn, `slots` by bucket too.
    """

    def __init__(self, segment: Segment, cohort: int, device: torch.device, cores: Sequence[int]) -> None:
        """cores: the worker's, near which the shared memory shall lie."""
        self.segment, self.cohort = segment, cohort
        self.indices: list[int] = []  # of its matrices' records in StepControl
        self.members: list[tuple[int, ...]] = []  # of the records in each bucket
        self.memory = SegmentMemory.create(segment, cores=cores)
        memory, weight_dtype, ring_dtype = self.memory, DTYPES[segment.weight_dtype], DTYPES[segment.ring_dtype]
        self.ring = torch.from_numpy(memory.ring).view(ring_dtype)
        self.state = tuple(torch.from_numpy(flat) for flat in (memory.master, memory.exp_avg, memory.exp_avg_sq))
        self.channel_step = torch.from_numpy(memory.channel_step)
        self.shadows = [self.state[0]]
        if memory.shadow is not None:
            flats = [memory.shadow_of(turn) for turn in range(segment.shadows)]
            self.shadows = [torch.from_numpy(flat).view(weight_dtype) for flat in flats]
        self.shows_prediction = False
        pins = Pins(device)
        # Also when nobody calls close(): memory that is unmapped while pinned poisons its addresses for the process.
        self._free = weakref.finalize(self, _free, pins, memory)
        pins.add(torch.from_numpy(memory.arenas[0].array(np.uint8, 0, memory.arenas[0].nbytes)))
        if not segment.in_place:
            pins.add(self.state[0] if memory.shadow is None else torch.from_numpy(memory.shadow))
        self.logs = [torch.from_numpy(memory.slot_record(turn, 0).device_log) for turn in (0, 1)]
        ready = [[memory.slot_record(turn, bucket.index).ready for bucket in segment.buckets] for turn in (0, 1)]
        self.slots = [[HostWord(word, device) for word in words] for words in ready]
        self.ends = [HostWord(memory.sent_word(turn), device) for turn in (0, 1)]
        self.weights = torch.zeros(segment.numel, dtype=weight_dtype, device=device)
        self.accumulator: Tensor | None = None
        if not segment.keeps_steps:
            self.accumulator = torch.zeros(segment.numel, dtype=ring_dtype, device=device)
        events = len(segment.buckets) if device.type == "cuda" else 0
        self.gradients_exist = [torch.cuda.Event() for _ in range(events)]
        self.uploaded = [torch.cuda.Event() for _ in range(events)]

    @property
    def host_bytes(self) -> int:
        """Of its shared memory, each arena once."""
        return sum(arena.nbytes for arena in self.memory.arenas)

    def lane(self, turn: int, step: int) -> Tensor:
        """`[numel]` of the ring: where step `step` of the window with slots of `turn` puts its gradients."""
        first = self.segment.lane(turn, step) * self.segment.numel
        return self.ring[first : first + self.segment.numel]

    def shadow(self, turn: int) -> Tensor:
        """`[numel]`: the results of windows with the records of `turn`."""
        return self.shadows[turn % len(self.shadows)]

    def fill_host_from_weights(self) -> None:
        """Shadows and master of every element from the weights on the device; synchronises."""
        for shadow in self.shadows:
            shadow.copy_(self.weights)
        self.state[0].copy_(self.shadows[0])

    def show_masters(self, turn: int) -> None:
        """The shadow of `turn` takes the rounded masters."""
        _round(self.state[0], self.shadow(turn))

    def kept(self, bucket: Bucket, turn: int) -> Tensor:
        """`[bucket's elements]`, instead of a result of `turn` that will not come: what is visible, in the weights'
        dtype, or the fp32 masters as they are, where nothing is predicted."""
        kept = self.shadow(turn ^ 1) if self.segment.predicted else self.state[0]
        return kept[bucket.start : bucket.stop]

    def put_back(self, bucket: Bucket, turn: int) -> None:
        """The shadow of `turn` takes what is `kept` of a bucket; for segments that are `in_place` or `predicted`."""
        _round(self.kept(bucket, turn), self.shadow(turn)[bucket.start : bucket.stop])

    def close(self) -> None:
        """Unpin, give the shared memory back and drop every view of it; idempotent."""
        self._free()
        empty = torch.empty(0, device="cpu")
        self.ring = self.channel_step = empty
        self.state, self.shadows = (empty, empty, empty), [empty]
        self.logs, self.slots, self.ends = [], [], []


def _round(values: Tensor, rounded: Tensor) -> None:
    """`round_to`, both `[n]`, a piece at a time."""
    for piece, target in zip(values.split(_CHUNK), rounded.split(_CHUNK), strict=True):
        round_to(target, piece)


def _free(pins: Pins, memory: SegmentMemory) -> None:
    pins.release()
    memory.close()


class HostWord:
    """A word of the records, int64 `[1]`, and its address on the device where a stream can write it."""

    def __init__(self, word: np.ndarray, device: torch.device) -> None:
        self.value = torch.from_numpy(word)
        words = stream_words(device)
        self.address = 0 if words is None else words.device_address(self.value.data_ptr())


def new_segment(
    config: ZenFlowConfig, index: int, dtype: torch.dtype, newcomers: list[Newcomer], n_groups: int
) -> Segment:
    """Lay out deferred parameters of one dtype, in reverse registration order: the order in which backward ends."""
    shapes = [(*matrix_shape(newcomer.param), newcomer.group) for newcomer in reversed(newcomers)]
    return lay_out_for(config, index, shapes, DTYPE_NAMES[dtype], n_groups)
