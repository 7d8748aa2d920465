"""Weights that somebody else has written, replaced or moved since the optimizer's last write.

In-place changes (`load_state_dict`, an EMA swap, clamping, surgery on a row) bump autograd's version of the Parameter;
where the pipeline's own writes do, `record.version` follows. Then each element is compared with what was visible, and
only where it differs does the master follow the weight. What was visible is the rounded master, except while a deferred
result is on its way: then the master has moved on already, and what it was before is reckoned back from the update it
received. Where results are shown as predictions, the second of the two shadows has kept what was visible.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels

from zenflow.cpu_pass import plan_update
from zenflow.param_record import ParamRecord, bits, view_of_its_own
from zenflow.pipeline import Pipeline
from zenflow.predictions import visible_shadow

logger = logging.getLogger("zenflow")

_CHUNK = 1 << 22  # elements that are widened to float64 at once
# Share of the magnitudes that meet in an update: above the sum of its roundings, far below a step of bf16.
_ROUNDING = 2.0**-21


def adopt_outside_changes(pipeline: Pipeline, *, force: bool = False) -> None:
    """Bring masters and flat storage in line with weights that were changed outside.

    `force` compares every parameter, for edits that autograd cannot see (`.data`). ValueError names a parameter that
    changed dtype, device or shape, or that was written in place while a replayed result is on its way, or between the
    backward pass that uploads and its `step()`. (Another shape over the same memory shows in the gradient's.)
    """
    for record in pipeline.records:
        if force or record.is_foreign:
            if pipeline.uploads.holds(record):
                raise ValueError(
                    f"{record.name} was changed between backward() and step(), while the next weights were being "
                    "uploaded into it; change weights after step(), or build the optimizer with upload='step'"
                )
            pending = pipeline.uploads.pending_storages()
            pipeline.wait_for_worker()
            param = record.param
            moved = param.data_ptr() != record.address or not param.is_contiguous()
            changed = _move_back(record) if moved else None
            _follow_weights(pipeline, record, changed, pending=record.storage in pending)
            record.version = record.param._version


def _move_back(record: ParamRecord) -> Tensor:
    """Copy the parameter's new memory over its old one; where the bits differ, bool `[rows, cols]`."""
    param, weight = record.param, record.weight
    if param.dtype != weight.dtype or param.device != weight.device or param.shape != record.shape:
        raise ValueError(
            f"{record.name} was {weight.dtype} {tuple(record.shape)} on {weight.device} when the optimizer was built "
            f"and is now {param.dtype} {tuple(param.shape)} on {param.device}; build the optimizer after such changes"
        )
    with torch.no_grad():
        new = param.data.reshape(weight.shape).contiguous()  # of the old memory, if it is transposed
        changed = bits(new) != bits(weight)
        weight.copy_(new)
        param.data = view_of_its_own(weight, param.shape)
    return changed


def _follow_weights(pipeline: Pipeline, record: ParamRecord, changed: Tensor | None, pending: bool) -> None:
    """Masters follow the weights where they changed; so does, while it is `pending`, the result to be uploaded, and
    what is kept of the visible weights."""
    if record.kind == "whole":
        _follow(record.master, record.weight)
        return
    if record.selected.numel():
        index = record.selected.to(record.weight.device)
        _follow(record.master, gather_channels(record.weight, index, record.kind, validate=False))
    master, weight, predicted = record.host[0], record.weight.cpu(), record.storage.segment.predicted
    if changed is None and predicted:
        changed = bits(visible_shadow(record, pending=pending)) != bits(weight)
    elif changed is None and pending:
        changed = _changed_while_pending(pipeline, record, weight)
    if changed is None:
        _follow(master, weight)
        return
    changed = changed.cpu()
    master.copy_(torch.where(changed, weight.to(torch.float32), master))
    if pending or predicted:
        for shadow in record.host_shadows:
            shadow.copy_(torch.where(changed, weight, shadow))


def _changed_while_pending(pipeline: Pipeline, record: ParamRecord, weight: Tensor) -> Tensor:
    """Where `weight`, `[rows, cols]` on the host, cannot be what was visible before the pending update."""
    if pipeline.config.deferred_rule == "replay":
        # Several updates lie between, and the second moments before each of them cannot be told from the last.
        raise ValueError(
            f"{record.name} was changed from outside while a replayed result is on its way; with "
            "deferred_rule='replay' call flush() before weights are changed in place"
        )
    master, exp_avg, exp_avg_sq = record.host
    hyper = pending_hyper(pipeline, record)
    if not len(hyper):
        return bits(master.to(weight.dtype)) != bits(weight)
    received = record.host_step.numpy() - 1  # before the update
    update = plan_update(hyper, received, pipeline.config.deferred_lr_scale)
    eps, decay = (float(value) for value in update.constants[4:6])
    shape = (1, -1) if record.kind == "column" else (-1, 1)
    step_size, denom_scale = (
        torch.from_numpy(np.asarray(factor, dtype=np.float64)).view(shape).expand(weight.shape)
        for factor in (update.step_size, update.denom_scale)
    )
    changed = torch.empty(weight.shape, dtype=torch.bool, device="cpu")
    rows = max(1, _CHUNK // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], rows):
        part = slice(start, start + rows)
        after, seen = master[part].double(), weight[part]
        move = step_size[part] * exp_avg[part].double()
        move /= exp_avg_sq[part].double().sqrt() * denom_scale[part] + eps
        before = (after + move) / decay
        slack = (after.abs() + move.abs() + before.abs()) * _ROUNDING
        lowest, highest = ((before + side).to(weight.dtype).float() for side in (-slack, slack))
        changed[part] = ~((lowest <= seen.float()) & (seen.float() <= highest))
    return changed


def pending_hyper(pipeline: Pipeline, record: ParamRecord) -> np.ndarray:
    """float64 `[n, 5]`: lr, beta1, beta2, eps, weight decay at the n steps that the pending update stands for."""
    if record.index in pipeline.uploads.loaded_hyper:
        return pipeline.uploads.loaded_hyper[record.index]
    storage = record.storage
    item = next(
        item
        for item in pipeline.uploads.pending
        if item.storage is storage and record.index in storage.members[item.bucket.index]
    )
    slot = storage.memory.read_slot(item.bucket.index, item.seq, item.turn)
    return slot.hyper[slot.counted[:, storage.indices.index(record.index)], record.group]


def _follow(master: Tensor, weight: Tensor) -> None:
    """master := weight where the weight is not the rounded master, bit for bit."""
    changed = bits(master.to(weight.dtype)) != bits(weight)
    master.copy_(torch.where(changed, weight.to(torch.float32), master))
