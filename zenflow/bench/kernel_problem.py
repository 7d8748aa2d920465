"""What one measurement of a kernel works on: a matrix, its selected channels, and the bytes that a job on it moves.

Bytes are counted twice. `must` is what the job has to read and write, element by element. `bus` is what the memory bus
carries for it at best: a GPU reads and writes sectors of 32 bytes, and a sector that is written in part is first read.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from zenflow_kernels.table import Entry

from zenflow.matrices import count_selected

SECTOR = 32  # bytes
KINDS = {"columns": "column", "rows": "row", "whole": "whole"}


@dataclass(frozen=True)
class Moved:
    """Bytes read and written: what the job needs, and what the memory bus carries for it at best."""

    must: int
    bus: int

    def __add__(self, other: Moved) -> Moved:
        return Moved(self.must + other.must, self.bus + other.bus)


def exactly(n_bytes: int) -> Moved:
    """Bytes in whole runs of neighbours: the bus carries no others."""
    return Moved(n_bytes, n_bytes)


@dataclass(frozen=True)
class Problem:
    """A matrix `[rows, cols]` of which the share `ratio` of its columns or rows is selected, or all of it (`whole`).

    Everything made of it is a function of these values: two builds of one problem hold the same numbers.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    layout: str
    ratio: float
    device: torch.device

    @property
    def kind(self) -> str:
        return KINDS[self.layout]

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def channels(self) -> int:
        return {"columns": self.cols, "rows": self.rows, "whole": 1}[self.layout]

    @property
    def length(self) -> int:
        """Elements of a channel."""
        return self.numel // max(1, self.channels)

    @property
    def n(self) -> int:
        """Selected channels, as the engine counts them."""
        if self.layout == "whole":
            return 1
        return count_selected(self.ratio, self.channels)

    @property
    def selected(self) -> int:
        """Elements of the selected channels."""
        return self.n * self.length

    @property
    def item(self) -> int:
        """Bytes of a weight, and of a gradient and of an accumulator, which have its dtype here."""
        return self.dtype.itemsize

    def index(self) -> Tensor:
        """int64 `[n]`, ascending: the selected channels, drawn at random, on the CPU."""
        generator = torch.Generator().manual_seed(self.channels)
        return torch.randperm(self.channels, generator=generator)[: self.n].sort().values

    def read_scattered(self) -> Moved:
        """To read the selected channels out of the matrix."""
        touched, _ = self._sectors()
        return Moved(self.item * self.selected, touched)

    def write_scattered(self) -> Moved:
        """To write them in their places: sectors that are written in part are read first."""
        touched, partly = self._sectors()
        return Moved(self.item * self.selected, touched + partly)

    def _sectors(self) -> tuple[int, int]:
        """Bytes of the sectors that hold a selected element, and of those that hold another one, too.

        Of the first row, which begins with a sector, times the rows; whole rows are runs of neighbours.
        """
        if self.layout != "columns":
            return self.item * self.selected, 0
        width = SECTOR // self.item
        _, held = torch.unique_consecutive(self.index() // width, return_counts=True)
        partly = int((held < width).sum())
        return SECTOR * held.numel() * self.rows, SECTOR * partly * self.rows

    def normal(self, *shape: int, seed: int, dtype: torch.dtype | None = None) -> Tensor:
        """Standard normal numbers of that shape, of the problem's dtype unless another one is given."""
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=dtype or self.dtype, device=self.device)

    def gradient(self) -> Tensor:
        return self.normal(self.rows, self.cols, seed=1)

    def entry(self, *, folds: bool, stochastic: bool = False) -> Entry:
        """The matrix with its state; with an accumulator if it `folds`. `stochastic`: in bf16, without fp32 masters."""
        rows, cols, n = self.rows, self.cols, self.n
        compact = {"columns": (rows, n), "rows": (n, cols), "whole": (rows, cols)}[self.layout]
        slot = None
        if self.layout != "whole":
            slot = torch.full((self.channels,), -1, dtype=torch.int32)
            slot[self.index()] = torch.arange(n, dtype=torch.int32)
            slot = slot.to(self.device)
        dtypes = (torch.bfloat16 if stochastic else torch.float32, torch.float32, torch.float32)
        master, exp_avg, exp_avg_sq = (
            self.normal(*compact, seed=seed, dtype=dtype) for seed, dtype in enumerate(dtypes, start=2)
        )
        weight = self.normal(rows, cols, seed=5)
        if stochastic and self.layout == "whole":
            master = weight
        return Entry(
            weight=weight,
            kind=self.kind,
            group=0,
            master=master,
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq.square_(),
            start=torch.full((n,), 20, dtype=torch.int32, device=self.device),
            slot=slot,
            accumulator=self.normal(rows, cols, seed=6) if folds and self.layout != "whole" else None,
        )


def make_problem(numel: int, dtype: torch.dtype, layout: str, ratio: float, device: torch.device) -> Problem:
    """The squarest matrix of `numel` elements whose rows are a power of two long; a rest that fills no row is left."""
    cols = 2 ** (int(math.log2(numel)) // 2)
    return Problem(numel // cols, cols, dtype, layout, ratio, device)
