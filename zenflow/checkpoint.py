"""The optimizer's state as plain tensors and numbers, and back.

Per parameter: fp32 `master`, `exp_avg`, `exp_avg_sq` in the parameter's shape, whoever owns the channel; `step` int64
`[channels]` (`[1]` with `whole: True`); `selected` int64, and `owned`, false until the first selection; of the running
window the partial sum (`accumulator`) and its `count`, or, with `accumulate_on: host`, the raw gradients of its steps
(`gradients`, by position); and, only while a deferred result is on its way, the `weight` that is visible meanwhile and
the scalars of the steps behind that result (`pending_hyper`, `[n, 5]`). Under `zenflow`: clock and counters, the
running window's scalars, presence and log, and the configuration that shaped all this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.scatter import scatter_channels_

from zenflow.checks import group_hyper
from zenflow.config import ZenFlowConfig
from zenflow.outside import adopt_outside_changes
from zenflow.pipeline import Pipeline
from zenflow.storage import Newcomer, ParamRecord, count_selected, is_deferred, matrix_shape
from zenflow.uploads import Sent

State = dict[int, dict[str, Any]]  # by torch's parameter index
FORMAT = 1
STATES = ("master", "exp_avg", "exp_avg_sq")
ENGINE_KEYS = {
    "config": dict,
    "clock": dict,
    "counters": dict,
    "skipped": int,
    "window_log": Tensor,
    "hyper_log": list,
    "present_log": list,
}
SHAPING = ("topk_ratio", "channel_dim", "min_deferred_numel", "accumulate_on", "ring_dtype", "update_interval")


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
    adopt_outside_changes(pipeline)
    pipeline.wait_for_worker()
    pipeline.sender.finish_copies()
    advances, counts = pipeline.control.advance.tolist(), pipeline.control.count.tolist()
    running, pending = bool(pipeline.hyper_log), pipeline.pending_storages()
    state = {}
    for record in pipeline.records:
        count = counts[record.index] if running else 0
        entry = _entry(pipeline, record, advances[record.index], count, pending=record.storage in pending)
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


def _entry(pipeline: Pipeline, record: ParamRecord, advance: int, count: int, *, pending: bool) -> dict[str, Any]:
    """One parameter's state, on the CPU; `count`: its counted steps in the running window."""
    shape = record.param.shape
    entry: dict[str, Any] = {name: tensor.view(shape) for name, tensor in zip(STATES, full_state(record), strict=True)}
    entry["step"] = full_step(record, advance)
    entry["whole"] = record.kind == "whole"
    if record.storage is not None:
        entry["selected"], entry["owned"], entry["count"] = record.selected.clone(), record.owned, count
        if record.accumulator is None:
            entry["gradients"] = _gradients(pipeline, record)
        elif count:
            entry["accumulator"] = record.accumulator.to("cpu", copy=True).view(shape)
        if pending:
            entry["weight"] = record.weight.to("cpu", copy=True).view(shape)
            entry["pending_hyper"] = pipeline.pending_hyper(record).tolist()
    return entry


def _gradients(pipeline: Pipeline, record: ParamRecord) -> dict[int, Tensor]:
    """A parameter's raw gradients of the running window by position, where it had one."""
    turn = record.storage.memory.turn(0)
    return {
        position: record.lane(turn, position).clone().view(record.param.shape)
        for position, present in enumerate(pipeline.present_log)
        if present[record.index]
    }


def check_form(state_dict: dict[str, Any]) -> None:
    """ValueError unless this has the parts of an optimizer's state, with settings that can be used."""
    for name, kind in {"state": dict, "param_groups": list}.items():
        if not isinstance(state_dict.get(name), kind):
            raise ValueError(f"{name} is {state_dict.get(name)!r} in the state; allowed is a {kind.__name__}")
    if not isinstance(state_dict.get("zenflow", {}), dict):
        raise ValueError(f"zenflow is {state_dict['zenflow']!r} in the state; allowed is a dict")
    for group in state_dict["param_groups"]:
        group_hyper(group)


