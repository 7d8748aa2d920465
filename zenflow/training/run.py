"""One run from its configuration to its folder: check, load, train, table and plot."""

from __future__ import annotations

import json
import logging
import platform
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zenflow.disk import opened, replacing, room_for
from zenflow.folder_lock import locked
from zenflow.report.settings import ADAMWS, ZENFLOW, engine_of
from zenflow.signals import Stopped, StopRequest, exit_code
from zenflow.terminal import counted, show
from zenflow.trace_view import describe_file, render
from zenflow.training.checkpoints import Keeper, add_command, forget_after, forget_by_clock
from zenflow.training.checks import check
from zenflow.training.data import Dataset, load_data
from zenflow.training.engines import build_engine, check_masters, simulated_rule, zenflow_config
from zenflow.training.errors import InputError
from zenflow.training.loop import Loop
from zenflow.training.metrics import History, Recorder, StepTimer
from zenflow.training.metrics_file import NAME as METRICS
from zenflow.training.metrics_file import MetricsFile
from zenflow.training.models import Tokenizer, load_model, load_tokenizer
from zenflow.training.rates import DeferredRates
from zenflow.training.resuming import Resumption, check_resolved, settled, take_up
from zenflow.training.run_state import RunState, check_data, check_model, fingerprint, load_engine, set_random_states
from zenflow.training.saving import check_room_for_model, save_model
from zenflow.training.schema import (
    Device,
    Dtype,
    PeerEngine,
    RuleConfig,
    SimulatedEngine,
    TrackingMode,
    TrainConfig,
    ZenFlowEngine,
    plain,
)
from zenflow.training.sources import locate
from zenflow.training.summary import Subject, summarise, table

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """What a run needs, read and on the CPU; nothing of the device is taken yet."""

    model: nn.Module
    tokenizer: Tokenizer
    data: Dataset
    device: torch.device
    steps_per_epoch: int
    record: dict[str, Any]  # the configuration with every `auto` resolved, for config.json and trackers


def train(config: TrainConfig, folder: Path, *, part_of_sweep: bool = False, given: Sequence[str] = ()) -> float:
    """Run `config`, leave everything in `folder`, and return the final validation loss.

    With `config.resume` a run goes on, with its own configuration; `given` are the settings that its user names anew.

    Errors: InputError (one sentence) for what the user can mend, before anything is taken; a run on its own then leaves
    nothing behind, a job of a sweep leaves the sentence in its own log. Stopped after one of the signals, when the run
    is saved. Anything else is logged with its traceback and raised.
    """
    try:
        resumption = None
        if config.resume is not None:
            config, resumption = take_up(config, folder, given)
        if resumption is not None and resumption.loss is not None:
            if not resumption.state:
                check_resolved(prepare(config).record, resumption.record, folder)
            log.info("the run in %s is finished", folder)
            forget_by_clock(folder)  # if it was killed after its results were written
            return resumption.loss
        check(config, folder, goes_on=resumption is not None)
        prepared = prepare(config)
        if config.save_model:
            check_room_for_model(prepared.model, folder)
        return _train(config, folder, prepared, resumption, part_of_sweep=part_of_sweep)
    except InputError as error:
        if part_of_sweep:
            log.error("%s", error)
        raise
    except Stopped as stop:
        log.warning("%s", stop)
        raise
    except KeyboardInterrupt:
        log.warning("interrupted; what was recorded so far is in %s", folder)
        raise
    except BaseException as error:
        add_command(error, folder)
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
    del record["resume"]
    record["log_every"] = config.log_every or (10 if on_gpu else 1)
    record["device"], record["model"]["dtype"] = "cuda" if on_gpu else "cpu", dtype.name
    record["model"]["config"] = {} if config.model.path is not None else config.model.config
    record["data"]["path"] = str(locate(config.data))
    if isinstance(config.engine, RuleConfig):
        if isinstance(config.engine, SimulatedEngine):
            engine = simulated_rule(config.engine, config.optimizer).config
        else:
            engine = zenflow_config(config.engine, config.optimizer, steps_per_epoch)
        values = vars(engine) | {"visible_after": engine.visible_after_steps}
        record["engine"] |= {name: values[name] for name in record["engine"] if name in values}
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


