"""engine=simulated in a run, in a sweep and in a report."""

from __future__ import annotations

import dataclasses

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.train import CONF
from tests.commands import BRIEF
from zenflow.report.runs import find, read
from zenflow.report.study import studies
from zenflow.training.checks import _check_values
from zenflow.training.command import register
from zenflow.training.engines import simulated_rule
from zenflow.training.schema import AdamWEngine, SimulatedEngine, TrainConfig, ZenFlowEngine, plain

OWN = {"betas_per_window": "none", "second_moment": "mean", "delay_compensation": 0.0, "growing_rounds": 0}
SHORT = (*BRIEF, "steps=9", "engine.select_interval=3", "engine.update_interval=2")


def losses(outcome, job: str = "") -> list[float]:
    return [line["loss"] for line in outcome.metrics(job) if "loss" in line]


def test_its_settings_are_the_engine_s_with_its_defaults_and_four_of_its_own():
    simulated, engine = plain(SimulatedEngine()), plain(ZenFlowEngine())
    assert {name: value for name, value in simulated.items() if name not in engine} == OWN
    assert simulated == OWN | {name: engine[name] for name in simulated if name in engine}
    listed = OmegaConf.to_container(OmegaConf.load(CONF / "engine" / "simulated.yaml"))
    del listed["defaults"]
    assert listed == simulated


def test_a_run_has_the_engine_s_losses_and_a_report_names_it(command, tmp_path):
    rule = ("engine.stagger=true", "engine.weight_prediction=1")
    simulated = command(*SHORT, "engine=simulated", *rule)
    assert simulated.code == 0, simulated.err
    engine = command(*SHORT, "engine=zenflow", *rule, folder=tmp_path / "out" / "engine")
    assert losses(simulated) == losses(engine) and len(losses(engine)) == 9
    summary, other = simulated.summary(), engine.summary()
    for name in ("validation_loss_after", "windows", "selections", "skipped_steps"):
        assert summary[name] == other[name], name
    assert summary["engine"] == "simulated, k 0.1, U 2"
    assert "windows" in simulated.out and "CPU optimizer" not in simulated.out
    (study,) = studies([read(folder) for folder in find([tmp_path / "out"])], [], {})
    assert [setting.name for setting in study.settings] == ["zenflow", "simulated"]


def test_a_resumed_run_is_the_uninterrupted_one(command, tmp_path):  # I7
    words = (*SHORT, "engine=simulated", "engine.delay_compensation=10", "engine.growing_rounds=6")
    whole = command(*words, "checkpoint_every=4", "keep_checkpoints=9")
    expected = whole.metrics()
    assert whole.code == 0, whole.err
    again = command("resume=" + str(whole.folder / "checkpoints" / "step_00000004"), folder=whole.folder)
    assert again.code == 0, again.err
    untimed = [
        [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]
        for lines in (expected, again.metrics())
    ]
    assert untimed[0] == untimed[1]


@pytest.mark.parametrize("name", ["simulate_rules", "simulate_rules_gpu"])
def test_every_rule_of_the_sweep_is_valid_distinct_and_beside_adamw(name):
    register()
    configs = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        swept = compose("train", [f"experiment={name}"], return_hydra_config=True).hydra.sweeper.params
        for words in swept.variant.split(","):
            config = compose("train", [f"experiment={name}", *words.strip().strip("'").split()])
            configs.append(OmegaConf.to_object(config))
    rules = []
    for config in configs:
        assert isinstance(config, TrainConfig)
        _check_values(config)
        if isinstance(config.engine, SimulatedEngine):
            rules.append(repr(simulated_rule(config.engine, config.optimizer)))
    assert isinstance(configs[0].engine, AdamWEngine)
    assert len(set(rules)) == len(rules) == len(configs) - 1
    assert len({repr(plain(dataclasses.replace(config, engine=AdamWEngine()))) for config in configs}) == 1
    tried = {key for config in configs[1:] for key, value in plain(config.engine).items() if value != OWN.get(key)}
    assert tried >= OWN.keys()


def test_the_sweep_runs_by_one_command_and_a_report_puts_rules_beside_adamw(command):
    variant = "variant='engine=adamw','engine.update_interval=4','engine.stagger=true engine.delay_compensation=9'"
    small = ("debug=rules", "model.path=null", "threads=1", "steps=5", "evaluate_every=null", "data.evaluate_samples=8")
    outcome = command("experiment=simulate_rules", *small, "seed=0", variant)
    assert outcome.code == 0, outcome.err
    (study,) = studies([read(folder) for folder in find([outcome.folder])], [], {})
    assert study.baseline.name == "adamw"
    assert [setting.name for setting in study.settings] == [
        "adamw",
        "simulated, U 4",
        "simulated, stagger true, delay_compensation 9",
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.delay_compensation=-1", ["engine.delay_compensation", "-1", "a finite number >= 0"]),
        ("engine.growing_rounds=-1", ["engine.growing_rounds", "-1", ">= 0"]),
        ("engine.betas_per_window=third", ["third", "none", "first", "both"]),
        ("engine.visible_after=9", ["engine.visible_after", "9", "1 to 4"]),
        ("engine.deferred_rule=replay", ["engine.deferred_rule", "replay", "accumulate_on='host'"]),
        ("engine.worker_threads=1", ["engine.worker_threads"]),
        ("trace=trace.json", ["trace is 'trace.json'", "engine=simulated: null"]),
    ],
)
def test_a_bad_value_is_one_sentence(command, override, words):
    outcome = command(*BRIEF, "engine=simulated", override)
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-train: ") and "\n" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