def check(pipeline: Pipeline, everyone: Sequence[Newcomer], state: State, engine: dict[str, Any]) -> None:
    """Refuse, before anything changes, a state that does not fit: ValueError naming what differs.

    `everyone` are all parameters in torch's order, laid out or not.
    """
    if engine.get("format") != FORMAT:
        raise ValueError(f"the state has ZenFlow format {engine.get('format')!r}; allowed is {FORMAT}")
    _check_engine(pipeline, engine)
    mine = asdict(pipeline.config)
    for name in SHAPING:
        saved = engine["config"].get(name)
        if saved != mine[name]:
            raise ValueError(f"the state was saved with {name}={saved!r}, this optimizer has {mine[name]!r}")
    strangers = sorted(set(state) - set(range(len(everyone))), key=str)
    if strangers:
        raise ValueError(f"the state has entries {strangers}; this optimizer has parameters 0 to {len(everyone) - 1}")
    known = {id(record.param) for record in pipeline.records}
    for index, newcomer in enumerate(everyone):
        if index in state:
            present = [bool(row.get(index, False)) for row in engine["present_log"]]
            _check_entry(pipeline.config, newcomer, state[index], present)
        elif pipeline.clock.state.step and id(newcomer.param) in known:
            raise ValueError(f"the state has no entry for {newcomer.name}, which has been trained here already")


def _check_engine(pipeline: Pipeline, engine: dict[str, Any]) -> None:
    for name, kind in ENGINE_KEYS.items():
        if not isinstance(engine.get(name), kind):
            raise ValueError(
                f"{name} is {engine.get(name)!r} in the state's 'zenflow' part; allowed is a {kind.__name__}"
            )
    clock, log = engine["clock"], engine["window_log"]
    mine = pipeline.clock.state_dict()
    if {name: type(value) for name, value in clock.items()} != {name: type(value) for name, value in mine.items()}:
        raise ValueError(f"clock is {clock} in the state; allowed is the form of {mine}")
    if log.dtype != torch.int32 or log.shape != pipeline.control.window_log.shape:
        raise ValueError(
            f"window_log is {log.dtype} {tuple(log.shape)}; allowed is {pipeline.control.window_log.shape}"
        )
    position, counters = clock["position"], engine["counters"]
    if set(counters) != set(pipeline.counters) or not all(isinstance(count, int) for count in counters.values()):
        raise ValueError(
            f"counters are {counters} in the state; allowed are whole numbers for {list(pipeline.counters)}"
        )
    steps = [len(engine["hyper_log"]), len(engine["present_log"])]
    if (
        not 0 <= position < pipeline.config.update_interval
        or steps != [position, position]
        or min(clock["step"], clock["window"]) < 1
    ):
        raise ValueError(f"the state stands at {clock} and has logs of {steps} steps; these do not belong together")
    groups = [group for row in engine["hyper_log"] for group in row]
    if not all(_is_scalars(group) for group in groups):
        raise ValueError("hyper_log in the state does not hold five numbers a group")
    if not all(isinstance(row, dict) for row in engine["present_log"]):
        raise ValueError("present_log in the state does not hold a dict a step")


def _check_entry(config: ZenFlowConfig, newcomer: Newcomer, entry: dict[str, Any], present: Sequence[bool]) -> None:
    """`present`: in which steps of the running window the parameter had a gradient."""
    param, deferred = newcomer.param, is_deferred(config, newcomer.param)
    rows, cols = matrix_shape(param)
    channels = (cols if config.channel_dim == "column" else rows) if deferred else 1
    shapes = {name: (tuple(param.shape), torch.float32) for name in STATES} | {"step": ((channels,), torch.int64)}
    required = [*shapes, "whole", *(("selected", "owned", "count") if deferred else ())]
    missing = [name for name in required if name not in entry]
    if missing:
        raise ValueError(f"the state of {newcomer.name} lacks {', '.join(missing)}")
    if entry["whole"] is not (not deferred):
        raise ValueError(
            f"the state of {newcomer.name} was saved with whole={entry['whole']}, here it is {not deferred}"
        )
    if deferred:
        n = count_selected(config, channels) if entry["owned"] else 0
        shapes["selected"] = (n,), torch.int64
        shapes |= {name: (tuple(param.shape), None) for name in ("accumulator", "weight") if name in entry}
        _check_window(config, newcomer, entry, present)
    for name, (shape, dtype) in shapes.items():
        found = entry[name]
        if not isinstance(found, Tensor) or tuple(found.shape) != shape or found.dtype != (dtype or found.dtype):
            what = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
            raise ValueError(
                f"{name} of {newcomer.name} is {what} in the state; allowed is {dtype or 'a tensor'} {shape}"
            )
    for name in STATES:
        if entry[name].isnan().any():
            raise ValueError(f"{name} of {newcomer.name} holds NaN in the state; allowed are numbers")
    hyper = entry.get("pending_hyper", [])
    if not isinstance(hyper, list) or not all(_is_scalars(row) for row in hyper):
        raise ValueError(f"pending_hyper of {newcomer.name} is {hyper!r}; allowed is a list of five numbers a step")
    if entry["step"].numel() and int(entry["step"].min()) < 0:
        raise ValueError(f"step of {newcomer.name} is {int(entry['step'].min())}; allowed is 0 or more")
    if deferred and not _is_choice(entry["selected"], channels):
        raise ValueError(
            f"selected of {newcomer.name} must rise strictly within [0, {channels}), got {entry['selected']}"
        )


