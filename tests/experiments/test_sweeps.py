"""Sweeps: every job its own folder, worker and wandb run; a failure is its own job's; one table at the end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import BRIEF, ROOT
from zenflow.training.command import _swept
from zenflow.training.engines import ZenFlowRun
from zenflow.training.sweep import Job, jobs

GRID = [(0.05, 2), (0.05, 4), (0.1, 2), (0.1, 4)]


def test_a_sweep_leaves_separate_runs(command, kept, monkeypatch):  # F1, F10, F14, F15
    monkeypatch.setenv("WANDB_RUN_ID", "stale")
    grid = ("engine.topk_ratio=0.05,0.1", "engine.update_interval=2,4", "optimizer.lr=1e-3")
    outcome = command("-m", *BRIEF, "tracking=offline", "engine=together", *grid)
    assert outcome.code == 0
    names = [str(number) for number in range(4)]
    chosen = [outcome.config(job)["engine"] for job in names]
    assert [(engine["topk_ratio"], engine["update_interval"]) for engine in chosen] == GRID
    assert [outcome.summary(job)["windows"] for job in names] == [2, 1, 2, 1]
    runs = [kept(outcome.folder / job) for job in names]
    assert [run.id for run in runs] == [outcome.summary(job)["wandb_id"] for job in names]
    assert len({run.id for run in runs}) == 4 and "stale" not in {run.id for run in runs}
    for job, run, (k, window) in zip(names, runs, GRID, strict=True):
        steps = list(range(1, 5))
        assert [record["step"] for record in outcome.metrics(job) if "loss" in record] == steps
        assert [record["step"] for record in run.history if "loss" in record] == steps
        assert run.config["engine"] == outcome.config(job)["engine"]
        assert (run.group, run.exit_code) == (outcome.folder.name, 0)
        assert run.name == f"{job} engine.topk_ratio={k} engine.update_interval={window}"
        assert run.tags == [f"engine.topk_ratio={k}", f"engine.update_interval={window}"]


def test_a_sweep_ends_with_a_table_of_its_jobs(command):  # F14
    outcome = command("-m", *BRIEF, "engine=adamw", "optimizer.lr=1e-5,1e-4,-1")
    assert outcome.code == 1
    rates = [outcome.config(job)["optimizer"]["lr"] for job in "01"]
    assert rates == [0.00001, 0.0001] and {type(rate) for rate in rates} == {float}
    table = (outcome.folder / "summary.txt").read_text()
    assert table in outcome.out
    losses = [f"{outcome.metrics(job)[-1]['validation_loss']:.4f}" for job in "01"]
    steps = [f"{1e3 * outcome.summary(job)['step_seconds_mean']:,.2f}" for job in "01"]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    assert rows[0] == ["job", "settings", "validation loss", "mean step ms", "status"]
    assert rows[2:] == [
        ["0", "optimizer.lr=1e-05", losses[0], steps[0], "whole"],
        ["1", "optimizer.lr=0.0001", losses[1], steps[1], "whole"],
        ["2", "optimizer.lr=-1", "-", "-", "did not start: optimizer.lr is -1.0; allowed: a finite number >= 0."],
    ]


def test_a_failing_job_does_not_stop_its_siblings(command, kept, monkeypatch):  # F2, F3, F4
    """The second raises, the third is refused; the fourth and the fifth run, each with a worker of its own."""
    step, workers = ZenFlowRun.step, []

    def fail_once(engine):
        step(engine)
        stats = engine.optimizer.stats()
        if stats.steps == 1:
            workers.append(stats.worker_pid)
        if engine.param_groups[0]["lr"] == 0.25:
            raise RuntimeError("the engine broke")

    monkeypatch.setattr(ZenFlowRun, "step", fail_once)
    settings = ("optimizer.warmup_steps=0", "optimizer.schedule=constant", "optimizer.lr=0.125,0.25,-1,0.5,0.75")
    outcome = command("-m", *BRIEF, "tracking=offline", *settings)
    assert outcome.code == 1
    assert "the engine broke" in outcome.err
    finished = [(outcome.folder / job / "summary.json").exists() for job in "01234"]
    assert finished == [True, False, False, True, True]
    assert len(workers) == len(set(workers)) == 4 and not [pid for pid in workers if Path(f"/proc/{pid}").exists()]
    logs = [(outcome.folder / job / "train.log").read_text() for job in "01234"]
    assert "Traceback" in logs[1] and "the engine broke" in logs[1]
    assert "optimizer.lr is -1.0" in logs[2]
    assert "the engine broke" not in logs[0] + "".join(logs[2:])
    assert [kept(outcome.folder / job).exit_code for job in "0134"] == [0, 1, 0, 0]
    status = re.findall(r"\| (\w[^|]*?) +\|$", (outcome.folder / "summary.txt").read_text(), flags=re.M)
    assert status[1:] == [
        "whole",
        "unfinished: 0 of 4 steps; RuntimeError: the engine broke",
        "did not start: optimizer.lr is -1.0; allowed: a finite number >= 0.",
        "whole",
        "whole",
    ]


def test_a_group_and_a_name_that_are_given_stay(command, kept):
    outcome = command("-m", *BRIEF, "engine=adamw", "tracking=offline", "tracking.group=mine", "seed=3", "steps=1,2")
    run = kept(outcome.folder / "1")
    assert (run.group, run.name, run.tags) == ("mine", "1 steps=2", ["steps=2"])


def test_the_note_of_a_job_is_found_whatever_lies_beside_it(tmp_path):
    for number in (10, 2):
        (tmp_path / "sub" / str(number)).mkdir(parents=True)
        Job(tmp_path / "sub" / str(number), "sweep", number, ("seed=1",)).leave_note()
    for place, text in enumerate(("[1]", "{", '{"job": "x"}')):
        (tmp_path / str(place)).mkdir()
        (tmp_path / str(place) / "job.json").write_text(text)
    Job(tmp_path / "sub" / "2", "later", 3, ()).leave_note()
    assert [(job.number, job.overrides) for job in jobs(tmp_path)] == [(2, ("seed=1",)), (10, ("seed=1",))]


def test_two_jobs_at_a_time(tmp_path):  # F9
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="hydra-joblib-launcher is not installed")
    launcher = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=sweep")
    settings = ("optimizer.lr=1e-3,-1,2e-3", "tracking=offline")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "-m", *BRIEF, *settings, *launcher],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels"), *sys.path])},
        capture_output=True,
        text=True,
    )
    refusal = f"#1 zenflow-train: {tmp_path / 'sweep' / '1'}: optimizer.lr is -1.0; allowed: a finite number >= 0."
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == refusal
    table = (tmp_path / "sweep" / "summary.txt").read_text()
    assert re.findall(r"\| (whole|did not start)", table) == ["whole", "did not start", "whole"]
    assert table in done.stdout
    for told, jobs_of_it in (
        (" - step 2 of 4: loss ", "02"),
        ("train loss  ", "02"),
        (" - optimizer.lr is -1.0; allow", "1"),
    ):
        lines = [line for line in done.stdout.splitlines() if told in line]
        assert sorted(line[:3] for line in lines) == [f"#{job} " for job in jobs_of_it]
    assert "#" not in (tmp_path / "sweep" / "0" / "train.log").read_text()


def test_hydra_s_own_choices_of_a_log_are_there(command):
    outcome = command(*BRIEF, "engine=adamw", "hydra/job_logging=stdout")
    assert outcome.code == 0 and "step 4 of 4: loss" in outcome.out and not (outcome.folder / "train.log").exists()


@pytest.mark.parametrize(("code", "reported"), [(0, True), (1, True), (130, False), (143, False)])
def test_the_rules_script_reports_although_runs_failed_but_not_when_it_was_interrupted(tmp_path, code, reported):
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\ncase "$*" in *experiment=rules_peers*) exit {code} ;; esac\n'
    )
    python.chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "rules.sh", tmp_path / "rules", "threads=1"],
        env=os.environ | {"PYTHON": str(python), "SWEEP": "rules_peers", "CORPORA": "headers c_headers"},
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert done.returncode == code
    assert sum("experiment=rules_pretrain" in call for call in calls) == 1
    assert sum("experiment=rules_peers" in call for call in calls) == (2 if reported else 1)
    assert calls[-1].startswith("-m zenflow.report") == reported


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (
            ["variant='engine=stagger'", "engine.update_interval=8", "optimizer.lr=1"],
            ["engine=stagger", "optimizer.lr=1"],
        ),
        (["variant='engine=adamw model.dtype=a'", "engine=zenflow", "model.dtype=b"], ["engine=adamw model.dtype=a"]),
        (["variant='+engine.update_interval=2'", "engine.update_interval=8"], ["+engine.update_interval=2"]),
        (["variant=null", "engine.update_interval=8"], ["null", "engine.update_interval=8"]),
        (["optimizer.schedule='linear'", "batch_size=4"], ["optimizer.schedule='linear'"]),
    ],
    ids=["another engine's", "said twice", "added", "none", "quoted"],
)
def test_a_note_holds_the_words_that_count(tmp_path, words, kept):
    """A variant's words are applied last, and what was given for the engine that it replaces is dropped."""
    varied = ("variant", "engine", "engine.update_interval", "optimizer.lr", "optimizer.schedule", "model.dtype")
    lines = [
        "hydra:",
        "  sweeper:",
        "    params:",
        *(f"      {name}: a,b" for name in varied),
        "  overrides: {task: []}",
    ]
    (tmp_path / "multirun.yaml").write_text("\n".join(lines))
    assert list(_swept(tmp_path, words)) == kept
