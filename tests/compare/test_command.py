"""`zenflow-compare` as a whole, on the tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import experiments.compare
from tests.commands import SMOKE, runner
from tests.diagnose.readme import README, commands
from zenflow.compare.config import CompareConfig, CompareSettings, check_alike, check_settings, words_of
from zenflow.compare.judge import Check
from zenflow.compare.side import run_side
from zenflow.training.command import register
from zenflow.training.engines import AdamW

SHORT = (*SMOKE, "steps=8", "evaluate_every=4", "compare.warm_up=2")
ROOT = Path(experiments.compare.__file__).resolve().parents[1]


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    return runner(experiments.compare.main, "zenflow-compare", tmp_path, monkeypatch, capsys)


def test_a_comparison_of_offload_and_zenflow(command, tmp_path):
    (tmp_path / "b.txt").write_text("engine=zenflow\nengine.update_interval=2  # U\n")
    outcome = command(
        *SHORT, "engine.min_deferred_numel=64", "repeats=2", "seed=5", "a=engine=zero_offload", "b=@b.txt"
    )
    assert outcome.code == 0, outcome.err
    names = sorted(path.name for path in outcome.folder.iterdir())
    assert names == ["compare.json", "compare.log", "compare.md", "compare.png", "runs.jsonl"]
    assert (outcome.folder / "compare.md").read_text() in outcome.out
    assert (outcome.folder / "compare.png").read_bytes().startswith(b"\x89PNG")
    found = outcome.json("compare.json")
    runs = found["runs"]
    assert [json.loads(line) for line in (outcome.folder / "runs.jsonl").read_text().splitlines()] == runs
    assert [(run["side"], run["seed"], run["place"]) for run in runs] == [
        ("a", 5, 1),
        ("b", 5, 2),
        ("b", 6, 3),
        ("a", 6, 4),
    ]
    assert runs[0]["weights"] == runs[1]["weights"] != runs[2]["weights"] == runs[3]["weights"]
    assert runs[0]["order"] == runs[1]["order"] != runs[2]["order"] == runs[3]["order"]
    assert [[point["step"] for point in run["curve"]] for run in runs] == [[0, 4, 8]] * 4
    assert runs[0]["curve"][0] == runs[1]["curve"][0] and runs[0]["curve"][2] != runs[1]["curve"][2]
    assert all(run["tokens_per_second"] > 0 and run["trainer_cpus"] >= 0 for run in runs)
    assert runs[0]["bytes_to_host"] > runs[1]["bytes_to_host"] > 0
    works = {(check["side"], check["name"]): check["works"] for check in found["checks"]}
    assert len(works) == 10 and all(works.values())
    assert [check["name"] for check in found["checks"][:3]] == ["short run", "checkpoint", "going on from it"]
    assert found["judgement"]["verdict"] in ("adopt", "do not adopt", "not enough evidence")
    assert len(found["judgement"]["criteria"]) == 4
    assert found["settings"]["a"]["engine"]["topk_ratio"] == 0
    assert found["settings"]["b"]["engine"]["update_interval"] == 2
    assert [found["settings"][side]["steps"] for side in "ab"] == [8, 8]
    assert found["sides"] == {"a": "engine=zero_offload", "b": "engine=zenflow engine.update_interval=2"}
    assert found["machine"]["torch"] and found["machine"]["memory"].endswith("GiB")


def test_the_same_side_twice_gives_the_same_losses_and_no_evidence(command):
    outcome = command(*SHORT, "plot=false", "repeats=1", "a=engine=adamw", "b=engine=adamw")
    assert outcome.code == 0, outcome.err
    found = outcome.json("compare.json")
    losses = [[point["loss"] for point in run["curve"]] for run in found["runs"]]
    assert losses[0] == losses[1] and found["runs"][0]["stall"] is None
    assert all(check["works"] for check in found["checks"]) and not (outcome.folder / "compare.png").exists()
    assert found["judgement"]["verdict"] == "not enough evidence"
    assert found["judgement"]["criteria"][2]["difference"] == {"mean": 0.0, "low": None, "high": None, "n": 1}
    assert "Both sides have the same settings" in outcome.out


class Forgetful(AdamW):
    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("a", "b", "verdict"),
    [
        ("engine=zero_offload", "engine=adamw", "do not adopt"),
        ("engine=adamw", "engine=zero_offload", "not enough evidence"),
    ],
)
def test_what_does_not_work_ends_it_before_the_long_runs(command, monkeypatch, a, b, verdict):
    monkeypatch.setattr("zenflow.training.engines.AdamW", Forgetful)
    monkeypatch.setattr("zenflow.compare.run.run_side", lambda *_: pytest.fail("a long run was made"))
    outcome = command(*SHORT, "repeats=2", f"a={a}", f"b={b}")
    assert outcome.code == 0, outcome.err
    assert sorted(path.name for path in outcome.folder.iterdir()) == ["compare.json", "compare.log", "compare.md"]
    broken = "a" if a == "engine=adamw" else "b"
    found = outcome.json("compare.json")
    assert found["judgement"]["verdict"] == verdict and found["runs"] == [] == found["judgement"]["criteria"]
    (reason,) = found["judgement"]["reasons"]
    assert reason.startswith(f"{broken}: checkpoint does not work: ") and "differs in what was loaded" in reason
    text = (outcome.folder / "compare.md").read_text()
    assert text.startswith(f"# {verdict}\n") and "| NO " in text and "speed and quality of what does not work" in text
    assert "## 2." not in text and "## Criteria" not in text


@pytest.mark.parametrize(("side", "made"), [("a", "a"), ("b", "ab")])
def test_a_loss_that_does_not_fall_ends_it_after_that_side_s_first_run(command, monkeypatch, side, made):
    def rising(name, config, place):
        done = run_side(name, config, place)
        checks = [Check(name, "training", name != side, "seed 0: held-out loss 2 -> 3")]
        return replace(done, checks=checks)

    monkeypatch.setattr("zenflow.compare.run.run_side", rising)
    outcome = command(*SHORT, "repeats=2", "a=engine=adamw", "b=engine=adamw", "plot=false")
    assert outcome.code == 0, outcome.err
    found = outcome.json("compare.json")
    assert "".join(run["side"] for run in found["runs"]) == made
    assert f"{side}: training does not work: seed 0: held-out loss 2 -> 3." in found["judgement"]["reasons"]


def test_a_later_seed_whose_loss_does_not_fall_lets_the_others_run(command, monkeypatch):
    def rising(name, config, place):
        done = run_side(name, config, place)
        return replace(done, checks=[Check(name, "training", place != 3, "held-out loss 2 -> 3")])

    monkeypatch.setattr("zenflow.compare.run.run_side", rising)
    outcome = command(*SHORT, "repeats=2", "a=engine=adamw", "b=engine=adamw", "plot=false")
    found = outcome.json("compare.json")
    assert len(found["runs"]) == 4 and found["judgement"]["verdict"] == "do not adopt"


def test_a_rule_of_the_simulation_may_be_compared(command):
    outcome = command(*SHORT, "plot=false", "repeats=1", "a=engine=simulated", "b=engine=zenflow")
    assert outcome.code == 0, outcome.err
    a, b = outcome.json("compare.json")["runs"]
    assert [point["loss"] for point in a["curve"]] == [point["loss"] for point in b["curve"]] and a["stall"] is None


def test_other_weights_end_it_after_the_first_pair(command, monkeypatch):
    digests = iter(range(99))
    monkeypatch.setattr("zenflow.compare.side.digest", lambda _: f"{next(digests):064}")
    outcome = command(*SHORT, "plot=false", "repeats=2", "a=engine=adamw", "b=engine=adamw")
    assert outcome.code != 0 and "seed 0: the weights are 0" in (outcome.folder / "compare.log").read_text()
    assert len((outcome.folder / "runs.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a=engine=adamw optimizer.lr=1", "b=engine=zenflow"], "optimizer.lr is 1.0 in a and 0.002 in b"),
        (["b=engine=zenflow model.width=32"], "model.width is 64 in a and 32 in b"),
        (["a=engine=zenflow engine.topk_ration=0.1"], "did you mean topk_ratio"),
        (["b=@none.txt"], "b=@none.txt cannot be read (No such file or directory)"),
        (["b=engine=zenflow engine.topk_ratio=2"], "engine.topk_ratio is 2"),
        (["repeats=0"], "repeats is 0; allowed: an integer from 1 to 100"),
        (["evaluate_every=null"], "evaluate_every is None; allowed: an integer from 1 to steps / 2 = 4"),
    ],
)
def test_what_is_refused_before_anything_runs_leaves_nothing(command, tmp_path, words, told):
    outcome = command(*SHORT, *words)
    assert outcome.code == 1 and told in outcome.err and "zenflow-compare: " in outcome.err
    assert "Traceback" not in outcome.err and list(tmp_path.iterdir()) == []


def test_a_folder_with_a_comparison_is_refused(command):
    folder = command(*SHORT, "repeats=0").folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "compare.md").write_text("kept")
    outcome = command(*SHORT, "repeats=1")
    assert outcome.code == 1 and "already holds compare.md" in outcome.err
    assert (folder / "compare.md").read_text() == "kept"


def test_the_help_explains_the_two_sides(command):
    outcome = command("--help")
    words = (
        'b="engine=zenflow engine.update_interval=8"',
        "a=@now.txt",
        "only engine settings may",
        "not enough evidence",
    )
    assert not [word for word in words if word.lower() not in outcome.out.lower()]


def test_the_arithmetic_loads_no_torch():
    code = (
        "import sys, zenflow.compare.curve, zenflow.compare.criteria, zenflow.compare.judge, zenflow.compare.text; "
        "import zenflow.bench.topology; print('torch' in sys.modules or 'hydra' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("words", commands("zenflow-compare"), ids=" ".join)
def test_the_readme_s_commands_compose(words):
    register()
    ConfigStore.instance().store(name="base_compare", node=CompareConfig)
    words = [experiments.compare.quoted(word) for word in words]
    with initialize_config_dir(str(experiments.compare.CONF), version_base="1.3"):
        shared = OmegaConf.to_object(compose("compare", words))
        sides = [
            OmegaConf.to_object(compose("compare", [*words, *words_of(side, getattr(shared, side))])) for side in "ab"
        ]
    check_alike(*sides)
    for side in sides:
        check_settings(side)


def test_the_readme_s_limits_are_the_defaults():
    chosen = CompareSettings()
    assert f"`compare.min_gain` ({chosen.min_gain})" in README
    assert f"`compare.max_loss_rise` ({chosen.max_loss_rise})" in README
