"""`zenflow-diagnose` as a whole, on the tiny model."""

from __future__ import annotations

import itertools
import types

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import experiments.diagnose
from tests.commands import SMOKE, runner
from tests.diagnose.readme import README, blocks, commands
from zenflow.diagnose import ceilings
from zenflow.diagnose.config import DiagnoseConfig, check_settings
from zenflow.diagnose.figures import Ceilings
from zenflow.diagnose.verdict import Thresholds
from zenflow.training.command import register

SHORT = (*SMOKE, "diagnose.steps=21", "diagnose.warm_up=2", "diagnose.triad_bytes=65536")


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return runner(experiments.diagnose.main, "zenflow-diagnose", tmp_path, monkeypatch, capsys)


def test_a_diagnosis_of_the_offload(command):
    outcome = command(*SHORT)
    assert outcome.code == 0, outcome.err
    names = sorted(path.name for path in outcome.folder.iterdir())
    assert names == ["diagnose.log", "diagnosis.json", "diagnosis.png", "diagnosis.txt"]
    assert (outcome.folder / "diagnosis.txt").read_text() in outcome.out
    assert (outcome.folder / "diagnosis.png").read_bytes().startswith(b"\x89PNG")
    found = outcome.json("diagnosis.json")
    measured, figures = found["measured"], found["figures"]
    assert len(measured["steps"]) == len(measured["losses"]) == figures["steps"] == 21
    assert figures["stall"] > 0 and figures["worker_busy"] > 0 and figures["data"] > 0
    parts = sum(figures[name] for name in ("data", "compute", "optimizer", "stall"))
    assert parts == pytest.approx(figures["mean"])
    assert figures["bytes_to_host"] > 4e5 and figures["pass_share"] > 0 and figures["to_host"] is None
    assert measured["trainer_cpu"] > 0 and measured["worker_cpu"] is not None
    assert measured["validation_after"] < measured["validation_before"] and figures["health"]["falling"]
    assert any("Only 21 steps" in remark for remark in found["verdict"]["remarks"])
    assert found["settings"]["engine"]["topk_ratio"] == 0 and found["settings"]["diagnose"]["steps"] == 21
    assert found["machine"]["torch"] and found["machine"]["memory"] in outcome.out and "torch" in outcome.out
    assert found["limits"]["stall_share"] == 0.1


def test_a_diagnosis_of_adamw_waits_for_no_offload(command):
    outcome = command(*SHORT, "engine=adamw", "accumulate=2")
    assert outcome.code == 0, outcome.err
    figures = outcome.json("diagnosis.json")["figures"]
    assert figures["stall"] is None and figures["optimizer"] > 0 and "not known for this optimizer" in outcome.out
    assert outcome.json("diagnosis.json")["verdict"]["kind"] in ("compute-bound", "inconclusive")


def test_two_diagnoses_see_the_same_data(command, tmp_path):
    losses = [command(*SHORT, folder=tmp_path / name).json("diagnosis.json")["measured"]["losses"] for name in "ab"]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["engine=zenflow"], "engine.topk_ratio is 0.1; a diagnosis is of a run without ZenFlow"),
        (["engine=deepspeed_offload"], "engine=deepspeed_offload is another project's"),
        (["engine.update_interval=4"], "engine.update_interval is 4"),
        (["engine.overlap_step=true"], "engine.overlap_step is True"),
        (["diagnose.steps=0"], "diagnose.steps is 0; allowed: an integer from 2 to 500"),
        (["diagnose.steps=501"], "diagnose.steps is 501; allowed: an integer from 2 to 500"),
        (["diagnose.warm_up=0"], "diagnose.warm_up is 0; allowed: an integer from 1 to 500"),
        (["diagnose.stepz=3"], "did you mean steps"),
        (["batch_size=0"], "batch_size is 0; allowed"),
    ],
)
def test_what_is_refused_and_leaves_nothing(command, tmp_path, words, told):
    outcome = command(*SHORT, *words)
    assert outcome.code == 1 and told in outcome.err and "zenflow-diagnose: " in outcome.err
    assert "Traceback" not in outcome.err and list(tmp_path.iterdir()) == []


def test_a_folder_with_a_diagnosis_is_refused(command):
    outcome = command(*SHORT, "engine=adamw")
    before = (outcome.folder / "diagnosis.json").read_bytes()
    again = command(*SHORT, "engine=adamw")
    assert again.code == 1 and "already holds diagnosis.json" in again.err
    assert (outcome.folder / "diagnosis.json").read_bytes() == before


def test_the_help_says_what_it_is_for(command):
    outcome = command("--help")
    words = ("zenflow-diagnose debug=smoke", "diagnosis.json", "engine=zero_offload", "memory-rich", "diagnose.warm_up")
    assert not [word for word in words if word not in outcome.out]


@pytest.mark.parametrize("words", commands("zenflow-diagnose"), ids=" ".join)
def test_the_readme_s_commands_compose(words):
    register()
    ConfigStore.instance().store(name="base_diagnose", node=DiagnoseConfig)
    with initialize_config_dir(str(experiments.diagnose.CONF), version_base="1.3"):
        check_settings(OmegaConf.to_object(compose("diagnose", words)))


def test_the_readme_s_thresholds_are_those_that_decide():
    limits = Thresholds()
    assert (limits.min_steps, limits.noise, limits.memory_share) == (20, 1.5, 0.9)
    assert limits.data_share == limits.stall_share == 0.1
    for words in ("fewer than 20 steps", "p95 over 1.5 medians", "10% of a step or more", "at most 90% of the card"):
        assert words in README


def test_the_readme_s_loop_runs(monkeypatch, capsys):
    monkeypatch.setattr(ceilings, "measure", lambda *_: Ceilings())
    (block,) = (block for block in blocks("py") if "Diagnosis" in block)
    layer = torch.nn.Linear(7, 5)
    names = {
        "model": lambda batch: types.SimpleNamespace(loss=layer(batch).square().mean()),
        "optimizer": torch.optim.AdamW(layer.parameters()),
        "loader": itertools.repeat(torch.ones(3, 7)),
    }
    exec(block, names)
    assert "100 steps" in capsys.readouterr().out
