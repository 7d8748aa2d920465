"""What the optimizer is given, checked by name: parameters at construction, gradients and weights at every step.

Weights may be changed from outside at any time (`load_state_dict`, an EMA swap, surgery on a row). In-place changes
bump autograd's version of the Parameter, which the pipeline's own writes never do; then the masters follow the weights
wherever their bits differ from what the optimizer last wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from zenflow_kernels.fingerprint import row_fingerprints
from zenflow_kernels.gather import gather_channels

from zenflow.storage import DTYPE_NAMES, Newcomer, ParamRecord

if TYPE_CHECKING:
    from zenflow.pipeline import Pipeline

logger = logging.getLogger("zenflow")

_BITS = {2: torch.int16, 4: torch.int32}
_HYPER = ("lr", "betas[0]", "betas[1]", "eps", "weight_decay")
_ABOVE = (float("inf"), 1.0, 1.0, float("inf"), float("inf"))


def check_parameters(newcomers: Sequence[Newcomer], device: torch.device) -> None:
    """Refuse by name what cannot be trained: foreign device, sparse, complex or non-float, overlapping memory."""
    for newcomer in newcomers:
        param, name = newcomer.param, newcomer.name
        if param.layout != torch.strided:
            raise ValueError(f"{name} is sparse ({param.layout}); ZenFlow takes dense parameters only")
        if param.dtype not in DTYPE_NAMES:
            allowed = ", ".join(sorted(DTYPE_NAMES.values()))
            raise ValueError(f"{name} has dtype {param.dtype}; allowed are {allowed}")
        if param.device != device:
            raise ValueError(f"{name} is on {param.device}, the first parameter on {device}; all must be on one device")
    _check_overlap(newcomers)


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
                f"{one.name} and {other.name} are distinct Parameters over the same memory; "
                "pass one Parameter for tied weights, or give each its own storage"
            )


def group_hyper(group: dict) -> tuple[float, float, float, float, float]:
    """A param group's lr, beta1, beta2, eps and weight decay as float64; ValueError for one that cannot be used."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.device.type != "cpu":
        raise ValueError(f"lr is a tensor on {lr.device}; allowed is a number or a tensor on the CPU")
    beta1, beta2 = group["betas"]
    values = float(lr), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"])
    for name, value, above in zip(_HYPER, values, _ABOVE, strict=True):
        if not 0 <= value < above:
            raise ValueError(f"{name} is {value}; allowed is 0 <= {name} < {above:g}")
    return values


def has_gradient(param: Tensor) -> bool:
    """Whether a parameter takes part in a step: it has a gradient and is not frozen."""
    return param.requires_grad and param.grad is not None


def usable_gradient(record: ParamRecord) -> Tensor | None:
    """The gradient as the kernels read it (dense, contiguous, the weight's dtype), or None if there is none.

    ValueError for one of another kind.
    """
    param = record.param
    if not has_gradient(param):
        return None
    grad = param.grad
    if grad.layout != torch.strided:
        raise ValueError(f"{record.name} has a sparse gradient ({grad.layout}); ZenFlow takes dense gradients only")
    if grad.dtype != record.weight.dtype or grad.device != record.weight.device:
        raise ValueError(
            f"{record.name} has a gradient of {grad.dtype} on {grad.device}; "
            f"allowed is {record.weight.dtype} on {record.weight.device}"
        )
    return grad if grad.is_contiguous() else grad.contiguous()


def adopt_outside_changes(pipeline: Pipeline, *, force: bool = False) -> None:
    """Bring masters and flat storage in line with weights that somebody else has written, replaced or moved.

    `force` compares every parameter, for edits that autograd cannot see (`.data`). ValueError names a parameter that
    changed dtype, device or shape.
    """
    pending = pipeline.pending_storages()
    for record in pipeline.records:
        param = record.param
        moved = param.data_ptr() != record.weight.data_ptr() or param.dtype != record.weight.dtype
        if moved or force or param._version != record.version:
            pipeline.wait_for_worker()
            changed = _move_back(record) if moved else None
            _follow_weights(record, changed, pending=record.storage in pending)
            record.version = param._version


def _move_back(record: ParamRecord) -> Tensor:
    """Copy the parameter's new memory over its old one; where the bits differ, bool `[rows, cols]`."""
    param, weight = record.param, record.weight
    if param.dtype != weight.dtype or param.device != weight.device or param.numel() != weight.numel():
        raise ValueError(
            f"{record.name} was {weight.dtype} on {weight.device} with {weight.numel()} elements when the optimizer "
            f"was built and is now {param.dtype} on {param.device} with {param.numel()}; "
            "build the optimizer after such changes"
        )
    with torch.no_grad():
        new = param.data.reshape(weight.shape)
        changed = bits(new) != bits(weight)
        weight.copy_(new)
        param.data = weight.view(param.shape)
    return changed


def _follow_weights(record: ParamRecord, changed: Tensor | None, pending: bool) -> None:
    """Masters follow the weights: where `changed`, or where that is unknown, where the bits show it.

    While a result is on its way (`pending`) the bits that are visible are neither the master's nor the shadow's; then
    each row's fingerprint tells. What was changed is also put into the result that is still to be uploaded.
    """
    if record.kind == "whole":
        _follow(record.master, record.weight)
        return
    if record.selected.numel():
        index = record.selected.to(record.weight.device)
        _follow(record.master, gather_channels(record.weight, index, record.kind, validate=False))
    master, shadow, weight = record.host[0], record.host_shadow, record.weight.cpu()
    if changed is None and pending:
        changed = _changed_rows(record)[:, None].expand(weight.shape)
    if changed is None:
        _follow(master, weight)
        return
    changed = changed.cpu()
    master.copy_(torch.where(changed, weight.to(torch.float32), master))
    if pending:
        shadow.copy_(torch.where(changed, weight, shadow))
        take_fingerprint(record)


def take_fingerprint(record: ParamRecord) -> None:
    """Remember the deferred weights that are visible now, row by row."""
    record.fingerprint = row_fingerprints(record.weight, record.slot if record.kind == "column" else None)


def _changed_rows(record: ParamRecord) -> Tensor:
    before = record.fingerprint
    assert before is not None, "a result is on its way, so its matrix has a fingerprint"
    changed = row_fingerprints(record.weight, record.slot if record.kind == "column" else None) != before
    if record.kind == "row":
        changed[record.selected.to(changed.device)] = False
    if changed.any():
        logger.warning(
            "%d rows of %s were changed while a deferred result was on its way; they keep their new weights",
            int(changed.sum()), record.name,
        )  # fmt: skip
    return changed


def _follow(master: Tensor, weight: Tensor) -> None:
    """master := weight where the weight is not the rounded master, bit for bit."""
    changed = bits(master.to(weight.dtype)) != bits(weight)
    master.copy_(torch.where(changed, weight.to(torch.float32), master))


def bits(tensor: Tensor) -> Tensor:
    """The same memory as integers, so that NaN and signed zeros compare as what they are."""
    return tensor.view(_BITS[tensor.element_size()])
