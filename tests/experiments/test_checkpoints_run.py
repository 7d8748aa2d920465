"""A run's checkpoints: written while it trains, a few of them kept, and no training lost to a disk."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shlex
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.durability import assert_durable, watch_disk
from tests.experiments.interrupted import TINY, ZENFLOW, make_text, told, write_late
from tests.shortages import files_up_to
from zenflow import background_save
from zenflow.disk import DiskFullError
from zenflow.state_tree import flatten
from zenflow.trace import Tracer
from zenflow.training.checkpoints import all_of, command_for, step_of
from zenflow.training.loop import Loop
from zenflow.training.metrics_file import MetricsFile
from zenflow.training.run_state import RunState, random_states, set_random_states


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *make_text(tmp_path / "text.txt"))


def full(path: Path, needed: int) -> None:
    raise DiskFullError(errno.ENOSPC, f"no room: {needed:,} bytes needed, 0 available", str(path))


def test_a_full_disk_ends_no_training_and_costs_no_checkpoint(command, words, monkeypatch):
    from zenflow import checkpoint_folder

    check = checkpoint_folder.check_room
    monkeypatch.setattr(
        checkpoint_folder, "check_room", lambda path, needed: (full if step_of(path) > 4 else check)(path, needed)
    )
    run = command(*words, *ZENFLOW, "checkpoint_every=2", "keep_checkpoints=1")
    assert run.code == 0
    assert [step_of(path) for path in all_of(run.folder)] == [4]
    assert run.out.count("NOT SAVED") == 4 and "bytes needed, 0 available" in run.out


def test_training_goes_on_while_a_checkpoint_is_written(command, words, monkeypatch):
    """The file of step 4 is not written before step 7 has been made."""
    write_late(monkeypatch, 7)
    run = command(*words, *ZENFLOW, "checkpoint_every=4")
    assert run.code == 0 and [step_of(path) for path in all_of(run.folder)] == [12, 8]


def test_an_error_while_a_checkpoint_is_written_reaches_the_run(command, words, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise ArithmeticError("no save")

    monkeypatch.setattr(background_save.checkpoint_folder, "save", broken)
    run = command(*words, "engine=adamw", "checkpoint_every=4")
    assert run.code == 1 and "ArithmeticError: no save" in run.out
    assert [line["step"] for line in run.metrics() if "loss" in line][:4] == [1, 2, 3, 4]


def test_a_disk_that_fails_ends_no_training(command, words, monkeypatch):
    """Where metrics.jsonl cannot be brought down to the disk, for one."""

    def fail(file: MetricsFile) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(MetricsFile, "bring_down", fail)
    run = command(*words, "engine=adamw", "checkpoint_every=5")
    assert run.code == 0 and run.out.count("NOT SAVED: [Errno 5] Input/output error") == 2
    assert all_of(run.folder) == []


@pytest.mark.parametrize("stopped", [False, True], ids=["", "stopped"])
def test_a_host_without_memory_for_the_copy_ends_no_training(command, words, monkeypatch, stopped):
    """To take it all the same would be the end of a run that could go on. One that ends anyway tries to save."""
    monkeypatch.setattr("zenflow.training.run_state.available_memory", lambda: 1000)
    if stopped:
        stop_in(6, monkeypatch)
    run = command(*words, *ZENFLOW, "checkpoint_every=5")
    assert run.code == (143 if stopped else 0)
    told_of = re.findall(r"NOT SAVED: a copy of the run needs ([\d,]+) bytes of host memory, 1,000 bytes are", run.out)
    assert len(told_of) == (1 if stopped else 2)
    assert [step_of(path) for path in all_of(run.folder)] == ([6] if stopped else [])


@pytest.mark.parametrize("moment", ["copied", "written"])
def test_memory_that_the_system_refuses_ends_no_training(command, words, monkeypatch, moment):
    """As under `ulimit -v`: torch says so by an error that is no MemoryError, Python by one."""

    def refused(*_: object, **__: object) -> None:
        if moment == "written":
            raise MemoryError  # which says nothing
        torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr(*{
        "copied": ("zenflow.training.run_state.copy_to_host", refused),
        "written": (background_save.checkpoint_folder, "save", refused),
    }[moment])  # fmt: skip
    run = command(*words, *ZENFLOW, "checkpoint_every=5")
    said = {
        "copied": r"can't allocate memory: you tried to allocate \d+ bytes",
        "written": "the host has no memory left. Training goes on",
    }[moment]
    assert run.code == 0 and len(re.findall(f"NOT SAVED: {said}", run.out)) == 2
    assert all_of(run.folder) == []


COPIES = {
    "zenflow": ZENFLOW,
    "zenflow-bf16": (*ZENFLOW, "model.dtype=bfloat16"),
    "simulated": ("engine=simulated",),
    "adamw": ("engine=adamw",),
    "adamw-bf16": ("engine=adamw", "model.dtype=bfloat16"),
    "adamw-bf16-on-the-host": ("engine=adamw_offload", "model.dtype=bfloat16"),
    "adamw-bf16-without-masters": ("engine=adamw_bf16", "model.dtype=bfloat16"),
}


@pytest.mark.parametrize("engine", COPIES)
def test_the_memory_that_a_copy_is_said_to_need_is_hardly_less_than_it_takes(command, words, monkeypatch, engine):
    """And never more: what could be saved is saved."""
    asked, taken, gather = [], [], RunState.gather

    def gathered(state: RunState, step: int, **how: bool) -> dict:
        found = gather(state, step, **how)
        tensors = flatten({name: found[name] for name in ("model", "engine")})[1]
        taken.append(sum(tensor.nbytes for tensor in tensors.values()))
        with monkeypatch.context() as patch, pytest.raises(MemoryError) as refusal:
            patch.setattr("zenflow.training.run_state.available_memory", lambda: 0)
            gather(state, step, **how)
        asked.append(int(re.search(r"needs ([\d,]+) bytes", str(refusal.value))[1].replace(",", "")))
        return found

    monkeypatch.setattr(RunState, "gather", gathered)
    assert command(*words, *COPIES[engine], "checkpoint_every=5").code == 0
    assert len(asked) == 2
    for said, took in zip(asked, taken, strict=True):
        assert 0.6 * took < said <= took


def stop_in(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM, when its update has been made."""
    stepping = Loop._step

    def stepped(loop: Loop, number: int) -> None:
        stepping(loop, number)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Loop, "_step", stepped)


