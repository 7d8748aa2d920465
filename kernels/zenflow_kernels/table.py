"""The parameters of one device and dtype, described in a table on the device so that one launch serves them all.

A kernel's program number leads through `tile_entry` to an entry, and the entry's row in `fields` to its pointers and
geometry. Pointers of state are written once; gradients get new addresses every step, so theirs are uploaded by `bind`.

A *step tile* is a block of whole rows, or a part of one row where a row is longer than a tile; a *norm tile* is a
range of a parameter's elements. Both depend on the parameter alone, never on its neighbours or on buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from zenflow_kernels import cards
from zenflow_kernels.dispatch import FLOAT_DTYPES
from zenflow_kernels.stochastic_rounding import check_key
from zenflow_kernels.tiles import KINDS

STEP_TILE = 32768  # elements: where one program folds and updates, its gradient is in the caches in between
NORM_TILE = 32768  # elements a partial sum
CHANNEL_TILE = 1024  # channels that one program inverts
ALIGN_BYTES = 16  # of every pointer and row, for vector loads and stores
BLOCK_WIDTHS = (8, 32, 128, 512)  # columns of the blocks a tile is walked in
WIDE_BLOCK = 2048  # of a matrix that fills them by three quarters, and whose columns are folded


@dataclass(frozen=True)
class Entry:
    """One parameter matrix and its state on the device; all addresses are fixed, the contents change in place.

    Until the first selection `slot` is -1 throughout, and the compact state is neither read nor written; its table is
    told where that is so again, by `forget_channels`. A master in bf16, for bf16 weights alone, holds the selected
    weights themselves, rounded stochastically at each update; of a whole parameter it may be the weight.
    """

    weight: Tensor  # [rows, cols] contiguous view of the parameter
    kind: str  # "column" | "row" | "whole"
    group: int  # row of the hyperparameter and bias tables
    master: Tensor  # fp32, or bf16 (below): column [rows, n], row [n, cols], whole [rows, cols]
    exp_avg: Tensor
    exp_avg_sq: Tensor
    start: Tensor  # int32 [n] (whole: [1]): t of each selected channel when its advance count was 0
    slot: Tensor | None  # int32 [channels]: position in the compact state, each once, -1 = deferred; None for whole
    accumulator: Tensor | None  # [rows, cols] fp32 or bf16; None for whole, and where others take the gradient
    stream: int = 0  # of the draws that round a bf16 master, see `stochastic_rounding`; no two parameters' alike

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def axis(self) -> int:
        """The dimension along which channels are numbered."""
        return 1 if self.kind == "column" else 0

    @property
    def channels(self) -> int:
        return {"column": self.shape[1], "row": self.shape[0], "whole": 1}[self.kind]

    @property
    def selected(self) -> int:
        """Number of channels in the compact state; a parameter selected whole is one channel."""
        return self.start.numel()

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns as the kernels walk them: a parameter selected whole is one long row."""
        return self.shape if self.kind != "whole" else (min(1, self.weight.numel()), self.weight.numel())

    def compact_shape(self) -> tuple[int, int]:
        rows, cols = self.shape
        return {"column": (rows, self.selected), "row": (self.selected, cols), "whole": (rows, cols)}[self.kind]


@dataclass(frozen=True)
class Launch:
    """Entries that one launch serves: the same kind, block shape and alignment, all or none with an accumulator."""

    kind: str
    block_cols: int
    even: bool  # every row starts on an ALIGN_BYTES boundary
    folds: bool
    entries: tuple[int, ...]
    tile_entry: Tensor  # int32 [tiles]

    @property
    def long_rows(self) -> bool:
        """Whether rows are walked in the widest blocks, and several programs update a tile, see `selected`."""
        return self.kind == "row" and self.block_cols == BLOCK_WIDTHS[-1]


