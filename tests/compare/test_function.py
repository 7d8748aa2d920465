"""Whether a side's function is really tried, and what counts as equal."""

from __future__ import annotations

import errno
import math
import re

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

import experiments.compare
from tests.commands import SMOKE
from zenflow.bench.topology import topology
from zenflow.checkpoint_folder import load, read_manifest, save
from zenflow.compare.config import CompareConfig
from zenflow.compare.function import first_difference, try_side
from zenflow.compare.side import digest
from zenflow.disk import DiskFullError
from zenflow.training.command import register
from zenflow.training.engines import AdamW as AdamWRun
from zenflow.training.engines import Report
from zenflow.training.errors import InputError


@pytest.mark.parametrize(
    ("one", "other", "where"),
    [
        ({"w": torch.tensor([1.0, math.nan])}, {"w": torch.tensor([1.0, math.nan])}, None),
        ({"w": torch.tensor([0.0])}, {"w": torch.tensor([-0.0])}, "state['w']"),
        ({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.float64)}, "state['w']"),
        ({"w": torch.zeros(0, 3)}, {"w": torch.zeros(3, 0)}, "state['w']"),
        ({"g": [{"lr": 1.0}]}, {"g": [{"lr": 2.0}]}, "state['g'][0]['lr']"),
        ({"g": [1]}, {"g": [1, 2]}, "the length of state['g']"),
        ({"a": 1}, {"b": 1}, "the keys of state"),
        ({"n": np.arange(3)}, {"n": np.arange(3)}, None),
        ({"n": np.arange(3)}, {"n": np.arange(4)}, "state['n']"),
        ({"n": (1, None)}, {"n": [1, None]}, None),
    ],
)
def test_the_first_difference_is_named(one, other, where):
    assert first_difference(one, other) == where


@pytest.fixture
def config():
    """`config("engine=zenflow", ...)` as the command makes it, for 4 steps of the tiny model."""
    register()
    ConfigStore.instance().store(name="base_compare", node=CompareConfig)

    def made(*words: str) -> CompareConfig:
        with initialize_config_dir(str(experiments.compare.CONF), version_base="1.3"):
            return OmegaConf.to_object(compose("compare", [*SMOKE, "steps=4", "evaluate_every=2", *words]))

    return made


def outcome(tried) -> dict[str, bool]:
    return {check.name: check.works for check in tried.checks}


@pytest.mark.parametrize(
    "words",
    [
        ("engine=zenflow", "engine.update_interval=2", "engine.min_deferred_numel=64"),
        ("engine=zenflow", "engine.update_interval=2", "model.dtype=bfloat16"),
        ("engine=zero_offload",),
        ("engine=adamw", "model.dtype=bfloat16"),
        ("engine=adamw_offload",),
        ("engine=simulated", "engine.update_interval=2"),
    ],
    ids=" ".join,
)
def test_a_side_that_works_goes_on_from_its_checkpoint(tmp_path, config, words):
    tried = try_side("b", config(*words), tmp_path)
    assert outcome(tried) == {"short run": True, "checkpoint": True, "going on from it": True}
    resumed, uninterrupted = re.findall(r"[0-9.]+", tried.checks[2].seen)
    assert resumed == uninterrupted and not list(tmp_path.iterdir())


def test_the_checkpoint_is_the_product_s_own_and_made_in_the_midst_of_a_window(tmp_path, config, monkeypatch):
    read = []

    def looked_at(folder):
        names = sorted(path.name for path in folder.iterdir())
        manifest, state = read_manifest(folder), load(folder)
        read.append((names, manifest.shards, state["engine"]["optimizer"]["zenflow"]["clock"]))
        return state

    monkeypatch.setattr("zenflow.compare.function.load", looked_at)
    words = ("engine=zenflow", "engine.update_interval=2", "engine.full_warm_up_rounds=0")
    try_side("b", config(*words), tmp_path)
    ((names, shards, clock),) = read
    assert names == ["manifest.json", *shards] and len(shards) == 1
    assert clock["step"] == 3 and clock["position"] % 2 == 1


class Forgetful(AdamWRun):
    """Loads nothing."""

    def load_state_dict(self, state):
        pass


