"""Where a parameter lives: its flat storage on the device, its arenas on the host, its compact selected state.

`SegmentStorage` holds one segment on both sides, as torch tensors over the same bytes that the worker maps.
`ParamRecord` is one parameter in it (or a parameter that is selected whole and needs none of it).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from zenflow_kernels.table import Entry

from zenflow.config import ZenFlowConfig
from zenflow.driver import stream_words
from zenflow.geometry import Matrix, Segment, lay_out
from zenflow.ring import SegmentMemory

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Newcomer:
    """A parameter that is to be laid out, with the index of its param group and its name for messages."""

    param: Parameter
    group: int
    name: str
    number: int  # among the optimizer's parameters, in their order


def matrix_shape(param: Tensor) -> tuple[int, int]:
    """`[shape[0], prod(shape[1:])]`; parameters with fewer than two dimensions are one row."""
    if param.dim() < 2:
        return 1, param.numel()
    return param.shape[0], param[0].numel() if param.shape[0] else 0


def count_channels(config: ZenFlowConfig, param: Tensor) -> int:
    """How many channels a parameter matrix has: its columns or its rows, as `channel_dim` says."""
    rows, cols = matrix_shape(param)
    return cols if config.channel_dim == "column" else rows


def count_selected(topk_ratio: float, channels: int) -> int:
    """How many of a matrix's channels are selected: 0 if k = 0, else `max(1, round(k * channels))`."""
    return 0 if topk_ratio == 0 else min(channels, max(1, round(topk_ratio * channels)))


def is_deferred(config: ZenFlowConfig, param: Tensor) -> bool:
    """Whether any of the parameter's channels is left to the CPU optimizer."""
    if param.dim() < 2 or param.numel() < max(1, config.min_deferred_numel):
        return False
    channels = count_channels(config, param)
    return count_selected(config.topk_ratio, channels) < channels


@dataclass(eq=False)
class ParamRecord:
    """One laid-out parameter.

    `weight` is `[rows, cols]` over the parameter's own memory. `master`, `exp_avg`, `exp_avg_sq` are the compact fp32
    state of the selected channels (`[rows, n]` for columns, `[n, cols]` for rows, everything if selected whole) and
    `start` their t less the device's advance count. `selected` are their indices, ascending, on the host. Under
    `selected_masters: stochastic` their master is a bf16 copy of their weights, which an upload overwrites; if selected
    whole, it is the weight itself.
    """

    param: Parameter
    name: str
    group: int
    index: int  # in StepControl's arrays
    kind: str  # "column" | "row" | "whole"
    weight: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    start: Tensor
    stream: int  # of the draws that round its weights
    slot: Tensor | None = None
    accumulator: Tensor | None = None
    storage: SegmentStorage | None = None
    matrix: Matrix | None = None
    selected: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64, device="cpu"))
    owned: bool = True  # False until the first selection
    untouched: bool = False  # the worker's master is the weight itself, its moments and t are zero
    version: int = 0  # the parameter's autograd version when its bits were last known
    # The weight's, at hand for what looks through all parameters in every step.
    address: int = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.address, self.dtype, self.device = self.weight.data_ptr(), self.weight.dtype, self.weight.device

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else has moved or written the parameter since its bits were last known."""
        return self.param.data_ptr() != self.address or self.param._version != self.version

    @property
    def n_selected(self) -> int:
        return self.start.numel()

    @property
    def compact(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments in the worker's arena, `[rows, cols]`, entries of selected channels being scratch."""
        assert self.storage is not None and self.matrix is not None
        first, last = self.matrix.offset, self.matrix.offset + self.matrix.numel
        return tuple(flat[first:last].view(self.weight.shape) for flat in self.storage.state)  # type: ignore[return-value]

    @property
    def host_step(self) -> Tensor:
        """AdamW updates that each channel has received from the worker, int32 `[channels]`."""
        assert self.storage is not None and self.matrix is not None
        first = self.matrix.step_offset
        return self.storage.channel_step[first : first + self.matrix.channels]

    def host_shadow(self, turn: int) -> Tensor:
        """What an upload of a window with the records of `turn` would write, `[rows, cols]` in the weight's dtype."""
        assert self.storage is not None and self.matrix is not None
        first, last = self.matrix.offset, self.matrix.offset + self.matrix.numel
        return self.storage.shadow(turn)[first:last].view(self.weight.shape)

    @property
    def host_shadows(self) -> list[Tensor]:
        """The one that there is, or two."""
        return [self.host_shadow(turn) for turn in range(len(self.storage.shadows))]

    def lane(self, turn: int, step: int) -> Tensor:
        """Where the ring keeps its raw gradient of one step, `[rows, cols]` on the host (`accumulate_on: host`)."""
        assert self.storage is not None and self.matrix is not None
        first, last = self.matrix.offset, self.matrix.offset + self.matrix.numel
        return self.storage.lane(turn, step)[first:last].view(self.weight.shape)

    def install_owners(self, selected: Tensor, on_device: Tensor, start: Tensor, *, owned: bool = True) -> None:
        """From now on the GPU owns the channels `selected`, whose state lies in the compact one in that order.

        selected: int64 `[n]`, ascending, on the host; on_device: the same on the device; start: their t less the
        device's advance count, int `[n]`. `owned=False`, with no channel: the first selection is still to come.
        """
        self.slot.fill_(-1)
        if selected.numel():
            position = torch.arange(selected.numel(), dtype=torch.int32, device=self.slot.device)
            self.slot.index_copy_(0, on_device, position)
            self.start.copy_(start)
        self.selected, self.owned, self.untouched = selected, owned, False

    def entry(self) -> Entry:
        """The record as the grouped kernels see it."""
        return Entry(
            self.weight, self.kind, self.group,
            self.master, self.exp_avg, self.exp_avg_sq,
            self.start, self.slot, self.accumulator, self.stream,
        )  # fmt: skip


