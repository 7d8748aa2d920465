"""Parameters as matrices of channels, before they have a place: which are deferred, how much is selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow.config import ZenFlowConfig

DTYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


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
