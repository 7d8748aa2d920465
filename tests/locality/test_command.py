"""`zenflow-locality` as a whole, on the tiny model."""

from __future__ import annotations

import csv
import json

import pytest

import experiments.locality
import experiments.train
from tests.commands import SMOKE, runner

SHORT = (*SMOKE, "steps=6", "evaluate_every=null", "locality.lags=[1,4,16]")
OUTPUTS = ["locality.csv", "locality.json", "locality.log", "locality.md", "locality.png"]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return runner(experiments.locality.main, "zenflow-locality", tmp_path, monkeypatch, capsys)


def test_a_study_leaves_tables_and_a_picture_and_changes_no_step(command, tmp_path, monkeypatch, capsys):
    outcome = command(*SHORT)
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in outcome.folder.iterdir()) == OUTPUTS
    assert (outcome.folder / "locality.png").read_bytes().startswith(b"\x89PNG")
    text = (outcome.folder / "locality.md").read_text()
    assert text in outcome.out and "too short for 16 steps later" in text
    result = outcome.json("locality.json")
    with open(outcome.folder / "locality.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(result["matrices"]) == 20
    assert {row["dim"] for row in rows} == {"column", "row"}
    assert all(0 < float(row["top_0.01"]) < float(row["top_0.1"]) < 1 for row in rows)
    assert all(0 <= float(row["overlap_4"]) <= 1 and row["overlap_16"] == "" for row in rows)
    assert {dim: len(steps) for dim, steps in result["overall_by_step"].items()} == {"column": 6, "row": 6}

    train = runner(experiments.train.main, "zenflow-train", tmp_path, monkeypatch, capsys)
    plain = train(*SHORT[:-1], "engine=adamw", "plot=false", folder=tmp_path / "plain")
    assert [line["loss"] for line in plain.metrics() if "loss" in line] == result["losses"]


def test_zenflow_s_own_gradients_can_be_studied(command):
    outcome = command(*SHORT, "engine=zenflow", "plot=false", "model.dtype=bfloat16")
    assert outcome.code == 0, outcome.err
    assert "tiny on stdlib, zenflow, 6 steps" in (outcome.folder / "locality.md").read_text()


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("locality.shares=[0.1,0.05]", ["locality.shares", "[0.1, 0.05]", "each above the last"]),
        ("locality.shares=[0]", ["locality.shares", "above 0"]),
        ("locality.shares=[]", ["locality.shares", "[]"]),
        ("locality.lags=4", ["locality.lags is 4", "a list, as [1,4,16]"]),
        ("locality.lags=[0]", ["locality.lags", "[0]", ">= 1"]),
        ("locality.lags=[0,1]", ["locality.lags", "[0, 1]", ">= 1"]),
        ("locality.lags=[6]", ["locality.lags", "6", "below steps"]),
        ("locality.topk_ratio=1.5", ["locality.topk_ratio", "1.5", "up to 1"]),
        ("locality.min_numel=0", ["locality.min_numel", "0", ">= 1"]),
        ("locality.min_numel=1000000", ["locality.min_numel", "1000000", "give less"]),
        ("locality.laggs=[1]", ["locality.laggs", "did you mean lags"]),
        ("optimizer.lr=-1", ["optimizer.lr", "-1"]),
        ("engine=deepspeed_zenflow", ["engine=deepspeed_zenflow", "takes the gradients away", "engine=zenflow"]),
    ],
)
def test_a_bad_value_is_one_sentence_and_leaves_nothing(command, tmp_path, override, words):
    outcome = command(*SHORT, override)
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-locality: ") and "\n" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_study_is_refused_and_unchanged(command, tmp_path):
    folder = tmp_path / "study"
    folder.mkdir()
    (folder / "locality.json").write_text("{}")
    outcome = command(*SHORT, "plot=false", folder=folder)
    assert outcome.code == 1 and "already holds locality.json" in outcome.err
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("locality.json", "{}")]


def test_a_sweep_leaves_a_study_a_job(command):
    outcome = command("-m", *SHORT, "plot=false", "seed=0,1")
    assert outcome.code == 0, outcome.err
    seeds = [json.loads((outcome.folder / job / "locality.json").read_text())["settings"]["seed"] for job in "01"]
    assert seeds == [0, 1]


def test_the_help_says_what_a_study_leaves(command):
    outcome = command("--help")
    assert outcome.code == 0
    assert [name for name in OUTPUTS if name not in outcome.out and name != "locality.log"] == []
