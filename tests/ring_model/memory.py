"""The cells of memory that the model's operations read and write, by name."""

from __future__ import annotations

from tests.ring_model.explore import Stamp
from tests.ring_model.setup import Setup


class Memory:
    """step: the one that runs, from 1; cells: their numbers; first: their stamps, all 0; counters: see `Program`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.buckets, self.step = range(setup.buckets), 0
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

    def _each(self, name: str, stamp: Stamp, *place: object) -> dict[int, Stamp]:
        return {self._cell(name, *place, bucket): stamp for bucket in self.buckets}

    def _gradient(self, bucket: int) -> int:
        """In place, or in memory that nobody else gets before it was copied (`record_stream`)."""
        return self._cell("gradient", bucket) if self.setup.zeroed else self._cell("gradient", self.step, bucket)

    def _gradients(self, stamp: Stamp) -> dict[int, Stamp]:
        return {self._gradient(bucket): stamp for bucket in self.buckets}

    def _lane(self, window: int, step: int, bucket: int) -> int:
        """`geometry.Segment.lane`: one, or one a step of two turns."""
        return self._cell("lane", window % 2, step, bucket) if self.setup.on_host else self._cell("ring", bucket)
