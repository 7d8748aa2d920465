"""Tables over random parameters, every tensor inside poisoned memory with canaries on both sides."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, FOLD_OVERWRITE, StepControl
from zenflow_kernels.numerics import pack_hyper
from zenflow_kernels.table import Entry, Table

from zenflow.bias import bias_table

MARGIN = 64  # elements before and after; a multiple of every vector width, so that alignment is the slot's own
HYPERS = [(1e-3, 0.9, 0.999, 1e-8, 0.01), (3e-2, 0.8, 0.95, 1e-6, 0.1)]  # lr, beta1, beta2, eps, weight decay


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers: NaN equals NaN, whatever its payload, and 0.0 differs from -0.0."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    tensor = tensor.detach().cpu().contiguous()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return tensor.view(integer)


class Padded:
    """Tensors carved out of larger memory whose margins must never change."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.slabs: list[tuple[Tensor, int, int]] = []

    def hold(self, values: Tensor, shift: int = 0) -> Tensor:
        """A contiguous copy on the device between two margins; `shift` elements off the alignment."""
        fill = float("nan") if values.is_floating_point() else -7
        slab = torch.full((2 * MARGIN + shift + values.numel(),), fill, dtype=values.dtype, device=self.device)
        start = MARGIN + shift
        slab[start : start + values.numel()] = values.reshape(-1).to(self.device)
        self.slabs.append((slab, start, start + values.numel()))
        return slab[start : start + values.numel()].view(values.shape)

    def check(self) -> None:
        """Fail if anything outside the tensors was written."""
        for slab, start, stop in self.slabs:
            for margin in (slab[:start], slab[stop:]):
                good = torch.isnan(margin) if slab.is_floating_point() else margin == -7
                assert bool(good.all()), "a canary was overwritten"


@dataclass(frozen=True)
class Spec:
    """What one parameter of a test table looks like."""

    kind: str
    rows: int
    cols: int
    selected: int = 1
    group: int = 0
    shift: int = 0  # elements by which weight, gradient and accumulator miss their alignment
    folds: bool = True  # has an accumulator (unless whole)
    stochastic: bool = False  # its master is the weight in bf16, compact; of a whole parameter the weight itself

    def __str__(self) -> str:
        return f"{self.kind}-{self.rows}x{self.cols}-n{self.selected}"


def values(shape: tuple[int, ...], generator: torch.Generator, *, spread: float = 4.0) -> Tensor:
    """fp32 with magnitudes over many binades, some exact zeros and negative zeros."""
    x = torch.randn(shape, generator=generator) * torch.exp(spread * torch.randn(shape, generator=generator))
    pick = torch.rand(shape, generator=generator)
    return torch.where(pick < 0.02, 0.0, torch.where(pick < 0.04, -0.0, x))


def make_entry(spec: Spec, dtype: torch.dtype, acc_dtype: torch.dtype, pad: Padded, gen: torch.Generator) -> Entry:
    """An entry with random state; `slot` is a random injection, not the ascending one."""
    shape = (spec.rows, spec.cols)
    whole = spec.kind == "whole"
    channels = {"column": spec.cols, "row": spec.rows, "whole": 1}[spec.kind]
    n = 1 if whole else spec.selected
    compact = {"column": (spec.rows, n), "row": (n, spec.cols), "whole": shape}[spec.kind]
    slot = torch.full((channels,), -1, dtype=torch.int32)
    slot[torch.randperm(channels, generator=gen)[:n]] = torch.arange(n, dtype=torch.int32)
    weight = pad.hold(values(shape, gen).to(dtype), spec.shift)
    master = values(compact, gen).to(torch.bfloat16 if spec.stochastic else torch.float32)
    return Entry(
        weight=weight,
        kind=spec.kind,
        group=spec.group,
        master=weight if whole and spec.stochastic else pad.hold(master),
        exp_avg=pad.hold(values(compact, gen)),
        exp_avg_sq=pad.hold(values(compact, gen).square()),
        start=pad.hold(torch.randint(0, 400, (n,), generator=gen, dtype=torch.int32)),
        slot=None if whole else pad.hold(slot),
        accumulator=None if whole or not spec.folds else pad.hold(values(shape, gen).to(acc_dtype), spec.shift),
        stream=int(torch.randint(0, 2**32, (1,), generator=gen)) if spec.stochastic else 0,
    )