@pytest.fixture
def full_from(monkeypatch) -> Callable[[int, int], None]:
    """`full_from(4, 9)`: when step 4 begins, and all before it is saved, no file grows any more, in the middle of the
    next line; from step 9 on they do again, and after the run."""
    limit, stepping, close = ExitStack(), Loop._step, MetricsFile.close

    def fill(first: int, last: int) -> None:
        def stepped(loop: Loop, number: int) -> None:
            if number == first:
                loop._keeper._settle()
                limit.enter_context(files_up_to(loop._recorder._file._path.stat().st_size + 10))
            if number == last:
                limit.close()
            stepping(loop, number)

        monkeypatch.setattr(Loop, "_step", stepped)

    def closed(file: MetricsFile) -> None:
        close(file)
        limit.close()

    monkeypatch.setattr(MetricsFile, "close", closed)
    return fill


@pytest.mark.parametrize("engine", ["zenflow", "adamw"])
def test_a_disk_that_is_full_for_a_while_costs_no_line(command, words, full_from, engine, tmp_path):
    """metrics.jsonl, too: its lines come when there is room, and a checkpoint vouches for none that is not there."""
    settings = (*words, *(ZENFLOW if engine == "zenflow" else ("engine=adamw",)))
    whole = command(*settings, folder=tmp_path / "whole")
    full_from(4, 9)
    run = command(*settings, "checkpoint_every=1", "keep_checkpoints=12")
    assert run.code == 0
    assert told(run) == told(whole)
    assert run.out.count("NOT WRITTEN") == 1
    steps = [step_of(path) for path in all_of(run.folder)]
    assert steps == [12, 11, 10, 9, 3, 2, 1] and run.out.count("NOT SAVED") == 5


