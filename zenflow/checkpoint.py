"""The optimizer's state as plain tensors and numbers, and back.

Per parameter: fp32 `master`, `exp_avg`, `exp_avg_sq` in the parameter's shape, whoever owns the channel; `step` int64
`[channels]` (`[1]` with `whole: True`); `selected` int64, and `owned`, false until the first selection; of its running
window the partial sum (`accumulator`) and its `count`, or, with `accumulate_on: host`, the raw gradients of its steps
(`gradients`, by number from 0); its `cohort`, with `stagger`; its channels' running `scores`, fp32 `[channels]`, with
`importance_over` window or average; and, only while a deferred result is on its way, the `weight` that is visible
meanwhile and the scalars of the steps behind that result (`pending_hyper`, `[n, 5]`). Where results are predicted, what
is on its way is there too, as `pending_weight`, if it is not the rounded master, and with nothing on its way the
visible `weight`, if it is not. Under `zenflow`: clock and counters, the running windows' scalars, presence and log, the
order of the norm's sums, what uploads have learned of the model, and the configuration that shaped all this.

A state moves freely between devices, bucket sizes, worker threads and upload settings; between values of
`accumulate_on`, `ring_dtype` and `update_interval` at a window's end, which `flush()` makes, and in the middle of a
window from `accumulate_on: host` to `gpu`: its gradients are summed here as they would have been on the device. It also
moves between values of `weight_prediction`: what is visible and on its way stays what it is, except where predictions
come to a run that makes none. That shows masters at once. Where `importance` or `importance_over` differ, and in an
older state, scores begin anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from zenflow_kernels.control import LOG_CLIP, LOG_FINITE, LOG_INV_SCALE, LOG_WORDS, STAMP_WORDS
from zenflow_kernels.gather import gather_channels

from zenflow.channel_state import full_state, full_step
from zenflow.checkpoint_checks import FORMAT, STATES, State, predicts, scores_alike
from zenflow.config import ZenFlowConfig
from zenflow.matrices import Newcomer
from zenflow.outside import adopt_outside_changes, pending_hyper
from zenflow.param_record import ParamRecord
from zenflow.pipeline import Pipeline
from zenflow.predictions import coming_shadow, coming_turn, saved_predictions
from zenflow.visible import make_visible


def save(pipeline: Pipeline, indices: dict[int, int]) -> tuple[State, dict[str, Any]]:
    """`(state by torch's parameter index, the engine's own part)`; waits for the worker, changes nothing.

    `indices` maps `id(param)` to that index.
    """
    adopt_outside_changes(pipeline)
    pipeline.wait_for_worker()
    pipeline.sender.finish_copies()
    advances, counts = pipeline.control.advance.tolist(), pipeline.control.count.tolist()
    pending = pipeline.uploads.pending_storages()
    state = {}
    for index, record in _by_index(pipeline, indices):
        running = record.storage is not None and pipeline.running_steps(record.storage.cohort)
        count = counts[record.index] if running else 0
        state[index] = _entry(pipeline, record, advances[record.index], count, pending=record.storage in pending)
    return state, {
        "format": FORMAT,
        "config": asdict(pipeline.config),
        "clock": pipeline.clock.state_dict(),
        "counters": dict(pipeline.counters),
        "skipped": int(pipeline.control.skipped.item()),
        "window_log": pipeline.control.window_log.to("cpu", copy=True),
        "hyper_log": [[list(group) for group in row] for row in pipeline.hyper_log],
        "present_log": [
            {index: row[record.index] for index, record in _by_index(pipeline, indices)} for row in pipeline.present_log
        ],
        "layout": [[indices[id(record.param)] for record in together] for together in laid_out(pipeline)],
        "norm_order": [
            indices[id(pipeline.records[number].param)] for number in pipeline.norm_order.records(len(pipeline.records))
        ],
        "uploads": _renumbered(
            pipeline.uploads.state_dict(), {record.index: indices[id(record.param)] for record in pipeline.records}
        ),
    }


def _renumbered(uploads: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    """What was learned about parameters under their other numbers; about strangers nothing is kept."""
    arrivals = {
        name: {numbers[index]: learned for index, learned in by_index.items() if index in numbers}
        for name, by_index in uploads["arrivals"].items()
    }
    tried = {
        name: sorted(numbers[index] for index in uploads[name] if index in numbers) for name in ("passed", "failed")
    }
    return {**uploads, **tried, "arrivals": arrivals}


def _by_index(pipeline: Pipeline, indices: dict[int, int]) -> list[tuple[int, ParamRecord]]:
    """The records in the order of torch's indices, whenever they were laid out."""
    return sorted(((indices[id(record.param)], record) for record in pipeline.records), key=lambda pair: pair[0])