def _check_window(config: ZenFlowConfig, newcomer: Newcomer, entry: dict[str, Any], present: Sequence[bool]) -> None:
    """What an entry says of the running window and of a pending result."""
    if not isinstance(entry["count"], int) or not 0 <= entry["count"] <= len(present):
        raise ValueError(
            f"count of {newcomer.name} is {entry['count']}; allowed is 0 to {len(present)}, the window's steps"
        )
    if ("weight" in entry) != ("pending_hyper" in entry):
        raise ValueError(f"the state of {newcomer.name} has only one of weight and pending_hyper")
    if config.accumulate_on == "host":
        _check_gradients(newcomer, entry.get("gradients"), present)
    elif entry["count"] and "accumulator" not in entry:
        raise ValueError(f"the state of {newcomer.name} counts {entry['count']} steps and lacks their accumulator")


def _check_gradients(newcomer: Newcomer, gradients: Any, present: Sequence[bool]) -> None:
    expected = [position for position, had in enumerate(present) if had]
    if not isinstance(gradients, dict) or sorted(gradients) != expected:
        found = sorted(gradients) if isinstance(gradients, dict) else repr(gradients)
        raise ValueError(f"gradients of {newcomer.name} are {found} in the state; allowed are its steps {expected}")
    for grad in gradients.values():
        if not isinstance(grad, Tensor) or grad.shape != newcomer.param.shape or grad.dtype != newcomer.param.dtype:
            raise ValueError(f"gradients of {newcomer.name} in the state are not of its shape and dtype")


def _is_scalars(row: Any) -> bool:
    return isinstance(row, list | tuple) and len(row) == 5 and all(isinstance(value, int | float) for value in row)


def _is_choice(selected: Tensor, channels: int) -> bool:
    inside = bool(((selected >= 0) & (selected < channels)).all())
    return inside and bool((selected[1:] > selected[:-1]).all())


def load(pipeline: Pipeline, state: State, engine: dict[str, Any], indices: dict[int, int]) -> None:
    """Take over a checked state: owners, masters, moments, t, partial sums, clock; masters win over weights."""
    adopt_outside_changes(pipeline)
    pipeline.wait_for_worker()
    pipeline.sender.finish_copies()  # raw gradients may be on their way into the lanes that a loaded window takes
    pipeline.make_visible()
    for record in pipeline.records:
        entry = state.get(indices[id(record.param)])
        if entry is not None:
            _load_record(pipeline, record, entry)
        elif record.storage is not None:
            record.host_shadow.copy_(record.weight)  # what its bucket uploads with the others' pending results
    if any("weight" in entry for entry in state.values()):
        for record in pipeline.records:  # those without a pending result of their own wait for no update
            pipeline.loaded_hyper.setdefault(record.index, np.empty((0, 5)))
        # The worker has nothing to do with them: their slot is the last that it has finished.
        pipeline.uploads.pending = [
            Sent(storage, bucket, pipeline.sender.sent, turn=0, window=0)
            for storage in pipeline.storages
            for bucket in storage.segment.buckets
        ]
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
    pipeline.prepare_backward()


def _load_record(pipeline: Pipeline, record: ParamRecord, entry: dict[str, Any]) -> None:
    shape, device = record.weight.shape, record.weight.device
    pipeline.control.advance[record.index] = 0
    pipeline.control.count[record.index] = 0
    whole = [entry[name].reshape(shape).to(torch.float32) for name in STATES]
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
    record.install_owners(selected.clone(), selected.to(device), step[selected], owned=bool(entry["owned"]))
    if "weight" in entry:
        pipeline.loaded_hyper[record.index] = np.array(entry["pending_hyper"], dtype=np.float64).reshape(-1, 5)
    pipeline.control.count[record.index] = entry["count"]
    if record.accumulator is None:
        for position, grad in entry["gradients"].items():
            record.lane(record.storage.memory.turn(0), position).copy_(grad.reshape(shape))
    elif entry["count"]:
        record.accumulator.copy_(entry["accumulator"].reshape(shape))
