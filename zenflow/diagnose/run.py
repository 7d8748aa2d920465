"""`zenflow-diagnose` from its configuration to its folder."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from torch import Tensor

from zenflow.bench.machine import facts
from zenflow.bench.topology import topology
from zenflow.cores import gpu_bus_id
from zenflow.diagnose.config import DiagnoseConfig, check_settings
from zenflow.diagnose.meter import Meter
from zenflow.diagnose.result import WIDTH, Result
from zenflow.diagnose.session import Diagnosis
from zenflow.terminal import show
from zenflow.training import run as training
from zenflow.training.checks import check
from zenflow.training.data import Batch, Samples
from zenflow.training.engines import Engine, build_engine
from zenflow.training.errors import InputError, errors_logged, require_free
from zenflow.training.loop import Loop
from zenflow.training.metrics import Evaluation, History, StepTimer
from zenflow.training.schema import AdamWEngine, ZenFlowEngine, plain

log = logging.getLogger(__name__)
OUTPUTS = ("diagnosis.json", "diagnosis.txt", "diagnosis.png")


def diagnose(config: DiagnoseConfig, folder: Path, *, part_of_sweep: bool = False) -> float:
    """Measure the run and leave `OUTPUTS` in `folder`; the median step in seconds.

    Errors: InputError (one sentence) for what the user can mend; anything else is logged with its traceback and raised.
    """
    with errors_logged(log, "diagnosis", folder, part_of_sweep=part_of_sweep):
        check_settings(config)
        require_free(folder, OUTPUTS)
        chosen = config.diagnose
        config = replace(config, steps=chosen.warm_up + chosen.steps, evaluate_every=None, trace=None)
        check(config, folder)
        result, record = _measure(config)
        _leave(result, record | {"diagnose": plain(chosen)}, folder)
        if config.plot:
            _draw(result, folder)
        log.info("everything is in %s", folder)
        return result.figures.median


def _measure(config: DiagnoseConfig) -> tuple[Result, dict[str, Any]]:
    """The result, and the settings with every `auto` resolved."""
    prepared = training.prepare(config)
    model = prepared.model.to(prepared.device).train()
    with (
        _memory_error_told(config),
        build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch) as engine,
    ):
        diagnosis = _diagnosis(config, engine)
        data = replace(prepared.data, train=Watched(prepared.data.train, diagnosis.meter))
        loop_engine = engine if isinstance(config.engine, ZenFlowEngine) else Timed(engine, diagnosis.meter)
        Loop(config, model, data, loop_engine, _Listener(diagnosis), StepTimer(prepared.device)).run()
        return diagnosis.result(), prepared.record


def _diagnosis(config: DiagnoseConfig, engine: Engine) -> Diagnosis:
    offloads = isinstance(config.engine, ZenFlowEngine)
    return Diagnosis(
        engine.optimizer if offloads else engine,  # AdamW's step, with its norm, is timed from outside
        steps=config.diagnose.steps,
        warm_up=config.diagnose.warm_up,
        triad_bytes=config.diagnose.triad_bytes,
        engine="zero_offload" if offloads else "adamw_offload" if config.engine.offload else "adamw",
    )


class Watched:
    """Samples whose batches' making, and way to the device, is timed as waiting for data."""

    def __init__(self, samples: Samples, meter: Meter) -> None:
        self._samples, self._meter = samples, meter

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: list[int]) -> _WatchedBatch:
        with self._meter.waiting():
            return _WatchedBatch(self._samples.batch(indices), self._meter)


class _WatchedBatch:
    def __init__(self, batch: Batch, meter: Meter) -> None:
        self._batch, self._meter = batch, meter

    def to(self, device: torch.device) -> Batch:
        with self._meter.waiting():
            return self._batch.to(device)


class Timed:
    """An engine whose steps are timed as the optimizer's; all else is the engine's."""

    def __init__(self, engine: Engine, meter: Meter) -> None:
        self._engine, self._meter = engine, meter

    def step(self) -> None:
        with self._meter.optimizing():
            self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Listener:
    """What the loop tells its recorder, told to the diagnosis; nothing is read before the end."""

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.history = History()
        self._diagnosis = diagnosis

    def step(self, number: int, loss: Tensor, lr: float, tokens: int, *, last: bool) -> None:
        self._diagnosis.step_done(loss)

    def evaluation(self, result: Evaluation) -> None:
        self._diagnosis.validation.append(result.loss)
        self._diagnosis.scores.append(result.named_scores)


@contextmanager
def _memory_error_told(config: DiagnoseConfig) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        advice = "use engine=zero_offload" if isinstance(config.engine, AdamWEngine) else "use a smaller batch_size"
        raise InputError(f"The run does not fit on the device; {advice}. ({str(error).partition('. ')[0]})") from error


def _leave(result: Result, settings: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = facts() | topology(gpu_bus_id())
    told = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    text = f"{result.text()}\n{fill(told, WIDTH, break_on_hyphens=False)}\n"
    (folder / "diagnosis.txt").write_text(text, encoding="utf-8")
    (folder / "diagnosis.json").write_text(result.json(settings=settings, machine=machine), encoding="utf-8")
    show(text)


def _draw(result: Result, folder: Path) -> None:
    try:
        from zenflow.diagnose.picture import save_picture

        save_picture(result, folder / "diagnosis.png")
    except ImportError as error:
        log.info("no picture: %s (the extra `plot`)", error)
