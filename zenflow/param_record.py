"""One parameter: its weights, the compact state of its selected channels, and its part of a segment."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter
from zenflow_kernels.table import Entry

from zenflow.config import ZenFlowConfig
from zenflow.geometry import Matrix
from zenflow.matrices import Newcomer, count_selected, matrix_shape
from zenflow.storage import SegmentStorage

_BITS = {2: torch.int16, 4: torch.int32}


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
    shape: torch.Size = field(init=False)
    dtype: torch.dtype = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.address, self.dtype, self.device = self.weight.data_ptr(), self.weight.dtype, self.weight.device
        self.shape = self.param.shape

    @property
    def is_foreign(self) -> bool:
        """Whether somebody else has moved, transposed or written the parameter since its bits were last known."""
        param = self.param
        return param.data_ptr() != self.address or param._version != self.version or not param.is_contiguous()

    @property
    def n_selected(self) -> int:
        """Channels that are selected, or will be by the first selection; 1 if selected whole."""
        return self.start.numel()

    @property
    def compact(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments of the selected channels, on the device."""
        return self.master, self.exp_avg, self.exp_avg_sq

    @property
    def host(self) -> tuple[Tensor, Tensor, Tensor]:
        """Master and moments in the worker's arena, `[rows, cols]`, entries of selected channels being scratch."""
        return tuple(map(self._own, self.storage.state))  # type: ignore[return-value]

    @property
    def host_step(self) -> Tensor:
        """AdamW updates that each channel has received from the worker, int32 `[channels]`."""
        assert self.storage is not None and self.matrix is not None
        first = self.matrix.step_offset
        return self.storage.channel_step[first : first + self.matrix.channels]

    def host_shadow(self, turn: int) -> Tensor:
        """What an upload of a window with the records of `turn` would write, `[rows, cols]` in the weight's dtype."""
        return self._own(self.storage.shadow(turn))

    @property
    def host_shadows(self) -> list[Tensor]:
        """The one that there is, or two."""
        return [self.host_shadow(turn) for turn in range(len(self.storage.shadows))]

    def lane(self, turn: int, step: int) -> Tensor:
        """Where the ring keeps its raw gradient of one step, `[rows, cols]` on the host (`accumulate_on: host`)."""
        return self._own(self.storage.lane(turn, step))

    def _own(self, flat: Tensor) -> Tensor:
        """Its part, `[rows, cols]`, of what is flat over its segment."""
        assert self.matrix is not None, f"{self.name} is selected whole and has no place in a segment"
        return flat[self.matrix.offset :][: self.matrix.numel].view(self.weight.shape)

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


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN and signed zeros compare as what they are."""
    return tensor.view(_BITS[tensor.element_size()])


def view_of_its_own(flat: Tensor, shape: torch.Size) -> Tensor:
    """The same memory as `flat` in a storage of its own: tools that save models take one storage for one tensor."""
    with torch.cuda.device_of(flat):  # dlpack exports from the current GPU alone
        return torch.from_dlpack(flat.view(-1)).view(shape)
