"""Everything about a run that can be refused before a file is written, a process started or GPU memory taken."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zenflow.report.settings import engine_of
from zenflow.training.checkpoints import FOLDER, all_of, command_for
from zenflow.training.engines import simulated_rule, zenflow_config
from zenflow.training.errors import InputError
from zenflow.training.models import check_model
from zenflow.training.peers import check_peer
from zenflow.training.schema import (
    AdamWEngine,
    DataKind,
    Device,
    ModelKind,
    PeerEngine,
    SimulatedEngine,
    TrainConfig,
    ZenFlowEngine,
    plain,
)
from zenflow.training.sources import is_classification, locate

OUTPUTS = ("config.json", "metrics.jsonl", "summary.json", "summary.txt", "loss.png", "train.log", "model", FOLDER)

Rule = tuple[str, Callable[[Any], bool]]
POSITIVE: Rule = ("an integer >= 1", lambda value: value >= 1)
POSITIVE_OR_NULL: Rule = ("an integer >= 1 or null", lambda value: value is None or value >= 1)
SHARE: Rule = ("a number between 0 and 1", lambda value: 0 < value < 1)
BETA: Rule = ("a number from 0 to below 1", lambda value: 0 <= value < 1)
NOT_NEGATIVE: Rule = ("a finite number >= 0", lambda value: 0 <= value < math.inf)
RULES: dict[str, Rule] = {
    "seed": ("an integer from 0 to 2**63 - 1", lambda value: 0 <= value < 2**63),
    "threads": POSITIVE_OR_NULL,
    "steps": POSITIVE,
    "batch_size": POSITIVE,
    "accumulate": POSITIVE,
    "evaluate_every": POSITIVE_OR_NULL,
    "log_every": POSITIVE_OR_NULL,
    "checkpoint_every": POSITIVE_OR_NULL,
    "checkpoint_minutes": ("a finite number > 0 or null", lambda value: value is None or 0 < value < math.inf),
    "keep_checkpoints": POSITIVE,
    "data.max_length": ("an integer >= 4", lambda value: value >= 4),
    "data.max_characters": POSITIVE_OR_NULL,
    "data.max_bytes": POSITIVE_OR_NULL,
    "data.held_out": SHARE,
    "data.evaluate_samples": POSITIVE,
    "optimizer.lr": NOT_NEGATIVE,
    "optimizer.beta1": BETA,
    "optimizer.beta2": BETA,
    "optimizer.eps": NOT_NEGATIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.max_grad_norm": ("a finite number > 0 or null", lambda value: value is None or 0 < value < math.inf),
    "optimizer.warmup_steps": ("an integer >= 0", lambda value: value >= 0),
    "optimizer.final_lr_ratio": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
}


def check(config: TrainConfig, folder: Path, *, goes_on: bool = False) -> None:
    """Errors: InputError, one sentence naming what is wrong and what is allowed.

    goes_on: the run in `folder` is continued; else there must be none.
    """
    _check_values(config)
    _check_writable(folder)
    if not goes_on and (present := [name for name in OUTPUTS if (folder / name).exists()]):
        goes = f"; `{command_for(folder)}` goes on with it" if all_of(folder) else ""
        raise InputError(f"{folder} already holds a run ({present[0]}){goes}; give another folder as hydra.run.dir.")
    if config.device is Device.cuda and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no GPU here; use device=cpu or device=auto.")
    if isinstance(config.engine, ZenFlowEngine):
        zenflow_config(config.engine, config.optimizer, steps_per_epoch=1)
        passes, accumulate = config.engine.backward_passes_per_step, config.accumulate
        if passes not in (None, accumulate):
            raise InputError(
                f"engine.backward_passes_per_step is {passes}; allowed: null or what accumulate is, {accumulate}."
            )
    elif isinstance(config.engine, SimulatedEngine):
        simulated_rule(config.engine, config.optimizer)
    elif isinstance(config.engine, PeerEngine):
        check_peer(config)
    elif not isinstance(config.engine, AdamWEngine):
        raise InputError(
            "No engine was chosen; allowed: a ZenFlowEngine, an AdamWEngine, a SimulatedEngine or a PeerEngine."
        )
    _check_trace(config)
    if is_classification(config.data) != (config.model.kind is ModelKind.encoder):
        raise InputError(_mismatch(config))
    if config.data.max_bytes is not None and config.data.kind is not DataKind.headers:
        raise InputError(
            f"data.max_bytes is {config.data.max_bytes}; allowed with data.kind={config.data.kind.name}: null "
            "(data.max_characters limits the training text of every kind)."
        )
    locate(config.data)
    check_model(config.model)


def _check_values(config: TrainConfig) -> None:
    if config.variant is not None:
        raise InputError(f"variant is {config.variant!r}; only a command applies it. Allowed here: null.")
    if config.resume is not None:
        raise InputError(f"resume is {config.resume!r}; only zenflow-train goes on with a run. Allowed here: null.")
    for name, (allowed, within) in RULES.items():
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        if not within(value):
            raise InputError(f"{name} is {value!r}; allowed: {allowed}.")


def _check_trace(config: TrainConfig) -> None:
    name, chosen = config.trace, list(config.trace_steps)
    if name is None:
        return
    path = Path(name)
    if path.name != name or path.suffix != ".json" or {name, path.with_suffix(".png").name} & set(OUTPUTS):
        raise InputError(
            f"trace is {name!r}; allowed: null or a file's name that ends in .json and is none of the run's own."
        )
    if not isinstance(config.engine, ZenFlowEngine):
        engine = engine_of({"engine": plain(config.engine)})
        raise InputError(f"trace is {name!r}; allowed with engine={engine}: null.")
    if len(chosen) != 2 or not 1 <= chosen[0] <= chosen[1] <= config.steps:
        raise InputError(
            f"trace_steps is {chosen}; allowed: the first and the last step to record, from 1 to steps={config.steps}."
        )


def _check_writable(folder: Path) -> None:
    """Try a file without a name in the folder, or in the nearest one above it that exists."""
    try:
        nearest = next(place for place in (folder, *folder.absolute().parents) if place.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written ({error.strerror}); give another folder as hydra.run.dir."
        ) from error


def _mismatch(config: TrainConfig) -> str:
    data, model = f"data.kind={config.data.kind.name}", f"model.kind={config.model.kind.name}"
    if is_classification(config.data):
        return f"{data} has labels, which {model} cannot use; take model=minilm or another encoder."
    return f"{data} has no labels, which {model} needs; take data=snippets, or model=smollm2, causal, bytes or tiny."
