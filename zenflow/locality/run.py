"""`zenflow-locality` from its configuration to its folder."""

from __future__ import annotations

import csv
import json
import logging
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from zenflow.bench.machine import facts
from zenflow.locality.config import LocalityConfig, check_settings
from zenflow.locality.figures import Row, curves, kind_rows, matrix_rows, share_rows, survival_rows
from zenflow.locality.study import CURVE, Study
from zenflow.locality.text import study_text
from zenflow.report.settings import engine_of, task_name
from zenflow.terminal import show
from zenflow.training import run as training
from zenflow.training.checks import check
from zenflow.training.engines import Engine, build_engine
from zenflow.training.errors import InputError, errors_logged, require_free
from zenflow.training.loop import Loop
from zenflow.training.metrics import Evaluation, History, StepTimer

log = logging.getLogger(__name__)
OUTPUTS = ("locality.json", "locality.csv", "locality.md", "locality.png")


def study_locality(config: LocalityConfig, folder: Path, *, part_of_sweep: bool = False) -> float:
    """Train, watch, and leave `OUTPUTS` in `folder`.

    Returns the part, from 0 to 1, of the squared norm of all matrices that `locality.shares[0]` of their columns hold.

    Errors: InputError (one sentence) for what the user can mend; anything else is logged with its traceback and raised.
    """
    with errors_logged(log, "study", folder, part_of_sweep=part_of_sweep):
        check_settings(config)
        require_free(folder, OUTPUTS)
        config = replace(config, trace=None)
        check(config, folder)
        seen = _watch(config)
        rows = matrix_rows(seen.study)
        _leave(seen, rows, folder)
        if config.plot:
            _draw(seen, rows, folder)
        log.info("everything is in %s", folder)
        return share_rows(seen.study, rows)[0]["overall"]


class Watched:
    """An engine before whose steps a study takes the gradients; all else is the engine's."""

    def __init__(self, engine: Engine, study: Study) -> None:
        self._engine, self._study = engine, study

    def step(self) -> None:
        self._study.observe()
        self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class Listener:
    """What the loop tells its recorder, kept in `history`; a loss is read at once, as the study waits anyway."""

    def __init__(self, timer: StepTimer) -> None:
        self.history = History()
        self._timer = timer

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, *, last: bool) -> None:
        self.history.losses.append(float(loss))
        self.history.seconds += self._timer.read()

    def evaluation(self, result: Evaluation) -> None:
        self.history.evaluations.append(result)
        log.info("step %d: validation loss %.4f", result.step, result.loss)


@dataclass(frozen=True)
class Seen:
    """A study and the run that it watched; `record` is the configuration with every `auto` resolved."""

    study: Study
    record: dict[str, Any]
    parameters: int
    history: History

    @property
    def title(self) -> str:
        """What was watched."""
        return f"{task_name(self.record)}, {engine_of(self.record)}, {self.study.steps:,} steps"

    @property
    def heading(self) -> list[str]:
        """What was watched, on what, and whether it trained."""
        record, losses = self.record, self.history.losses
        first, last = (self.history.evaluations[place].loss for place in (0, -1))
        samples, machine = record["batch_size"] * record["accumulate"], facts()
        return [
            f"{self.title} of {samples:,} samples, lr {record['optimizer']['lr']:g}, seed {record['seed']}, "
            f"weights in {record['model']['dtype']}",
            f"{self.study.matrices:,} matrices with {self.study.numel / 1e6:,.1f}M of {self.parameters / 1e6:,.1f}M "
            f"parameters; {self.study.empty:,} steps without a finite gradient",
            f"training loss {losses[0]:.4f} -> {statistics.fmean(losses[-10:]):.4f} (mean of the last 10), "
            f"held out {first:.4f} -> {last:.4f}",
            f"{machine['gpu'] or machine['cpu']}, torch {machine['torch']}, commit {machine['commit'] or 'unknown'}",
        ]


def _watch(config: LocalityConfig) -> Seen:
    prepared = training.prepare(config)
    model = prepared.model.to(prepared.device).train()
    timer = StepTimer(prepared.device)
    study, listener = Study(model.named_parameters(), config.locality), Listener(timer)
    with build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch) as engine:
        Loop(config, model, prepared.data, Watched(engine, study), listener, timer).run()
    if study.empty == study.steps:
        raise InputError("No step had a finite gradient above zero; give a smaller optimizer.lr, or other data.")
    parameters = sum(weight.numel() for weight in model.parameters())
    return Seen(study, prepared.record, parameters, listener.history)


def _leave(seen: Seen, rows: list[Row], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    text = study_text(seen.study, rows, seen.heading)
    (folder / "locality.md").write_text(text, encoding="utf-8")
    with open(folder / "locality.csv", "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    (folder / "locality.json").write_text(json.dumps(_result(seen, rows), indent=1), encoding="utf-8")
    show(text)


def _result(seen: Seen, rows: list[Row]) -> dict[str, Any]:
    """All of it; shares are from 0 to 1."""
    study = seen.study
    return {
        "settings": seen.record,
        "machine": facts(),
        "steps": study.steps,
        "steps_without_gradient": study.empty,
        "losses": seen.history.losses,
        "validation_losses": {point.step: point.loss for point in seen.history.evaluations},
        "shares": share_rows(study, rows),
        "survival": survival_rows(study, rows),
        "kinds": kind_rows(study, rows),
        "matrices": rows,
        "overall_by_step": {dim: [one.tolist() for one in steps] for dim, steps in study.overall.items()},
        "curve": {"channels": CURVE.tolist()} | {dim: values.tolist() for dim, values in curves(study).items()},
    }


def _draw(seen: Seen, rows: list[Row], folder: Path) -> None:
    try:
        from zenflow.locality.picture import save_picture

        save_picture(seen.study, rows, f"Locality of the gradient: {seen.title}", folder / "locality.png")
    except ImportError as error:
        log.info("no picture: %s (the extra `plot`)", error)