def _entry(pipeline: Pipeline, record: ParamRecord, advance: int, count: int, *, pending: bool) -> dict[str, Any]:
    """One parameter's state, on the CPU; `count`: its counted steps in the running window."""
    shape = record.param.shape
    entry: dict[str, Any] = {name: tensor.view(shape) for name, tensor in zip(STATES, full_state(record), strict=True)}
    entry["step"] = full_step(record, advance)
    entry["whole"] = record.kind == "whole"
    if record.storage is not None:
        entry["selected"], entry["owned"], entry["count"] = record.selected.clone(), record.owned, count
        if (scores := pipeline.scores.of(record)) is not None:
            entry["scores"] = scores.to("cpu", copy=True)
        if pipeline.config.stagger:
            entry["cohort"] = record.storage.cohort
        if record.accumulator is None:
            entry["gradients"] = _gradients(pipeline, record)
        elif count:
            entry["accumulator"] = record.accumulator.to("cpu", copy=True).view(shape)
        if pending:
            entry["weight"] = record.weight.to("cpu", copy=True).view(shape)
            entry["pending_hyper"] = pending_hyper(pipeline, record).tolist()
        if record.storage.segment.predicted:
            entry |= saved_predictions(record, entry["master"], pending=pending)
    return entry


def _gradients(pipeline: Pipeline, record: ParamRecord) -> dict[int, Tensor]:
    """A parameter's raw gradients of its running window by number, where it had one."""
    turn, steps = record.storage.memory.turn(0), pipeline.running_steps(record.storage.cohort)
    latest = pipeline.present_log[len(pipeline.present_log) - steps :]
    return {
        number: record.lane(turn, place).clone().view(record.param.shape)
        for number, (place, present) in enumerate(zip(pipeline.clock.rows(steps), latest, strict=True))
        if present[record.index]
    }


def laid_out(pipeline: Pipeline) -> list[list[ParamRecord]]:
    """The records that got their places at one time, of one dtype; buckets and launches are theirs alone."""
    return [pipeline.records[table.first :][: len(table.entries)] for table in pipeline.tables]


def saved_layout(everyone: Mapping[int, Newcomer], state_dict: dict[str, Any]) -> list[list[Newcomer]]:
    """The parameters of a checked state, as they were laid out in the run that saved it; empty if it does not say."""
    return [[everyone[index] for index in together] for together in state_dict["zenflow"].get("layout", [])]


def saved_cohorts(
    everyone: Mapping[int, Newcomer], state_dict: dict[str, Any], config: ZenFlowConfig
) -> dict[int, int]:
    """By `id(param)`, the cohorts in a checked state that a run with these settings has to go on with."""
    interval = state_dict["zenflow"]["config"].get("update_interval")
    if type(interval) is not int or interval != config.update_interval:
        return {}
    state = state_dict["state"]
    return {
        id(newcomer.param): state[index]["cohort"]
        for index, newcomer in everyone.items()
        if "cohort" in state.get(index, {})
    }


def load(pipeline: Pipeline, state: State, engine: dict[str, Any], indices: dict[int, int]) -> None:
    """Take over a checked state: owners, masters, moments, t, partial sums, clock; masters win over weights."""
    adopt_outside_changes(pipeline)
    pipeline.wait_for_worker()
    pipeline.sender.finish_copies()  # raw gradients may be on their way into the lanes that a loaded window takes
    make_visible(pipeline)
    with pipeline.in_one_piece():
        _take_over(pipeline, state, engine, indices)
    pipeline.prepare_backward()


def _take_over(pipeline: Pipeline, state: State, engine: dict[str, Any], indices: dict[int, int]) -> None:
    """`load`'s part that must not be broken off."""
    pipeline.clock.load_state_dict(engine["clock"])
    pipeline.hyper_log = [[tuple(group) for group in row] for row in engine["hyper_log"]]
    if predicts(engine["config"]) and not pipeline.config.predicts:
        state = {index: _without_predictions(entry) for index, entry in state.items()}
    for record in pipeline.records:
        entry = state.get(indices[id(record.param)])
        if entry is not None:
            _load_record(pipeline, record, entry, engine["window_log"])
        elif record.storage is not None:
            _fill_shadows(record, record.weight)  # what its bucket uploads with the others' pending results
    for table in pipeline.tables:
        table.forget_channels()
    pending = {record.storage for record in pipeline.records if record.index in pipeline.uploads.loaded_hyper}
    for record in pipeline.records:  # those without a pending result of their own wait for no update
        if record.storage in pending:
            pipeline.uploads.loaded_hyper.setdefault(record.index, np.empty((0, 5)))
    pipeline.uploads.pending = []
    for storage in pipeline.storages:
        storage.shows_prediction = storage.segment.predicted
        if storage in pending:
            pipeline.uploads.pending += pipeline.finished(
                storage, coming_turn(storage), predicted=storage.segment.predicted
            )
    pipeline.scores.load(_saved_scores(pipeline, state, engine["config"], indices), pipeline.records)
    steps = [entry["step"] for entry in state.values()]
    pipeline.highest_t = max((int(step.max()) for step in steps if step.numel()), default=0)
    pipeline.counters.update(engine["counters"])
    pipeline.control.skipped.fill_(engine["skipped"])
    if engine["window_log"].shape == pipeline.control.window_log.shape:  # else no window runs, and all will be written
        pipeline.control.window_log.copy_(engine["window_log"])
        pipeline.logged = int(engine["window_log"][:STAMP_WORDS].cpu().view(torch.int64))
    pipeline.present_log = [
        [bool(row.get(indices[id(record.param)], False)) for record in pipeline.records]
        for row in engine["present_log"]
    ]
    records = {indices[id(record.param)]: record.index for record in pipeline.records}
    pipeline.norm_order.load([records[index] for index in engine["norm_order"]], len(records))
    pipeline.uploads.load_state_dict(_renumbered(engine["uploads"], records))


