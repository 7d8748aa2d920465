"""What a run was set to, from its resolved configuration: which runs are one setting, and how settings are called.

A setting is everything that bears on the result or its speed, except the seed and torch's threads: not the run's name,
what it saves, its plot or its tracking. The machine (summary.json) is part of it. A task is the model and the data:
within it losses may be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from typing import Any

from zenflow.config import usual_delay
from zenflow.training.errors import InputError
from zenflow.training.schema import Peer, SimulatedEngine

Values = dict[str, Hashable]

ADAMW, ADAMW_BF16, ZENFLOW, ZERO_OFFLOAD = "adamw", "adamw_bf16", "zenflow", "zero_offload"
ADAMW_OFFLOAD = "adamw_offload"
SIMULATED = "simulated"
PEERS = tuple(Peer.__members__)  # offloads of other projects
ADAMWS = (ADAMW, ADAMW_BF16, ADAMW_OFFLOAD)  # torch's; the second has no masters, the third's are on the host
ZERO_OFFLOAD_KEYS = {"engine.topk_ratio": 0, "engine.update_interval": 1, "engine.overlap_step": False}
# Which no other engine has.
SIMULATED_KEYS = tuple(f"engine.{name}" for name in SimulatedEngine.__annotations__)
DELAY = "engine.visible_after"
SYMBOLS = {"engine.topk_ratio": "k", "engine.update_interval": "U"}
# `device` says less than the machine does.
WITHOUT_EFFECT = (
    *("seed", "name", "plot", "variant", "engine.masters", "engine.offload", "engine.peer", "device"),
    *("threads", "save_model", "checkpoint_every", "keep_checkpoints"),
)
NOT_RECORDED = "not recorded"
LONG = 30  # characters, from which on a name is too long for a picture


def flat(config: dict[str, Any], prefix: str = "") -> Values:
    """{"engine": {"topk_ratio": 0.1}} as {"engine.topk_ratio": 0.1}; lists become tuples."""
    values: Values = {}
    for name, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = _hashable(value)
    return values


def _hashable(value: Any) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def engine_of(config: dict[str, Any]) -> str:
    """The choice of `engine=` that the configuration amounts to."""
    engine = config["engine"]
    if "peer" in engine:
        return engine["peer"]
    if "topk_ratio" not in engine:
        if engine.get("offload"):
            return ADAMW_OFFLOAD
        return ADAMW if engine.get("masters", True) else ADAMW_BF16
    if "delay_compensation" in engine:
        return SIMULATED
    synchronous = all(engine.get(key.partition(".")[2]) == value for key, value in ZERO_OFFLOAD_KEYS.items())
    return ZERO_OFFLOAD if synchronous else ZENFLOW


def setting_of(config: dict[str, Any], machine: str | None) -> Values:
    """The setting, with `engine` first; without what the choice of the engine says already."""
    kind, values = engine_of(config), flat(config)
    dropped = {name for name in values if name in WITHOUT_EFFECT or name.startswith("tracking.")}
    dropped |= set(ZERO_OFFLOAD_KEYS) if kind == ZERO_OFFLOAD else set()
    if values.get("trace") is None:
        dropped.add("trace_steps")
    if (window := values.get("engine.update_interval")) is not None:
        overlap, stagger = (bool(values.get(f"engine.{name}")) for name in ("overlap_step", "stagger"))
        if values.get(DELAY) == usual_delay(window, overlap_step=overlap, stagger=stagger):
            dropped.add(DELAY)  # nobody has chosen it: it follows from the others
    if values.get("data.kind") not in ("file", "alpaca", "headers"):
        dropped.add("data.path")  # where this machine keeps what `kind` names; any folder of headers is another corpus
    kept = {name: value for name, value in values.items() if name not in dropped}
    engine = {name: value for name, value in kept.items() if name.startswith("engine.")}
    place = {} if machine is None else {"machine": "cpu" if cpu_threads(machine) else machine}
    return {"engine": kind} | engine | kept | place


def cpu_threads(machine: str | None) -> int | None:
    """Of "cpu, 2 threads", as summary.json has it: 2. None for a GPU."""
    found = re.fullmatch(r"cpu, (\d+) threads?", machine or "")
    return int(found[1]) if found else None


def task_of(config: dict[str, Any]) -> Values:
    """Model and data, less what may be varied without making the losses incomparable."""
    values = setting_of(config, None)
    varied = ("model.dtype", "data.max_characters")
    return {
        name: value for name, value in values.items() if name.startswith(("model.", "data.")) and name not in varied
    }


def task_name(config: dict[str, Any]) -> str:
    """A task in words, as "minilm on snippets"."""
    model, data = config["model"], config["data"]
    source = model.get("path") or model.get("package") or model.get("kind")
    text = data["path"] if data.get("kind") == "file" and data.get("path") else data.get("task") or data.get("kind")
    return f"{_last_parts(source)} on {_last_parts(text)}"


def _last_parts(path: Any) -> str:
    """The end of a path; two parts of a run's own model, which is always in a folder `model`."""
    parts = str(path).rstrip("/").split("/")
    return "/".join(parts[-2:] if parts[-1] == "model" else parts[-1:])


