"""What a state must be to be loaded: refused by name before anything changes."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from zenflow_kernels.control import LOG_FINITE, LOG_WORDS, STAMP_WORDS

from zenflow.checks import group_hyper
from zenflow.config import ZenFlowConfig, usual_delay
from zenflow.matrices import Newcomer, count_channels, count_selected, is_deferred
from zenflow.pipeline import Pipeline
from zenflow.window import WindowClock

State = dict[int, dict[str, Any]]  # by torch's parameter index
FORMAT = 3
STATES = ("master", "exp_avg", "exp_avg_sq")
ENGINE_KEYS = {
    "config": dict,
    "clock": dict,
    "counters": dict,
    "skipped": int,
    "window_log": Tensor,
    "hyper_log": list,
    "present_log": list,
    "norm_order": list,
    "uploads": dict,
}
# Which channels there are, how many are selected, and when a result is visible.
SHAPING = ("topk_ratio", "channel_dim", "min_deferred_numel", "stagger", "visible_after")
WINDOW = ("update_interval", "accumulate_on", "ring_dtype")  # of a window that runs
MOST_STEPS = 2**32  # what the device's counters hold
WEIGHTS = ("weight", "pending_weight")  # that are visible and on their way


def predicts(config: dict[str, Any]) -> bool:
    """Whether results were shown as predictions where a state has this configuration, which may lack the setting."""
    factor = config.get("weight_prediction", 0.0)
    return type(factor) is float and factor > 0 and _equal(config.get("overlap_step"), True)


def scores_alike(saved: dict[str, Any], mine: ZenFlowConfig) -> bool:
    """Whether the running scores of a state with this configuration, which may lack the settings, go on here."""
    return all(_equal(saved.get(name), getattr(mine, name)) for name in ("importance", "importance_over"))


def check_form(state_dict: dict[str, Any], numbers: Sequence[Sequence[int]]) -> None:
    """ValueError unless this has the parts of an optimizer's state, with settings that can be used.

    numbers: of the parameters of each group, as torch counts them.
    """
    for name, kind in {"state": dict, "param_groups": list}.items():
        if not isinstance(state_dict.get(name), kind):
            raise ValueError(f"{name} is {state_dict.get(name)!r} in the state; allowed is a {kind.__name__}")
    if not isinstance(state_dict.get("zenflow", {}), dict):
        raise ValueError(f"zenflow is {state_dict['zenflow']!r} in the state; allowed is a dict")
    for group in state_dict["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            raise ValueError(f"a param group is {group!r} in the state; allowed is a dict with a list of params")
        group_hyper(group)
    sizes, mine = [len(group["params"]) for group in state_dict["param_groups"]], list(map(len, numbers))
    if sizes != mine:
        raise ValueError(f"the state has param groups of {sizes} parameters, this optimizer of {mine}")
    for group, expected in zip(state_dict["param_groups"], numbers, strict=True):
        if not all(_equal(number, other) for number, other in zip(group["params"], expected, strict=True)):
            raise ValueError(f"a param group has params {group['params']} in the state; allowed is {list(expected)}")


def check(pipeline: Pipeline, everyone: Mapping[int, Newcomer], state_dict: dict[str, Any]) -> None:
    """Refuse, before anything changes, a state that does not fit: ValueError naming what differs.

    `everyone` are all parameters by torch's index, laid out or not.
    """
    state, engine = state_dict["state"], state_dict["zenflow"]
    if not _equal(engine.get("format"), FORMAT):
        raise ValueError(f"the state has ZenFlow format {engine.get('format')!r}; allowed is {FORMAT}")
    for name, kind in ENGINE_KEYS.items():
        if not isinstance(engine.get(name), kind):
            raise ValueError(
                f"{name} is {engine.get(name)!r} in the state's 'zenflow' part; allowed is a {kind.__name__}"
            )
    _check_config(asdict(pipeline.config), engine)
    _check_engine(pipeline, engine)
    _check_logs(engine, len(state_dict["param_groups"]))
    _check_uploads(engine["uploads"])
    for index, entry in state.items():
        if not isinstance(entry, dict):
            raise ValueError(f"entry {index} of the state is {entry!r}; allowed is a dict")
    strangers = sorted(set(state) - set(everyone), key=str)
    if strangers:
        raise ValueError(
            f"the state has entries {strangers}; this optimizer's {len(everyone)} parameters go up to {max(everyone)}"
        )
    clock = _check_clock(pipeline, engine, state)
    known = {id(record.param) for record in pipeline.records}
    for index, newcomer in everyone.items():
        if index in state:
            present = [row.get(index, False) for row in engine["present_log"]]
            _check_entry(pipeline.config, newcomer, state[index])
            if is_deferred(pipeline.config, newcomer.param):
                _check_window(engine, clock, newcomer, state[index], present)
        elif pipeline.clock.state.step and id(newcomer.param) in known:
            raise ValueError(f"the state has no entry for {newcomer.name}, which has been trained here already")
    layout = engine.get("layout", [])
    together = layout if isinstance(layout, list) and all(isinstance(part, list) for part in layout) else [[None]]
    for name, given, order in (
        ("layout", layout, [index for part in together for index in part]),
        ("norm_order", engine["norm_order"], engine["norm_order"]),
    ):
        if (
            not all(type(index) is int for index in order)
            or not set(order) <= set(state)
            or len(set(order)) < len(order)
        ):
            raise ValueError(f"{name} is {given} in the state; allowed is an order of its entries")


def _check_config(mine: dict[str, Any], engine: dict[str, Any]) -> None:
    saved = engine["config"]
    for name in SHAPING:
        same = _equal(saved.get(name), mine[name])
        if not same and not (name == "visible_after" and _equal(_delay(saved), _delay(mine))):
            raise ValueError(f"the state was saved with {name}={saved.get(name)!r}, this optimizer has {mine[name]!r}")
    if not engine["hyper_log"]:
        return
    sums_here = _equal(saved.get("accumulate_on"), "host") and mine["accumulate_on"] == "gpu"
    for name in WINDOW[:1] if sums_here else WINDOW:
        if not _equal(saved.get(name), mine[name]):
            raise ValueError(
                f"the state was saved in the middle of a window with {name}={saved.get(name)!r}, this optimizer has "
                f"{mine[name]!r}; load it with the same {name}, flush(), and save what that gives"
            )


def _delay(config: dict[str, Any]) -> Any:
    """`visible_after` in steps, also where it is auto; what is found there if that is no delay."""
    after, longest = config.get("visible_after"), config.get("update_interval")
    if _equal(after, "auto") and type(longest) is int:
        return usual_delay(longest, overlap_step=True, stagger=_equal(config.get("stagger"), True))
    return after


def _check_engine(pipeline: Pipeline, engine: dict[str, Any]) -> None:
    clock, log = engine["clock"], engine["window_log"]
    mine = pipeline.clock.state_dict()
    if {name: type(value) for name, value in clock.items()} != {name: type(value) for name, value in mine.items()}:
        raise ValueError(f"clock is {clock} in the state; allowed is the form of {mine}")
    expected = pipeline.control.window_log.shape
    if not has_values(log, torch.int32) or log.dim() != 1 or (engine["hyper_log"] and log.shape != expected):
        raise ValueError(f"window_log is {log.dtype} {tuple(log.shape)}; allowed is torch.int32 {tuple(expected)}")
    if not 0 <= engine["skipped"] < MOST_STEPS:
        raise ValueError(f"skipped is {engine['skipped']} in the state; allowed is 0 to 2**32 - 1")
    counters = engine["counters"]
    if set(counters) != set(pipeline.counters) or not all(isinstance(count, int) for count in counters.values()):
        raise ValueError(
            f"counters are {counters} in the state; allowed are whole numbers for {list(pipeline.counters)}"
        )


def _check_clock(pipeline: Pipeline, engine: dict[str, Any], state: State) -> WindowClock:
    """The clock of the saved run. ValueError unless cohorts, clock and logs belong together."""
    config, mine, saved = pipeline.config, pipeline.clock, engine["clock"]
    cohorts = {index: entry["cohort"] for index, entry in state.items() if "cohort" in entry}
    # Of other windows, none of which runs, the cohorts do not matter.
    same = _equal(engine["config"].get("update_interval"), mine.update_interval)
    most = mine.update_interval if same else float("inf")
    wrong = [cohort for cohort in cohorts.values() if type(cohort) is not int or not 1 <= cohort <= most]
    missing = [index for index, entry in state.items() if "selected" in entry and "cohort" not in entry]
    if wrong or (config.stagger and saved["position"] and missing) or (cohorts and not config.stagger):
        raise ValueError(f"cohort is {cohorts} in the state; allowed is, with stagger, 1 to U for each deferred matrix")
    clock = WindowClock(
        update_interval=mine.update_interval, select_interval=mine.select_interval,
        full_warm_up_rounds=mine.full_warm_up_rounds, visible_after=mine.visible_after,
    )  # fmt: skip
    clock.cohorts = tuple(sorted(set(cohorts.values()))) or (mine.update_interval,)
    clock.load_state_dict(saved)
    steps = [len(engine["hyper_log"]), len(engine["present_log"])]
    # Fewer where a cohort began after some steps of its window.
    shortest = min(1, clock.longest) if config.stagger else clock.longest
    if (
        not 0 <= saved["position"] < 2 * mine.update_interval
        or steps[0] != steps[1]
        or not shortest <= steps[0] <= clock.longest
        or not all(1 <= saved[name] < MOST_STEPS for name in ("step", "window"))
    ):
        raise ValueError(f"the state stands at {saved} and has logs of {steps} steps; these do not belong together")
    return clock


def _check_logs(engine: dict[str, Any], n_groups: int) -> None:
    """The running window's scalars, one row a step and five numbers a group, and presence, by parameter."""
    rows = engine["hyper_log"]
    if not all(isinstance(row, list) and all(_is_scalars(group) for group in row) for row in rows):
        raise ValueError(f"hyper_log is {rows!r:.200} in the state; allowed are five numbers a group and step")
    if rows and not max(map(len, rows)) == min(map(len, rows)) <= n_groups:
        raise ValueError(f"hyper_log in the state has rows of {list(map(len, rows))} groups; there are {n_groups}")
    rows = engine["present_log"]
    if not all(isinstance(row, dict) and all(isinstance(had, bool) for had in row.values()) for row in rows):
        raise ValueError(f"present_log is {rows!r:.200} in the state; allowed is a dict of booleans a step")


