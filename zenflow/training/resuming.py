"""Going on with a run: which configuration it has, and which settings may be changed on the way."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zenflow.checkpoint_folder import PROJECT, libraries
from zenflow.training.checkpoints import all_of, read_latest, run_of
from zenflow.training.errors import InputError
from zenflow.training.run_state import FORMAT
from zenflow.training.schema import TrainConfig, from_plain, plain

log = logging.getLogger(__name__)
AUTO = "auto"
# What bears on how a run is watched, kept or spread over a machine, and on no bit of its steps; and how long it is.
FREE = (
    *("steps", "evaluate_every", "log_every", "checkpoint_every", "checkpoint_minutes", "keep_checkpoints"),
    *("resume", "save_model", "plot", "trace", "trace_steps", "tracking.mode"),
    *("engine.worker_threads", "engine.core_binding", "engine.pt_reserved_cores_perc", "engine.bucket_bytes"),
    *("engine.upload", "engine.upload_check"),
)
PATHS = ("model.path", "data.path")
EVERYTHING = ("variant", "experiment", "debug")  # words that may set anything


@dataclass(frozen=True)
class Resumption:
    """Where a run goes on: after `step` steps, with a verified `state`; {} if none of them has been saved.

    `record` is the run's configuration with every `auto` resolved, as it was; `loss` that of a run which is finished.
    """

    step: int
    state: dict[str, Any]
    record: dict[str, Any]
    loss: float | None = None


def settled(config: TrainConfig) -> dict[str, Any]:
    """The configuration as a checkpoint keeps it: as it was given, with paths that mean the same everywhere."""
    values = plain(replace(config, resume=None))
    for section in ("model", "data"):
        path = values[section]["path"]
        values[section]["path"] = None if path is None else str(Path(path).expanduser().absolute())
    return values


def take_up(config: TrainConfig, folder: Path, given: Sequence[str]) -> tuple[TrainConfig, Resumption | None]:
    """The configuration to go on with, and where; None where a run begins (`resume: auto` in a folder without one).

    `given` are the settings and groups that the command line names, which are compared with the run's; under `auto` all
    are. Errors: InputError if there is nothing to go on with, or a setting differs that must not.
    """
    automatic = config.resume == AUTO
    place = folder if automatic else Path(config.resume).expanduser().absolute()
    run = run_of(place)
    if automatic and not (run / "config.json").exists():
        return replace(config, resume=None), None
    if not place.is_dir():
        raise InputError(
            f"resume={config.resume} is no folder (as {place}); give a run's folder or a checkpoint of one."
        )
    if run.resolve() != folder.resolve():
        raise InputError(
            f"resume={config.resume} goes on in the run's own folder, not in {folder}; leave out hydra.run.dir and -m."
        )
    if automatic and not all_of(run):
        return replace(config, resume=None), _unsaved(config, run)
    checkpoint = read_latest(place)
    state, saved = checkpoint.state, checkpoint.manifest.configuration
    if state.get("format") != FORMAT or not {"asked", "resolved"} <= saved.keys():
        raise InputError(
            f"{checkpoint.folder} has the run format {state.get('format')!r}; this version reads {FORMAT}."
        )
    _check_version(saved["asked"], run, checkpoint.manifest.libraries.get(PROJECT))
    if (torch_then := checkpoint.manifest.libraries.get("torch")) != str(torch.__version__):
        log.warning("torch was %s and is %s, which may round otherwise: bits may differ", torch_then, torch.__version__)
    new = settled(config)
    _check_same(saved["asked"], new, [""] if automatic else [_group(name) for name in given], run)
    changed = FREE if automatic else [name for name in FREE if name in map(_group, given)]
    going_on = replace(from_plain(_with(saved["asked"], new, changed)), resume=None)
    if going_on.steps < (step := state["step"]):
        raise InputError(f"steps is {going_on.steps}, but {step} have been made; allowed: an integer >= {step}.")
    loss = _finished(going_on, run, automatic) if place == run else None  # from a given checkpoint it goes on again
    return going_on, Resumption(step, state, saved["resolved"], loss)


def check_resolved(record: dict[str, Any], was: dict[str, Any], run: Path) -> None:
    """Errors: InputError if what `auto` comes to here, or the device, is not what it was."""
    there, here = ({name: value for name, value in _flat(part).items() if name not in PATHS} for part in (was, record))
    _refuse_differences(there, here, run)


def _unsaved(config: TrainConfig, run: Path) -> Resumption:
    """A run without a checkpoint, under `auto`: it is finished, or begins again."""
    try:
        record = json.loads((run / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{run / 'config.json'} is damaged; give another folder as hydra.run.dir.") from error
    _check_version(record, run, None)
    loss = _finished(config, run, automatic=True)
    if loss is None and (run / "summary.json").exists():
        raise InputError(f"The run in {run} is finished, and has no checkpoint from which it could make more steps.")
    if loss is None:
        log.warning("no step of the run in %s has been saved; it begins again", run)
    return Resumption(0, {}, record, loss)


def _check_version(was: dict[str, Any], run: Path, version: str | None) -> None:
    """Errors: InputError if the configuration is one of other settings than there are: no command can go on with it.

    version: of this project, that wrote it, if that is known.
    """
    try:
        today = _flat(plain(from_plain({name: value for name, value in was.items() if name != "device"})))
        if not (missing := [name for name in today.keys() - _flat(was).keys() if name not in FREE or "." in name]):
            return
        named = f" ({version})" if version not in (None, libraries().get(PROJECT)) else ""
        reason = f"The run in {run} was begun with another version{named}, which had no {', '.join(sorted(missing))}"
    except InputError as error:
        reason = f"The run in {run} was begun with another version: {str(error).rstrip('.')}"
    model = run / "model"
    weights = f" from its final weights, with model.path={model}" if model.is_dir() else ""
    raise InputError(f"{reason}. This version cannot go on with it: use that one, or begin a new run{weights}.")


def _finished(config: TrainConfig, run: Path, automatic: bool) -> float | None:
    """The loss of a run that is finished, under `auto`; without it InputError, unless there are more steps to make."""
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # it was killed before it could write it, or meanwhile
        return None
    if config.steps > summary["steps"]:
        if config.save_model and (run / "model").exists():
            raise InputError(f"{run / 'model'} is there already; move it away, or give save_model=false.")
        return None
    if automatic:
        return summary["validation_loss_after"]
    raise InputError(f"The run in {run} is finished, with {summary['steps']:,} steps; give more steps to go on.")


def _group(name: str) -> str:
    """`tracking=offline` is about its mode only, and an experiment about everything."""
    return "tracking.mode" if name == "tracking" else "" if name in EVERYTHING else name


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _check_same(was: dict[str, Any], new: dict[str, Any], names: Sequence[str], run: Path) -> None:
    def named(values: dict[str, Any]) -> dict[str, Any]:
        chosen = _flat(values).items()
        return {
            name: value
            for name, value in chosen
            if any(not about or name == about or name.startswith(f"{about}.") for about in names)
        }

    _refuse_differences(named(was), named(new), run)


def _refuse_differences(was: dict[str, Any], new: dict[str, Any], run: Path) -> None:
    for name in (*was, *new):
        may_differ = name in FREE and (name in was or "." not in name)
        if not may_differ and (name not in was or name not in new or was[name] != new[name]):
            there, here = (repr(values[name]) if name in values else "missing" for values in (was, new))
            raise InputError(
                f"{name} is {here}, and {there} in the run in {run}; resume goes on with it as it is. Allowed are "
                f"changes of {', '.join(free for free in FREE if free != 'resume')}."
            )


def _with(values: dict[str, Any], new: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """`values` with those of `new` under these names, where it has them."""
    merged = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    for name in names:
        section, _, key = name.rpartition(".")
        source, target = (new.get(section), merged.get(section)) if section else (new, merged)
        if source is not None and key in source:
            target[key] = source[key]
    return merged
