"""What can be configured, and what every bad value says."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf

from experiments.train import CONF
from zenflow import ZenFlowConfig
from zenflow.training.command import explain, register
from zenflow.training.schema import SimulatedEngine, TrainConfig, ZenFlowEngine, from_plain, plain

SMOKE = ("debug=smoke", "plot=false", "threads=1")


def composed(*overrides: str) -> TrainConfig:
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return OmegaConf.to_object(compose("train", list(overrides)))


def options(group: str) -> list[str]:
    return [f"{group}={path.stem}" for path in sorted(Path(CONF, group).glob("*.yaml"))]


def test_the_schema_has_the_engine_s_fields_with_the_engine_s_defaults():
    engine = {item.name: getattr(ZenFlowConfig(), item.name) for item in dataclasses.fields(ZenFlowConfig)}
    del engine["max_grad_norm"]  # one setting for all engines, in the optimizer group
    assert plain(ZenFlowEngine()) == engine


@pytest.mark.parametrize(
    "choice", [choice for group in CONF.iterdir() if group.is_dir() for choice in options(group.name)]
)
def test_every_option_composes(choice):
    assert isinstance(composed(choice), TrainConfig)


def test_the_engine_s_file_lists_every_field_with_its_default():
    listed = OmegaConf.to_container(OmegaConf.load(CONF / "engine" / "zenflow.yaml"))
    del listed["defaults"]
    assert listed == plain(ZenFlowEngine())


@pytest.mark.parametrize("choice", options("engine"))
def test_what_a_run_recorded_is_its_configuration_again(choice):
    """`resume` reads it: also of a simulated rule, and of another project's offload."""
    config = composed(choice)
    again = from_plain(plain(config))
    assert again == config and type(again.engine) is type(config.engine)


def test_the_engines_are_what_their_names_say():
    offload = composed("engine=zero_offload").engine
    assert (offload.topk_ratio, offload.update_interval, offload.overlap_step) == (0, 1, False)
    assert (offload.stagger, offload.weight_prediction, offload.full_warm_up_rounds) == (False, 0.0, 0)
    assert (composed().engine.topk_ratio, composed().engine.update_interval) == (0.1, 4)


SCHEDULE = ("stagger", "weight_prediction", "visible_after", "full_warm_up_rounds")
PAPER, STAGGERED = (False, 0.0, "auto", 0), (True, 0.0, "auto", 4)


@pytest.mark.parametrize(
    ("choice", "schedule", "changed"),
    [
        ("together", PAPER, {}),
        ("stagger", STAGGERED, {}),
        ("zenflow", (True, 1.0, "auto", 4), {}),
        ("predicted", (True, 1.0, 1, 4), {}),
        ("accumulate_none", PAPER, {"deferred_lr_scale": "none"}),
        ("accumulate_2", PAPER, {"deferred_lr_scale": 2}),
        ("replay", PAPER, {"accumulate_on": "host", "deferred_rule": "replay"}),
        ("replay_undelayed", PAPER, {"accumulate_on": "host", "deferred_rule": "replay", "overlap_step": False}),
    ],
)
def test_an_engine_is_the_default_with_its_schedule_and_its_rule(choice, schedule, changed):
    """Rules are compared on the paper's schedule, on which they have been measured."""
    engine = plain(composed(f"engine={choice}").engine)
    assert engine == plain(ZenFlowEngine()) | dict(zip(SCHEDULE, schedule, strict=True)) | changed


def test_simulated_rules_depart_from_the_paper_s_schedule():
    engine = plain(composed("experiment=simulate_rules").engine)
    assert tuple(engine[name] for name in SCHEDULE) == PAPER
    assert composed("engine=simulated").engine == SimulatedEngine()


