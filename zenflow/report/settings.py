"""What a run was set to, from its resolved configuration: which runs are one setting, and in what settings differ.

A setting is everything that bears on the result or its speed, except the seed and torch's threads: not the run's name,
what it saves, its plot or its tracking. The machine (summary.json) is part of it. A task is the model and the data:
within it losses may be compared.
"""

from __future__ import annotations

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
# Which bear on nothing there: windows of one step have one cohort, nothing is late, and every step is as in a warm-up.
IDLE_KEYS = ("engine.stagger", "engine.weight_prediction", "engine.full_warm_up_rounds")
# Which no other engine has.
SIMULATED_KEYS = tuple(f"engine.{name}" for name in SimulatedEngine.__annotations__)
DELAY = "engine.visible_after"
# `device` says less than the machine does.
WITHOUT_EFFECT = (
    *("seed", "name", "plot", "variant", "engine.masters", "engine.offload", "engine.peer", "device"),
    *("threads", "save_model", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
)
NOT_RECORDED = "not recorded"
OWN_PATH = ("file", "alpaca", "headers")  # kinds of data whose path is another corpus, not where this machine keeps one


def flat(config: dict[str, Any], prefix: str = "") -> Values:
    """{"engine": {"topk_ratio": 0.1}} as {"engine.topk_ratio": 0.1}; lists become tuples, and dicts in them, too."""
    values: Values = {}
    for name, value in config.items():
        if isinstance(value, dict):
            values |= flat(value, f"{prefix}{name}.")
        else:
            values[prefix + name] = _hashable(value)
    return values


def _hashable(value: Any) -> Hashable:
    if isinstance(value, dict):
        return tuple((name, _hashable(item)) for name, item in value.items())
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
    dropped |= {*ZERO_OFFLOAD_KEYS, *IDLE_KEYS} if kind == ZERO_OFFLOAD else set()
    if values.get("trace") is None:
        dropped.add("trace_steps")
    if (window := values.get("engine.update_interval")) is not None:
        overlap, stagger = (bool(values.get(f"engine.{name}")) for name in ("overlap_step", "stagger"))
        if values.get(DELAY) == usual_delay(window, overlap_step=overlap, stagger=stagger):
            dropped.add(DELAY)  # nobody has chosen it: it follows from the others
    if values.get("data.kind") not in OWN_PATH:
        dropped.add("data.path")
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
    text = _last_parts(data.get("task") or data.get("kind"))
    if data.get("kind") in OWN_PATH and data.get("path"):
        text = f"{text} {_last_parts(data['path'])}".removeprefix("file ")
    return printable(f"{_last_parts(source)} on {text}")


def printable(text: str) -> str:
    """The text with what UTF-8 has no bytes for as \\udcff: a path's bytes may be no text."""
    return text.encode(errors="backslashreplace").decode()


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
    return [name for name in ordered if len({value_of(values, name) for values in settings if has(values, name)}) > 1]


def has(values: Values, name: str) -> bool:
    """Whether a setting is one that a key says something about: AdamW's has none of the engine's."""
    if not name.startswith("engine."):
        return (name, values.get("engine")) != ("model.dtype", ADAMW_BF16)  # the name says it
    if values["engine"] in (SIMULATED, *PEERS):
        return name in values
    if name in SIMULATED_KEYS or values["engine"] in ADAMWS:
        return False
    return not (values["engine"] == ZERO_OFFLOAD and name in (*ZERO_OFFLOAD_KEYS, *IDLE_KEYS))


def value_of(values: Values, name: str) -> Hashable:
    """What a setting has under a key; NOT_RECORDED where the run was made before there was one."""
    return values.get(name, NOT_RECORDED)


def order(values: Values, keys: Sequence[str]) -> list[tuple[int, float, str]]:
    """A sort key: AdamW, synchronous offload, other projects' offloads, ZenFlow, simulations; numbers by size."""
    kinds = (*ADAMWS, ZERO_OFFLOAD, *PEERS, ZENFLOW, SIMULATED)
    return [(0, kinds.index(values["engine"]), ""), *(place_of(value_of(values, name)) for name in keys)]


def place_of(value: Hashable) -> tuple[int, float, str]:
    """A value's sort key: numbers by size, then words."""
    return (0, value, "") if isinstance(value, (int, float)) else (1, 0, str(value))


def parse_overrides(words: Sequence[str]) -> Values:
    """["engine=adamw", "optimizer.lr=1e-4"] as values. Errors: InputError for a word that is no KEY=VALUE."""
    wanted: Values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise InputError(f"baseline {word!r} is no setting; allowed: KEY=VALUE, as engine=adamw.")
        wanted[name] = parsed(text)
    return wanted


def parsed(text: str) -> Hashable:
    """A value as it is written on a command line."""
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
