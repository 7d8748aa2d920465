"""The optimizer's state as plain tensors and numbers, and back.

Per parameter: fp32 `master`, `exp_avg`, `exp_avg_sq` in the parameter's shape, whoever owns the channel; `step` int64
`[channels]` (`[1]` with `whole: True`); `selected` int64; the partial sum of the running window (`accumulator`,
`count`); and, only while a deferred result is on its way, the `weight` that is visible meanwhile. Under `zenflow`: the
clock, the running window's scalars, and the configuration that shaped all this.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.scatter import scatter_channels_

from zenflow.pipeline import Pipeline
from zenflow.storage import ParamRecord

State = dict[int, dict[str, Any]]  # by torch's parameter index
FORMAT = 1
SHAPING = ("topk_ratio", "channel_dim", "min_deferred_numel", "ring_dtype", "update_interval")


def full_state(record: ParamRecord) -> tuple[Tensor, Tensor, Tensor]:
    """Master and moments of all channels, fp32 `[rows, cols]` on the host, each from its owner."""
    if record.kind == "whole":
        return tuple(tensor.to("cpu", copy=True) for tensor in record.compact)  # type: ignore[return-value]
    merged = tuple(host.clone() for host in record.host)
    if record.selected.numel():
        for whole, compact in zip(merged, record.compact, strict=True):
            scatter_channels_(whole, record.selected, compact.cpu(), record.kind, validate=False)
    return merged  # type: ignore[return-value]


def full_step(record: ParamRecord, advance: int) -> Tensor:
    """t of every channel, int64 `[channels]` on the host (`[1]` if selected whole)."""
    own = record.start.cpu().to(torch.int64) + advance
    if record.kind == "whole":
        return own
    step = record.host_step.to(torch.int64)
    if record.selected.numel():
        step[record.selected] = own
    return step


def save(pipeline: Pipeline, indices: dict[int, int]) -> tuple[State, dict[str, Any]]:
    """`(state by torch's parameter index, the engine's own part)`; waits for the worker, changes nothing.

    `indices` maps `id(param)` to that index.
    """
    pipeline.wait_for_worker()
    advances, counts = pipeline.control.advance.tolist(), pipeline.control.count.tolist()
    running = bool(pipeline.hyper_log)
    state = {}
    for record in pipeline.records:
        shape = record.param.shape
        entry: dict[str, Any] = {
            name: tensor.view(shape)
            for name, tensor in zip(("master", "exp_avg", "exp_avg_sq"), full_state(record), strict=True)
        }
        entry["step"] = full_step(record, advances[record.index])
        entry["whole"] = record.kind == "whole"
        if record.storage is not None:
            entry["selected"], entry["owned"] = record.selected.clone(), record.owned
            entry["count"] = counts[record.index] if running else 0
            if entry["count"]:
                entry["accumulator"] = record.accumulator.to("cpu", copy=True).view(shape)
            if pipeline.is_pending(record):
                entry["weight"] = record.weight.to("cpu", copy=True).view(shape)
        state[indices[id(record.param)]] = entry
    return state, {
        "format": FORMAT,
        "config": asdict(pipeline.config),
        "clock": pipeline.clock.state_dict(),
        "counters": dict(pipeline.counters),
        "skipped": int(pipeline.control.skipped.item()),
        "window_log": pipeline.control.window_log.to("cpu", copy=True),
        "hyper_log": [[list(group) for group in row] for row in pipeline.hyper_log],
        "present_log": [
            {indices[id(record.param)]: row[record.index] for record in pipeline.records}
            for row in pipeline.present_log
        ],
    }


def check(pipeline: Pipeline, state: State, engine: dict[str, Any], indices: dict[int, int]) -> None:
    """Refuse, before anything changes, a state that does not fit: ValueError naming what differs."""
    if engine.get("format") != FORMAT:
        raise ValueError(f"optimizer state has ZenFlow format {engine.get('format')!r}; this version reads {FORMAT}")
    mine = asdict(pipeline.config)
    for name in SHAPING:
        saved = engine["config"].get(name)
        if saved != mine[name]:
            raise ValueError(f"the state was saved with {name}={saved!r}, this optimizer has {mine[name]!r}")
    for record in pipeline.records:
        entry = state.get(indices[id(record.param)])
        shape = tuple(record.param.shape)
        if entry is not None and tuple(entry["master"].shape) != shape:
            raise ValueError(f"the state of {record.name} has shape {tuple(entry['master'].shape)}; allowed is {shape}")


def load(pipeline: Pipeline, state: State, engine: dict[str, Any], indices: dict[int, int]) -> None:
    """Take over a checked state: owners, masters, moments, t, partial sums, clock; masters win over weights."""
    pipeline.wait_for_worker()
    pipeline.pending = []
    pipeline.control.advance.zero_()
    pipeline.control.count.zero_()
    for record in pipeline.records:
        entry = state.get(indices[id(record.param)])
        if entry is not None:
            _load_record(pipeline, record, entry)
    if any("weight" in entry for entry in state.values()):
        pipeline.pending = [
            (storage, bucket, pipeline.sent) for storage in pipeline.storages for bucket in storage.segment.buckets
        ]
    pipeline.take_fingerprints(pipeline.records)
    pipeline.clock.load_state_dict(engine["clock"])
    steps = (entry["step"] for entry in state.values())
    pipeline.highest_t = max(int(step.max()) for step in steps if step.numel())
    pipeline.counters.update(engine["counters"])
    pipeline.control.skipped.fill_(engine["skipped"])
    pipeline.control.window_log.copy_(engine["window_log"])
    pipeline.hyper_log = [[tuple(group) for group in row] for row in engine["hyper_log"]]
    pipeline.present_log = [
        [bool(row.get(indices[id(record.param)], False)) for record in pipeline.records]
        for row in engine["present_log"]
    ]


def _load_record(pipeline: Pipeline, record: ParamRecord, entry: dict[str, Any]) -> None:
    shape, device = record.weight.shape, record.weight.device
    whole = [entry[name].reshape(shape).to(torch.float32) for name in ("master", "exp_avg", "exp_avg_sq")]
    step = entry["step"].to(torch.int32)
    visible = entry.get("weight", entry["master"]).reshape(shape)
    record.weight.copy_(visible)
    record.version = record.param._version
    if record.kind == "whole":
        for compact, tensor in zip(record.compact, whole, strict=True):
            compact.copy_(tensor)
        record.start.copy_(step)
        return
    selected = entry["selected"]
    for number, (host, compact, tensor) in enumerate(zip(record.host, record.compact, whole, strict=True)):
        host.copy_(tensor)
        if selected.numel():
            compact.copy_(gather_channels(tensor, selected, record.kind, validate=False).to(device))
            if number:
                host.index_fill_(0 if record.kind == "row" else 1, selected, 0)
    record.host_shadow.copy_(whole[0])
    record.host_step.copy_(step)
    record.slot.fill_(-1)
    if selected.numel():
        record.start.copy_(step[selected])
        record.slot[selected.to(device)] = torch.arange(selected.numel(), dtype=torch.int32, device=device)
    record.selected, record.owned = selected.clone(), bool(entry["owned"])
    pipeline.control.count[record.index] = entry["count"]
    if entry["count"]:
        record.accumulator.copy_(entry["accumulator"].reshape(shape))
