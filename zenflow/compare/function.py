"""Whether a side works at all, before hours are spent: a short run, and its end once more from a checkpoint.

The checkpoint is a `checkpoint_folder` with what zenflow-train keeps of weights, optimizer and random states. It is
made a step before the end: for most settings in the midst of a window, and with the CPU process at work.
"""

from __future__ import annotations

import gc
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zenflow.background_save import copy_to_host
from zenflow.checkpoint_folder import load, save
from zenflow.compare.config import CompareConfig
from zenflow.compare.judge import Check
from zenflow.safetensors_file import content_of
from zenflow.training import run as training
from zenflow.training.engines import Engine, build_engine
from zenflow.training.errors import InputError
from zenflow.training.loop import Loop
from zenflow.training.metrics import Evaluation, History, StepTimer
from zenflow.training.run_state import load_engine, random_states, set_random_states

CLOSE = 1e-3  # of the held-out loss: more than the order of a device's sums changes in one step


@dataclass(frozen=True)
class Tried:
    """What was found of a side, and its settings with every `auto` resolved."""

    checks: list[Check]
    settings: dict[str, Any]


def try_side(side: str, config: CompareConfig, folder: Path) -> Tried:
    """Train `config.steps` steps, two at least, and the last once more from a checkpoint in `folder`, which is removed.

    Checks: losses and evaluations are finite, and steps are made; the checkpoint is read back, and taken up by a new
    optimizer, with equal bits; from there the run comes to its end. InputError where the disk does not take it.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".function-") as scratch:
        keeper, heard = _Keeper(Path(scratch) / "checkpoint", config.steps - 1), _Heard()
        settings, skipped = _train(config, keeper, heard)
        release()
        resumed = _Heard()
        fault = keeper.fault or _go_on(config, keeper.saved, keeper.step, resumed)
        release()
    checks = [_short_run(side, heard, skipped), _checkpoint(side, keeper.step, fault)]
    if fault is None:
        checks.append(_going_on(side, heard.evaluations[-1].loss, resumed.evaluations[-1].loss))
    return Tried(checks, settings)


def release() -> None:
    """Let the next run find the memory that the one before it had."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def first_difference(one: Any, other: Any, name: str = "state") -> str | None:
    """Where two nested states differ, or None; tensors and arrays by dtype, shape and bits, wherever they lie."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"the keys of {name}"
        found = (first_difference(one[key], other[key], f"{name}[{key!r}]") for key in one)
        return next(filter(None, found), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"the length of {name}"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (first_difference(*pair, f"{name}[{place}]") for place, pair in pairs)), None)
    return None if _bits(one) == _bits(other) else name


class _Heard:
    """What the loop tells its recorder."""

    def __init__(self) -> None:
        self.history = History()
        self.losses: list[Tensor] = []
        self.evaluations: list[Evaluation] = []

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, *, last: bool) -> None:
        self.losses.append(loss)

    def evaluation(self, result: Evaluation) -> None:
        self.evaluations.append(result)


class _Keeper:
    """Makes the checkpoint of `model` and `engine` after `step` steps and reads it: `saved`, or the `fault` in it."""

    stopping = False
    model: nn.Module
    engine: Engine

    def __init__(self, place: Path, step: int) -> None:
        self.step, self.saved, self.fault = step, {}, None
        self._place = place

    def step_ended(self, step: int) -> None:
        if step != self.step:
            return
        state = _state(self.model, self.engine)
        try:
            save(self._place, state)
            self.saved = load(self._place)
        except OSError as error:
            raise InputError(f"The checkpoint that a comparison tries cannot be written: {error}.") from error
        except ValueError as error:
            self.fault = str(error)
        else:
            self.fault = _told(first_difference(state, self.saved), "what was read")


def _train(config: CompareConfig, keeper: _Keeper, heard: _Heard) -> tuple[dict[str, Any], int]:
    """The settings, and how many steps were skipped."""
    prepared = training.prepare(config)
    model = prepared.model.to(prepared.device).train()
    with build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch) as engine:
        keeper.model, keeper.engine = model, engine
        Loop(config, model, prepared.data, engine, heard, StepTimer(prepared.device), keeper=keeper).run()
        skipped = engine.report().skipped_steps
        del keeper.model, keeper.engine
    return prepared.record, skipped


def _go_on(config: CompareConfig, saved: dict[str, Any], step: int, heard: _Heard) -> str | None:
    """Take up what was saved after `step` steps in a new model and optimizer, and go on; or what is wrong with it."""
    prepared = training.prepare(config)
    prepared.model.load_state_dict(saved["model"])
    model = prepared.model.to(prepared.device).train()
    with build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch) as engine:
        try:
            load_engine(engine, saved["engine"])
        except InputError as error:
            return str(error)
        set_random_states(saved["random"], prepared.device)
        if fault := _told(first_difference(saved, _state(model, engine)), "what was loaded"):
            return fault
        Loop(config, model, prepared.data, engine, heard, StepTimer(prepared.device), start=step).run()
    return None


def _state(model: nn.Module, engine: Engine) -> dict[str, Any]:
    """As zenflow-train saves it, less the totals of time and traffic, which go on while it is taken."""
    state = engine.state_dict()
    return {
        "model": copy_to_host(model.state_dict()),
        "engine": state | {"totals": dict.fromkeys(state["totals"], 0)} if "totals" in state else state,
        "random": random_states(next(model.parameters()).device),
    }


def _told(difference: str | None, where: str) -> str | None:
    return None if difference is None else f"{difference} differs in {where}"


def _short_run(side: str, heard: _Heard, skipped: int) -> Check:
    losses = [float(loss) for loss in heard.losses]
    held_out = [point.loss for point in heard.evaluations]
    works = all(map(math.isfinite, (*losses, *held_out))) and skipped < len(losses)
    seen = f"{len(losses)} steps, {skipped} skipped; training loss {losses[0]:.4g} -> {losses[-1]:.4g}, held-out loss "
    return Check(side, "short run", works, seen + f"{held_out[0]:.4g} -> {held_out[-1]:.4g}")


def _checkpoint(side: str, step: int, fault: str | None) -> Check:
    return Check(
        side, "checkpoint", fault is None, fault or f"after {step} steps, loaded by a new optimizer with equal bits"
    )


def _going_on(side: str, uninterrupted: float, resumed: float) -> Check:
    return Check(
        side,
        "going on from it",
        math.isclose(uninterrupted, resumed, rel_tol=CLOSE),
        f"held-out loss {resumed:.6g}; uninterrupted {uninterrupted:.6g}",
    )


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dtype, tuple(value.shape), bytes(content_of(value))
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return value