@dataclass
class World:
    """A table with everything a step needs; `twin()` is an independent copy on the CPU for the reference."""

    table: Table
    control: StepControl
    hyper: Tensor
    bias: Tensor
    pad: Padded

    @property
    def partials(self) -> Tensor:
        return torch.full((self.table.n_partials,), float("nan"), dtype=torch.float64, device=self.hyper.device)

    def state(self) -> dict[str, Tensor]:
        """Every tensor a step may write, by name."""
        names = ("weight", "master", "exp_avg", "exp_avg_sq", "start", "slot", "accumulator")
        entries = enumerate(self.table.entries)
        tensors = {f"{number}.{name}": getattr(entry, name) for number, entry in entries for name in names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def twin(self) -> World:
        pad = Padded("cpu")
        entries = []
        for entry in self.table.entries:
            fields = {name: value for name, value in vars(entry).items() if isinstance(value, Tensor)}
            held = {name: pad.hold(value.cpu()) for name, value in fields.items()}
            if entry.master is entry.weight:
                held["master"] = held["weight"]
            entries.append(replace(entry, **held))
        control = StepControl(**{name: tensor.cpu().clone() for name, tensor in vars(self.control).items()})
        table = Table(entries, self.table.first, step_tile=self.table.step_tile, norm_tile=self.table.norm_tile)
        table.bind([None if grad is None else grad.cpu() for grad in self.table.grads])
        return World(table, control, self.hyper.cpu(), self.bias.cpu(), pad)


def make_world(
    specs: list[Spec],
    device: str,
    dtype: torch.dtype,
    *,
    acc_dtype: torch.dtype = torch.float32,
    first: int = 2,
    seed: int = 0,
    step_tile: int = 256,
    norm_tile: int = 64,
) -> World:
    """Entries numbered from `first` among `first + len + 1` parameters, with a control that has seen no step."""
    gen = torch.Generator().manual_seed(seed)
    pad = Padded(device)
    entries = [make_entry(spec, dtype, acc_dtype, pad, gen) for spec in specs]
    table = Table(entries, first, step_tile=step_tile, norm_tile=norm_tile)
    control = StepControl.create(first + len(specs) + 1, 4, device)
    hyper = torch.tensor([pack_hyper(*row) for row in HYPERS], device=device)
    bias = torch.stack([torch.from_numpy(bias_table(row[1], row[2], 300).copy()[:257]) for row in HYPERS])
    table.bind([pad.hold(values((spec.rows, spec.cols), gen).to(dtype), spec.shift) for spec in specs])
    return World(table, control, hyper, bias.to(device), pad)


def decide(world: World, offset: int, scales: tuple[float, float] = (1.0, 0.37)) -> None:
    """A decision made by hand: the three folds in turn, beginning at `offset`, and some advances."""
    fold = [(offset + number) % 3 for number in range(world.control.fold.numel())]
    assert {FOLD_NONE, FOLD_OVERWRITE, FOLD_ADD} == {0, 1, 2}
    world.control.fold.copy_(torch.tensor(fold))
    world.control.advance.copy_(torch.arange(len(fold)) * 40)
    world.control.inv_scale.fill_(scales[0])
    world.control.clip.fill_(scales[1])


def assert_equal(world: World, twin: World) -> None:
    """Every tensor of both, bit for bit, and nothing written beside them."""
    state, expected = world.state(), twin.state()
    for name in state:
        assert torch.equal(bits(state[name]), bits(expected[name])), name
    world.pad.check()
    twin.pad.check()