class Resetting(AdamWRun):
    """Comes back without its first moments."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for one in self.optimizer.state.values():
            one["exp_avg"].zero_()


class Refusing(AdamWRun):
    def load_state_dict(self, state):
        raise ValueError("the state is of another model")


class Unkeepable(AdamWRun):
    def state_dict(self):
        return super().state_dict() | {"hook": print}


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Forgetful, r"state\['engine'\]\['optimizer'\].* differs in what was loaded"),
        (Resetting, r"\['exp_avg'\] differs in what was loaded"),
        (Refusing, "optimizer state cannot be used here: the state is of another model"),
        (Unkeepable, "hook"),
    ],
)
def test_an_optimizer_that_does_not_come_back_is_found(tmp_path, config, monkeypatch, kind, told):
    monkeypatch.setattr("zenflow.training.engines.AdamW", kind)
    tried = try_side("b", config("engine=adamw"), tmp_path)
    assert outcome(tried) == {"short run": True, "checkpoint": False}
    assert re.search(told, tried.checks[1].seen) and not list(tmp_path.iterdir())


def test_a_file_that_differs_from_what_was_saved_is_found(tmp_path, config, monkeypatch):
    def lossy(folder, state):
        save(folder, state | {"model": {name: one + 1e-7 for name, one in state["model"].items()}})

    monkeypatch.setattr("zenflow.compare.function.save", lossy)
    tried = try_side("a", config("engine=adamw"), tmp_path)
    assert not outcome(tried)["checkpoint"] and "differs in what was read" in tried.checks[1].seen


def test_a_damaged_file_is_found(tmp_path, config, monkeypatch):
    def damaging(folder, state):
        save(folder, state)
        shard = folder / "shard-00001.safetensors"
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)

    monkeypatch.setattr("zenflow.compare.function.save", damaging)
    tried = try_side("a", config("engine=adamw"), tmp_path)
    assert not outcome(tried)["checkpoint"] and "is damaged: its SHA-256" in tried.checks[1].seen


def test_a_full_disk_is_the_user_s_and_no_fault_of_a_side(tmp_path, config, monkeypatch):
    def full(folder, state):
        raise DiskFullError(errno.ENOSPC, "300 bytes are needed, 200 available", str(folder))

    monkeypatch.setattr("zenflow.compare.function.save", full)
    with pytest.raises(InputError, match="cannot be written: .*300 bytes are needed"):
        try_side("b", config("engine=adamw"), tmp_path)
    assert not list(tmp_path.iterdir())


class Diverging(AdamWRun):
    def step(self):
        super().step()
        with torch.no_grad():
            self._weights[0].fill_(math.nan)


class Astray(AdamWRun):
    """Comes back with equal bits, and goes on elsewhere."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.zero_grad = lambda: [weight.data.mul_(3) for weight in self._weights]


def test_a_loss_that_is_not_finite_is_found(tmp_path, config, monkeypatch):
    monkeypatch.setattr("zenflow.training.engines.AdamW", Diverging)
    tried = try_side("b", config("engine=adamw"), tmp_path)
    assert outcome(tried)["short run"] is False and "held-out loss 5.503 -> nan" in tried.checks[0].seen


def test_a_run_in_which_no_step_is_made_does_not_work(tmp_path, config, monkeypatch):
    monkeypatch.setattr("zenflow.training.engines.AdamW.report", lambda _: Report(0.0, skipped_steps=4))
    tried = try_side("b", config("engine=adamw"), tmp_path)
    assert outcome(tried)["short run"] is False and tried.checks[0].seen.startswith("4 steps, 4 skipped")


def test_another_end_from_the_checkpoint_is_found(tmp_path, config, monkeypatch):
    monkeypatch.setattr("zenflow.training.engines.AdamW", Astray)
    tried = try_side("b", config("engine=adamw"), tmp_path)
    assert outcome(tried) == {"short run": True, "checkpoint": True, "going on from it": False}


def test_a_digest_is_of_names_shapes_and_bits():
    states = [
        {"w": torch.zeros(2, 3)},
        {"v": torch.zeros(2, 3)},
        {"w": torch.zeros(3, 2)},
        {"w": torch.zeros(2, 3, dtype=torch.bfloat16)},
        {"w": torch.full((2, 3), -0.0)},
    ]
    assert len({digest(state) for state in states}) == 5
    assert digest(states[0]) == digest({"w": torch.zeros(3, 2).t()})
    assert digest({"w": torch.ones(1)}) == digest({"w": torch.ones(4)[::2][:1]})


def test_topology_is_read_where_there_is_one(tmp_path):
    for number, cpus in (("node0", "0-3"), ("node10", "4-7"), ("node2", "8-11")):
        (tmp_path / "nodes" / number).mkdir(parents=True)
        (tmp_path / "nodes" / number / "cpulist").write_text(cpus + "\n")
    device = tmp_path / "pci" / "0000:dc:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    found = topology("0000:DC:00.0", tmp_path / "nodes", tmp_path / "pci")
    assert list(found)[1:] == ["node0", "node2", "node10", "gpu_bus", "gpu_numa_node"]
    assert found["node2"] == "cpus 8-11" and found["gpu_numa_node"] == "1"
    assert list(topology(None, tmp_path / "none", tmp_path / "pci")) == ["memory"]
