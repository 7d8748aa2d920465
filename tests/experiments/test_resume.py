"""I7 through the command line: a run that is saved and goes on is the run that went through; what cannot is refused."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import tests.experiments.interrupted as interrupted
from tests.commands import ENVIRONMENT, Outcome
from tests.experiments.interrupted import (
    TINY,
    ZENFLOW,
    add_dropout,
    assert_same_run,
    begun,
    contents,
    goes_on,
    make_text,
    told,
)
from zenflow.training.checkpoints import all_of, folder_of, step_of
from zenflow.training.loop import Loop

MODES = {
    "gpu": ZENFLOW,
    "together": (*ZENFLOW, "engine=together"),
    "host": (*ZENFLOW, "engine.accumulate_on=host"),
    "replay-bf16": (*ZENFLOW, "engine=replay", "model.dtype=bfloat16", "accumulate=2"),
    "predicted-bf16": (*ZENFLOW, "engine=predicted", "engine.selected_masters=stochastic", "model.dtype=bfloat16"),
    "adamw": ("engine=adamw",),
    "adamw-bf16": ("engine=adamw", "model.dtype=bfloat16"),
    "adamw-bf16-on-the-host": ("engine=adamw_offload", "model.dtype=bfloat16"),
    "adamw-bf16-without-masters": ("engine=adamw_bf16", "model.dtype=bfloat16"),
}
SAVED_AT = {"gpu": (5, 6, 7, 8), "host": (6, 7)}
ELSEWHERE = ("engine.bucket_bytes=256", "engine.upload=step", "log_every=100", "evaluate_every=5", "save_model=true")


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *make_text(tmp_path / "text.txt"))


@pytest.fixture
def dropout():
    remove = add_dropout()
    yield
    remove()


@pytest.mark.parametrize("mode", MODES)
def test_i7_saved_at_any_step_of_a_window_a_run_goes_on(command, words, dropout, tmp_path, mode):
    """I7, B12, G1, G3: with dropout, a new order of the data every 6 steps, a schedule and clipping."""
    settings = (*words, *MODES[mode], "save_model=true")
    whole = command(*settings, "evaluate_every=5")
    left = command(*settings, "evaluate_every=5", "checkpoint_every=1", "keep_checkpoints=12", folder=tmp_path / "left")
    assert_same_run(left, whole)
    for step in SAVED_AT.get(mode, (7,)):
        folder = begun(left, tmp_path / str(step), step)
        resumed = goes_on(command, folder, *(ELSEWHERE if step == 8 else ()))
        assert resumed.code == 0
        assert_same_run(resumed, whole)


def interrupt(when: str, step: int, number: int, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """The command with dropout in a process of its own, and a signal in its middle."""
    command = [sys.executable, "-m", interrupted.__name__, when, str(step), str(int(number)), *words]
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def test_i7_in_processes_of_their_own(command, words, dropout, tmp_path):
    """F16: SIGTERM saves though no checkpoint was asked for; the printed command goes on, from another folder too."""
    settings = [*words, *ZENFLOW, "save_model=true"]
    whole = command(*settings)
    stopped = interrupt("step", 6, signal.SIGTERM, *settings, "hydra.run.dir=a folder", cwd=tmp_path)
    assert stopped.returncode == 128 + signal.SIGTERM and "Traceback" not in stopped.stderr
    assert [step_of(path) for path in all_of(tmp_path / "a folder")] == [6]
    printed = next(line for line in stopped.stdout.splitlines() if line.startswith("zenflow-train "))
    (tmp_path / "elsewhere").mkdir()
    (word,) = shlex.split(printed)[1:]
    done = interrupt("never", 0, 0, word, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert_same_run(Outcome(0, done.stdout, done.stderr, tmp_path / "a folder"), whole)


@pytest.mark.parametrize("when", ["step", "save"])
def test_a_kill_costs_the_steps_since_the_last_checkpoint(command, words, dropout, tmp_path, when):
    """SIGKILL: every step is in metrics.jsonl once, though some were made twice."""
    settings = (*words, *ZENFLOW, "save_model=true")
    whole = command(*settings)
    further = ("checkpoint_every=4", "hydra.run.dir=killed")
    killed = interrupt(when, {"step": 7, "save": 8}[when], signal.SIGKILL, *settings, *further, cwd=tmp_path)
    assert killed.returncode == -signal.SIGKILL
    folder = tmp_path / "killed"
    assert [step_of(path) for path in all_of(folder)] == [4]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    assert len((folder / "metrics.jsonl").read_text().splitlines()) > 6
    resumed = goes_on(command, folder)
    assert resumed.code == 0
    assert_same_run(resumed, whole)
    assert not list(folder.glob("checkpoints/.*"))


@pytest.mark.parametrize("earlier", [True, False], ids=["saved", "nothing-saved"])
def test_a_killed_cpu_process_costs_the_steps_since_the_last_checkpoint(command, words, monkeypatch, earlier):
    """E7: the run ends with its name and, below the traceback, how to go on; it goes on as if nothing had been."""
    settings, stepping = (*words, *ZENFLOW, "save_model=true"), Loop._step
    whole = command(*settings, folder=Path("whole").absolute())

    def stepped(loop: Loop, number: int) -> None:
        stepping(loop, number)
        if number == 7:
            os.kill(loop._engine.optimizer.stats().worker_pid, signal.SIGKILL)

    monkeypatch.setattr(Loop, "_step", stepped)
    killed = command(*settings, *(["checkpoint_every=3"] if earlier else []))
    monkeypatch.setattr(Loop, "_step", stepping)
    assert killed.code == 1 and "was killed by signal 9 (SIGKILL)" in killed.out
    assert [step_of(path) for path in all_of(killed.folder)] == ([6, 3] if earlier else [])
    how = f"What is saved goes on from step_00000006:\nzenflow-train resume={killed.folder}\n"
    assert killed.out.endswith(how) == earlier and ("goes on from" in killed.out) == earlier
    if earlier:
        resumed = goes_on(command, killed.folder)
        assert resumed.code == 0
        assert_same_run(resumed, whole)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_taken(command, saved):
    (shard,) = folder_of(saved.folder, 6).glob("shard-*")
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    folder, expected = saved.folder, told(saved)
    resumed = goes_on(command, folder, "checkpoint_every=null", "save_model=true")
    assert resumed.code == 0
    assert re.search(r"WARNING.*step_00000006/shard-00001.safetensors is damaged", resumed.out)
    assert [step_of(path) for path in all_of(folder)] == [4]
    assert told(resumed) == expected
    for path in folder_of(folder, 4).glob("shard-*"):
        path.unlink()
    (folder / "summary.json").unlink()
    unchanged = contents(folder)
    refused = goes_on(command, folder)
    assert refused.code == 1 and "step_00000004/shard-00001.safetensors is missing" in refused.err
    assert contents(folder) == unchanged


REFUSED = {
    "lr": (["optimizer.lr=0.5"], "optimizer.lr is 0.5, and 0.002 in the run"),
    "engine": (["engine=adamw"], "engine.topk_ratio is missing, and 0.1"),
    "window": (["engine.update_interval=8"], "engine.update_interval is 8, and 4"),
    "experiment": (["debug=smoke"], "threads is None, and 1"),
    "seed": (["seed=1", "steps=20"], "seed is 1, and 0"),
    "too few steps": (["steps=5"], "steps is 5, but 6 have been made; allowed: an integer >= 6"),
    "setting": (["checkpoint_every=0"], "checkpoint_every is 0; allowed: an integer >= 1 or null"),
    "no time": (["checkpoint_minutes=0"], "checkpoint_minutes is 0.0; allowed: a finite number > 0 or null"),
    "none kept": (["keep_checkpoints=0"], "keep_checkpoints is 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_run_is_refused_before_anything_changes(command, saved, case):
    words, sentence = REFUSED[case]
    before = contents(saved.folder)
    refused = goes_on(command, saved.folder, *words)
    assert refused.code == 1 and sentence in refused.err and refused.err.count("\n") <= 1
    assert contents(saved.folder) == before


def test_a_run_keeps_its_schedule_where_the_default_is_another(command, words, tmp_path):
    """Also under `resume=auto`, which compares every setting: it names the one that differs."""
    words = (*words, *ZENFLOW, "save_model=true")
    whole = command(*words, "engine=together")
    left = command(*words, "engine=together", "checkpoint_every=1", "keep_checkpoints=12", folder=tmp_path / "left")
    folder = begun(left, tmp_path / "begun", 5)
    refused = command(*words, "engine.full_warm_up_rounds=0", "resume=auto", folder=folder)
    assert refused.code == 1 and "engine.stagger is True, and False in the run" in refused.err
    resumed = goes_on(command, folder)
    assert resumed.code == 0
    assert resumed.config()["engine"]["stagger"] is False and resumed.config()["engine"]["weight_prediction"] == 0
    assert_same_run(resumed, whole)


def test_other_data_is_refused(command, words, tmp_path):
    saved = command(*words, "engine=adamw", "checkpoint_every=6")
    (saved.folder / "summary.json").unlink()
    before, text = contents(saved.folder), (tmp_path / "text.txt").read_text()
    for changed, sentence in (
        (text.replace("some", "come"), "The training samples are not those of the checkpoint"),
        (text * 2, "training samples, and the checkpoint's had 24"),
    ):
        (tmp_path / "text.txt").write_text(changed)
        refused = goes_on(command, saved.folder)
        assert refused.code == 1 and sentence in refused.err
    assert contents(saved.folder) == before


def test_where_there_is_nothing_to_go_on_with(command, saved, words, kept_run, tmp_path):
    finished = goes_on(command, kept_run / "run")
    assert finished.code == 1 and "is finished, with 8 steps" in finished.err
    elsewhere = command(f"resume={saved.folder}", folder=tmp_path / "elsewhere")
    assert elsewhere.code == 1 and "leave out hydra.run.dir" in elsewhere.err and not elsewhere.folder.exists()
    shutil.rmtree(saved.folder / "checkpoints")
    none = goes_on(command, saved.folder)
    assert none.code == 1 and "holds no checkpoint" in none.err
    absent = goes_on(command, tmp_path / "absent")
    assert absent.code == 1 and "holds no checkpoint" in absent.err and not absent.folder.exists()
    again = command(*words, *ZENFLOW, folder=saved.folder)
    assert again.code == 1 and "already holds a run" in again.err and "resume" not in again.err


def test_a_run_that_another_process_writes_is_refused(command, saved):
    before = contents(saved.folder)
    with open(saved.folder / "metrics.jsonl") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused = goes_on(command, saved.folder)
    assert refused.code == 1 and f"Another process trains in {saved.folder}" in refused.err
    assert contents(saved.folder) == before


@pytest.mark.parametrize("what", ["cut", "changed", "missing"])
def test_metrics_that_are_not_what_the_checkpoint_saw_are_refused(command, saved, what):
    path = saved.folder / "metrics.jsonl"
    text = path.read_text()
    path.write_text(text[:200] if what == "cut" else text.replace('"step": 2,', '"step": 3,', 1))
    if what == "missing":
        path.unlink()
    before = contents(saved.folder)
    refused = goes_on(command, saved.folder)
    assert refused.code == 1 and str(path) in refused.err
    assert contents(saved.folder) == before


@pytest.mark.parametrize("what", ["folder", "run"])
def test_a_newer_format_is_refused(command, saved, monkeypatch, what):
    where = "zenflow.checkpoint_folder.VERSION" if what == "folder" else "zenflow.training.resuming.FORMAT"
    monkeypatch.setattr(where, 0)
    refused = goes_on(command, saved.folder)
    assert refused.code == 1 and re.search("has version 1; this program reads|has the run format 1; this", refused.err)


def test_more_steps_go_on_from_a_finished_run(command, kept_run, saved, tmp_path):
    shutil.copytree(kept_run / "run", tmp_path / "finished")
    before = json.loads((tmp_path / "finished" / "summary.json").read_text())
    longer = goes_on(command, tmp_path / "finished", "steps=10", "evaluate_every=null", "plot=true")
    assert longer.code == 0
    lines = longer.metrics()
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 11))
    assert [line["step"] for line in lines if "loss" not in line] == [0, 4, 10]
    summary = longer.summary()
    assert summary["steps"] == longer.config()["steps"] == 10
    assert summary["training_seconds"] == pytest.approx(lines[-1]["elapsed_seconds"])
    assert summary["training_seconds"] == pytest.approx(sum(line.get("seconds", 0) for line in lines))
    assert summary["training_seconds"] > before["training_seconds"]
    compute = [line["compute_seconds"] for line in lines if "loss" in line][1:]
    assert summary["compute_seconds_per_step"] == pytest.approx(sum(compute) / 9)
    assert (
        summary["train_loss_first"] == lines[1]["loss"]
        and summary["validation_loss_before"] == before["validation_loss_before"]
    )
    assert (longer.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_an_earlier_checkpoint_that_is_given_takes_the_run_back(command, saved):
    expected = told(saved)
    again = goes_on(command, saved.folder, place=folder_of(saved.folder, 4))
    assert again.code == 0 and "step_00000006 is removed" in again.out
    assert told(again) == expected


def test_the_same_command_starts_and_goes_on_and_ends(command, words, tmp_path):
    settings = (*words, *ZENFLOW, "resume=auto", "checkpoint_every=4", "save_model=true")
    first = command(*settings)
    assert first.code == 0 and "finds nothing to go on from" not in first.out
    before = contents(first.folder)
    assert command(*settings).code == 0
    assert contents(first.folder) == before
    other = command(*settings, "optimizer.lr=0.5")
    assert other.code == 1 and "optimizer.lr is 0.5" in other.err
    halfway = command(*settings, folder=begun(first, tmp_path / "halfway", 8))
    assert halfway.code == 0 and "goes on after step 8" in halfway.out
    assert_same_run(halfway, first)
    shutil.rmtree(halfway.folder / "checkpoints")
    for name in ("summary.json", "summary.txt"):
        (halfway.folder / name).unlink()
    begins_again = command(*settings, folder=halfway.folder)
    assert begins_again.code == 0 and "it begins again" in begins_again.out
    assert_same_run(begins_again, first)


def test_auto_without_a_folder_says_that_it_begins(tmp_path):
    words = ["-m", "experiments.train", "debug=smoke", "steps=0", "resume=auto"]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    assert "resume=auto without hydra.run.dir=RUN finds nothing to go on from: a new run, " in done.stdout


def test_another_torch_is_a_warning(command, saved, monkeypatch):
    monkeypatch.setattr("zenflow.training.resuming.torch", types.SimpleNamespace(__version__="9.9"))
    run = goes_on(command, saved.folder)
    assert run.code == 0 and f"torch was {torch.__version__} and is 9.9" in run.out