def key(values: Values) -> Hashable:
    """Equal for equal settings, however they were ordered."""
    return frozenset(values.items())


def differing(settings: Sequence[Values]) -> list[str]:
    """The keys in which settings or tasks differ, the engine's first, then in the configuration's order.

    A key of the engine is compared only among those whose engine has it.
    """
    names = dict.fromkeys(name for values in settings for name in values)
    ordered = sorted(names, key=lambda name: not name.startswith("engine"))
    return [name for name in ordered if len({_value(values, name) for values in settings if _has(values, name)}) > 1]


def _has(values: Values, name: str) -> bool:
    if not name.startswith("engine."):
        return (name, values.get("engine")) != ("model.dtype", ADAMW_BF16)  # the name says it
    if values["engine"] in (SIMULATED, *PEERS):
        return name in values
    if name in SIMULATED_KEYS or values["engine"] in ADAMWS:
        return False
    return not (values["engine"] == ZERO_OFFLOAD and name in ZERO_OFFLOAD_KEYS)


def _value(values: Values, name: str) -> Hashable:
    return values.get(name, NOT_RECORDED)


def named(settings: Sequence[Values], keys: Sequence[str], usual: Values | None = None) -> list[str]:
    """Each setting by its values of `keys`, as "zenflow, k 0.05, U 4"; the engine alone where nothing differs.

    usual: values that go without saying.
    """
    short, usual = _short_names(keys), usual or {}
    names = []
    for values in settings:
        parts = [str(values["engine"])] if "engine" in keys or not keys else []
        for name in keys:
            if name == DELAY and name not in values:
                continue  # it follows from the others
            if name in usual and _value(values, name) == usual[name]:
                continue
            if name != "engine" and _has(values, name):
                others = {_value(other, name) for other in settings}
                word = _shown(_value(values, name), others)
                parts.append(word if name == "machine" else f"{short[name]} {word}")
        names.append(", ".join(parts) or str(values["engine"]))
    return names


def brief(settings: Sequence[Values], keys: Sequence[str]) -> tuple[list[str], str]:
    """Names for a picture, and what they leave out: of long ones the values that most settings have.

    They are as distinct as the full names, which they are where these are short enough.
    """
    full = named(settings, keys)
    if max(map(len, full)) <= LONG:
        return full, ""
    usual: Values = {}
    for name in keys:
        if name not in ("engine", "machine", DELAY, *SYMBOLS):
            shown = [_value(values, name) for values in settings if _has(values, name)]
            usual[name] = max(shown, key=shown.count)
    short = named(settings, keys, usual)
    if len(set(short)) < len(short):
        return full, ""
    words, everyone = _short_names(keys), settings
    told = [
        f"{words[name]} {_shown(value, {_value(other, name) for other in everyone})}" for name, value in usual.items()
    ]
    return short, ", ".join(told)


def details(values: Values, others: Sequence[Values]) -> list[str]:
    """What tells a task from others of the same name, as "path one/text.txt"."""
    keys = differing(others)
    short = _short_names(keys)
    return [f"{short[name]} {_shown(_value(values, name), {_value(other, name) for other in others})}" for name in keys]


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    lasts = [name.rpartition(".")[2] for name in keys]
    return {
        name: SYMBOLS.get(name, last if lasts.count(last) == 1 else name)
        for name, last in zip(keys, lasts, strict=True)
    }


def _shown(value: Hashable, others: set[Hashable]) -> str:
    """A value in few characters; of a path as many last parts as tell it from the others."""
    if isinstance(value, float):
        return f"{value:g}" if float(f"{value:g}") == value else repr(value)
    if isinstance(value, str):
        if "/" not in value:
            return value
        parts, rivals = value.split("/"), [other.split("/") for other in others if isinstance(other, str)]
        for count in range(1, len(parts) + 1):
            if sum(rival[-count:] == parts[-count:] for rival in rivals) == 1:
                return "/".join(parts[-count:])
    return json.dumps(value)


def order(values: Values, keys: Sequence[str]) -> list[tuple[int, float, str]]:
    """A sort key: AdamW, synchronous offload, other projects' offloads, ZenFlow, simulations; numbers by size."""
    kinds = (*ADAMWS, ZERO_OFFLOAD, *PEERS, ZENFLOW, SIMULATED)
    places: list[tuple[int, float, str]] = [(0, kinds.index(values["engine"]), "")]
    for name in keys:
        value = _value(values, name)
        places.append((0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value)))
    return places


def parse_overrides(words: Sequence[str]) -> Values:
    """["engine=adamw", "optimizer.lr=1e-4"] as values. Errors: InputError for a word that is no KEY=VALUE."""
    wanted: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise InputError(f"baseline {word!r} is no setting; allowed: KEY=VALUE, as engine=adamw.")
        wanted[name] = _parsed(text)
    return wanted


def _parsed(text: str) -> Hashable:
    if text.lower() in (words := {"true": True, "false": False, "null": None}):
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def matches(values: Values, wanted: Values) -> bool:
    """Whether a setting has all the wanted values; what the choice of its engine implies counts."""
    implied = ZERO_OFFLOAD_KEYS if values["engine"] == ZERO_OFFLOAD else {}
    return all((implied | values).get(name, NOT_RECORDED) == value for name, value in wanted.items())
