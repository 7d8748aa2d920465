"""In which order the parameters' partial sums become the gradient's norm.

Parameters are laid out as they come and wake up; an optimizer that is built anew lays them out together. Sums in
another order may differ in their last bit, and so may the clip factor: a resumed run keeps the order of its past.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor
from zenflow_kernels.table import Table


class NormOrder:
    """The order of the records, or after a load that of the saved run, in which later ones follow with their first
    gradient, as if they had been laid out then."""

    def __init__(self) -> None:
        self._order: list[int] | None = None
        self._places: Tensor | None = None  # int64 on the device: where the partial sums that are added lie

    def records(self, count: int) -> list[int]:
        """Those of `count` records that are summed, by index, in this order."""
        return list(range(count)) if self._order is None else list(self._order)

    def load(self, order: Sequence[int], count: int) -> None:
        """From now on these of `count` records are summed, in this order."""
        self._order, self._places = None if list(order) == list(range(count)) else list(order), None

    def arrange(self, partials: Tensor, tables: Sequence[Table], present: Sequence[bool]) -> Tensor:
        """Of all tables' partial sums, f64 `[n]`, those that are added, in this order; waits for nothing.

        present: which records have a gradient.
        """
        if self._order is None:
            return partials
        known = set(self._order)
        new = [index for index, has_gradient in enumerate(present) if has_gradient and index not in known]
        if new or self._places is None:
            self._order += new
            counts = [-(-entry.weight.numel() // table.norm_tile) for table in tables for entry in table.entries]
            starts = list(accumulate(counts, initial=0))
            places = [place for index in self._order for place in range(starts[index], starts[index + 1])]
            self._places = torch.tensor(places, dtype=torch.int64, device="cpu")
            if partials.is_cuda:
                self._places = self._places.pin_memory().to(partials.device, non_blocking=True)
        return partials[self._places]
