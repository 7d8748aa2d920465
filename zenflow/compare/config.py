"""The settings of `zenflow-compare`: zenflow-train's for both sides, and what each side has for itself."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zenflow.training.errors import InputError
from zenflow.training.schema import PeerEngine, TrainConfig, plain

OWN = "engine."  # only settings under it may differ


@dataclass
class CompareSettings:
    """How to run and what decides. A difference is b's from a's, and its whole 95% interval has to be on one side."""

    warm_up: int = 10  # steps of each run that the system figures leave out
    min_gain: float = 0.05  # of tokens a second: b must be this much faster to be worth a change
    max_loss_rise: float = 0.02  # of the held-out loss: b may not be this much worse


@dataclass
class CompareConfig(TrainConfig):
    """Runs of each side; `plot` is for the comparison's own picture.

    Of their settings checkpoint_every, checkpoint_minutes, keep_checkpoints, log_every, save_model, trace and tracking
    have no effect.
    """

    a: str = "engine=zero_offload"  # settings for a alone, or @FILE with them
    b: str = "engine=zenflow"
    repeats: int = 3  # seeds, from `seed` on
    compare: CompareSettings = field(default_factory=CompareSettings)


def words_of(name: str, text: str) -> list[str]:
    """The settings in `text`, or in the file that it names as @FILE: separated by spaces or lines, # begins a remark.

    Errors: InputError naming the side and what is allowed.
    """
    try:
        if text.startswith("@"):
            text = Path(text[1:]).expanduser().read_text(encoding="utf-8")
        return shlex.split(text, comments=True)
    except OSError as error:
        raise InputError(
            f"{name}={text} cannot be read ({error.strerror}); allowed: settings, as in {name}='engine=zenflow "
            "engine.update_interval=4', or @ and the name of a file with them."
        ) from error
    except ValueError as error:
        raise InputError(f"{name}={text!r} has an open quote; allowed: settings separated by spaces.") from error


def check_alike(a: CompareConfig, b: CompareConfig) -> None:
    """Errors: InputError for another project's engine; naming each setting that is not the engine's and differs."""
    for side, config in (("a", a), ("b", b)):
        if isinstance(config.engine, PeerEngine):
            name = config.engine.peer.name
            raise InputError(
                f"engine={name} in {side} is another project's and keeps no checkpoint, which a comparison tries; "
                f"zenflow-train -m seed=0,1,2 engine={name},zenflow trains with both, and zenflow-report compares them."
            )
    one, other = (getattr(side.engine, "masters", True) for side in (a, b))
    if one != other:
        raise InputError(
            f"engine.masters is {one} in a and {other} in b, which is another precision. Allowed: fp32 masters in "
            "both, or in none."
        )
    different = [
        f"{key} is {one!r} in a and {other!r} in b"
        for key, one, other in differences(plain(a), plain(b))
        if not key.startswith(OWN)
    ]
    if different:
        raise InputError(
            f"{'; '.join(different)}. Only engine settings may differ: give the rest once, for both, outside a and b."
        )


def check_settings(config: CompareConfig) -> None:
    """Errors: InputError naming a setting, its value and what is allowed."""
    chosen, every = config.compare, config.evaluate_every
    rules = (
        ("repeats", config.repeats, "an integer from 1 to 100", 1 <= config.repeats <= 100),
        ("compare.warm_up", chosen.warm_up, f"an integer from 1 to steps - 2 = {config.steps - 2}",
         1 <= chosen.warm_up <= config.steps - 2),
        ("compare.min_gain", chosen.min_gain, "a number from 0 to 10", 0 <= chosen.min_gain <= 10),
        ("compare.max_loss_rise", chosen.max_loss_rise, "a number from 0 to 10", 0 <= chosen.max_loss_rise <= 10),
        ("evaluate_every", every, f"an integer from 1 to steps / 2 = {config.steps // 2}, since quality at equal time "
         "is read between evaluations", every is not None and 1 <= every <= config.steps // 2),
    )  # fmt: skip
    for name, value, allowed, right in rules:
        if not right:
            raise InputError(f"{name} is {value}; allowed: {allowed}.")


def differences(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted name and both values of everything in which two nested dictionaries differ; absent is None."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in dict.fromkeys([*a, *b]):
            yield from differences(a.get(name), b.get(name), f"{key}.{name}" if key else name)
    elif a != b:
        yield key, a, b
