"""States of `torch.optim.AdamW`, and ours, each as the other.

AdamW keeps two moments and one step count t a parameter; its weights are its masters. Where the channels of a parameter
have different t (the deferred ones get one update a window), AdamW's t is the largest and the moments of the others are
scaled so that the bias-corrected ones stay: `m * (1 - beta1**T) / (1 - beta1**t)`, in float64, rounded once. With one t
for all channels (k = 1, U = 1, or `replay` without absent gradients), nothing is rounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from zenflow.channel_state import full_state, full_step
from zenflow.checkpoint_checks import FORMAT, State, described, has_values
from zenflow.matrices import Newcomer, count_channels, count_selected, is_deferred
from zenflow.param_record import ParamRecord
from zenflow.pipeline import Pipeline
from zenflow.window import ClockState

MOMENTS = ("exp_avg", "exp_avg_sq")
_KEYS = {"step", *MOMENTS}
_OTHER_MATHEMATICS = {"amsgrad": False, "maximize": False, "decoupled_weight_decay": True}  # allowed values
_HOW_IT_RUNS = ("foreach", "capturable", "differentiable", "fused")


def is_adamw_state(state_dict: dict[str, Any]) -> bool:
    """Whether this is the state of a torch AdamW (or Adam) that has made a step."""
    entries = state_dict["state"].values()
    return (
        "zenflow" not in state_dict
        and bool(entries)
        and all(isinstance(entry, dict) and _KEYS <= entry.keys() <= {*_KEYS, "max_exp_avg_sq"} for entry in entries)
    )


def from_adamw(
    pipeline: Pipeline, everyone: Mapping[int, Newcomer], state_dict: dict[str, Any], masters: Sequence[Tensor] | None
) -> dict[str, Any]:
    """An AdamW state as one of ours: all channels deferred until the first selection, the clock at AdamW's step.

    `everyone` are the parameters by torch's index. `masters`: for each its fp32 value, in its shape; None: the weights.
    ValueError names what AdamW has and we have not, or what does not fit.
    """
    for group in state_dict["param_groups"]:
        for name, allowed in _OTHER_MATHEMATICS.items():
            if group.get(name, allowed) != allowed:
                raise ValueError(f"{name} is {group[name]!r} in the state; allowed is {allowed}")
    if masters is not None and len(masters) != len(everyone):
        raise ValueError(f"there are {len(masters)} masters; allowed is one for each of {len(everyone)} parameters")
    config, state, places = pipeline.config, {}, {index: place for place, index in enumerate(everyone)}
    for index, entry in state_dict["state"].items():
        if index in everyone:
            newcomer = everyone[index]
            master = newcomer.param.detach() if masters is None else masters[places[index]]
            state[index] = _entry_from_adamw(pipeline, newcomer, entry, master)
        else:
            state[index] = {}  # refused by number, as in any state
    steps = [int(entry["step"].max()) for entry in state.values() if entry and entry["step"].numel()]
    engine = {
        "format": FORMAT,
        "config": asdict(config),
        "clock": asdict(ClockState(step=max([1, *steps]))),
        "counters": dict.fromkeys(pipeline.counters, 0),
        "skipped": 0,
        "window_log": torch.zeros_like(pipeline.control.window_log, device="cpu"),
        "hyper_log": [],
        "present_log": [],
        "norm_order": sorted(state, key=str),
        "uploads": {"fell_back": False, "tries": 0, "passed": [], "failed": [], "arrivals": {"seen": {}, "usual": {}}},
    }
    groups = [
        {name: value for name, value in group.items() if name not in (*_OTHER_MATHEMATICS, *_HOW_IT_RUNS)}
        for group in state_dict["param_groups"]
    ]
    return {"state": state, "param_groups": groups, "zenflow": engine}


def _entry_from_adamw(pipeline: Pipeline, newcomer: Newcomer, entry: dict[str, Any], master: Tensor) -> dict[str, Any]:
    config, param = pipeline.config, newcomer.param
    t = _whole(newcomer, entry["step"])
    tensors = {"master": master} | {name: entry[name] for name in MOMENTS}
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor.shape != param.shape or not has_values(tensor):
            raise ValueError(
                f"{name} of {newcomer.name} is {described(tensor)}; allowed are numbers of shape {tuple(param.shape)}"
            )
    converted = {name: tensor.detach().to("cpu", torch.float32, copy=True) for name, tensor in tensors.items()}
    if not is_deferred(config, param):
        return converted | {"step": torch.full((1,), t, dtype=torch.int64, device="cpu"), "whole": True}
    channels = count_channels(config, param)
    return converted | {
        "step": torch.full((channels,), t, dtype=torch.int64, device="cpu"),
        "whole": False,
        "selected": torch.empty(0, dtype=torch.int64, device="cpu"),
        "owned": count_selected(config.topk_ratio, channels) == 0,
        "count": 0,
        "gradients": {},
    }


def _whole(newcomer: Newcomer, step: Any) -> int:
    try:
        t = float(step)
    except (TypeError, ValueError, RuntimeError):
        t = math.nan
    if not (t.is_integer() and 0 <= t < 2**31):
        raise ValueError(f"step of {newcomer.name} is {step}; allowed are whole numbers from 0 to 2**31 - 1")
    return int(t)


def to_adamw(pipeline: Pipeline, indices: dict[int, int], groups: list[dict[str, Any]]) -> State:
    """AdamW's state by torch's parameter index, fp32 on the CPU; waits for the worker, changes nothing.

    groups: the optimizer's. RuntimeError while the weights lack gradients that have been seen.
    """
    if pipeline.hyper_log or pipeline.uploads.pending:
        raise RuntimeError(
            "AdamW has no place for a window that is running or a result that is on its way; call flush() first"
        )
    pipeline.wait_for_worker()
    advances = pipeline.control.advance.tolist()
    state = {
        indices[id(record.param)]: _entry_to_adamw(record, advances[record.index], groups[record.group]["betas"])
        for record in pipeline.records
    }
    return {index: state[index] for index in sorted(state) if state[index]["step"]}


def _entry_to_adamw(record: ParamRecord, advance: int, betas: tuple[float, float]) -> dict[str, Tensor]:
    _, *moments = full_state(record)
    step = full_step(record, advance)
    largest = int(step.max()) if step.numel() else 0
    entry = {"step": torch.tensor(float(largest), dtype=torch.float32, device="cpu")}
    shape = (-1, 1) if record.kind == "row" else (1, -1)
    for name, moment, beta in zip(MOMENTS, moments, betas, strict=True):
        if bool((step != largest).any()):
            t = step.clamp(min=1).to(torch.float64)  # a channel without an update has moments of zero
            factor = (1 - beta**largest) / (1 - beta**t)
            moment = (moment.to(torch.float64) * factor.view(shape)).to(torch.float32)
        entry[name] = moment.view(record.param.shape)
    return entry
