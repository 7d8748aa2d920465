"""Cores and memory that a process may use: affinity, hardware threads, cgroup quotas, NUMA nodes (A10, E13)."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from zenflow import cores
from zenflow.arena import Arena
from zenflow.cores import CorePlan, available_memory, cpu_quota, node_cpus, physical_cores, plan_cores

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Pretends to run on the given CPUs, with the given siblings and quota."""

    def pretend(allowed, siblings=None, quota=math.inf):
        for cpu, text in (siblings or {}).items():
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(text + "\n")
        found = physical_cores(set(allowed), tmp_path)
        monkeypatch.setattr(cores, "physical_cores", lambda: found)
        monkeypatch.setattr(cores, "cpu_quota", lambda: quota)

    return pretend


def write_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("allowed", [{3, 5, 9}, {0, 1}, set(range(16))], ids=str)
def test_bound_cores_are_disjoint_and_neither_is_empty(machine, allowed, share):
    machine(allowed)
    plan = plan_cores(share, bind=True)
    assert plan.trainer_cores and plan.worker_cores
    assert set(plan.trainer_cores) | set(plan.worker_cores) == allowed
    assert not set(plan.trainer_cores) & set(plan.worker_cores)
    assert plan.worker_threads == len(plan.worker_cores)


def test_one_core_is_shared(machine):
    machine({7})
    assert plan_cores(0.25, bind=True) == CorePlan((7,), (7,), 1)


def test_sixteen_cores_are_cut_as_the_share_says(machine):
    machine(range(16))
    plan = plan_cores(0.25, bind=True)
    assert (plan.trainer_cores, plan.worker_cores) == ((0, 1, 2, 3), tuple(range(4, 16)))


