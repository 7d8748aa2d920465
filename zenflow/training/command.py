"""A command and its jobs: the one file of the library that knows Hydra, which is imported only where it is used."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zenflow.disk import DiskFullError
from zenflow.signals import exit_code
from zenflow.terminal import as_of_job, lines_of_job
from zenflow.training.errors import InputError, said
from zenflow.training.schema import (
    AdamWEngine,
    DeepSpeedZenFlowEngine,
    PeerEngine,
    SimulatedEngine,
    TrainConfig,
    ZenFlowEngine,
)

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from zenflow.training.sweep import Job

log = logging.getLogger(__name__)


class JobFailed(RuntimeError):
    """Job `number` of a sweep failed, as `sentence` says; more is in its own log."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(number, sentence)
        self.number, self.sentence = number, sentence


def register() -> None:
    """Make the schema known to Hydra; conf/train.yaml and conf/engine/*.yaml refer to it by these names."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    OmegaConf.register_new_resolver("run_folder", _run_folder, replace=True)
    store = ConfigStore.instance()
    store.store(name="base_train", node=TrainConfig)
    store.store(group="schema/engine", name="zenflow", node=ZenFlowEngine)
    store.store(group="schema/engine", name="adamw", node=AdamWEngine)
    store.store(group="schema/engine", name="simulated", node=SimulatedEngine)
    store.store(group="schema/engine", name="peer", node=PeerEngine)
    store.store(group="schema/engine", name="deepspeed_zenflow", node=DeepSpeedZenFlowEngine)


def _run_folder(resume: str | None, otherwise: str) -> str:
    """Where a run is written: that which goes on stays where it is."""
    from zenflow.training.checkpoints import run_of
    from zenflow.training.resuming import AUTO

    return otherwise if resume in (None, AUTO) else str(run_of(Path(str(resume)).expanduser().absolute()))


def given_settings() -> list[str]:
    """The settings and groups that the command line names, of a job that runs."""
    from hydra.core.hydra_config import HydraConfig

    return [_key(word) for word in HydraConfig.get().overrides.task]


def run_command(
    job: Callable[[], None], name: str = "zenflow-train", after_sweep: Callable[[Path], None] | None = None
) -> None:
    """Run a `hydra.main` function as the command `name`: a user's mistake is one sentence, anything else a traceback.

    Exits with 1 after either, and with 128 and the signal's number when interrupted. However a sweep ends,
    `after_sweep` gets its folder.
    """
    global _sweep, _made
    _sweep = _made = None
    register()
    # Hydra prints errors in its own way and exits, unless this tells it to raise them.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        job()
    except KeyboardInterrupt as stop:
        sys.exit(exit_code(stop))
    except Exception as error:
        if (sentence := explain(error)) is None:
            raise
        # Several jobs may write to one terminal: it begins as what they log does.
        with lines_of_job(error.number if isinstance(error, JobFailed) else None):
            sys.exit(as_of_job(f"{name}: {sentence}"))
    finally:
        _take_back()
        if after_sweep is not None and _sweep is not None and _sweep.is_dir():
            after_sweep(_sweep)


def run_job(train: Callable[..., float], cfg: DictConfig, name: str = "zenflow-train") -> float:
    """Call `train`, of the command `name`, with the composed configuration as dataclasses and the job's own folder.

    A job on its own exits with the user's mistake as one sentence, or with 1 where `train` has logged the traceback. In
    a sweep JobFailed is raised: Hydra runs the other jobs, then raises the first of these.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from zenflow.training.resuming import AUTO

    running = HydraConfig.get()
    folder, sweep = Path(running.runtime.output_dir), running.mode is RunMode.MULTIRUN
    with lines_of_job(running.job.num if sweep else None):
        try:
            job = _note_job(folder) if sweep else None
            config = OmegaConf.to_object(_with_variant(cfg, part_of_sweep=sweep))
            if job is not None:
                job.name_run(config.tracking)
            elif config.resume == AUTO and not any("run.dir=" in word for word in running.overrides.hydra):
                log.warning("resume=auto without hydra.run.dir=RUN finds nothing to go on from: a new run, %s", folder)
            return train(config, folder, part_of_sweep=sweep)
        except Exception as error:
            known = isinstance(error, (InputError, MemoryError, DiskFullError))
            if sweep:
                told = said(error) if known else f"{error!r}, with its traceback in the log"
                raise JobFailed(running.job.num, f"{folder}: {told}") from error
            sys.exit(f"{name}: {said(error)}" if known else 1)


def _with_variant(cfg: DictConfig, *, part_of_sweep: bool) -> DictConfig:
    """`cfg`, or, where it has a variant, the configuration composed anew with the variant's words behind all others.

    Errors: InputError if they do not fit; a job of a sweep leaves the sentence in its log.
    """
    from hydra import compose
    from hydra.core.hydra_config import HydraConfig
    from hydra.errors import HydraException

    if cfg.get("variant") is None:
        return cfg
    running = HydraConfig.get()
    words = cfg.variant.split()
    given = [word for word in running.overrides.task if not word.startswith(_dropped_for(words))]
    try:
        varied = compose(running.job.config_name, [*given, *words])
    except (HydraException, ValueError) as error:
        sentence = f"variant is {cfg.variant!r}: {explain(error) or error}"
        if part_of_sweep:
            log.error("%s", sentence)
        raise InputError(sentence) from error
    varied.variant = None
    return varied


