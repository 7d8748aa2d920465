"""A run is the same with, without and despite wandb, which keeps what it should; metrics.jsonl is complete always."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import wandb

from tests.commands import BRIEF, ENVIRONMENT, Outcome
from tests.processes import within
from tests.wandb_server import answering
from zenflow.report.runs import LeftOut, read
from zenflow.training.schema import TrackingConfig, TrackingMode
from zenflow.training.wandb_tracking import WandbRun

ADAMW = (*BRIEF, "engine=adamw")


def losses(outcome: Outcome) -> list[float]:
    return [record["loss"] for record in outcome.metrics() if "loss" in record]


@pytest.fixture
def plain(command, tmp_path) -> list[float]:
    """The losses of ADAMW without wandb."""
    if not _plain:
        _plain.extend(losses(command(*ADAMW, folder=tmp_path / "plain")))
    return _plain


_plain: list[float] = []


def autos(values: object, name: str = "") -> list[str]:
    """The names of settings that are `auto` or an interpolation, at any depth."""
    if isinstance(values, dict):
        return [found for key, value in values.items() for found in autos(value, f"{name}.{key}".strip("."))]
    return [name] if values == "auto" or (isinstance(values, str) and "${" in values) else []


def test_wandb_gets_what_the_run_is_and_how_it_went(command, kept, monkeypatch):  # F10, F15
    for name, value in {"ID": "stale", "RUN_ID": "stale", "RESUME": "must", "NAME": "stale"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    outcome = command(*BRIEF, "tracking=offline", "engine.topk_ratio=auto", "evaluate_every=2", "+tracking.tags=[mine]")
    assert outcome.code == 0
    run, summary = kept(outcome.folder), outcome.summary()
    assert (run.id, run.name, run.group, run.tags) == (summary["wandb_id"], "run", "", ["mine"])
    assert run.id != "stale" and run.exit_code == 0
    assert run.config["engine"]["topk_ratio"] == 0.1
    # How many threads the CPU process takes follows from each window, and a model's own tokenizer has no other name.
    assert autos(run.config) == ["engine.worker_threads"]
    assert {name: value for name, value in run.config.items() if name != "_wandb"} == outcome.config()
    lines = outcome.metrics()
    assert [line for line in run.history if "validation_loss" in line] == [
        line | {"over_time/validation_loss": line["validation_loss"]} for line in lines if "validation_loss" in line
    ]
    assert [line for line in run.history if "loss" in line] == [
        line | {"over_time/loss": line["loss"]} for line in lines if "loss" in line
    ]
    assert run.axes == {
        "*": "tokens",
        "over_time/loss": "elapsed_seconds",
        "over_time/validation_loss": "elapsed_seconds",
    }
    for name in ("validation_loss_after", "step_seconds_mean", "tokens_per_second"):
        assert run.summary[name] == summary[name], name


def test_every_line_says_how_far_the_run_is(command):
    outcome = command(*BRIEF, "evaluate_every=2")
    tokens, seconds = 0, 0.0
    for line in outcome.metrics():
        tokens, seconds = tokens + line.get("batch_tokens", 0), seconds + line.get("seconds", 0.0)
        assert (line["tokens"], line["elapsed_seconds"]) == (tokens, pytest.approx(seconds))
    summary = outcome.summary()
    assert (summary["tokens"], summary["training_seconds"]) == (tokens, pytest.approx(seconds))


def test_a_missing_wandb_is_a_warning_and_changes_nothing(command, plain, monkeypatch, tmp_path):  # F13
    monkeypatch.delitem(sys.modules, "zenflow.training.wandb_tracking", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracked = command(*ADAMW, "tracking=offline", folder=tmp_path / "tracked")
    assert tracked.code == 0
    assert "pip install wandb" in tracked.out and tracked.summary()["wandb_id"] is None
    assert losses(tracked) == plain


@pytest.mark.parametrize("missing", ["network", "key"])
def test_what_cannot_be_sent_is_kept_and_changes_nothing(command, plain, kept, monkeypatch, tmp_path, missing):  # F13
    monkeypatch.setattr("zenflow.training.wandb_tracking.INIT_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # the port of a service that only takes
    monkeypatch.setenv("HOME", str(tmp_path))  # no key of whoever runs the tests
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    if missing == "network":
        monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    tracked = command(*ADAMW, "tracking=online", folder=tmp_path / "tracked")
    assert tracked.code == 0 and "wandb cannot send this run" in tracked.out
    assert losses(tracked) == plain
    run = kept(tracked.folder)
    assert run.id == tracked.summary()["wandb_id"] and run.exit_code == 0
    assert [line["loss"] for line in run.history if "loss" in line] == plain


@pytest.mark.parametrize("when", ["log", "finish"])
def test_a_wandb_that_breaks_while_it_runs_is_a_warning_and_changes_nothing(
    command, plain, kept, monkeypatch, tmp_path, when
):

    def broken(*_: object, **__: object) -> None:
        raise ConnectionResetError("Connection lost")  # as after its own process was killed

    monkeypatch.setattr(wandb.Run, when, broken)
    tracked = command(*ADAMW, "tracking=offline", folder=tmp_path / "tracked")
    assert tracked.code == 0 and tracked.out.count("wandb stopped, metrics.jsonl has everything") == 1
    assert losses(tracked) == plain


FAILING = """
import experiments.train, zenflow.training.loop as loop
def fail(*_):
    print("now", flush=True)
    raise ArithmeticError("no evaluation")