def tell_autograd(records: Iterable[ParamRecord]) -> None:
    """These weights change now: a graph that still needs the old ones raises, as after any update in place."""
    changed = list(records)
    torch.autograd.graph.increment_version([record.param for record in changed])
    for record in changed:
        record.version += 1


class Pins:
    """Page-locks host ranges for the device's copy engines; ranges are whole pages inside their own mappings."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._owner = os.getpid()
        self._addresses: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """RuntimeError with the bytes asked for if the host does not allow it."""
        if self._device is None or tensor.numel() == 0:
            return
        first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(first, stop - first, 0))
        if code != 0:
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # CUDA keeps the error for whoever asks next: ask
            raise RuntimeError(
                f"cudaHostRegister could not pin {stop - first:,} bytes of host memory (CUDA error {code}); "
                "the limit on locked memory (`ulimit -l`) or the host's free memory is too low"
            )
        self._addresses.append(first)

    def release(self) -> None:
        """Unpin everything, once the device has finished its copies; nothing in a forked copy of the owner."""
        if self._addresses and os.getpid() == self._owner:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                for address in self._addresses:
                    torch.cuda.cudart().cudaHostUnregister(address)
        self._addresses = []


class SegmentStorage:
    """One segment: flat weights and accumulator on `device`, and torch views of its shared memory.

    cohort: of all its matrices, see `window.py`.

    `weights` `[numel]` and `accumulator` `[numel]` (None where the worker sums the gradients) are on the device; `ring`
    `[lanes * numel]` and `shadows` `[numel]` are their counterparts on the host, `state` the worker's master and
    moments, fp32 `[numel]` each, `channel_step` int32 `[n_channels]`. There is one shadow, for fp32 weights the master
    itself, or two by turn where results are predicted; `shows_prediction`: some that are visible may be. `logs` and
    `slots` are by turn, `slots` by bucket too.
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
        pins.add(self.state[0] if memory.shadow is None else torch.from_numpy(memory.shadow))
        self.logs = [torch.from_numpy(memory.slot_record(turn, 0).device_log) for turn in (0, 1)]
        self.slots = [[SlotWord(memory, turn, bucket.index, device) for bucket in segment.buckets] for turn in (0, 1)]
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

    def close(self) -> None:
        """Unpin, give the shared memory back and drop every view of it; idempotent."""
        self._free()
        empty = torch.empty(0, device="cpu")
        self.ring = self.channel_step = empty
        self.state, self.shadows = (empty, empty, empty), [empty]
        self.logs, self.slots = [], []


