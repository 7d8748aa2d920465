"""What the worker does with a slot: from scalars and presence to the plans of its matrices, then the pass, then t."""

from __future__ import annotations

import numpy as np

from zenflow.cpu_pass import Arrays, Plan, SegmentPass, make_lanes, plan_replay, plan_update
from zenflow.geometry import ITEM_BYTES
from zenflow.native import Native
from zenflow.ring import SegmentMemory, Slot
from zenflow.worker_settings import WorkerSettings


class SegmentWork:
    """The slots of one segment, bucket by bucket in the order in which they are sent.

    AssertionError for the rule `replay` without a lane a step.
    """

    def __init__(
        self, memory: SegmentMemory, settings: WorkerSettings, *, threads: int, library: Native | None
    ) -> None:
        segment = memory.segment
        assert settings.deferred_rule == "accumulate" or segment.keeps_steps, "replay needs the gradient of every step"
        self.memory, self.settings = memory, settings
        self._channels = np.array([matrix.channels for matrix in segment.matrices])
        self._first_channel = np.array([matrix.step_offset for matrix in segment.matrices])
        self._advances = np.zeros(len(segment.matrices), dtype=np.int32)
        self._begun = [[p.matrix for p in bucket.pieces if p.row_start == 0] for bucket in segment.buckets]
        self._ended = [[p.matrix for p in bucket.pieces if p.last] for bucket in segment.buckets]
        arrays = Arrays(
            memory.master, memory.exp_avg, memory.exp_avg_sq, memory.ring, memory.shadow_of(0),
            segment.ring_dtype, None if memory.shadow is None else segment.weight_dtype,
        )  # fmt: skip
        pieces = [bucket.pieces for bucket in segment.buckets]
        self._pass = SegmentPass(arrays, segment.matrices, pieces, threads=threads, library=library)
        self._plans: WindowPlans | None = None

    def set_threads(self, threads: int) -> None:
        """For the passes from now on."""
        self._pass.threads = threads

    def process(self, bucket: int, seq: int, turn: int) -> None:
        """Update the bucket's part of master, moments and shadow, and t where a matrix ends. TornSlotError."""
        slot = self.memory.read_slot(bucket, seq, turn)
        if bucket == 0:
            if self.memory.segment.predicted:
                self._pass.write_to(self.memory.shadow_of(turn))
            bounds = [
                extreme.reduceat(self.memory.channel_step, self._first_channel) for extreme in (np.minimum, np.maximum)
            ]
            self._plans = WindowPlans(self.memory, self.settings, slot, turn, *bounds)
        for number in self._begun[bucket]:
            plan = self._plans.plan(number)
            self._pass.set_plan(number, plan)
            self._advances[number] = 0 if plan is None else plan.advance
        self._pass.run(bucket)
        self._advance(self._ended[bucket])

    def _advance(self, ended: list[int]) -> None:
        """Every piece of these matrices, in this bucket or an earlier one, has been updated from the old t."""
        if ended:
            matrices = slice(ended[0], ended[-1] + 1)
            first = self._first_channel[ended[0]]
            added = np.repeat(self._advances[matrices], self._channels[matrices])
            self.memory.channel_step[first : first + len(added)] += added


class WindowPlans:
    """The plans of one window; matrices of one group, presence and t share theirs.

    lowest, highest: int32 `[n_matrices]`, bounds of the t of each matrix's channels.
    """

    def __init__(
        self,
        memory: SegmentMemory,
        settings: WorkerSettings,
        slot: Slot,
        turn: int,
        lowest: np.ndarray,
        highest: np.ndarray,
    ) -> None:
        self.memory, self.settings, self.slot, self.turn = memory, settings, slot, turn
        self._lowest, self._highest = lowest, highest
        self._shared: dict[tuple, Plan] = {}
        self._lanes: dict[bytes, np.ndarray] = {}

    def plan(self, number: int) -> Plan | None:
        """The matrix's plan, None if no step was counted for it."""
        matrix = self.memory.segment.matrices[number]
        counted = self.slot.counted[:, number]
        if not counted.any():
            return None
        if self._lowest[number] < self._highest[number]:
            span = slice(matrix.step_offset, matrix.step_offset + matrix.channels)
            return self._make(matrix.group, counted, self.memory.channel_step[span])
        key = matrix.group, counted.tobytes(), int(self._lowest[number])
        if key not in self._shared:
            self._shared[key] = self._make(matrix.group, counted, self._lowest[number : number + 1])
        return self._shared[key]

    def _make(self, group: int, counted: np.ndarray, channel_step: np.ndarray) -> Plan:
        hyper, lanes, settings = self.slot.hyper[counted, group], self._lanes_of(counted), self.settings
        prediction = settings.weight_prediction if self.slot.predict else 0.0
        if settings.deferred_rule == "replay":
            return Plan(plan_replay(hyper, channel_step), lanes, prediction)
        return Plan(plan_update(hyper, channel_step, settings.deferred_lr_scale), lanes, prediction)

    def _lanes_of(self, counted: np.ndarray) -> np.ndarray:
        key, segment, slot = counted.tobytes(), self.memory.segment, self.slot
        if key not in self._lanes:
            nbytes = segment.numel * ITEM_BYTES[segment.ring_dtype]
            if segment.keeps_steps:
                offsets = [nbytes * segment.lane(self.turn, int(place)) for place in slot.places[counted]]
                self._lanes[key] = make_lanes(offsets, slot.inv_scale[counted], slot.clip[counted])
            else:
                self._lanes[key] = make_lanes([nbytes * segment.lane(self.turn, 0)], [1.0], [1.0])
        return self._lanes[key]
