"""Other projects' offloads as engines. With their packages they train; without, they are refused by a sentence."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch import nn

from experiments.train import CONF
from tests.commands import BRIEF
from tests.experiments.interrupted import signal_after
from tests.house.test_imports import in_fresh_interpreter
from zenflow.cores import affinities
from zenflow.report.settings import PEERS, engine_of, key, task_of
from zenflow.training import peers
from zenflow.training.checks import _check_values
from zenflow.training.command import register
from zenflow.training.engines import AdamW, build_engine
from zenflow.training.errors import InputError
from zenflow.training.loop import Loop
from zenflow.training.schema import (
    DeepSpeedZenFlowEngine,
    OptimizerConfig,
    Peer,
    PeerEngine,
    TrainConfig,
    plain,
)


class Stranger(nn.Module):
    """A module that has to be called in a model's place, as DeepSpeed's."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner, self.called = model, 0

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.called += 1
        return self.inner(*inputs)


class Double(peers.PeerRun):
    """Another project's engine without another project: called as DeepSpeed is, with AdamW's steps."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__(name)
        self.module, self.losses = Stranger(model), []
        self._adamw = AdamW(model.parameters(), 1.0, lr=1e-3)
        self.step, self.zero_grad = self._adamw.step, self._adamw.zero_grad

    @property
    def param_groups(self) -> list[dict]:
        return self._adamw.param_groups

    def wrapped(self, model: nn.Module) -> nn.Module:
        return self.module

    def backward(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.item())
        loss.backward()

    def __exit__(self, *exception: object) -> None:
        self.zero_grad()


@pytest.fixture
def installed(monkeypatch) -> None:
    """Both packages, as far as anybody asks whether they are there."""
    monkeypatch.setattr(peers, "find_spec", lambda name: object())


@pytest.fixture
def doubles(monkeypatch, installed) -> list[Double]:
    """The engines that were built in the place of another project's."""
    built: list[Double] = []

    def build(model: nn.Module, engine: PeerEngine, optimizer: OptimizerConfig) -> Double:
        built.append(Double(model, engine.peer.name))
        return built[-1]

    monkeypatch.setattr(peers, "build_peer", build)
    return built


@pytest.mark.parametrize(
    ("engine", "package"),
    [("torchao_offload", "torchao"), ("deepspeed_offload", "deepspeed"), ("deepspeed_zenflow", "deepspeed")],
)
def test_a_missing_package_is_named_before_anything_is_made(command, monkeypatch, tmp_path, engine, package):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    monkeypatch.setattr("zenflow.training.run.load_data", pytest.fail)
    outcome = command(*BRIEF, f"engine={engine}")
    assert outcome.code == 1 and "\n" not in outcome.err
    assert f"engine={engine} needs the package {package}" in outcome.err and f"pip install {package}" in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("engine=deepspeed_offload checkpoint_every=2", "checkpoint_every is 2; allowed with engine=deepspeed_offload"),
        ("engine=deepspeed_offload accumulate=2", "accumulate is 2; allowed with engine=deepspeed_offload: 1."),
        ("engine=deepspeed_zenflow autocast=true", "autocast is true; allowed with engine=deepspeed_zenflow: false"),
        (
            "engine=deepspeed_offload engine.peer=torchao_offload device=cpu",
            "device is cpu, the CPU here; allowed with engine=torchao_offload: a GPU",
        ),
        ("engine=deepspeed_zenflow engine.peer=deepspeed_offload", "engine.peer is deepspeed_offload here"),
        ("engine=deepspeed_offload engine.peer=deepspeed_zenflow", "give engine=deepspeed_zenflow instead"),
        ("engine=deepspeed_offload engine.peer=megatron", "megatron"),
        ("engine=deepspeed_offload engine.topk_ratio=0.5", "engine.topk_ratio is no setting of engine"),
        ("engine=deepspeed_zenflow engine.topk_ratio=1", "engine.topk_ratio is 1.0; allowed: a number between 0 and 1"),
        ("engine=deepspeed_zenflow engine.topk_ratio=0", "engine.topk_ratio is 0.0; allowed"),
        ("engine=deepspeed_zenflow engine.update_interval=0", "engine.update_interval is 0; allowed: an integer >= 1"),
        ("engine=deepspeed_zenflow engine.update_interval=auto", "engine.update_interval"),
        ("engine=deepspeed_zenflow engine.select_interval=3", "engine.select_interval is 3; allowed: 0 (once) or"),
        ("engine=deepspeed_zenflow engine.full_warm_up_rounds=-1", "engine.full_warm_up_rounds is -1; allowed"),
        ("engine=deepspeed_zenflow trace=t.json", "trace is 't.json'; allowed with engine=deepspeed_zenflow: null"),
    ],
)
def test_what_an_engine_cannot_do_is_one_sentence_and_leaves_nothing(command, installed, tmp_path, words, told):
    outcome = command(*BRIEF, *words.split())
    assert outcome.code == 1 and told in outcome.err and "\n" not in outcome.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("engine=torchao_offload", "optimizer.max_grad_norm is 1.0; allowed with engine=torchao_offload: null, since"),
        ("engine=deepspeed_offload device=cpu", "engine=deepspeed_offload takes the GPU that there is"),
    ],
)
def test_what_it_cannot_do_beside_a_gpu(command, installed, monkeypatch, words, told):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    outcome = command(*BRIEF, *words.split())
    assert outcome.code == 1 and told in outcome.err and "\n" not in outcome.err