class Table:
    """Entries that share device and dtypes of weights, masters and accumulators, numbered from `first` in
    `StepControl`'s arrays.

    Raises ValueError naming the entry and the tensor where a shape, dtype, device or layout is not what `Entry` says.
    step_tile: None: the card's, or STEP_TILE.
    """

    def __init__(
        self, entries: Sequence[Entry], first: int, *, step_tile: int | None = None, norm_tile: int = NORM_TILE
    ) -> None:
        self.entries, self.first, self.norm_tile = tuple(entries), first, norm_tile
        _check_entries(self.entries)
        self.device = self.entries[0].weight.device if self.entries else torch.device("cpu")
        self.weight_dtype = self.entries[0].weight.dtype if self.entries else torch.float32
        self.master_dtype = self.entries[0].master.dtype if self.entries else torch.float32
        if step_tile is None:
            matrices = [(entry.kind, entry.accumulator is not None) for entry in self.entries if entry.kind != "whole"]
            launch_class = self.launch_class(*(matrices or [("whole", False)])[0])
            step_tile = cards.constants("fused_step", launch_class, self.device, STEP_TILE=STEP_TILE)["STEP_TILE"]
        self.step_tile = step_tile
        deferred = [entry.accumulator for entry in self.entries if entry.accumulator is not None]
        self.accumulator_dtype = deferred[0].dtype if deferred else torch.float32
        self.grads: list[Tensor | None] = [None] * len(self.entries)
        self.grads_aligned = True
        self._addresses = [0] * len(self.entries)

        self._numels = [entry.weight.numel() for entry in self.entries]
        self._tiles = [_step_tiles(entry, step_tile) for entry in self.entries]
        self._norm_tiles = [-(-entry.weight.numel() // norm_tile) for entry in self.entries]
        self.n_partials = sum(self._norm_tiles)
        # Channel of each selected position, derived from `slot` by the kernels at every step; -1 before a selection.
        n_positions = sum(entry.selected for entry in self.entries if entry.slot is not None)
        self.channel = torch.full((n_positions,), -1, dtype=torch.int32, device=self.device)
        # Of each position in this step: lr / (1 - beta1**t) and 1 / sqrt(1 - beta2**t), where it has a channel.
        self.factors = torch.ones(2, n_positions, dtype=torch.float32, device=self.device)
        self._channel_tiles = [0 if e.slot is None else -(-e.channels // CHANNEL_TILE) for e in self.entries]
        numbers = range(len(self.entries))
        self.channel_tile_entry = self._to_device(_repeat(numbers, self._channel_tiles), torch.int32)
        self.norm_tile_entry = self._to_device(_repeat(numbers, self._norm_tiles), torch.int32)
        self.launches = self._plan_launches()
        self.fields = self._to_device(self._field_rows(), torch.int64)
        self.grad_ptrs = torch.zeros(len(self.entries), dtype=torch.int64, device=self.device)

    def launch_class(self, kind: str, folds: bool) -> str:
        """The class of its entries of one kind, with an accumulator or without, by which a card's constants go."""
        stochastic, alone = self.master_dtype == torch.bfloat16, kind != "whole" and not folds
        return cards.launch_class(kind, self.weight_dtype, stochastic=stochastic, alone=alone)

    def bind(self, grads: Sequence[Tensor | None]) -> None:
        """Take this step's gradients, one an entry: contiguous, the weight's shape (any view of it), dtype and device.

        None means absent. On CUDA the addresses are copied in stream order without waiting, from pinned memory that
        torch's allocator holds until the copy is done. Raises ValueError for a gradient of another kind.
        """
        if len(grads) != len(self.entries):
            raise ValueError(f"bind needs one gradient an entry: {len(self.entries)}, got {len(grads)}")
        addresses = [0] * len(grads)
        for number, grad in enumerate(grads):
            if grad is not None:
                address = addresses[number] = grad.data_ptr()
                good = grad.is_contiguous() and grad.numel() == self._numels[number]
                # Memory that was a good gradient in the last step lies on this device.
                if (
                    not good
                    or grad.dtype is not self.weight_dtype
                    or (address != self._addresses[number] and grad.device != self.device)
                ):
                    raise self._refused(number, grad)
        self.grads = list(grads)
        if addresses == self._addresses:
            return  # torch's allocator mostly gives the same memory again
        self._addresses = addresses
        self.grads_aligned = not any(address % ALIGN_BYTES for address in addresses)
        staged = torch.tensor(addresses, dtype=torch.int64, device="cpu", pin_memory=self.device.type == "cuda")
        self.grad_ptrs.copy_(staged, non_blocking=True)

    def _refused(self, number: int, grad: Tensor) -> ValueError:
        return ValueError(
            f"gradient {number} must be contiguous, {self._numels[number]} elements of {self.weight_dtype} on "
            f"{self.device}, got {tuple(grad.shape)} with strides {grad.stride()} of {grad.dtype} on {grad.device}"
        )

    def release(self) -> None:
        """Let go of the bound gradients so that `zero_grad` frees them; on CUDA it is reused in stream order."""
        self.grads = [None] * len(self.entries)

    def forget_channels(self) -> None:
        """After `slot` of an entry has become -1 throughout, as in a state from before its first selection."""
        self.channel.fill_(-1)

    def grad(self, number: int) -> Tensor | None:
        """The bound gradient of one entry as `[rows, cols]`."""
        grad = self.grads[number]
        return None if grad is None else grad.view(self.entries[number].shape)

    def _to_device(self, values: list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _plan_launches(self) -> list[Launch]:
        classes: dict[tuple[str, int, bool, bool], list[int]] = {}
        for number, entry in enumerate(self.entries):
            if self._tiles[number][2]:
                classes.setdefault(_launch_class(entry), []).append(number)
        launches = []
        for launch_class, numbers in classes.items():
            tiles = _repeat(numbers, [self._tiles[number][2] for number in numbers])
            launches.append(Launch(*launch_class, tuple(numbers), self._to_device(tiles, torch.int32)))
        return launches

    def _field_rows(self) -> list[int]:
        step_tile = [0] * len(self.entries)
        for launch in self.launches:
            firsts = _before([self._tiles[number][2] for number in launch.entries])
            for number, tile in zip(launch.entries, firsts, strict=True):
                step_tile[number] = tile
        norm_tile, channel_tile, values = _before(self._norm_tiles), _before(self._channel_tiles), []
        channel = _before([0 if entry.slot is None else entry.selected for entry in self.entries])
        for number, entry in enumerate(self.entries):
            tile_rows, parts, _ = self._tiles[number]
            pointers = (entry.weight, entry.master, entry.exp_avg, entry.exp_avg_sq, entry.start, entry.slot)
            values += [0 if tensor is None else tensor.data_ptr() for tensor in pointers]
            values += [tensor.data_ptr() + 4 * channel[number] for tensor in (self.channel, *self.factors)]
            values += [0 if entry.accumulator is None else entry.accumulator.data_ptr()]
            values += [*entry.extent, entry.selected, entry.group, tile_rows, parts, entry.channels]
            values += [step_tile[number], norm_tile[number], channel_tile[number], entry.stream]
        return values


def _repeat(numbers: Sequence[int], counts: Sequence[int]) -> list[int]:
    return [number for number, count in zip(numbers, counts, strict=True) for _ in range(count)]


def _before(counts: Sequence[int]) -> list[int]:
    """Exclusive running sum."""
    return list(accumulate(counts, initial=0))[: len(counts)]


def _step_tiles(entry: Entry, tile: int) -> tuple[int, int, int]:
    """Rows of a tile, parts of a row, number of tiles."""
    rows, cols = entry.extent
    if rows == 0 or cols == 0:
        return 1, 1, 0
    tile_rows, parts = max(1, tile // cols), -(-cols // tile)
    return tile_rows, parts, -(-rows // tile_rows) * parts


def _launch_class(entry: Entry) -> tuple[str, int, bool, bool]:
    cols, folds = entry.shape[1], entry.accumulator is not None
    block_cols = BLOCK_WIDTHS[-1]
    if entry.kind == "column" and folds and 4 * cols >= 3 * WIDE_BLOCK * -(-cols // WIDE_BLOCK):
        block_cols = WIDE_BLOCK
    elif entry.kind != "whole":
        block_cols = next((width for width in BLOCK_WIDTHS if width >= cols), block_cols)
    tensors, row = (entry.weight, entry.accumulator), cols if entry.kind != "whole" else entry.weight.numel()
    if entry.kind != "column":  # the compact state has its rows, too
        tensors += (entry.master, entry.exp_avg, entry.exp_avg_sq)
    even = row * entry.weight.element_size() % ALIGN_BYTES == 0
    even = even and all(tensor.data_ptr() % ALIGN_BYTES == 0 for tensor in tensors if tensor is not None)
    return entry.kind, block_cols, even, folds


def _check_entries(entries: Sequence[Entry]) -> None:
    for number, entry in enumerate(entries):
        if entry.kind not in KINDS:
            raise ValueError(f"entry {number}: kind must be one of {list(KINDS)}, got {entry.kind!r}")
        if entry.weight.dim() != 2 or entry.weight.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"entry {number}: weight must be [rows, cols] of {FLOAT_DTYPES}, got {tuple(entry.weight.shape)} of "
                f"{entry.weight.dtype}"
            )
        if (entry.kind == "whole") != (entry.slot is None):
            raise ValueError(f"entry {number}: slot belongs to column and row entries, and only to them")
        if entry.kind == "whole" and entry.accumulator is not None:
            raise ValueError(f"entry {number}: a whole parameter has no accumulator")
        if entry.kind == "whole" and entry.selected != 1:
            raise ValueError(f"entry {number}: a whole parameter has one start, got {entry.selected}")
        check_key(stream=entry.stream)
        compact = entry.compact_shape()
        bf16 = entry.weight.dtype == torch.bfloat16
        expected = {
            "master": (compact, (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)),
            "exp_avg": (compact, (torch.float32,)),
            "exp_avg_sq": (compact, (torch.float32,)),
            "start": ((entry.selected,), (torch.int32,)),
            "slot": ((entry.channels,), (torch.int32,)),
            "accumulator": (entry.shape, (torch.float32, torch.bfloat16)),
            "weight": (entry.shape, (entries[0].weight.dtype,)),
        }
        for name, (shape, dtypes) in expected.items():
            _check_tensor(f"entry {number}: {name}", getattr(entry, name), shape, dtypes, entries[0].weight.device)
    for name in ("master", "accumulator"):
        tensors = [getattr(entry, name) for entry in entries]
        dtypes = {tensor.dtype for tensor in tensors if tensor is not None}
        if len(dtypes) > 1:
            raise ValueError(f"the entries of a table share one {name} dtype, got {dtypes}")


def _check_tensor(
    name: str, tensor: Tensor | None, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> None:
    if tensor is None:
        return
    good = tuple(tensor.shape) == shape and tensor.dtype in dtypes and tensor.device == device
    if not good or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous {shape} of {dtypes} on {device}, got {tuple(tensor.shape)} with strides "
            f"{tensor.stride()} of {tensor.dtype} on {tensor.device}"
        )