def _dropped_for(variant: Sequence[str]) -> tuple[str, ...]:
    """How words begin that a variant of these words leaves out: what was given for the ablated engine is not for
    another that it takes in its place.
    """
    return ("variant=", "engine.") if any(word.startswith("engine=") for word in variant) else ("variant=",)


def _note_job(folder: Path) -> Job:
    """Leave in a job's folder which one of its sweep it is."""
    from hydra.core.hydra_config import HydraConfig

    from zenflow.training.sweep import Job

    running = HydraConfig.get()
    sweep = Path(running.sweep.dir)
    job = Job(folder, sweep.name, running.job.num, _swept(sweep, running.overrides.task))
    job.leave_note()
    return job


_sweep: Path | None = None  # the folder of the sweep that runs
_made: Path | None = None  # the folder of the sweep or the run, if it is made for it


def folder_watch() -> Any:
    """A Hydra callback (conf/train.yaml): Hydra makes a folder before anybody has looked at the settings."""
    from hydra.experimental.callback import Callback

    class Watch(Callback):
        def on_run_start(self, config: DictConfig, **_: Any) -> None:
            _note_made(Path(config.hydra.run.dir))

        def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
            global _sweep
            _sweep = Path(config.hydra.sweep.dir)
            _note_made(_sweep)

    return Watch()


def _note_made(folder: Path) -> None:
    global _made
    _made = None if folder.exists() else folder


def _take_back() -> None:
    """Remove what Hydra has made for a run or a sweep that was refused: a folder with nothing of theirs in it."""
    if _made is not None and [path.name for path in _made.glob("*")] in ([], ["multirun.yaml"]):
        with suppress(OSError):
            (_made / "multirun.yaml").unlink(missing_ok=True)
            _made.rmdir()
            _made.parent.rmdir()


def _swept(sweep: Path, words: Sequence[str]) -> tuple[str, ...]:
    """Those of a job's settings that its sweep varies; all of them under a sweeper that does not write which.

    A variant's words come without its name, and without those that it replaces.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    if not (sweep / "multirun.yaml").is_file():
        return tuple(words)
    asked = OmegaConf.load(sweep / "multirun.yaml").hydra
    given = [f"{name}={value}" for name, value in (asked.sweeper.get("params") or {}).items()]
    parsed = OverridesParser.create().parse_overrides([*given, *asked.overrides.task])
    varied = {override.key_or_group for override in parsed if override.is_sweep_override()}
    chosen = [word for word in words if _key(word) in varied]
    variant = next((word.removeprefix("variant=").strip("'") for word in chosen if word.startswith("variant=")), None)
    if variant is None:
        return tuple(chosen)
    dropped, said = _dropped_for(variant.split()), set(map(_key, variant.split()))
    return variant, *(word for word in chosen if not word.startswith(dropped) and _key(word) not in said)


def _key(word: str) -> str:
    """The setting or group that a word of the command line is about."""
    return word.partition("=")[0].lstrip("+~")


def explain(error: BaseException) -> str | None:
    """The sentence for an error that is the user's to mend, None for any other (which deserves its traceback)."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    if isinstance(error, JobFailed):
        return error.sentence
    # The job's own errors never come here bare: this is Hydra making the run's folder or writing to it.
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename} cannot be written ({error.strerror}); give another folder as hydra.run.dir."
    if isinstance(error, ValueError) and str(error).startswith("Config group override must be"):
        return f"{_group_without_option()} names no option; zenflow-train --help lists the options of each group."
    cause = error if isinstance(error, OmegaConfBaseException) else error.__cause__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _explain_key(cause)
    return _one_line(error) if isinstance(error, (HydraException, OmegaConfBaseException)) else None


def _group_without_option() -> str:
    """The word on the command line that gives a group something that is no name, as `data=null` does."""
    groups = [name for name, value in vars(TrainConfig()).items() if dataclasses.is_dataclass(value)]
    groups += ["experiment", "debug"]
    for word in sys.argv[1:]:
        group, _, value = word.partition("=")
        if group in groups and (value.lower() in ("null", "true", "false") or not value.isidentifier()):
            return word
    return "A group"


def _explain_key(error: Any) -> str:
    from omegaconf import ListConfig
    from omegaconf.errors import ValidationError

    name, owner = str(error.full_key), error.object_type
    parent, _, key = name.rpartition(".")
    if dataclasses.is_dataclass(owner) and key not in (names := [item.name for item in dataclasses.fields(owner)]):
        close = difflib.get_close_matches(key, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"allowed are {', '.join(sorted(names))}."
        return f"{name} is no setting{' of ' + parent if parent else ''}: {hint}"
    if isinstance(error, ValidationError) and isinstance(default := error.child_node, ListConfig):
        return f"{name} is {error.value!r}; allowed: a list, as {str(default).replace(' ', '')}."
    return f"{name}: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """What it says, without the notes that Hydra and OmegaConf append for themselves."""
    return " ".join(re.split("full_key:|Config search path:|See https:", str(error))[0].split())