def _check_uploads(uploads: dict[str, Any]) -> None:
    kinds = {"fell_back": bool, "tries": int, "passed": list, "failed": list, "arrivals": dict}
    good = {name: type(value) for name, value in uploads.items()} == kinds and _is_numbers(
        [uploads["tries"], *uploads["passed"], *uploads["failed"]]
    )
    arrivals = uploads["arrivals"] if good else {}
    good = {name: type(value) for name, value in arrivals.items()} == {"seen": dict, "usual": dict}
    if not good or not _is_numbers([*arrivals["seen"], *arrivals["usual"], *arrivals["usual"].values()]):
        raise ValueError(f"uploads are {uploads} in the state; allowed is what a ZenFlow optimizer saves")
    if not all(isinstance(seen, list) and _is_numbers(seen) for seen in arrivals["seen"].values()):
        raise ValueError(f"uploads have seen {arrivals['seen']} in the state; allowed are lists of whole numbers")


def _is_numbers(values: Iterable[Any]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check_entry(config: ZenFlowConfig, newcomer: Newcomer, entry: dict[str, Any]) -> None:
    param, deferred = newcomer.param, is_deferred(config, newcomer.param)
    channels = count_channels(config, param) if deferred else 1
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
        if not isinstance(entry["owned"], bool):
            raise ValueError(f"owned of {newcomer.name} is {entry['owned']!r}; allowed are True and False")
        n = count_selected(config.topk_ratio, channels) if entry["owned"] else 0
        shapes["selected"] = (n,), torch.int64
        shapes |= {name: (tuple(param.shape), None) for name in ("accumulator", *WEIGHTS) if name in entry}
        shapes |= {"scores": ((channels,), torch.float32)} if "scores" in entry else {}
    for name, (shape, dtype) in shapes.items():
        _check_tensor(newcomer, name, entry[name], shape, dtype)
    for name in (*STATES, *(("scores",) if deferred and "scores" in entry else ())):
        if entry[name].isnan().any():
            raise ValueError(f"{name} of {newcomer.name} holds NaN in the state; allowed are numbers")
    if (entry["exp_avg_sq"] < 0).any():
        raise ValueError(f"exp_avg_sq of {newcomer.name} holds negative numbers in the state; squares have none")
    hyper = entry.get("pending_hyper", [])
    if not isinstance(hyper, list) or not all(_is_scalars(row) for row in hyper):
        raise ValueError(f"pending_hyper of {newcomer.name} is {hyper!r}; allowed is a list of five numbers a step")
    if entry["step"].numel() and not 0 <= int(entry["step"].min()) <= int(entry["step"].max()) < 2**31:
        raise ValueError(f"step of {newcomer.name} is {entry['step']}; allowed is 0 to 2**31 - 1")
    if deferred and not _is_choice(entry["selected"], channels):
        raise ValueError(
            f"selected of {newcomer.name} must rise strictly within [0, {channels}), got {entry['selected']}"
        )


def _check_tensor(newcomer: Newcomer, name: str, found: Any, shape: tuple[int, ...], dtype: torch.dtype | None) -> None:
    """dtype None: any floating-point one."""
    if not isinstance(found, Tensor) or tuple(found.shape) != shape or not has_values(found, dtype):
        allowed = dtype or "floating-point numbers"
        raise ValueError(f"{name} of {newcomer.name} is {described(found)} in the state; allowed is {allowed} {shape}")


def described(found: Any) -> str:
    """What was found where a tensor has to be."""
    if isinstance(found, Tensor):
        return f"{found.dtype} {tuple(found.shape)} ({found.layout}, {found.device})"
    return repr(found)


def has_values(found: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether this is plain memory with numbers of the dtype; None: of any floating-point one."""
    plain = found.layout == torch.strided and not found.is_meta
    return plain and (found.is_floating_point() if dtype is None else found.dtype == dtype)


def _check_window(
    engine: dict[str, Any], clock: WindowClock, newcomer: Newcomer, entry: dict[str, Any], present: Sequence[bool]
) -> None:
    """What an entry says of its running window and of a pending result; present: in which steps it had a gradient."""
    log = engine["window_log"][STAMP_WORDS:-STAMP_WORDS].view(-1, LOG_WORDS)
    steps = min(clock.length(entry.get("cohort", clock.update_interval)), len(present))
    present = present[len(present) - steps :]
    counted = [bool(log[row, LOG_FINITE]) for row, had in zip(clock.rows(steps), present, strict=True) if had]
    if type(entry["count"]) is not int or entry["count"] != sum(counted):
        raise ValueError(f"count of {newcomer.name} is {entry['count']!r}; its steps that were counted are {counted}")
    has = {name for name in (*WEIGHTS, "pending_hyper") if name in entry}
    predicted = [{"weight"}, {"weight", "pending_weight", "pending_hyper"}] if predicts(engine["config"]) else []
    if has not in (allowed := [set(), {"weight", "pending_hyper"}, *predicted]):
        raise ValueError(f"the state of {newcomer.name} has {sorted(has)}; allowed are {list(map(sorted, allowed))}")
    if _equal(engine["config"].get("accumulate_on"), "host"):
        _check_gradients(newcomer, entry.get("gradients"), present)
    elif entry["count"] and "accumulator" not in entry:
        raise ValueError(f"the state of {newcomer.name} counts {entry['count']} steps and lacks their accumulator")


def _check_gradients(newcomer: Newcomer, gradients: Any, present: Sequence[bool]) -> None:
    expected = [position for position, had in enumerate(present) if had]
    if not isinstance(gradients, dict) or set(gradients) != set(expected):
        found = list(gradients) if isinstance(gradients, dict) else repr(gradients)
        raise ValueError(f"gradients of {newcomer.name} are {found} in the state; allowed are its steps {expected}")
    for grad in gradients.values():
        _check_tensor(newcomer, "a gradient", grad, tuple(newcomer.param.shape), newcomer.param.dtype)


def _is_scalars(row: Any) -> bool:
    """Whether these are a group's lr, betas, eps and weight decay at some step."""
    numbers = isinstance(row, list | tuple) and len(row) == 5 and all(type(value) in (int, float) for value in row)
    # A whole number may be larger than any float.
    return numbers and all(0 <= value <= sys.float_info.max for value in row) and max(row[1:3]) < 1


def _equal(found: Any, expected: Any) -> bool:
    """Also where what was found is of a kind that cannot be compared."""
    return type(found) is type(expected) and found == expected


def _is_choice(selected: Tensor, channels: int) -> bool:
    inside = bool(((selected >= 0) & (selected < channels)).all())
    return inside and bool((selected[1:] > selected[:-1]).all())