def _train(
    config: TrainConfig, folder: Path, prepared: Prepared, resumption: Resumption | None, *, part_of_sweep: bool
) -> float:
    with StopRequest() as request, ExitStack() as stack:
        file = _begin(folder, prepared) if resumption is None else _go_on(folder, prepared, resumption)
        stack.callback(file.close)
        earlier = None if resumption is None else resumption.state.get("wandb_id")
        tracker = stack.enter_context(_tracking(config, folder, prepared.record, earlier, len(file.lines)))
        history = _run(config, folder, prepared, tracker, file, resumption, request)
        summary = summarise(_subject(prepared), history) | {
            "wandb_id": None if tracker is None else tracker.id,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        if tracker is not None:
            tracker.summarise(summary)
        _finish(config, folder, summary, history)
        forget_by_clock(folder)
    if part_of_sweep and request.number is not None:
        raise Stopped(request.number, f"interrupted; the run in {folder} is finished, the sweep is not")
    return summary["validation_loss_after"]


def _begin(folder: Path, prepared: Prepared) -> MetricsFile:
    """InputError if another run has begun in the folder since this one's settings were checked."""
    folder.mkdir(parents=True, exist_ok=True)
    with opened(folder) as descriptor, locked(descriptor, folder):
        if (folder / METRICS).exists():
            raise InputError(f"Another run has begun in {folder}; give another folder as hydra.run.dir.")
        _write_whole(folder / "config.json", prepared.record)
        return MetricsFile.create(folder)


def _go_on(folder: Path, prepared: Prepared, resumption: Resumption) -> MetricsFile:
    """Everything that can be refused without an engine; nothing changes yet."""
    check_resolved(prepared.record, resumption.record, folder)
    state = resumption.state
    if state:
        check_model(prepared.model, state["model"])
        check_data(prepared.data, state["data"])
    return MetricsFile.take_up(folder, state.get("metrics_bytes", 0), resumption.step)


def _run(
    config: TrainConfig,
    folder: Path,
    prepared: Prepared,
    tracker: Any | None,
    file: MetricsFile,
    resumption: Resumption | None,
    request: StopRequest,
) -> History:
    """Train, from the start or from where the run was saved, and close everything that this has taken."""
    record, device = prepared.record, prepared.device
    start, saved = (0, {}) if resumption is None else (resumption.step, resumption.state)
    if saved:
        prepared.model.load_state_dict(saved["model"])
    model = prepared.model.to(device).train()
    timer = StepTimer(device)
    with ExitStack() as stack:
        engine = stack.enter_context(build_engine(model, config.engine, config.optimizer, prepared.steps_per_epoch))
        if saved:
            load_engine(engine, saved["engine"])
        if resumption is not None:
            _rewind(folder, record, file, start)
        rates = DeferredRates(record["engine"]) if isinstance(config.engine, ZenFlowEngine) else None
        recorder = stack.enter_context(Recorder(folder, timer, engine, record["log_every"], tracker, rates, file))
        state = RunState(
            model, engine, recorder, device, fingerprint(prepared.data), None if tracker is None else tracker.id
        )
        keeper = stack.enter_context(
            Keeper(
                folder,
                config.checkpoint_every,
                None if isinstance(config.engine, PeerEngine) else config.checkpoint_minutes,
                config.keep_checkpoints,
                state.gather,
                {"asked": settled(config), "resolved": record},
                request,
            )
        )
        if saved:
            set_random_states(saved["random"], device)
            saved.clear()  # it is the checkpoint's files, which could not be removed otherwise
        trace = _trace_file(config, folder, start)
        Loop(config, model, prepared.data, engine, recorder, timer, trace, keeper, start).run()
        recorder.history.report = engine.report()  # with the windows that the last flush has ended
        if config.save_model:
            shutil.rmtree(folder / "model", ignore_errors=True)  # left by a run that was killed just after
            save_model(model, prepared.tokenizer, engine.master, folder / "model")
    return recorder.history


def _rewind(folder: Path, record: dict[str, Any], file: MetricsFile, step: int) -> None:
    """Make the folder that of a run which has made `step` steps."""
    forget_after(folder, step)
    file.cut()
    for name in ("summary.json", "summary.txt", "loss.png"):
        (folder / name).unlink(missing_ok=True)
    _write_whole(folder / "config.json", record)
    log.info("the run goes on after step %d", step)


def _write_whole(path: Path, value: dict[str, Any]) -> None:
    """As JSON, whole or not at all, whatever kills the process. DiskFullError."""
    text = json.dumps(value, indent=2)
    with room_for(path, len(text)), replacing(path) as made:
        made.write_text(text, encoding="utf-8")


def _trace_file(config: TrainConfig, folder: Path, start: int) -> Path | None:
    if config.trace is None:
        return None
    if start >= config.trace_steps[0]:
        log.warning("no trace of steps %d to %d: the run goes on after step %d", *config.trace_steps, start)
        return None
    return folder / config.trace


@contextmanager
def _tracking(
    config: TrainConfig, folder: Path, record: dict[str, Any], earlier: str | None, told: int
) -> Iterator[Any | None]:
    """The run's tracker, if any; it learns how the block ended. `earlier` is its id in a run that goes on after `told`
    lines of metrics.jsonl."""
    tracker = _tracker(config, folder, record, earlier, told)
    code = 1
    try:
        yield tracker
        code = 0
    except KeyboardInterrupt as stop:
        code = exit_code(stop)
        raise
    finally:
        if tracker is not None:
            tracker.finish(code)


def _tracker(config: TrainConfig, folder: Path, record: dict[str, Any], earlier: str | None, told: int) -> Any | None:
    if config.tracking.mode is TrackingMode.disabled:
        return None
    try:
        from zenflow.training.wandb_tracking import start
    except ImportError as error:
        log.warning("tracking is off, metrics.jsonl has everything: %s (pip install wandb)", error)
        return None
    return start(config.tracking, folder, record, earlier, told)


def _subject(prepared: Prepared) -> Subject:
    record, engine = prepared.record, prepared.record["engine"]
    weights = list(prepared.model.parameters())
    random = record["model"]["config"].get("model_type")
    source = record["model"]["path"] or random or record["model"]["package"] or record["model"]["kind"]
    k, window, name = engine.get("topk_ratio"), engine.get("update_interval"), engine_of(record)
    on_gpu, threads = prepared.device.type == "cuda", counted(torch.get_num_threads(), "thread")
    adamw = (
        "adamw" + " without masters" * (not engine.get("masters", True)) + " on the host" * bool(engine.get("offload"))
    )
    together = ", windows together" * (name == ZENFLOW and not engine["stagger"])
    task = f", {record['data']['task']}" if record["data"]["task"] else ""
    return Subject(
        model=f"{source}, {record['model']['dtype']}",
        data=f"{record['data']['kind']}{task}, {len(prepared.data.train):,} samples of at most "
        f"{record['data']['max_length']} tokens, {len(prepared.data.held_out):,} held out",
        engine=adamw if name in ADAMWS else name if k is None else f"{name}, k {k:g}, U {window}{together}",
        device=torch.cuda.get_device_name(prepared.device) if on_gpu else f"cpu, {threads}",
        parameters=sum(weight.numel() for weight in weights),
        weight_bytes=sum(weight.nbytes for weight in weights),
        topk_ratio=k,
        update_interval=window,
    )


def _finish(config: TrainConfig, folder: Path, summary: dict[str, Any], history: History) -> None:
    text = table(summary)
    _write_whole(folder / "summary.json", summary)
    (folder / "summary.txt").write_text(text + "\n", encoding="utf-8")
    show(text)
    draws = find_spec("matplotlib") is not None
    if config.plot and draws:
        from zenflow.training.plot import save_plot

        save_plot(history, f"{config.name}: {summary['engine']}, {summary['model']}", folder / "loss.png")
    if config.trace is not None and (folder / config.trace).exists():
        _show_trace(folder / config.trace, draws)
    if not draws and (config.plot or config.trace is not None):
        log.info("no picture: matplotlib is not installed (the extra `plot`)")
    log.info("everything is in %s", folder)


def _show_trace(trace: Path, draws: bool) -> None:
    log.info("%s\n%s", trace.name, describe_file(trace))
    if draws:
        render(trace, trace.with_suffix(".png"))
