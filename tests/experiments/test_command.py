"""`zenflow-train` as a whole: one run, a sweep, failures, an interrupt."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zenflow
from tests.commands import BRIEF, ENVIRONMENT, ROOT
from zenflow.telemetry import StepRecord
from zenflow.training import run
from zenflow.training.metrics_file import MetricsFile

ENGINE_PART = {item.name for item in dataclasses.fields(StepRecord)} - {"step", "seconds", "staleness"}
FURTHER = ("staleness", "deferred_step", "deferred_lr", "tokens", "elapsed_seconds")


def test_smoke_runs_the_whole_path(command):
    outcome = command("debug=smoke", "engine.select_interval=8", "threads=1")
    assert outcome.code == 0
    assert sorted(path.name for path in outcome.folder.iterdir()) == [
        "config.json",
        "loss.png",
        "metrics.jsonl",
        "summary.json",
        "summary.txt",
        "train.log",
    ]
    steps = [record for record in outcome.metrics() if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 17))
    assert {"lr", "grad_norm", "tokens", "seconds", *ENGINE_PART} <= steps[0].keys()
    # All windows end in each step of the warm-up. Then a cohort's ends in every step and is visible two later; the
    # selections at 8 and 16 end all, without delay.
    late, at_once = dict.fromkeys([7, *range(11, 16)], 1), dict.fromkeys([*range(1, 5), 8, 16], 0)
    assert {line["step"]: line["staleness"] for line in steps if "staleness" in line} == late | at_once
    assert [record["step"] for record in outcome.metrics() if "validation_loss" in record] == [0, 8, 16]
    summary = outcome.summary()
    assert summary["validation_loss_after"] < summary["validation_loss_before"] - 0.5
    assert summary["selections"] == 4 and summary["windows"] == 16
    assert (outcome.folder / "summary.txt").read_text() in outcome.out
    assert (outcome.folder / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("threads", "told"), [(1, "cpu, 1 thread"), (2, "cpu, 2 threads")])
def test_the_summary_counts_threads_in_words(command, threads, told):
    outcome = command("debug=smoke", "plot=false", "steps=1", "engine=adamw", "device=cpu", f"threads={threads}")
    assert outcome.code == 0, outcome.err
    assert outcome.summary()["device"] == told and f" {told}\n" in (outcome.folder / "summary.txt").read_text()


@pytest.mark.parametrize("engine", ["adamw", "zero_offload"])
def test_the_comparison_engines_run(command, engine):
    outcome = command(*BRIEF, f"engine={engine}")
    assert outcome.code == 0
    steps = [record for record in outcome.metrics() if "loss" in record]
    assert [bool(ENGINE_PART & line.keys()) for line in steps] == [engine == "zero_offload"] * 4
    assert outcome.summary()["validation_loss_after"] < outcome.summary()["validation_loss_before"]


@pytest.mark.parametrize(
    "engine",
    [
        "engine=zero_offload",
        "engine=zenflow engine.topk_ratio=1",
        "engine=zenflow engine.update_interval=1 engine.overlap_step=false",
    ],
)
def test_without_delay_every_engine_follows_adamw(command, tmp_path, engine):  # G7
    settings = (*BRIEF, "steps=8", "optimizer.weight_decay=1", "engine.min_deferred_numel=64")
    reference = command(*settings[:-1], "engine=adamw", folder=tmp_path / "adamw")
    outcome = command(*settings, *engine.split(), folder=tmp_path / "zenflow")
    losses = [[record["loss"] for record in run.metrics() if "loss" in record] for run in (outcome, reference)]
    # torch's fused AdamW rounds in another order: a few units in the last place of fp32 a step.
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_bfloat16_weights_and_accumulation_run(command):
    outcome = command(*BRIEF, "model.dtype=bfloat16", "accumulate=2", "batch_size=4")
    assert outcome.code == 0
    assert outcome.config()["model"]["dtype"] == "bfloat16"
    assert outcome.summary()["tokens"] == 4 * 2 * 4 * 64


TRAFFIC = {
    "together": ({2, 4, 6}, {4, 6}),
    "zenflow": ({2, 3, 4, 5, 6, 7}, {3, 4, 5, 6, 7}),
}


@pytest.mark.parametrize("engine", TRAFFIC)
def test_each_step_s_traffic_is_in_its_own_line(command, engine):
    """Windows of 2 steps without selections after the first: down at a window's end, up two steps later; with cohorts
    one window ends in every step. The first step's line has the first selection's, too."""
    words = (f"engine={engine}", "engine.update_interval=2", "engine.upload=step", "engine.full_warm_up_rounds=0")
    outcome = command(*BRIEF, "steps=7", *words, "log_every=100")
    steps = [record for record in outcome.metrics() if "loss" in record]
    down, up = ({line["step"] for line in steps[1:] if line[name] > 0} for name in ("bytes_to_host", "bytes_to_device"))
    assert (down, up) == TRAFFIC[engine]
    assert outcome.summary()["engine"].endswith(", U 2, windows together") == (engine == "together")
    assert {line["step"] for line in steps if line.get("staleness") == 1} == up
    assert {line["step"] for line in steps if "staleness" in line} == up


def test_a_failing_step_loses_no_line(command, monkeypatch):
    step = zenflow.ZenFlow.step

    def fail(optimizer):
        if optimizer.stats().steps == 6:
            raise RuntimeError("no seventh step")
        step(optimizer)

    monkeypatch.setattr(zenflow.ZenFlow, "step", fail)
    outcome = command(*BRIEF, "steps=16", "log_every=100")
    assert outcome.code == 1 and "no seventh step" in outcome.out + outcome.err
    steps = [record for record in outcome.metrics() if "loss" in record]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(line.keys() >= ENGINE_PART for line in steps)


def test_a_trace_of_some_steps_and_its_picture(command):
    outcome = command(*BRIEF, "steps=12", "trace=some.json", "trace_steps=[5,8]")
    assert outcome.code == 0
    events = json.loads((outcome.folder / "some.json").read_text())["traceEvents"]
    assert len([event for event in events if event["name"] == "optimizer step"]) == 4
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} >= {
        "GPU compute",
        "copy to ring",
        "CPU optimizer",
    }
    assert (outcome.folder / "some.png").read_bytes().startswith(b"\x89PNG")
    assert "under GPU compute" in outcome.out
    assert [line["step"] for line in outcome.metrics() if "loss" in line] == list(range(1, 13))


def test_gradients_on_the_host_train(command):
    """The same windows, summed by the CPU optimizer, give the same losses; replay gives others."""
    settings = (*BRIEF, "steps=12", "engine.min_deferred_numel=64")
    losses = []
    for number, rule in enumerate(
        ("", "engine.accumulate_on=host", "engine.accumulate_on=host engine.deferred_rule=replay")
    ):
        outcome = command(*settings, *rule.split(), folder=Path(f"run-{number}").absolute())
        assert outcome.code == 0
        losses.append([record["loss"] for record in outcome.metrics() if "loss" in record])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] != losses[0] and losses[2][-1] < losses[2][0]


def test_the_help_says_what_a_run_leaves(command):
    outcome = command("--help")
    words = (*ENGINE_PART, *FURTHER, "trace.json", "trace_steps", "summary.txt", "checkpoint_every", "resume=auto")
    assert [word for word in words if word not in outcome.out] == []


def test_a_sweep_with_a_typo_leaves_nothing(command, tmp_path):
    (tmp_path / "kept").mkdir()
    for folder in (tmp_path / "out" / "sweep", tmp_path / "kept"):
        outcome = command("-m", *BRIEF, "engine.topk_ration=0.1,0.2", folder=folder)
        assert outcome.code == 1 and "did you mean topk_ratio" in outcome.err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_recorded_configuration_holds_resolved_values(command):  # F10
    outcome = command(*BRIEF, "engine.topk_ratio=auto", "engine.update_interval=auto", "engine.select_strategy=auto")
    engine = outcome.config()["engine"]
    assert (engine["topk_ratio"], engine["update_interval"], engine["select_strategy"]) == (0.1, 4, "step")
    assert outcome.config()["device"] in ("cpu", "cuda")


def test_an_interval_in_epochs_takes_their_length_from_the_data(command):
    outcome = command(*BRIEF, "engine.select_strategy=epoch", "engine.select_interval=1")
    assert outcome.code == 0
    assert outcome.config()["engine"]["steps_per_epoch"] == 3125 // 8


def test_a_run_that_nobody_can_watch_any_more_ends_well(tmp_path):
    """Its output goes to a full disk, as it may to a closed terminal or pipe, and there is no stderr."""
    shell = [f'exec "{sys.executable}" -m experiments.train "$@" > /dev/full 2>&-', "sh"]
    arguments = [*BRIEF, "engine=adamw", "plot=true", f"hydra.run.dir={tmp_path}"]
    done = subprocess.run(["sh", "-c", *shell, *arguments], env=ENVIRONMENT, cwd=ROOT, timeout=300)
    log = (tmp_path / "train.log").read_text()
    assert done.returncode == 0, log
    assert "the result cannot be printed (No space left on device)" in log and "everything is in" in log
    assert (tmp_path / "loss.png").exists()


def test_a_host_without_memory_is_named_by_the_command_where_python_says_nothing(command, monkeypatch):
    def refused(config):
        raise MemoryError

    monkeypatch.setattr(run, "prepare", refused)
    outcome = command(*BRIEF, "engine=adamw")
    assert outcome.code == 1 and outcome.err.endswith("the host has no memory left")


def test_a_folder_that_holds_a_run_is_refused_and_unchanged(command):
    first = command(*BRIEF, "engine=adamw")
    before = {path: path.read_bytes() for path in first.folder.iterdir()}
    second = command(*BRIEF, "engine=adamw", "seed=1")
    assert second.code == 1 and str(first.folder) in second.err and "already holds a run" in second.err
    assert {path: path.read_bytes() for path in first.folder.iterdir()} == before


@pytest.mark.parametrize("resume", [(), ("resume=auto",)])
def test_a_run_that_begins_in_the_folder_meanwhile_stays_what_it_is(resume, command, monkeypatch, tmp_path):
    """Two jobs that are started at once on one folder: the settings of the first are not written over."""
    folder, prepare = tmp_path / "out" / "run", run.prepare

    def late(config):
        (folder / "config.json").write_text("{}")
        MetricsFile.create(folder).close()
        return prepare(config)

    monkeypatch.setattr(run, "prepare", late)
    second = command(*BRIEF, "engine=adamw", *resume)
    assert second.code == 1 and f"Another run has begun in {folder}" in second.err
    assert (folder / "config.json").read_text() == "{}" and (folder / "metrics.jsonl").read_bytes() == b""


def test_from_another_folder_with_relative_paths_and_without_wandb(tmp_path):  # F5
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("a line of text that repeats itself\n" * 400)
    script = "import sys, experiments.train as t; t.main(); sys.exit(3 if 'wandb' in sys.modules else 0)"
    arguments = ["data=file", "data.path=data/notes.txt", "data.max_length=64", "engine=adamw", "hydra.run.dir=here"]
    done = subprocess.run(
        [sys.executable, "-c", script, *BRIEF, *arguments],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert f'"path": "{tmp_path}/data/notes.txt"' in (tmp_path / "here" / "config.json").read_text()
    assert (tmp_path / "here" / "metrics.jsonl").exists()
    beside = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if "here" not in path.parts}
    assert beside == {Path("data"), Path("data/notes.txt")}


def test_an_interrupt_ends_the_run_and_its_worker(tmp_path, kept):
    run = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *BRIEF, "steps=1000000", "tracking=offline", "hydra.run.dir=here"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in run.stdout:
        if "selection at step 1" in line:
            break
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()  # the worker, and wandb's process
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=300)
    assert run.returncode == 130
    assert "Traceback" not in errors
    assert children and not [child for child in children if Path(f"/proc/{child}").exists()]
    assert "interrupted" in (tmp_path / "here" / "train.log").read_text()
    assert kept(tmp_path / "here").exit_code == 130
