"""Whether saving is really tried, and what counts as equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from zenflow import ZenFlow
from zenflow.bench.topology import topology
from zenflow.compare.function import check_saving, first_difference
from zenflow.compare.side import digest


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


def stepped(optimizer, network):
    for _ in range(5):
        network(torch.ones(3, 17, dtype=network.weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zenflow_comes_back_equal(tmp_path, dtype):
    network = torch.nn.Linear(17, 31).to(dtype)
    with ZenFlow(network.parameters(), update_interval=2, min_deferred_numel=16, worker_threads=1) as optimizer:
        stepped(optimizer, network)
        optimizer.flush()
        checks = check_saving("b", network, optimizer, tmp_path)
    assert [check.works for check in checks] == [True, True] and not list(tmp_path.iterdir())


def test_an_optimizer_that_forgets_is_found(tmp_path):
    class Forgetful(torch.optim.AdamW):
        def load_state_dict(self, state):
            state["state"][0]["exp_avg"].zero_()
            super().load_state_dict(state)

    network = torch.nn.Linear(17, 31)
    optimizer = Forgetful(network.parameters())
    stepped(optimizer, network)
    weights, state = check_saving("b", network, optimizer, tmp_path)
    assert weights.works and not state.works and "exp_avg" in state.seen


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