loop.Loop._evaluate = fail
experiments.train.main()
"""


def test_an_exception_after_wandb_has_started_ends_the_process(tmp_path, kept):  # F12, F4
    command = [sys.executable, "-c", FAILING, *BRIEF, "tracking=offline", "hydra.run.dir=here"]
    run = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    assert "now\n" in iter(run.stdout.readline, "")
    run.communicate(timeout=30)
    assert run.returncode == 1
    assert "ArithmeticError: no evaluation" in (tmp_path / "here" / "train.log").read_text()
    assert kept(tmp_path / "here").exit_code == 1


def test_a_network_that_goes_away_holds_no_run_up(tmp_path, kept, monkeypatch):  # F12
    monkeypatch.setattr("zenflow.training.wandb_tracking.FINISH_SECONDS", 1.0)
    monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
    with answering() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        run = WandbRun(TrackingConfig(), tmp_path, {}, TrackingMode.online)
    run.log({"tokens": 1, "elapsed_seconds": 0.5, "loss": 2.0})
    within(30, run.finish, 1)
    left = kept(tmp_path, "run")
    assert left.exit_code == 1 and left.history[-1]["loss"] == 2.0


@pytest.mark.usefixtures("kept")
def test_a_run_that_goes_on_is_the_same_run_and_tells_nothing_twice(tmp_path, monkeypatch):
    """Killed after its fifth record, with a checkpoint from after the third: the fourth and fifth come once more.

    F15: whatever run the environment speaks of.
    """
    for name, value in {"API_KEY": 40 * "a", "RUN_ID": "stale", "RESUME": "must"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    lines = [{"tokens": 10 * step, "elapsed_seconds": 0.5, "loss": 2.0, "step": step} for step in range(1, 8)]
    with answering() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.address)
        first = WandbRun(TrackingConfig(), tmp_path, {}, TrackingMode.online)
        for line in lines[:5]:
            first.log(line)
        first.finish(1)
        second = WandbRun(TrackingConfig(), tmp_path, {}, TrackingMode.online, earlier=first.id, told=3)
        for line in lines[3:]:
            second.log(line)
        second.finish(0)
        assert second.id == first.id and list(server.history) == [first.id]
        (history,) = server.history.values()
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["_step"] for line in history] == list(range(7))
    assert [line["tokens"] for line in history] == [line["tokens"] for line in lines]


def test_a_run_that_is_open_already_is_another(tmp_path, kept):  # F15
    """wandb.init would give it back, and what is told of this one would be told of it."""
    theirs = wandb.init(mode="offline", dir=tmp_path, id="theirs", settings=wandb.Settings(console="off", quiet=True))
    (tmp_path / "ours").mkdir()
    ours = WandbRun(TrackingConfig(), tmp_path / "ours", {}, TrackingMode.offline)
    ours.log({"tokens": 1, "elapsed_seconds": 0.5, "loss": 2.0})
    ours.finish(1)
    theirs.finish(exit_code=0)
    assert ours.id != "theirs"
    own, other = kept(tmp_path / "ours"), kept(tmp_path)
    assert (own.id, own.exit_code, len(own.history)) == (ours.id, 1, 1)
    assert (other.id, other.exit_code, other.history) == ("theirs", 0, [])


def test_a_kill_loses_at_most_the_open_line(tmp_path):
    command = [sys.executable, "-m", "experiments.train", *BRIEF, "steps=1000", "engine.select_interval=4"]
    run = subprocess.Popen(
        [*command, "hydra.run.dir=here"], cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    for line in run.stdout:
        if "selection at step 12" in line:
            break
    run.kill()
    run.communicate()
    text = (tmp_path / "here" / "metrics.jsonl").read_text()
    whole = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    # The steps before the one that was running, of which a GPU may have passed one without its record.
    assert [line["step"] for line in whole if "loss" in line][:11] == list(range(1, 12))
    with open(tmp_path / "here" / "metrics.jsonl", "a") as file:
        file.write('{"step": 999, "lo')
    left = read(tmp_path / "here")
    assert isinstance(left, LeftOut) and re.match(r"unfinished: \d+ of 1000 steps; no error in its log", left.reason)