def _free(pins: Pins, memory: SegmentMemory) -> None:
    pins.release()
    memory.close()


class SlotWord:
    """A slot's `ready` word, int64 `[1]`, and its address on the device where a stream can write it."""

    def __init__(self, memory: SegmentMemory, turn: int, bucket: int, device: torch.device) -> None:
        self.ready = torch.from_numpy(memory.slot_record(turn, bucket).ready)
        words = stream_words(device)
        self.address = 0 if words is None else words.device_address(self.ready.data_ptr())


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN and signed zeros compare as what they are."""
    return tensor.view(_BITS[tensor.element_size()])


def view_of_its_own(flat: Tensor, shape: torch.Size) -> Tensor:
    """The same memory as `flat` in a storage of its own: tools that save models take one storage for one tensor."""
    return torch.from_dlpack(flat.view(-1)).view(shape)


def new_segment(
    config: ZenFlowConfig, index: int, dtype: torch.dtype, newcomers: list[Newcomer], n_groups: int
) -> Segment:
    """Lay out deferred parameters of one dtype, in reverse registration order: the order in which backward ends."""
    on_host, ring_dtype = config.accumulate_on == "host", config.ring_dtype
    if on_host:
        ring_dtype = DTYPE_NAMES[dtype]
    elif ring_dtype == "auto":
        ring_dtype = "bfloat16" if dtype == torch.bfloat16 else "float32"
    return lay_out(
        index,
        [(*matrix_shape(newcomer.param), newcomer.group) for newcomer in reversed(newcomers)],
        channel_dim=config.channel_dim,
        weight_dtype=DTYPE_NAMES[dtype],
        ring_dtype=ring_dtype,
        max_steps=config.update_interval,
        n_groups=n_groups,
        bucket_bytes=config.bucket_bytes,
        lanes=2 * config.update_interval if on_host else 1,
        predicted=config.predicts,
    )


def record_whole(newcomer: Newcomer, index: int, config: ZenFlowConfig) -> ParamRecord:
    """A parameter that is selected whole: its state is as large as itself, with one t."""
    param = newcomer.param
    if not param.data.is_contiguous():
        param.data = param.data.contiguous()
    weight = param.data.view(matrix_shape(param))
    master = weight if config.selected_masters == "stochastic" else weight.to(torch.float32, copy=True)
    exp_avg, exp_avg_sq = (torch.zeros_like(weight, dtype=torch.float32) for _ in range(2))
    start = torch.zeros(1, dtype=torch.int32, device=param.device)
    return ParamRecord(
        param, newcomer.name, newcomer.group, index, "whole",
        weight, master, exp_avg, exp_avg_sq, start, newcomer.number, version=param._version,
    )  # fmt: skip


def record_deferred(
    newcomer: Newcomer, index: int, storage: SegmentStorage, number: int, config: ZenFlowConfig
) -> ParamRecord:
    """Move a parameter into matrix `number` of the segment's flat storage and give it room for its selected state."""
    param, matrix = newcomer.param, storage.segment.matrices[number]
    first, last = matrix.offset, matrix.offset + matrix.numel
    flat = storage.weights[first:last]
    flat.view(param.shape).copy_(param.data)
    param.data = view_of_its_own(flat, param.shape)
    n = count_selected(config.topk_ratio, matrix.channels)
    compact = (matrix.rows, n) if matrix.channel_dim == "column" else (n, matrix.cols)
    masters = torch.bfloat16 if config.selected_masters == "stochastic" else torch.float32
    master, exp_avg, exp_avg_sq = (
        torch.zeros(compact, dtype=dtype, device=param.device) for dtype in (masters, torch.float32, torch.float32)
    )
    return ParamRecord(
        param, newcomer.name, newcomer.group, index, matrix.channel_dim,
        flat.view(matrix.rows, matrix.cols), master, exp_avg, exp_avg_sq,
        start=torch.zeros(n, dtype=torch.int32, device=param.device), stream=newcomer.number,
        slot=torch.full((matrix.channels,), -1, dtype=torch.int32, device=param.device),
        accumulator=None if storage.accumulator is None else storage.accumulator[first:last].view(matrix.rows, -1),
        storage=storage, matrix=matrix, owned=n == 0, untouched=True, version=param._version,
    )  # fmt: skip