@pytest.mark.parametrize("text", ["1e-5", "1e-4", "1", "0.5"])
def test_a_learning_rate_is_a_float_however_it_is_written(text):  # F14
    lr = composed(f"optimizer.lr={text}").optimizer.lr
    assert isinstance(lr, float) and lr == float(text)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.topk_ration=0.1", ["engine.topk_ration", "did you mean topk_ratio"]),
        ("stepz=3", ["stepz", "did you mean steps"]),
        ("model.colour=red", ["model.colour", "path", "dtype"]),
        ("optimizer.lr=fast", ["optimizer.lr", "fast", "Float"]),
        ("engine.update_interval=2.5", ["engine.update_interval", "2.5"]),
        ("engine.importance=cube", ["cube", "square", "magnitude"]),
        ("engine.importance_over=steps", ["steps", "window", "average"]),
        ("engine=zenflou", ["zenflou", "zero_offload", "adamw"]),
    ],
)
def test_a_typo_a_type_or_an_unknown_word_is_one_sentence_when_composed(override, words):
    with pytest.raises(HydraException) as caught:
        composed(override)
    sentence = explain(caught.value)
    assert sentence is not None and "\n" not in sentence and "full_key" not in sentence
    assert [word for word in words if word not in sentence] == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.topk_ratio=1.5", ["engine.topk_ratio", "1.5", "0 to 1"]),
        ("engine.topk_ratio=nan", ["engine.topk_ratio", "nan", "0 to 1"]),
        ("engine.update_interval=0", ["engine.update_interval", "0", ">= 1"]),
        ("engine.select_interval=often", ["engine.select_interval", "often", "auto"]),
        ("optimizer.lr=-1", ["optimizer.lr", "-1", ">= 0"]),
        ("optimizer.lr=nan", ["optimizer.lr", "nan"]),
        ("optimizer.beta2=1", ["optimizer.beta2", "below 1"]),
        ("optimizer.max_grad_norm=0", ["optimizer.max_grad_norm", "> 0"]),
        ("steps=0", ["steps", "0", ">= 1"]),
        ("seed=99999999999999999999999", ["seed", "99999999999999999999999", "0 to 2**63 - 1"]),
        ("batch_size=1000000", ["batch_size", "1000000", "1 to 3125", "training samples"]),
        ("batch_size=-2", ["batch_size", "-2"]),
        ("data.held_out=1", ["data.held_out", "between 0 and 1"]),
        ("model.heads=3", ["model.heads=3", "multiple"]),
        ("data=file", ["data.path"]),
        ("data=file data.path=missing.txt", ["data.path=missing.txt", "does not exist"]),
        ("data=file data.path=.", ["data.path=.", "folder"]),
        ("model=causal data=stdlib", ["model.path"]),
        ("model=causal data=stdlib model.path=missing", ["model.path=missing", "folder"]),
        ("model=causal data=stdlib model.path=.", ["config.json", "model.path"]),
        ("data.max_bytes=100", ["data.max_bytes is 100", "data.kind=stdlib", "null"]),
        ("data=headers data.max_bytes=0", ["data.max_bytes", "0", ">= 1"]),
        ("data=headers data.path=missing", ["data.path=missing", "does not exist"]),
        ("data=headers data.max_bytes=1", ["0 headers", "data.max_bytes=1", "at least 2"]),
        ("model.path=missing", ["model.path=missing", "folder"]),
        ("model.path=.", ["config.json", "model folder of a run"]),
        ("+model.config={model_type:qwen2}", ["model.config", "qwen2", "model.kind=tiny", "{}"]),
        ("model=bytes_small model.tokenizer=auto", ["model.config", "model.tokenizer=bytes"]),
        ("model=bytes_small model.config={vocab_size:256} model.config.model_type=qwen9", ["qwen9", "did you mean"]),
        ("model=bytes_small model.path=missing", ["model.path=missing", "folder"]),
        ("model=causal +model.config={hidden_size:3}", ["model.config", "model_type"]),
        ("model=bytes_small model.config.hiden_size=3", ["hiden_size"]),
        ("model=bytes_small +model.config.hiden_size=3", ["'hiden_size'", "did you mean hidden_size"]),
        ("model=bytes data=snippets", ["has labels", "model=minilm"]),
        ("save_model=always", ["save_model", "always"]),
        ("trace=model", ["trace", "model", ".json"]),
        ("model=minilm", ["no labels", "model.kind=encoder"]),
        ("data=snippets", ["has labels", "model=minilm"]),
        ("data.max_length=100000000", ["data.max_length=100000000", "tokens"]),
        ("engine.backward_passes_per_step=2", ["engine.backward_passes_per_step is 2", "accumulate is, 1"]),
        ("engine.deferred_rule=replay", ["engine.deferred_rule", "replay", "accumulate_on='host'"]),
        ("engine.accumulate_on=host engine.ring_dtype=float32", ["engine.ring_dtype", "float32", "auto"]),
        ("engine.backward_passes_per_step=0", ["engine.backward_passes_per_step", "0", ">= 1"]),
        ("trace=there/trace.json", ["trace", "there/trace.json", ".json"]),
        ("trace=trace.txt", ["trace", "trace.txt", ".json"]),
        ("trace=summary.json", ["trace", "summary.json", "none of the run's own"]),
        ("trace=loss.json", ["trace", "loss.json", "none of the run's own"]),
        ("trace=trace.json trace_steps=[5,17]", ["trace_steps", "[5, 17]", "steps=16"]),
        ("trace=trace.json trace_steps=[0,2]", ["trace_steps", "[0, 2]"]),
        ("trace=trace.json trace_steps=[3,2]", ["trace_steps", "[3, 2]"]),
        ("trace=trace.json trace_steps=[3]", ["trace_steps", "[3]"]),
        ("trace_steps=5", ["trace_steps is 5; allowed: a list, as [5,16]."]),
        ("trace_steps=null", ["trace_steps is None; allowed: a list, as [5,16]."]),
        ("tracking.tags=mine", ["tracking.tags is 'mine'; allowed: a list"]),
        ("trace=trace.json engine=adamw", ["trace", "engine=adamw", "null"]),
        ("data=null", ["data=null", "no option", "--help"]),
        ("model=1", ["model=1", "no option"]),
        ("experiment=null", ["experiment=null", "no option"]),
        ("engine.upload=later", ["later", "backward", "step"]),
        ("engine.upload_check=maybe", ["engine.upload_check", "maybe"]),
        ("engine.accumulate_on=disk", ["disk", "gpu", "host"]),
    ],
)
def test_a_bad_value_is_one_sentence_and_leaves_nothing(command, tmp_path, override, words):
    outcome = command(*SMOKE, *override.split())
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-train: ") and "\n" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [(), ("-m", "seed=0,1")], ids=["run", "sweep"])
@pytest.mark.parametrize("place", ["file", "file/run", "/proc/zenflow/run"])
def test_a_folder_that_cannot_be_made_is_one_sentence(command, tmp_path, place, mode):
    (tmp_path / "file").write_text("kept")
    outcome = command(*mode, *SMOKE, folder=tmp_path / place)
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-train: ") and "\n" not in outcome.err
    named = "/proc/zenflow" if place.startswith("/proc") else str(tmp_path / "file")
    assert named in outcome.err and "cannot be written" in outcome.err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["kept"]


def test_a_folder_that_is_there_but_takes_no_files_is_one_sentence(command):
    outcome = command(*SMOKE, folder=Path("/proc/self"))  # not even root can write there
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-train: ") and "\n" not in outcome.err
    assert "cannot be written" in outcome.err and "hydra.run.dir" in outcome.err


def test_a_missing_gpu_is_named(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "device=cuda" in command(*SMOKE, "device=cuda").err


def test_a_missing_package_says_what_to_install(command, monkeypatch, tmp_path):
    monkeypatch.setattr("zenflow.training.models.find_spec", lambda name: None)
    outcome = command("plot=false", "model=causal", "data=stdlib", f"model.path={tmp_path}")
    assert outcome.code == 1 and "pip install transformers" in outcome.err
