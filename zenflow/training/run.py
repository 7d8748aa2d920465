"""One run from its configuration to its folder: check, load, train, table and plot."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow.trace_view import describe, overlap_summary, read_events, render
from zenflow.training.checks import check
from zenflow.training.data import Dataset, load_data
from zenflow.training.engines import build_engine, check_masters, zenflow_config
from zenflow.training.errors import InputError
from zenflow.training.loop import Loop
from zenflow.training.metrics import History, Recorder, StepTimer, Subject, summarise, table
from zenflow.training.models import Tokenizer, load_model, load_tokenizer
from zenflow.training.rates import DeferredRates
from zenflow.training.saving import save_model
from zenflow.training.schema import Device, Dtype, TrackingMode, TrainConfig, ZenFlowEngine, plain
from zenflow.training.sources import locate

log = logging.getLogger(__name__)
INTERRUPTED = 130  # the exit code, as shells have it


@dataclass(frozen=True)
class Prepared:
    """What a run needs, read and on the CPU; nothing of the device is taken yet."""

    model: nn.Module
    tokenizer: Tokenizer
    data: Dataset
    device: torch.device
    steps_per_epoch: int
    record: dict[str, Any]  # the configuration with every `auto` resolved, for config.json and trackers


def train(config: TrainConfig, folder: Path, *, part_of_sweep: bool = False) -> float:
    """Run `config`, leave everything in `folder`, and return the final validation loss.

    Errors: InputError (one sentence) for what the user can mend, before anything is taken; a run on its own then leaves
    nothing behind, a job of a sweep leaves the sentence in its own log. Anything else is logged with its traceback and
    raised.
    """
    try:
        check(config, folder)
        return _train(config, folder, prepare(config))
    except InputError as error:
        if part_of_sweep:
            log.error("%s", error)
        _remove_if_empty(folder)
        raise
    except KeyboardInterrupt:
        log.warning("interrupted; what was recorded so far is in %s", folder)
        raise
    except BaseException:
        log.exception("the run in %s failed", folder)
        raise


def prepare(config: TrainConfig) -> Prepared:
    """Data, model and what is resolved of a checked configuration; may take GPU memory. InputError."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    on_gpu = config.device is not Device.cpu and torch.cuda.is_available()
    dtype = config.model.dtype
    if dtype is Dtype.auto:
        dtype = Dtype.bfloat16 if on_gpu else Dtype.float32
    check_masters(config.engine, dtype.name)
    tokenizer = load_tokenizer(config.model)
    data = load_data(config.data, tokenizer)
    if config.batch_size > len(data.train):
        raise InputError(
            f"batch_size is {config.batch_size}; allowed: an integer from 1 to {len(data.train)}, the training samples."
        )
    torch.manual_seed(config.seed)
    model = load_model(
        config.model, classes=data.classes, max_length=config.data.max_length, dtype=getattr(torch, dtype.name)
    )
    steps_per_epoch = max(1, len(data.train) // (config.batch_size * config.accumulate))
    record = plain(config)
    record["log_every"] = config.log_every or (10 if on_gpu else 1)
    record["device"], record["model"]["dtype"] = "cuda" if on_gpu else "cpu", dtype.name
    record["model"]["config"] = {} if config.model.path is not None else config.model.config
    record["data"]["path"] = str(locate(config.data))
    if isinstance(config.engine, ZenFlowEngine):
        values = vars(zenflow_config(config.engine, config.optimizer, steps_per_epoch))
        record["engine"] = {name: values[name] for name in record["engine"]}
    _resolve(record)
    return Prepared(model, tokenizer, data, torch.device(record["device"]), steps_per_epoch, record)


def _resolve(record: dict[str, Any]) -> None:
    """What `auto` comes to here. `worker_threads` stays: the engine takes as many as each window asks for."""
    model, engine = record["model"], record["engine"]
    if model["kind"] == "tiny":
        model["tokenizer"] = "bytes"
    if engine.get("core_binding") == "auto":
        engine["core_binding"] = record["device"] == "cuda"
    if engine.get("ring_dtype") == "auto" and engine["accumulate_on"] == "gpu":
        engine["ring_dtype"] = model["dtype"]  # the gradient's


def _train(config: TrainConfig, folder: Path, prepared: Prepared) -> float:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "config.json", "x", encoding="utf-8") as file:
        json.dump(prepared.record, file, indent=2)
    with _tracking(config, folder, prepared.record) as tracker:
        history = _run(config, folder, prepared, tracker)
        summary = summarise(_subject(prepared), history) | {
            "wandb_id": None if tracker is None else tracker.id,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if tracker is not None:
            tracker.summarise(summary)
        _finish(config, folder, summary, history)
    return summary["validation_loss_after"]


def _run(config: TrainConfig, folder: Path, prepared: Prepared, tracker: Any | None) -> History:
    """Train, and close everything that this has taken."""
    record = prepared.record
    model = prepared.model.to(prepared.device).train()
    timer = StepTimer(prepared.device)
    with ExitStack() as stack:
        engine = stack.enter_context(
            build_engine(model.parameters(), config.engine, config.optimizer, prepared.steps_per_epoch)
        )
        rates = DeferredRates(record["engine"]) if isinstance(config.engine, ZenFlowEngine) else None
        recorder = stack.enter_context(Recorder(folder, timer, engine, record["log_every"], tracker, rates))
        trace = None if config.trace is None else folder / config.trace
        Loop(config, model, prepared.data, engine, recorder, timer, trace).run()
        if config.save_model:
            save_model(model, prepared.tokenizer, engine.master, folder / "model")
    return recorder.history


@contextmanager
def _tracking(config: TrainConfig, folder: Path, record: dict[str, Any]) -> Iterator[Any | None]:
    """The run's tracker, if any; it learns how the block ended."""
    tracker = _tracker(config, folder, record)
    code = 1
    try:
        yield tracker
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        if tracker is not None:
            tracker.finish(code)


def _tracker(config: TrainConfig, folder: Path, record: dict[str, Any]) -> Any | None:
    if config.tracking.mode is TrackingMode.disabled:
        return None
    try:
        from zenflow.training.wandb_tracking import start
    except ImportError as error:
        log.warning("tracking is off, metrics.jsonl has everything: %s (pip install wandb)", error)
        return None
    return start(config.tracking, folder, record)


def _subject(prepared: Prepared) -> Subject:
    record, engine = prepared.record, prepared.record["engine"]
    weights = list(prepared.model.parameters())
    random = record["model"]["config"].get("model_type")
    source = record["model"]["path"] or random or record["model"]["package"] or record["model"]["kind"]
    k, window = engine.get("topk_ratio"), engine.get("update_interval")
    on_gpu = prepared.device.type == "cuda"
    adamw = "adamw" if engine.get("masters", True) else "adamw without masters"
    return Subject(
        model=f"{source}, {record['model']['dtype']}",
        data=f"{record['data']['kind']}, {len(prepared.data.train):,} samples of at most "
        f"{record['data']['max_length']} tokens, {len(prepared.data.held_out):,} held out",
        engine=adamw if k is None else f"zenflow, k {k:g}, U {window}",
        device=torch.cuda.get_device_name() if on_gpu else f"cpu, {torch.get_num_threads()} threads",
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        topk_ratio=k,
        update_interval=window,
    )


def _finish(config: TrainConfig, folder: Path, summary: dict[str, Any], history: History) -> None:
    text = table(summary)
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    draws = find_spec("matplotlib") is not None
    if config.plot and draws:
        from zenflow.training.plot import save_plot

        save_plot(history, f"{config.name}: {summary['engine']}, {summary['model']}", folder / "loss.png")
    if config.trace is not None:
        _show_trace(folder / config.trace, draws)
    if not draws and (config.plot or config.trace is not None):
        log.info("no picture: matplotlib is not installed (the extra `plot`)")
    log.info("everything is in %s", folder)


def _show_trace(trace: Path, draws: bool) -> None:
    log.info("%s\n%s", trace.name, describe(overlap_summary(read_events(trace))))
    if draws:
        render(trace, trace.with_suffix(".png"))


def _remove_if_empty(folder: Path) -> None:
    """Take back the folders that were made for a run which did not start; ones that hold anything stay."""
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()
