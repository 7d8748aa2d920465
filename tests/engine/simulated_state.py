"""One parameter of the simulation: the state of all its channels, whoever owns them, and AdamW in plain torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from zenflow.bias import bias_table

HIGHEST_STEP = 4096


def f32(value: float | Tensor) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64).to(torch.float32)


@dataclass
class Group:
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @classmethod
    def of(cls, param_group: dict[str, Any]) -> Group:
        lr, decay = float(param_group["lr"]), float(param_group["weight_decay"])
        return cls(lr, tuple(param_group["betas"]), param_group["eps"], decay)


@dataclass
class State:
    """One parameter as `[rows, cols]`: fp32 state of every channel, whoever owns it, and the weight that is visible."""

    visible: Tensor  # weight dtype
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    step: Tensor  # int64 [channels]
    selected: Tensor  # bool [channels]
    row_channels: bool
    whole: bool
    owned: bool  # a first selection was made
    accumulator: Tensor | None = None
    counted: list[Group] = field(default_factory=list)  # the group's settings at each counted step of this window
    kept: list[Tensor] = field(default_factory=list)  # and the clipped gradients of these steps, for `replay`
    pending: Tensor | None = None  # a finished result that is not visible yet
    age: int = 0  # steps since the last step of its window
    cohort: int | None = None  # under `stagger`, once it has been laid out
    scores: Tensor | None = None  # fp32 [channels], over this window or all steps so far

    @classmethod
    def of(cls, weight: Tensor, row_channels: bool, whole: bool) -> State:
        weight = weight.detach().cpu().clone()
        rows = weight.shape[0] if weight.dim() >= 2 else 1
        flat = weight.reshape(rows, math.prod(weight.shape[1:]) if weight.dim() >= 2 else weight.numel())
        channels = flat.shape[0] if row_channels else flat.shape[1]
        zeros = torch.zeros_like(flat, dtype=torch.float32)
        return cls(
            flat,
            flat.float(),
            zeros.clone(),
            zeros.clone(),
            torch.zeros(channels, dtype=torch.int64),
            torch.full((channels,), whole),
            row_channels,
            whole,
            owned=whole,
        )

    def per_channel(self, values: Tensor) -> Tensor:
        return values[:, None] if self.row_channels else values[None, :]

    def update(self, channels: Tensor, grad: Tensor, group: Group, lr: float, decay: float) -> None:
        """One AdamW update of the channels where the mask is set, in the written order; `grad` is fp32 [rows, cols]."""
        self.step[channels] += 1
        beta1, beta2 = group.betas
        table = torch.from_numpy(bias_table(beta1, beta2, HIGHEST_STEP).copy())
        factors = table[self.step.clamp(max=len(table) - 1)]
        first, second = self.per_channel(factors[:, 0]), self.per_channel(factors[:, 1])
        exp_avg = f32(beta1) * self.exp_avg + f32(1 - beta1) * grad
        exp_avg_sq = f32(beta2) * self.exp_avg_sq + f32(1 - beta2) * (grad * grad)
        root = exp_avg_sq.double().sqrt().float()
        master = self.master * f32(decay)
        master = master - (f32(lr) * first) * (exp_avg / (root * second + f32(group.eps)))
        mask = self.per_channel(channels)
        self.master = torch.where(mask, master, self.master)
        self.exp_avg = torch.where(mask, exp_avg, self.exp_avg)
        self.exp_avg_sq = torch.where(mask, exp_avg_sq, self.exp_avg_sq)

    def show(self, channels: Tensor, values: Tensor) -> None:
        self.visible = torch.where(self.per_channel(channels), values, self.visible)

    def show_masters(self, channels: Tensor) -> None:
        self.show(channels, self.master.to(self.visible.dtype))