def test_lines_that_a_full_disk_never_takes_are_told_at_the_end(command, words, full_from):
    full_from(4, 0)
    run = command(*words, *ZENFLOW)
    assert run.code == 1
    assert re.search(r"zenflow-train: .*no room: [\d,]+ bytes needed, [\d,]+ available: .*metrics.jsonl", run.err)
    assert re.search(r"\d+ lines are missing in .*metrics.jsonl", run.out)
    assert not (run.folder / "summary.json").exists()


def test_a_full_disk_changes_nothing_of_a_stop(command, words, full_from, monkeypatch):
    full_from(4, 0)
    stop_in(6, monkeypatch)
    run = command(*words, *ZENFLOW, "checkpoint_every=3")
    assert run.code == 143 and "could NOT be saved; this goes on from step_00000003" in run.out


def test_a_trace_that_cannot_be_written_ends_no_training(command, words, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Tracer, "write", fail)
    run = command(*words, *ZENFLOW, "trace=trace.json", "trace_steps=[3,6]")
    assert run.code == 0 and "no trace: [Errno 28]" in run.out
    assert [line["step"] for line in run.metrics() if "loss" in line] == list(range(1, 13))


def test_checkpoints_outlive_a_power_cut_with_their_folder(command, words, monkeypatch):
    calls = watch_disk(monkeypatch)
    run = command(*words, "engine=adamw", "checkpoint_every=12")
    (folder,) = all_of(run.folder)
    assert_durable(calls, folder)
    synced = [path for kind, path, _ in calls if kind == "sync"]
    assert synced.index(run.folder) < synced.index(folder.parent)


def test_the_last_checkpoints_are_kept(command, words):
    run = command(*words, "engine=adamw", "checkpoint_every=3")
    assert [step_of(path) for path in all_of(run.folder)] == [12, 9]


def test_all_generators_go_on():
    set_random_states(random_states(torch.device("cpu")), torch.device("cpu"))
    np.random.normal()  # leaves a second number behind
    states = random_states(torch.device("cpu"))
    drawn = [(random.random(), np.random.normal(), torch.rand(()).item()) for _ in range(3)]
    set_random_states(json.loads(json.dumps(states | {"torch": None})) | _with_tuples(states), torch.device("cpu"))
    assert [(random.random(), np.random.normal(), torch.rand(()).item()) for _ in range(3)] == drawn


def _with_tuples(states: dict) -> dict:
    """What JSON alone would lose, and a checkpoint keeps."""
    return {"python": states["python"], "torch": states["torch"]}


@pytest.mark.parametrize(
    "name", ["runs/a", "with space", "it's", "a,b=c{d}", 'quote"', "back\\slash", "it\\'s", "end\\"]
)
def test_the_command_that_goes_on_survives_shell_and_hydra(name):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    program, word = shlex.split(command_for(Path(name)))
    assert program == "zenflow-train"
    assert OverridesParser.create().parse_override(word).value() == name


@pytest.mark.gpu
def test_the_gpu_s_random_state_comes_back_and_stays_with_gpus() -> None:
    """Dropout on a GPU draws from its own generator; on a CPU there is none to put the state into."""
    device = torch.device("cuda")
    states = random_states(device)
    first, found = torch.rand(7, device=device), torch.rand(7)
    set_random_states(states, device)
    assert torch.equal(torch.rand(7, device=device), first) and torch.equal(torch.rand(7), found)
    later = torch.cuda.get_rng_state(device)
    set_random_states(states, torch.device("cpu"))
    assert torch.equal(torch.rand(7), found) and torch.equal(torch.cuda.get_rng_state(device), later)


def test_a_gpu_s_random_state_is_left_out_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state from a GPU goes on on a CPU; and on a GPU it is put back there."""
    device, put = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.arange(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: put.append((state.tolist(), device)))
    states = random_states(device)
    found = torch.rand(7)
    set_random_states(states, torch.device("cpu"))
    assert torch.equal(torch.rand(7), found) and put == []
    set_random_states(states, device)
    assert put == [(list(range(16)), device)]