def test_the_loop_calls_and_differentiates_as_the_engine_wants(command, doubles):
    outcome = command(*BRIEF, "engine=deepspeed_zenflow", "save_model=true")
    assert outcome.code == 0, outcome.err
    (double,) = doubles
    steps = [line for line in outcome.metrics() if "loss" in line]
    assert double.losses == pytest.approx([line["loss"] for line in steps]) and len(steps) == 4
    evaluations = 2 * 4  # batches of 8 samples, before and after
    assert double.module.called == len(steps) + evaluations
    assert [line["grad_norm"] for line in steps] == [0.0] * 4
    assert outcome.config()["engine"] == plain(DeepSpeedZenFlowEngine())
    assert "deepspeed_zenflow, k 0.1, U 4" in outcome.out
    assert not [word for word in ("stall", "windows", "CPU optimizer") if word in outcome.out]
    again = command(*BRIEF, f"model.path={outcome.folder / 'model'}", "engine=adamw", folder=outcome.folder / "again")
    assert again.summary()["validation_loss_before"] == outcome.summary()["validation_loss_after"]


def test_the_clock_saves_nothing_of_a_run_that_cannot_be_saved(command, doubles):
    outcome = command(*BRIEF, "engine=deepspeed_zenflow", "checkpoint_minutes=1e-9")
    assert outcome.code == 0, outcome.err
    assert "NOT SAVED" not in outcome.out and not (outcome.folder / "checkpoints").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP], ids=lambda number: number.name)
def test_a_signal_ends_a_run_that_cannot_be_saved(command, doubles, monkeypatch, number):
    monkeypatch.setattr(Loop, "_step", Loop._step)
    signal_after(3, number)
    stopped = command(*BRIEF, "engine=deepspeed_offload")
    assert stopped.code == 128 + number
    assert "NOT SAVED: engine=deepspeed_offload keeps no state" in stopped.out
    assert f"interrupted by {number.name} after step 3, which could NOT be saved" in stopped.out
    assert not (stopped.folder / "checkpoints").exists()
    monkeypatch.undo()
    refused = command(f"resume={stopped.folder}", folder=stopped.folder)
    assert refused.code == 1 and "holds no checkpoint" in refused.err and "\n" not in refused.err


def test_resume_auto_begins_again_and_leaves_what_is_finished(command, doubles):
    words = (*BRIEF, "engine=deepspeed_offload", "resume=auto")
    first = command(*words)
    before = first.metrics()
    again = command(*words)
    assert (first.code, again.code, len(doubles)) == (0, 0, 1) and again.metrics() == before
    (first.folder / "summary.json").unlink()
    assert command(*words).code == 0 and len(doubles) == 2


def test_no_package_is_imported_before_an_engine_is_built(tmp_path):
    code = """
import sys
sys.modules.update(dict.fromkeys(("torchao", "deepspeed")))
import zenflow.training.run, zenflow.training.checks, zenflow.report.command, zenflow.bench.peers
print("imported")
"""
    assert in_fresh_interpreter(code) == "imported"


@pytest.mark.parametrize("peer", Peer, ids=lambda peer: peer.name)
def test_a_state_is_refused_both_ways_and_a_trace(peer, tmp_path):
    engine = peers.PeerRun(peer.name)
    with pytest.raises(InputError, match=f"engine={peer.name} keeps no state"):
        engine.state_dict()
    with pytest.raises(InputError, match=f"engine={peer.name} takes no state"):
        engine.load_state_dict({})
    with pytest.raises(InputError, match="PeerRun has no trace; allowed: trace=null"):
        engine.trace(tmp_path / "trace.json")
    assert engine.records() is None


OPTIMIZER = OptimizerConfig(lr=0.5, beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=0.25, max_grad_norm=2.0)


def stand_in(monkeypatch, initialize: Callable[..., Any]) -> None:
    """A package `deepspeed` with this function."""
    package, utils = ModuleType("deepspeed"), ModuleType("deepspeed.utils")
    package.initialize, utils.safe_get_full_fp32_param = initialize, lambda weight: None
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.utils", utils)


