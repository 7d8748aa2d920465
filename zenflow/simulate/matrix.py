"""One parameter of a simulation: who owns which channel, its window, and the arithmetic of its updates.

The arithmetic has the engine's written order of single fp32 operations (`zenflow_kernels.numerics`), so that a rule
which the engine has gives the engine's bits. It differs in what it takes: the square that the second moment learns from
is given apart from the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from zenflow_kernels.importance import channel_scores
from zenflow_kernels.numerics import round_to_fp32
from zenflow_kernels.topk import select_channels

from zenflow.bias import bias_table
from zenflow.matrices import count_channels, count_selected, is_deferred, matrix_shape
from zenflow.simulate.rule import Rule

LARGEST = torch.finfo(torch.float32).max  # what the mean of a sum that overflows counts as
RING_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
STATE = ("master", "exp_avg", "exp_avg_sq", "exponents", "selected", "owned", "begun", "left", "pending", "age")
WINDOW = ("total", "counted", "grads", "seen")  # of the running window


class Hyper(NamedTuple):
    """A param group's settings at one step."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, group: dict[str, Any]) -> Hyper:
        """Those of one of torch's `param_groups`, as they are now."""
        return cls(float(group["lr"]), *group["betas"], group["eps"], float(group["weight_decay"]))

    @property
    def decay(self) -> float:
        """What a step leaves of a weight."""
        return 1 - self.lr * self.weight_decay


