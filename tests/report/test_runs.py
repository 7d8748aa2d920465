"""What is found below a folder, and which runs are left out with which reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.report.making import config, lines, log_line, make, write_lines
from zenflow.report.runs import LeftOut, Run, find, read
from zenflow.training.errors import InputError

LOSSES = {0: 3.0, 2: 2.0, 4: 1.0}
DEEP = 100_000 * "["
TRACEBACK = 'Traceback (most recent call last):\n  File "x.py", line 3, in step\nRuntimeError: no seventh step\n'


@pytest.fixture
def whole(tmp_path) -> Path:
    return make(tmp_path / "run", LOSSES)


def reason(folder: Path) -> str:
    found = read(folder)
    assert isinstance(found, LeftOut)
    return found.reason


def rewrite(folder: Path, keep) -> None:
    """Keep those lines of metrics.jsonl for which `keep` is true."""
    text = (folder / "metrics.jsonl").read_text().splitlines()
    write_lines(folder, [line for line in map(json.loads, text) if keep(line)])


def test_single_runs_sweeps_and_nested_ones_are_found_once(tmp_path):
    for name in ("single", "sweep/10", "sweep/2", "deep/er/sweep/0"):
        make(tmp_path / name, LOSSES)
    make(tmp_path / "single" / "wandb" / "copy", LOSSES)
    (tmp_path / "link").symlink_to(tmp_path / "sweep")
    found = find([tmp_path, tmp_path / "sweep", tmp_path / "link"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["deep/er/sweep/0", "single", "sweep/2", "sweep/10"]


def test_a_folder_without_runs_is_an_error_that_says_what_was_looked_for(tmp_path, whole):
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"hidden_size": 384}')
    (tmp_path / "model" / "train.log").write_text("[2026-11-29][somebody][ERROR] - else\n")
    for name in ("empty", "model", "missing"):
        with pytest.raises(InputError, match=r"metrics\.jsonl and config\.json") as error:
            find([whole, tmp_path / name])
        assert str(tmp_path / name) in str(error.value)


def test_a_moved_run_reads_the_same(tmp_path, whole):
    before = read(whole)
    shutil.move(whole, tmp_path / "else where" / "ü")
    after = read(tmp_path / "else where" / "ü")
    assert isinstance(after, Run)
    assert (after.steps, after.evaluations, after.config) == (before.steps, before.evaluations, before.config)


def test_every_step_of_a_resumed_run_counts_once(tmp_path, whole):
    """Steps 3 and 4 were gone through twice, and the evaluation after 4: what was written later counts."""
    again = lines(config(), {4: 0.5}, [9.0, 9.0, 2.0, 3.0], train=lambda step: 7.0)
    text = (whole / "metrics.jsonl").read_text()
    resumed = [line for line in again if line["step"] > 2]
    (whole / "metrics.jsonl").write_text(text + "".join(json.dumps(line) + "\n" for line in resumed))
    run = read(whole)
    assert run.repeated == 2
    assert [(step.loss, step.seconds) for step in run.steps] == [(1.0, 1.0), (1.0, 1.0), (7.0, 2.0), (7.0, 3.0)]
    assert [(point.step, point.seconds, point.loss) for point in run.evaluations] == [
        (0, 0.0, 3.0),
        (2, 2.0, 2.0),
        (4, 7.0, 0.5),
    ]


def test_a_job_that_did_not_start_gives_its_sentence(tmp_path):
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "train.log").write_text(log_line("ERROR", "optimizer.lr is -1.0; allowed: a finite number >= 0."))
    assert find([tmp_path]) == [tmp_path / "3"]
    assert reason(tmp_path / "3") == "did not start: optimizer.lr is -1.0; allowed: a finite number >= 0."


def test_a_failed_run_gives_its_exception(whole):
    (whole / "summary.json").unlink()
    rewrite(whole, lambda line: line["step"] <= 3 and "loss" in line)
    failed = log_line("INFO", "step 0") + log_line("ERROR", f"the run in {whole} failed") + TRACEBACK
    (whole / "train.log").write_text(failed + log_line("INFO", "closed", "somebody.else"))
    assert reason(whole) == "unfinished: 3 of 4 steps; RuntimeError: no seventh step"
    assert read(whole).config == config()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (None, "no error in its log (still running, or killed)"),
        (log_line("WARNING", "interrupted; what was recorded so far is in x"), "interrupted"),
    ],
    ids=["no log", "interrupted"],
)
def test_an_unfinished_run_says_how_far_it_came(whole, log, why):
    (whole / "summary.json").unlink()
    rewrite(whole, lambda line: line["step"] < 2)
    if log is not None:
        (whole / "train.log").write_text(log)
    assert reason(whole) == f"unfinished: 1 of 4 steps; {why}"


def test_what_is_missing_at_the_end(whole):
    (whole / "summary.json").unlink()
    assert reason(whole).startswith("unfinished: all steps, but no summary.json; ")
    rewrite(whole, lambda line: (line["step"], "loss" in line) != (4, False))
    assert reason(whole).startswith("unfinished: no evaluation after step 4; ")
    (whole / "metrics.jsonl").write_text("")
    assert reason(whole).startswith("unfinished: 0 of 4 steps; ")


def test_a_torn_last_line_is_a_step_that_is_missing(whole):
    text = (whole / "metrics.jsonl").read_text()
    (whole / "metrics.jsonl").write_text(text[: text.index('"step": 3') + 20])
    assert reason(whole).startswith("unfinished: 2 of 4 steps; ")


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("config.json", "{", "config.json is damaged: no JSON"),
        ("config.json", "[1]", "config.json is damaged: no JSON object"),
        ("config.json", json.dumps(config(seed="0")), "config.json is damaged: seed is '0'"),
        ("config.json", json.dumps(config(steps=0)), "config.json is damaged: steps is 0"),
        (
            "config.json",
            json.dumps(config(engine={"peer": "new"})),
            "config.json has an engine that is not known here: 'new'",
        ),
        ("config.json", DEEP, "config.json is damaged: no JSON"),
        ("summary.json", "", "summary.json is damaged: no JSON"),
        ("summary.json", DEEP, "summary.json is damaged: no JSON"),
        ("summary.json", '{"device": ["cpu"]}', "summary.json is damaged: device is ['cpu']"),
        ("summary.json", '{"stall_share": "a lot"}', "summary.json is damaged: stall_share is 'a lot'"),
        ("metrics.jsonl", '{"step": 1, \n{}\n', "metrics.jsonl is damaged: line 1 (no step's and no evaluation's)"),
        ("metrics.jsonl", '{"step": 0, "loss": 1}\n', "metrics.jsonl is damaged: line 1 (no 'batch_tokens')"),
        ("metrics.jsonl", "7\n", "metrics.jsonl is damaged: line 1 (no step's and no evaluation's)"),
        ("metrics.jsonl", '{"step": [1], "validation_loss": 1}\n', "metrics.jsonl is damaged: line 1"),
        ("metrics.jsonl", '{"step": 9, "validation_loss": 1.0}\n', "metrics.jsonl is damaged: step 9 of a run of 4"),
        ("metrics.jsonl", '{"step": 1.5, "validation_loss": 1.0}\n', "metrics.jsonl is damaged: line 1"),
        ("metrics.jsonl", f"{DEEP}\n", "metrics.jsonl is damaged: line 1"),
    ],
    ids=lambda value: value[:40],
)
def test_damaged_files_are_named(whole, name, text, why):
    (whole / name).write_text(text)
    assert reason(whole).startswith(why)


def test_a_missing_step_and_bytes_that_are_no_text(whole):
    rewrite(whole, lambda line: line["step"] != 2 or "loss" not in line)
    assert reason(whole) == "metrics.jsonl is damaged: step 2 is missing"
    (whole / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    assert reason(whole) == "metrics.jsonl is damaged: no UTF-8"
    (whole / "metrics.jsonl").unlink()
    assert reason(whole) == "no metrics.jsonl" and find([whole]) == [whole]
    (whole / "config.json").unlink()
    assert reason(whole) == "no config.json"


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_diverged_run_is_no_part_of_a_mean(tmp_path, loss):
    made = make(tmp_path / "run", {0: 3.0, 2: loss, 4: 1.0})
    assert reason(made) == f"diverged: the validation loss is {loss} after step 2"
