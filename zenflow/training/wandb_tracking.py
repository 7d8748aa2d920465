"""A run's metrics in Weights & Biases: the one file of the library that knows wandb, imported only when it is used."""

from __future__ import annotations

import logging
import uuid
from pathlib import Path
from typing import Any

import wandb

from zenflow.training.schema import TrackingConfig

log = logging.getLogger(__name__)


class WandbRun:
    """One wandb run with an id of its own, whatever the environment says; its files lie in the run's folder."""

    def __init__(self, config: TrackingConfig, folder: Path, settings: dict[str, Any]) -> None:
        self._run = wandb.init(
            id=uuid.uuid4().hex[:8],
            name=folder.name,
            project=config.project,
            group=config.group,
            dir=folder,
            config=settings,
            mode=config.mode.name,
            resume="never",
            reinit="create_new",
            settings=wandb.Settings(console="off", quiet=True),
        )
        self._run.define_metric("*", step_metric="tokens")
        self.id: str = self._run.id

    def log(self, record: dict[str, Any]) -> None:
        """One record; `tokens` (seen so far) is the horizontal axis."""
        self._run.log(record)

    def finish(self, exit_code: int) -> None:
        """End the run; 0 marks it as finished, anything else as failed."""
        self._run.finish(exit_code=exit_code)


def start(config: TrackingConfig, folder: Path, settings: dict[str, Any]) -> WandbRun | None:
    """The run, or None with a warning if wandb cannot start: training gives the same results without it."""
    try:
        return WandbRun(config, folder, settings)
    except wandb.Error as error:
        log.warning("wandb did not start, metrics.jsonl has everything: %s", error)
        return None