def _saved_scores(
    pipeline: Pipeline, state: State, config: dict[str, Any], indices: dict[int, int]
) -> dict[int, Tensor]:
    """By `record.index`, where they are of the kind that is kept here."""
    if not scores_alike(config, pipeline.config):
        return {}
    entries = {record.index: state.get(indices[id(record.param)], {}) for record in pipeline.records}
    return {index: entry["scores"] for index, entry in entries.items() if "scores" in entry}


def _load_record(pipeline: Pipeline, record: ParamRecord, entry: dict[str, Any], window_log: Tensor) -> None:
    shape, device = record.weight.shape, record.weight.device
    pipeline.control.advance[record.index] = 0
    pipeline.control.count[record.index] = 0
    whole = [entry[name].reshape(shape).to(torch.float32) for name in STATES]
    step = entry["step"].to("cpu", torch.int32)
    visible = entry.get("weight", entry["master"]).reshape(shape)
    record.weight.copy_(visible)
    record.version = record.param._version
    if record.kind == "whole":
        for compact, tensor in zip(record.compact, whole, strict=True):
            compact.copy_(tensor)
        record.start.copy_(step)
        return
    selected = entry["selected"].cpu()
    for number, (host, compact, tensor) in enumerate(zip(record.host, record.compact, whole, strict=True)):
        host.copy_(tensor)
        if selected.numel():
            compact.copy_(gather_channels(tensor, selected, record.kind, validate=False).to(device))
            if number:
                host.index_fill_(0 if record.kind == "row" else 1, selected, 0)
    _fill_shadows(record, visible)
    if "pending_hyper" in entry:
        pipeline.uploads.loaded_hyper[record.index] = np.array(entry["pending_hyper"], dtype=np.float64).reshape(-1, 5)
        coming_shadow(record).copy_(entry.get("pending_weight", entry["master"]).reshape(shape))
    record.host_step.copy_(step)
    record.install_owners(selected.clone(), selected.to(device), step[selected], owned=entry["owned"])
    pipeline.control.count[record.index] = entry["count"]
    places = pipeline.clock.rows(pipeline.running_steps(record.storage.cohort))
    if record.accumulator is None:
        for number, grad in entry.get("gradients", {}).items():
            record.lane(record.storage.memory.turn(0), places[number]).copy_(grad.reshape(shape))
    elif entry["count"] and "gradients" in entry:
        record.accumulator.copy_(_summed(record, entry["gradients"], window_log, places))
    elif entry["count"]:
        record.accumulator.copy_(entry["accumulator"].reshape(shape))


def _fill_shadows(record: ParamRecord, weight: Tensor) -> None:
    """Whatever is uploaded next is what is visible now."""
    for shadow in record.host_shadows:
        shadow.copy_(weight)


def _without_predictions(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry of a parameter whose last result is visible as it is, with nothing on its way."""
    return {name: value for name, value in entry.items() if name not in ("weight", "pending_hyper", "pending_weight")}


def _summed(record: ParamRecord, gradients: dict[int, Tensor], window_log: Tensor, places: Sequence[int]) -> Tensor:
    """`[rows, cols]` on the host: the accumulator after the steps so far, rounded as often as on the device.

    places: of the window's steps in the log.
    """
    log = window_log[STAMP_WORDS:-STAMP_WORDS].view(-1, LOG_WORDS).cpu()
    total = torch.zeros(record.weight.shape, dtype=torch.float32, device="cpu")
    for number in sorted(gradients):
        words = log[places[number]]
        if words[LOG_FINITE]:
            inv_scale, clip = words[[LOG_INV_SCALE, LOG_CLIP]].view(torch.float32)
            scaled = gradients[number].reshape(record.weight.shape).to("cpu", torch.float32) * inv_scale * clip
            total = (total + scaled).to(record.accumulator.dtype).to(torch.float32)
    total.index_fill_(0 if record.kind == "row" else 1, record.selected, 0)
    return total
