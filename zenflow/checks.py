"""What the optimizer is given, checked by name: parameters at construction, groups and gradients at every step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter

from zenflow.config import ZenFlowConfig
from zenflow.matrices import DTYPE_NAMES, Newcomer
from zenflow.param_record import ParamRecord

_HYPER = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")
_ABOVE = (float("inf"), 1.0, 1.0, float("inf"), float("inf"))


def check_parameters(newcomers: Sequence[Newcomer], device: torch.device, config: ZenFlowConfig) -> None:
    """Refuse by name what cannot be trained: foreign device, sparse, complex or non-float, overlapping memory, or none
    of its own; under `selected_masters: stochastic` every dtype but bf16."""
    for newcomer in newcomers:
        param, name = newcomer.param, newcomer.name
        if param.device.type == "meta":
            raise ValueError(f"{name} is on the meta device; give it memory before the optimizer is built")
        if isinstance(param, UninitializedParameter):
            raise ValueError(
                f"{name} has no shape yet; run a batch through its lazy module before the optimizer is built"
            )
        if param.requires_grad and _wraps_others(param):
            raise ValueError(
                f"{name} is a {type(param).__name__}; ZenFlow takes plain tensors, neither sharded nor quantized"
            )
        if param.layout != torch.strided:
            raise ValueError(f"{name} is sparse ({param.layout}); ZenFlow takes dense parameters only")
        if param.requires_grad and param.dtype not in DTYPE_NAMES:
            allowed = ", ".join(sorted(DTYPE_NAMES.values()))
            raise ValueError(f"{name} has dtype {param.dtype}; allowed are {allowed}")
        if param.requires_grad and param.dtype != torch.bfloat16 and config.selected_masters == "stochastic":
            raise ValueError(f"{name} has dtype {param.dtype}; allowed under selected_masters='stochastic' is bfloat16")
        if param.device != device:
            raise ValueError(f"{name} is on {param.device}, the first parameter on {device}; all must be on one device")
    _check_overlap([newcomer for newcomer in newcomers if not _wraps_others(newcomer.param)])


def _wraps_others(param: Tensor) -> bool:
    """Whether it has no memory of its own, but other tensors in it, as a `DTensor` of FSDP has."""
    return hasattr(param, "__tensor_flatten__")


def _check_overlap(newcomers: Sequence[Newcomer]) -> None:
    spans = []
    for newcomer in newcomers:
        param = newcomer.param
        if param.numel():
            extent = 1 + sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True))
            spans.append((param.data_ptr(), param.data_ptr() + extent * param.element_size(), newcomer))
            if extent < param.numel():
                shape = tuple(param.shape)
                raise ValueError(f"{newcomer.name} is an expanded view of shape {shape}; give it memory of its own")
    spans.sort(key=lambda span: span[0])
    for (_, stop, one), (start, _, other) in zip(spans, spans[1:], strict=False):
        if start < stop:
            raise ValueError(
                f"{one.name} and {other.name} are distinct Parameters over the same or interleaved memory; "
                "pass one Parameter for tied weights, or give each its own storage"
            )


def group_hyper(group: dict) -> tuple[float, float, float, float, float]:
    """A param group's lr, beta1, beta2, eps and weight decay as float64; ValueError for one that cannot be used."""
    lr = group.get("lr")
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise ValueError(f"lr is a tensor on {lr.device}; allowed is a number or a tensor on the CPU")
    try:
        beta1, beta2 = group["betas"]
        given = (lr, beta1, beta2, group["eps"], group["weight_decay"])
        values = tuple(float(value) for value in given)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        found = {name: group.get(name) for name in ("lr", "betas", "eps", "weight_decay")}
        raise ValueError(f"a param group has {found}; allowed are numbers, and a pair of them for betas") from error
    for name, value, above in zip(_HYPER, values, _ABOVE, strict=True):
        if not 0 <= value < above:
            raise ValueError(f"{name} is {value}; allowed is 0 <= {name} < {above:g}")
    return values


def has_gradient(param: Tensor) -> bool:
    """Whether a parameter takes part in a step: it has a gradient and is not frozen."""
    return param.requires_grad and param.grad is not None


def usable_gradient(record: ParamRecord) -> Tensor | None:
    """The gradient as the kernels read it (dense, contiguous, the weight's shape and dtype), or None if there is none.

    ValueError for one of another kind.
    """
    param = record.param
    grad = param.grad
    if grad is None or not param.requires_grad:
        return None
    if grad.layout != torch.strided:
        raise ValueError(f"{record.name} has a sparse gradient ({grad.layout}); ZenFlow takes dense gradients only")
    if grad.dtype is not record.dtype or grad.device != record.device or grad.shape != record.shape:
        raise ValueError(
            f"{record.name} has a gradient of {grad.dtype} {tuple(grad.shape)} on {grad.device}; "
            f"allowed is {record.dtype} {tuple(record.shape)} on {record.device}"
        )
    return grad if grad.is_contiguous() else grad.contiguous()
