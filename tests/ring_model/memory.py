"""The cells of memory that the model's operations read and write, by name."""

from __future__ import annotations

from collections.abc import Sequence

from tests.ring_model.explore import Stamp
from tests.ring_model.setup import Setup


class Memory:
    """step: the one that runs, from 1; cells: their numbers; first: their stamps, all 0; counters: see `Program`.

    buckets: of all segments, those of the first segment first.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.buckets, self.step = range(setup.buckets * setup.segments), 0
        self.cells: dict[tuple, int] = {}
        self.first: list[Stamp] = []
        self.counters: set[int] = set()

    def _cell(self, *name: object, counter: bool = False) -> int:
        if name not in self.cells:
            self.cells[name] = len(self.first)
            self.first.append(0)
            if counter:
                self.counters.add(self.cells[name])
        return self.cells[name]

    def _members(self, segment: int) -> range:
        return range(segment * self.setup.buckets, (segment + 1) * self.setup.buckets)

    def _segment(self, bucket: int) -> int:
        return bucket // self.setup.buckets

    def _backward_order(self) -> list[int]:
        """Layers are of one cohort after another, in the order of forward; buckets travel in that of backward."""
        segments = range(self.setup.segments)[::-1]
        return [self._members(segment)[place] for place in range(self.setup.buckets) for segment in segments]

    def _each(self, name: str, stamp: Stamp, *place: object) -> dict[int, Stamp]:
        return {self._cell(name, *place, bucket): stamp for bucket in self.buckets}

    def _all(self, name: str, stamps: Sequence[Stamp]) -> dict[int, Stamp]:
        """stamps: by segment."""
        return {self._cell(name, bucket): stamps[self._segment(bucket)] for bucket in self.buckets}

    def _gradient(self, bucket: int) -> int:
        """In place, or in memory that nobody else gets before it was copied (`record_stream`)."""
        return self._cell("gradient", bucket) if self.setup.zeroed else self._cell("gradient", self.step, bucket)

    def _gradients(self, stamp: Stamp) -> dict[int, Stamp]:
        return {self._gradient(bucket): stamp for bucket in self.buckets}

    def _shadow(self, turn: int, bucket: int) -> int:
        """`SegmentMemory.shadow_of`: one, or two in turn; lanes of the ring, if results take their gradients' place."""
        if self.setup.in_place:
            return self._lane(turn, 0, bucket)
        return self._cell("shadow", turn, bucket) if self.setup.predicts else self._cell("shadow", bucket)

    def _lane(self, turn: int, place: int, bucket: int) -> int:
        """`geometry.Segment.lane`: one, one a turn, or one a step of two turns."""
        if self.setup.on_host:
            return self._cell("lane", turn, place, bucket)
        two = self.setup.in_place and self.setup.predicts
        return self._cell("ring", turn, bucket) if two else self._cell("ring", bucket)