def built_by_a_double(
    monkeypatch, engine: PeerEngine, optimizer: OptimizerConfig, model: nn.Module,
    change: Callable[[list[torch.Tensor]], object] = len,
) -> dict:  # fmt: skip
    """What `deepspeed.initialize` is called with; it does `change` to the model's weights."""
    called: dict = {}

    def initialize(**arguments):
        called.update(arguments, environment=dict(os.environ))
        change([weight.data for weight in model.parameters()])
        return SimpleNamespace(optimizer=SimpleNamespace(process=None), destroy=lambda: None), None, None, None

    stand_in(monkeypatch, initialize)
    with build_engine(model, engine, optimizer, 1):
        pass
    return called


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deepspeed_gets_the_run_s_settings_and_the_process_back(monkeypatch, dtype):
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.delenv("RANK", raising=False)
    before, cores = dict(os.environ), affinities()
    model = nn.Linear(3, 2).to(dtype)
    called = built_by_a_double(monkeypatch, PeerEngine(Peer.deepspeed_offload), OPTIMIZER, model)
    assert called["model"] is model
    config = json.loads(json.dumps(called["config"]))
    assert config["optimizer"]["params"] == {"lr": 0.5, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.25}
    assert config["gradient_clipping"] == 2.0 and config["bf16"]["enabled"] == (dtype is torch.bfloat16)
    assert config["zero_optimization"]["stage"] == 2 and "zenflow" not in config["zero_optimization"]
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert {name: called["environment"][name] for name in peers.ALONE} == peers.ALONE
    assert called["environment"]["MASTER_PORT"] == "0"  # no two runs ask for the same
    after = affinities()
    assert dict(os.environ) == before and after | cores == after  # torch may have made threads meanwhile


def test_deepspeed_s_zenflow_gets_its_block(monkeypatch):
    engine = DeepSpeedZenFlowEngine(topk_ratio=0.2, update_interval=8, select_interval=40, overlap_step=False)
    without = OptimizerConfig(max_grad_norm=None)
    config = built_by_a_double(monkeypatch, engine, without, nn.Linear(3, 2))["config"]
    assert config["zero_optimization"]["zenflow"] == {
        "select_strategy": "step",
        "topk_ratio": 0.2,
        "update_interval": 8,
        "select_interval": 40,
        "full_warm_up_rounds": 0,
        "overlap_step": False,
    }
    assert config["gradient_clipping"] == 0.0


def test_a_deepspeed_that_cannot_start_leaves_the_process_as_it_was(monkeypatch):
    stand_in(monkeypatch, lambda **_: {}["no such op"])
    before = dict(os.environ)
    with pytest.raises(KeyError, match="no such op"):
        build_engine(nn.Linear(3, 2), PeerEngine(Peer.deepspeed_offload), OPTIMIZER, 1)
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda weights: weights[0].copy_(weights[0].clone()), 0),
        (lambda weights: weights[0].copy_(weights[0].flip(1)), 1),
        (lambda weights: weights[0].copy_(weights[0].flip(0)), 1),
        (lambda weights: [weight.view(-1)[-1:].neg_() for weight in weights], 2),
    ],
    ids=["nothing", "columns", "rows", "last-elements"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_that_deepspeed_changes_on_its_own_are_counted(monkeypatch, caplog, dtype, change, count):
    """Those of a matrix are looked at in several parts."""
    monkeypatch.setattr(peers, "_CHUNK", 6)
    model = nn.Linear(6, 3).to(dtype)
    built_by_a_double(monkeypatch, DeepSpeedZenFlowEngine(), OPTIMIZER, model, change)
    told = [record.getMessage() for record in caplog.records if record.name == peers.__name__]
    begins = f"engine=deepspeed_zenflow: deepspeed.initialize has changed {count} of the model's 2 weights"
    assert [line.startswith(begins) for line in told] == [True] * bool(count)


@pytest.fixture(scope="module")
def swept() -> list[TrainConfig]:
    """The configuration of every value of experiment=rules_peers."""
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        composed = compose("train", ["experiment=rules_peers"], return_hydra_config=True)
        words = composed.hydra.sweeper.params.variant.split(",")
        assert composed.hydra.sweeper.params.seed == "0,1,2"
        made = [compose("train", ["experiment=rules_peers", *word.strip().strip("'").split()]) for word in words]
    return [OmegaConf.to_object(config) for config in made]


def test_the_sweep_has_every_offload_on_one_task(swept):
    for config in swept:
        _check_values(config)
    records = [plain(config) for config in swept]
    engines = [engine_of(record) for record in records]
    assert engines[:3] == ["adamw", "adamw_offload", "zero_offload"] and set(PEERS) <= set(engines)
    ours = [record["engine"] for record in records if engine_of(record) == "zenflow"]
    schedules = [(one["stagger"], one["weight_prediction"], one["visible_after"]) for one in ours]
    assert schedules == [(False, 0.0, "auto"), (True, 0.0, "auto"), (True, 1.0, "auto"), (True, 1.0, 1)]
    assert len({key(task_of(record)) for record in records}) == 1
    clipped = {name for name, record in zip(engines, records, strict=True) if record["optimizer"]["max_grad_norm"]}
    assert set(engines) - clipped == {"torchao_offload"}
    others = [record["optimizer"] | {"max_grad_norm": None} for record in records]
    assert all(one == others[0] for one in others)


def test_deepspeed_s_zenflow_is_set_as_ours(swept):
    theirs = next(config.engine for config in swept if isinstance(config.engine, DeepSpeedZenFlowEngine))
    ours = next(config.engine for config in swept if engine_of(plain(config)) == "zenflow")
    for name in ("topk_ratio", "update_interval", "select_interval", "full_warm_up_rounds", "overlap_step"):
        assert getattr(theirs, name) == getattr(ours, name), name