@dataclass(eq=False)
class Matrix:
    """A parameter as `[rows, cols]`. Its state covers all channels; selected ones are updated in every step."""

    param: Parameter
    rule: Rule
    visible: Tensor  # the weight itself, seen as a matrix
    axis: int  # of the channels: 1 columns, 0 rows
    deferred: bool  # whether there are channels to defer
    master: Tensor  # fp32 [rows, cols], as both moments
    exp_avg: Tensor
    exp_avg_sq: Tensor
    exponents: Tensor  # int64 [2, channels]: of beta1 and beta2 in the bias corrections
    selected: Tensor  # int64 [n], ascending
    owned: bool  # whether its channels have owners; if not, the first finite gradient selects
    cohort: int = 0
    begun: bool = False  # whether its window has steps
    left: int = 0  # and how many are to come
    pending: Tensor | None = None  # a result that is not visible yet, in the weight's dtype
    age: int = 0  # steps since the end of the pending result's window
    total: Tensor | None = None  # the running window's sum of clipped gradients
    counted: list[Hyper] = field(default_factory=list)  # of its steps that were present and finite
    grads: list[Tensor] = field(default_factory=list)  # and their clipped gradients, where they have to be kept
    seen: list[Tensor] = field(default_factory=list)  # and the fp32 weights at which these were taken

    @classmethod
    def of(cls, param: Parameter, rule: Rule) -> Matrix:
        """With zero moments, and master and visible weight as they are. ValueError if it is not contiguous."""
        if not param.is_contiguous():
            raise ValueError(f"a parameter of shape {tuple(param.shape)} is not contiguous; allowed: contiguous ones")
        visible = param.detach().view(matrix_shape(param))
        channels, deferred = count_channels(rule.config, param), is_deferred(rule.config, param)
        master = visible.to(torch.float32, copy=True)
        return cls(
            param, rule, visible, 1 if rule.config.channel_dim == "column" else 0, deferred,
            master, torch.zeros_like(master), torch.zeros_like(master),
            exponents=torch.zeros(2, channels, dtype=torch.int64, device=param.device),
            selected=torch.arange(0 if deferred else channels, device=param.device),
            owned=not deferred or rule.config.topk_ratio == 0,
        )  # fmt: skip

    @property
    def rest(self) -> Tensor:
        """The deferred channels, int64, ascending."""
        marks = torch.ones(self.exponents.shape[1], dtype=torch.bool, device=self.selected.device)
        marks[self.selected] = False
        return marks.nonzero().flatten()

    def select(self, grad: Tensor) -> None:
        """New owners by the raw gradient `[rows, cols]`; state stays where it is, so nothing has to move."""
        config, kind = self.rule.config, "column" if self.axis else "row"
        wanted = count_selected(config.topk_ratio, self.exponents.shape[1])
        self.selected = select_channels(channel_scores(grad.contiguous(), kind, config.importance), wanted)
        self.owned = True

    def step(self, scaled: Tensor, hyper: Hyper) -> None:
        """Update the selected channels with the clipped fp32 gradient `[rows, cols]`, and fold the others."""
        if len(self.selected):
            grad = scaled.index_select(self.axis, self.selected)
            self._update(self.selected, grad, grad * grad, hyper, hyper.lr, hyper.decay)
        if not self.deferred:
            return
        total = scaled if self.total is None else self.total.float() + scaled
        self.total = total.to(self._ring_dtype)
        self.counted.append(hyper)
        if self.rule.keeps_steps:
            self.grads.append(scaled)
        if self.rule.delay_compensation:
            self.seen.append(self.visible.to(torch.float32, copy=True))

    @property
    def _ring_dtype(self) -> torch.dtype:
        config = self.rule.config
        if config.accumulate_on == "host":
            return torch.float32
        if config.ring_dtype == "auto":
            return torch.bfloat16 if self.visible.dtype == torch.bfloat16 else torch.float32
        return RING_DTYPES[config.ring_dtype]

    def show_masters(self, channels: Tensor) -> None:
        """Make the rounded masters of these channels visible."""
        self._show(channels, self.master)

    def show_pending(self) -> None:
        """Make the result that is on its way visible, if there is one."""
        if self.pending is not None:
            self._show(self.rest, self.pending)
            self.pending = None

    def _show(self, channels: Tensor, values: Tensor) -> None:
        shown = values.index_select(self.axis, channels).to(self.visible.dtype)
        self.visible.index_copy_(self.axis, channels, shown)

    def end_window(self, *, late: bool) -> None:
        """Move the deferred channels; `late`: visible later, else now. An older result becomes visible first."""
        self.begun = False
        self.show_pending()
        rest, before, moved = self.rest, self.master.clone() if late else self.master, bool(self.counted)
        if moved and self.rule.config.deferred_rule == "replay":
            for hyper, grad in zip(self.counted, self._gradients(rest), strict=True):
                self._update(rest, grad, grad * grad, hyper, hyper.lr, hyper.decay)
        elif moved:
            self._update_once(rest)
        self.total, self.counted, self.grads, self.seen = None, [], [], []
        if not late:
            self.show_masters(rest)
            return
        coming, ahead = self.master, self.rule.config.weight_prediction
        if moved and ahead:
            (ahead,) = round_to_fp32([ahead])
            coming = coming + (coming - before) * ahead
        self.pending, self.age = coming.to(self.visible.dtype, copy=True), 0

    def _gradients(self, rest: Tensor) -> Iterator[Tensor]:
        """The window's gradients of the deferred channels, step by step, compensated against the master as it is when
        each is taken: under `replay` that of the update before."""
        factor = self.rule.delay_compensation
        for place, grad in enumerate(self.grads):
            grad = grad.index_select(self.axis, rest)
            if factor:
                away = self.master.index_select(self.axis, rest) - self.seen[place].index_select(self.axis, rest)
                grad = grad + grad * grad * away * factor
            yield grad

    def _update_once(self, rest: Tensor) -> None:
        n, last, scale = len(self.counted), self.counted[-1], self.rule.config.deferred_lr_scale
        assert self.total is not None
        steps = self.master.new_full((), n)  # torch multiplies by the reciprocal of a number, on a GPU
        if self.rule.keeps_steps:
            grads = list(self._gradients(rest))
            grad, square = _sum(grads) / steps, _sum([x * x for x in grads]) / steps
        if not self.rule.delay_compensation:
            grad = (self.total.float() / steps).clamp(-LARGEST, LARGEST).index_select(self.axis, rest)
        if self.rule.second_moment == "mean":
            square = grad * grad
        factor = {"linear": n, "none": 1}.get(scale, scale)
        decay = last.decay
        if scale == "linear":
            decay = 1.0
            for hyper in self.counted:
                decay *= hyper.decay
        per_window = {"none": (1, 1), "first": (n, 1), "both": (n, n)}[self.rule.betas_per_window]
        self._update(rest, grad, square, last, last.lr * factor, decay, per_window)

    def _update(
        self, channels: Tensor, grad: Tensor, square: Tensor, hyper: Hyper, lr: float, decay: float,
        powers: tuple[int, int] = (1, 1),
    ) -> None:  # fmt: skip
        """One AdamW update of some channels; the moments decay by beta1 and beta2 to these powers."""
        self.exponents[:, channels] += self.exponents.new_tensor(powers)[:, None]
        first, second = self._corrections(channels, hyper)
        beta1, beta2 = hyper.beta1 ** powers[0], hyper.beta2 ** powers[1]
        b1, other1, b2, other2, eps, kept, rate = round_to_fp32(
            [beta1, 1 - beta1, beta2, 1 - beta2, hyper.eps, decay, lr]
        )
        p, m, v = (x.index_select(self.axis, channels) for x in (self.master, self.exp_avg, self.exp_avg_sq))
        m.mul_(b1).add_(grad * other1)
        v.mul_(b2).add_(square * other2)
        root = v.double().sqrt_().float()  # torch's fp32 square root is not correctly rounded on the CPU
        p.mul_(kept).sub_(m / (root * second + eps) * (first * rate))
        for whole, part in ((self.master, p), (self.exp_avg, m), (self.exp_avg_sq, v)):
            whole.index_copy_(self.axis, channels, part)

    def _corrections(self, channels: Tensor, hyper: Hyper) -> tuple[Tensor, Tensor]:
        """Both factors of each channel, broadcast against `[rows, cols]`."""
        found = self.exponents[:, channels]
        table = torch.from_numpy(bias_table(hyper.beta1, hyper.beta2, int(found.max()) if found.numel() else 0).copy())
        rows = found.clamp(max=len(table) - 1)
        table = table.to(rows.device)
        shape = (1, -1) if self.axis else (-1, 1)
        return table[rows[0], 0].view(shape), table[rows[1], 1].view(shape)

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on, beside the weight; not copied."""
        return {name: getattr(self, name) for name in (*STATE, *WINDOW)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up a state of the same shapes, moved to the weight's device."""
        for name in (*STATE, *WINDOW):
            setattr(self, name, _moved(state[name], self.visible.device))
        self.counted = [Hyper(*values) for values in self.counted]


def _sum(parts: list[Tensor]) -> Tensor:
    """One after another, as the engine's fold does."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device, copy=True) if isinstance(value, Tensor) else value