def test_the_worker_gets_one_hardware_thread_of_a_core(machine):
    machine(range(8), {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert plan_cores(0.25, bind=True) == CorePlan((0, 4), (1, 2, 3), 3)


def test_siblings_outside_the_affinity_mask_are_left_alone(machine):
    machine({1, 2, 6}, {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)})
    assert plan_cores(0.5, bind=True) == CorePlan((1,), (2,), 1)


def test_without_binding_all_cores_are_open_to_both(machine):
    machine(range(16))
    assert plan_cores(0.25, bind=False) == CorePlan(tuple(range(16)), tuple(range(16)), 12)


@pytest.mark.parametrize("quota, threads", [(2.0, 1), (0.5, 1), (8.9, 6), (100.0, 12)])
def test_threads_stay_within_the_quota(machine, quota, threads):
    machine(range(16), quota=quota)
    assert plan_cores(0.25, bind=True).worker_threads == threads


def test_a_given_number_of_threads_is_taken(machine):
    machine(range(4), quota=2.0)
    assert plan_cores(0.25, bind=True, threads=7).worker_threads == 7


@pytest.mark.parametrize(
    "files, membership, quota",
    [
        ({"cpu.max": "max 100000"}, "0::/", math.inf),
        ({"cpu.max": "200000 100000"}, "0::/", 2.0),
        ({"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, "0::/a/b", 3.0),
        ({"cpu.max": "50000 100000"}, "0::/../outside", 0.5),
        ({"cpu,cpuacct/x": "", "cpu/a/cpu.cfs_quota_us": "150000", "cpu/a/cpu.cfs_period_us": "100000"},
         "4:memory:/m\n3:cpu,cpuacct:/a", 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "3:cpu:/", math.inf),
        ({"other": ""}, "", math.inf),
    ],
    ids=["unlimited", "v2", "ancestor", "namespace", "v1", "v1-unlimited", "none"],
)  # fmt: skip
def test_cpu_quota(tmp_path, files, membership, quota):
    assert cpu_quota(write_tree(tmp_path, files), membership) == quota


@pytest.mark.parametrize(
    "files, membership, available",
    [
        ({"memory.max": "max", "memory.current": "5"}, "0::/", 4096 * 1024),
        ({"memory.max": "1000", "memory.current": "300", "memory.stat": "anon 1\ninactive_file 50"}, "0::/", 750),
        ({"a/memory.max": "100", "a/memory.current": "300"}, "0::/a/b", 0),
        ({"memory/a/memory.limit_in_bytes": "900", "memory/a/memory.usage_in_bytes": "200",
          "memory/a/memory.stat": "total_inactive_file 7"}, "4:memory:/a", 707),
    ],
    ids=["unlimited", "v2", "ancestor", "v1"],
)  # fmt: skip
def test_available_memory(tmp_path, files, membership, available):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9999 kB\nMemAvailable:    4096 kB\n")
    assert available_memory(write_tree(tmp_path, files), membership, meminfo) == available


def test_this_machine():
    plan = plan_cores(0.25, bind=True)
    allowed = os.sched_getaffinity(0)
    assert set(plan.trainer_cores) | set(plan.worker_cores) <= allowed
    assert 1 <= plan.worker_threads <= len(allowed)
    assert 0 < available_memory() < 1 << 50


SCRIPT = """
import os, threading
from zenflow.cores import CorePlan
allowed = os.sched_getaffinity(0)
one = min(allowed)
masks, stop = {}, threading.Event()
def report(name):
    masks[name] = os.sched_getaffinity(0)
def live():
    stop.wait()
    report("old")
old = threading.Thread(target=live)
old.start()
plan = CorePlan((one,), (one,), 1)
plan.bind_trainer()
plan.bind_trainer()
assert os.sched_getaffinity(0) == os.sched_getaffinity(old.native_id) == {one}
new = threading.Thread(target=report, args=["new"])
new.start(); new.join()
assert masks["new"] == {one}
plan.restore_trainer()
plan.restore_trainer()
stop.set(); old.join()
assert os.sched_getaffinity(0) == masks["old"] == allowed
"""


def test_binding_reaches_every_thread_and_is_undone():
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, cwd=REPOSITORY, timeout=300)


BUS = "0000:dc:00.0"


@pytest.fixture
def nodes(monkeypatch, tmp_path):
    """Pretends that the GPU at `BUS` hangs on `node`, and that the nodes have these CPUs."""

    def pretend(node, cpulists):
        pci = write_tree(tmp_path / "pci", {} if node is None else {f"{BUS}/numa_node": f"{node}\n"})
        trees = write_tree(tmp_path / "node", {f"node{n}/cpulist": text + "\n" for n, text in cpulists.items()})
        found = {bus: node_cpus(bus, pci, trees) for bus in (None, BUS, BUS.upper(), "0000:00:00.0")}
        monkeypatch.setattr(cores, "node_cpus", lambda bus: found[bus])

    return pretend


@pytest.mark.parametrize(
    "node, cpulist, cpus",
    [
        (1, "8-11,24-25,30", {8, 9, 10, 11, 24, 25, 30}),
        (1, "7", {7}),
        (1, "", set()),
        (-1, "0-3", set()),
        (None, "0-3", set()),
        (3, "0-3", set()),
    ],
    ids=["ranges", "one", "memory-only", "no-node", "no-device", "no-such-node"],
)
def test_cpus_of_a_device(tmp_path, node, cpulist, cpus):
    pci = write_tree(tmp_path, {} if node is None else {f"pci/{BUS}/numa_node": f"{node}\n"}) / "pci"
    write_tree(tmp_path, {"node/node1/cpulist": cpulist + "\n", "node/node0/cpulist": "0-7\n"})
    assert node_cpus(BUS.upper(), pci, tmp_path / "node") == cpus
    assert node_cpus(None, pci, tmp_path / "node") == set()


def test_both_stay_on_the_node_of_the_gpu(machine, nodes):
    """Two sockets of 24 cores with two hardware threads each; the GPU hangs on the second."""
    machine(range(96), {cpu: f"{cpu % 48},{cpu % 48 + 48}" for cpu in range(96)})
    nodes(1, {0: "0-23,48-71", 1: "24-47,72-95"})
    plan = plan_cores(0.25, bind=True, pci_bus_id=BUS)
    assert plan.trainer_cores == (*range(24, 30), *range(72, 78))
    assert (plan.worker_cores, plan.worker_threads) == (tuple(range(30, 48)), 18)


def test_a_node_with_enough_cores_wins_though_most_are_elsewhere(machine, nodes):
    machine(range(64))
    nodes(0, {0: "0-15", 1: "16-63"})
    plan = plan_cores(0.25, bind=True, pci_bus_id=BUS)
    assert (plan.trainer_cores, plan.worker_cores) == ((0, 1, 2, 3), tuple(range(4, 16)))


def test_with_too_few_cores_on_the_node_all_are_taken_its_own_first(machine, nodes):
    machine(range(16))
    nodes(1, {0: "0-7", 1: "8-15"})
    plan = plan_cores(0.25, bind=True, pci_bus_id=BUS)
    assert plan.trainer_cores == (8, 9, 10, 11)
    assert plan.worker_cores == (12, 13, 14, 15, *range(8))
    assert plan.worker_threads == 12


@pytest.mark.parametrize(
    "node, allowed",
    [(None, range(40)), (-1, range(40)), (2, range(40)), (1, range(20))],
    ids=["unknown", "none", "no-such-node", "not-allowed"],
)
def test_without_a_node_nothing_changes(machine, nodes, node, allowed):
    """Also where the affinity mask leaves no core of the GPU's node."""
    machine(allowed)
    nodes(node, {0: "0-19", 1: "20-39"})
    assert plan_cores(0.25, bind=True, pci_bus_id=BUS) == plan_cores(0.25, bind=True)


def test_an_unbound_plan_has_no_preference(machine, nodes):
    machine(range(40))
    nodes(1, {0: "0-19", 1: "20-39"})
    assert plan_cores(0.25, bind=False, pci_bus_id=BUS) == plan_cores(0.25, bind=False)


def test_e13_a_quota_of_two_cpus_on_sixteen_cores(machine, monkeypatch, tmp_path):
    """E13: cgroup `cpu.max` 200000 100000, read from its file: at most 2 worker threads, bound or not."""
    machine(range(16))
    group = write_tree(tmp_path / "cgroup", {"job/cpu.max": "200000 100000\n"})
    monkeypatch.setattr(cores, "cpu_quota", lambda: cpu_quota(group, "0::/job"))
    for bind in (True, False):
        assert 1 <= plan_cores(0.25, bind=bind).worker_threads <= 2


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("allowed", [{3, 5, 9}, {5}], ids=str)
def test_a10_a_mask_is_kept_whatever_the_gpus_node_has(machine, nodes, allowed, share):
    """A10: `taskset -c 3,5,9` beside a GPU on a node with all CPUs: nothing outside, neither empty."""
    machine(allowed)
    nodes(0, {0: "0-95"})
    plan = plan_cores(share, bind=True, pci_bus_id=BUS)
    assert plan.trainer_cores and plan.worker_cores
    assert set(plan.trainer_cores) | set(plan.worker_cores) == allowed


def test_pages_are_touched_on_the_given_cores(monkeypatch):
    """By every thread of the pool, and only there: the caller's own affinity stays."""
    seen, populate, before = [], Arena._populate, os.sched_getaffinity(0)

    def look(self, deadline, start):
        seen.append(os.sched_getaffinity(0))
        populate(self, deadline, start)

    monkeypatch.setattr(Arena, "_populate", look)
    monkeypatch.setattr("zenflow.arena.POPULATE_CHUNK", 1 << 16)
    core = max(before)
    arena = Arena.create("test", 1 << 20)
    arena.populate(3, [core])
    assert seen == [{core}] * 16
    assert os.sched_getaffinity(0) == before
    arena.close()


def test_pages_lie_on_the_node_of_the_cores():
    maps, sysfs = Path("/proc/self/numa_maps"), Path("/sys/devices/system/node")
    if not maps.exists():
        pytest.skip("the kernel does not tell where pages lie")
    core = max(os.sched_getaffinity(0))
    (node,) = (folder.name[4:] for folder in sysfs.glob("node[0-9]*") if (folder / f"cpu{core}").exists())
    arena = Arena.create("test", 8 << 20)
    arena.populate(2, [core])
    (line,) = (line for line in maps.read_text().splitlines() if line.startswith(f"{arena.address:x} "))
    assert [word.partition("=")[0] for word in line.split() if re.match(r"N\d+=", word)] == [f"N{node}"]
    arena.close()
