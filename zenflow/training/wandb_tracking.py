"""A run's metrics in Weights & Biases: the one file of the library that knows wandb, imported only when it is used."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import wandb

from zenflow.training.schema import TrackingConfig, TrackingMode

log = logging.getLogger(__name__)

INIT_SECONDS = 30.0  # for the service to answer, before a run that was to be sent as it goes is kept here
FINISH_SECONDS = 20.0  # for the last lines to be sent, before a run ends without them; all of them are kept here
NAME_LENGTH, TAG_LENGTH = 128, 64  # characters that wandb takes
OVER_TIME = "over_time/"  # before the name of a metric whose horizontal axis is time


class WandbRun:
    """One wandb run with an id of its own, whatever the environment says; its files lie in the run's folder.

    `earlier` is the id of a run that goes on, `told` how many records it has told of. wandb's step is the number of a
    record: one that it has already, as of a run that was killed after its checkpoint, is not taken again. Of a run that
    is kept here, `wandb sync` sends both parts to the same id.

    The horizontal axis of every metric is `tokens`. The losses and what else an evaluation gives are there twice: as
    `over_time/NAME` their axis is `elapsed_seconds`. What goes wrong while it runs ends the tracking, not the training.
    """

    def __init__(
        self,
        config: TrackingConfig,
        folder: Path,
        settings: dict[str, Any],
        mode: TrackingMode,
        earlier: str | None = None,
        told: int = 0,
    ) -> None:
        limits = {"init_timeout": INIT_SECONDS, "finish_timeout": FINISH_SECONDS}
        known = {name: value for name, value in limits.items() if name in wandb.Settings.model_fields}  # the last: 0.27
        self._run: Any = wandb.init(
            id=earlier or uuid.uuid4().hex[:8],
            name=(config.name or folder.name)[:NAME_LENGTH],
            project=config.project,
            group=config.group,
            tags=[tag[:TAG_LENGTH] for tag in config.tags],
            dir=folder,
            config=settings,
            mode=mode.name,
            resume="never" if earlier is None else "allow",
            reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True, **known),
        )
        self.id: str = self._run.id
        self._told = told
        self._over_time: set[str] = set()  # metrics whose second axis is defined
        self._run.define_metric("*", step_metric="tokens")

    def log(self, record: dict[str, Any]) -> None:
        """One record of metrics.jsonl; `tokens` and `elapsed_seconds` are those up to its end."""
        self._try(lambda: self._log(record))

    def _log(self, record: dict[str, Any]) -> None:
        timed = {
            OVER_TIME + name: value
            for name, value in record.items()
            if name == "loss" or name.startswith("validation_")
        }
        for name in timed.keys() - self._over_time:
            self._run.define_metric(name, step_metric="elapsed_seconds")
            self._over_time.add(name)
        if self._told >= self._run.starting_step:
            self._run.log(record | timed, step=self._told, commit=True)
        self._told += 1

    def summarise(self, summary: dict[str, Any]) -> None:
        """The run's figures, beside the last values of its metrics."""
        self._try(lambda: self._run.summary.update(summary))

    def finish(self, exit_code: int) -> None:
        """End the run; 0 marks it as finished, anything else as failed."""
        self._try(lambda: self._run.finish(exit_code=exit_code))

    def _try(self, tell: Callable[[], Any]) -> None:
        if self._run is None:
            return
        try:
            tell()
        except Exception as error:  # wandb's own process may be killed, or its disk full
            self._run = None
            log.warning("wandb stopped, metrics.jsonl has everything: %r", error)


def start(
    config: TrackingConfig, folder: Path, settings: dict[str, Any], earlier: str | None = None, told: int = 0
) -> WandbRun | None:
    """The run, or the one with the id `earlier`, which goes on after its first `told` records.

    One that cannot be sent is kept in the folder; None if that fails, too: training needs neither. Each is said in a
    warning.
    """
    if config.mode is TrackingMode.online:
        try:
            return WandbRun(config, folder, settings, TrackingMode.online, earlier, told)
        except Exception as error:
            log.warning(
                "wandb cannot send this run, which is kept for `wandb sync %s/wandb/offline-*`: %s", folder, error
            )
    try:
        return WandbRun(config, folder, settings, TrackingMode.offline, earlier, told)
    except Exception as error:
        log.warning("wandb did not start, metrics.jsonl has everything: %s", error)
        return None
