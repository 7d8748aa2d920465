"""Which cores and how much memory this process may use, and how trainer and worker share the cores.

Reads the affinity mask, the cgroup limits (v1 and v2, every level up to the root), the topology of the cores and the
NUMA node that a device hangs on.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
CPU_ROOT = Path("/sys/devices/system/cpu")
NODE_ROOT = Path("/sys/devices/system/node")
PCI_ROOT = Path("/sys/bus/pci/devices")
# Of one node, to draw its memory bandwidth: measured, 8 threads draw half of what 16 do, some 6 GB/s each.
ENOUGH_CORES = 16


@dataclass
class CorePlan:
    """Logical CPUs of the trainer and of the worker, and the worker's threads."""

    trainer_cores: tuple[int, ...]
    worker_cores: tuple[int, ...]
    worker_threads: int

    def bind_trainer(self) -> None:
        """Bind every thread of this process to `trainer_cores`; threads made later inherit it. Once until restored.

        Torch, where it is loaded, then has no more threads than that: they would spin against each other in every host
        operation. Of several plans that bind at once, as several optimizers have them, the last counts.
        """
        if not any(plan is self for plan in _Bound.plans):
            _Bound.plans.append(self)
            _bind()

    def restore_trainer(self) -> None:
        """Bind no longer. The last plan gives every thread back the CPUs it had, threads made since then those of the
        calling thread, and torch its threads."""
        if any(plan is self for plan in _Bound.plans):
            _Bound.plans = [plan for plan in _Bound.plans if plan is not self]
            _bind()


class _Bound:
    """This process's threads: the plans that bind them, the CPUs that each had before, and how many torch had."""

    plans: list[CorePlan] = []
    before: dict[int, set[int]] = {}
    torch_threads = 0


def _bind() -> None:
    """All threads follow the last of the plans, or are again what they were before the first."""
    torch, own = sys.modules.get("torch"), own_cpus()
    if not _Bound.before:
        _Bound.torch_threads = 0 if torch is None else torch.get_num_threads()
        _Bound.before = affinities()
    cores = set(_Bound.plans[-1].trainer_cores) if _Bound.plans else None
    set_affinities({} if cores else _Bound.before, cores or own)
    if _Bound.torch_threads:
        torch.set_num_threads(min(_Bound.torch_threads, len(cores)) if cores else _Bound.torch_threads)
    if not cores:
        _Bound.before = {}


def own_cpus() -> set[int]:
    """The logical CPUs that the calling thread may run on, or could before a plan bound it."""
    before = _Bound.before
    if not before:
        return os.sched_getaffinity(0)
    return before.get(threading.get_native_id()) or set().union(*before.values())


def affinities() -> dict[int, set[int]]:
    """The logical CPUs on which each thread of this process may run, by its native number."""
    found = {}
    for task in _own_tasks():
        with suppress(OSError):
            found[task] = os.sched_getaffinity(task)
    return found


def set_affinities(each: dict[int, set[int]], others: set[int]) -> None:
    """Let every thread of this process run on its CPUs in `each`, as `affinities` gives them, or on those of others."""
    for task in _own_tasks():
        with suppress(OSError):
            os.sched_setaffinity(task, each.get(task, others))


def plan_cores(
    reserved_share: float, bind: bool, threads: int | str = "auto", pci_bus_id: str | None = None
) -> CorePlan:
    """How trainer and worker share the logical CPUs that this process may run on.

    The trainer keeps `reserved_share` (0..1) of the physical cores, at least one, with all their hardware threads; the
    worker gets one hardware thread of each of the others, at least one. The two are disjoint, except on a single core,
    which they share. With `bind` false both lists are all allowed CPUs. `threads` "auto" is one a physical core of the
    worker's, within the cgroup's CPU quota; a number is taken as it is.

    pci_bus_id: of the GPU ("0000:dc:00.0"). A bound plan then takes the cores of its NUMA node alone, for both, even if
    that leaves most of the allowed ones idle: the GPU reaches ring and shadow without the link between the nodes, the
    worker's memory lies where it runs, and once its threads draw all of that memory's bandwidth, those of another node
    can add nothing. With fewer than `ENOUGH_CORES` the cores are the limit, not the memory; then all are taken, those
    of the node first, which makes them the trainer's. A node that is unknown, or has no allowed core, is no preference.
    """
    cores = physical_cores()
    if bind:
        cores = _near_first(cores, node_cpus(pci_bus_id))
    kept, given = _split(len(cores), reserved_share)
    if threads == "auto":
        budget = min(len(cores), max(1, math.floor(min(cpu_quota(), len(cores)))))
        worker_threads = min(given, _split(budget, reserved_share)[1])
    else:
        worker_threads = int(threads)
    everything = tuple(sorted(cpu for core in cores for cpu in core))
    if not bind:
        return CorePlan(everything, everything, worker_threads)
    trainer = tuple(sorted(cpu for core in cores[:kept] for cpu in core))
    return CorePlan(trainer, tuple(core[0] for core in cores[-given:]), worker_threads)


def _near_first(cores: list[tuple[int, ...]], node: set[int]) -> list[tuple[int, ...]]:
    near = [core for core in cores if core[0] in node]
    return near if len(near) >= ENOUGH_CORES else near + [core for core in cores if core[0] not in node]


def _own_tasks() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        return [threading.get_native_id()]


def _split(n_cores: int, reserved_share: float) -> tuple[int, int]:
    if n_cores == 1:
        return 1, 1
    kept = min(n_cores - 1, max(1, round(n_cores * reserved_share)))
    return kept, n_cores - kept


def physical_cores(allowed: set[int] | None = None, root: Path = CPU_ROOT) -> list[tuple[int, ...]]:
    """The allowed logical CPUs (default: those of `own_cpus`), one ascending tuple for each physical core."""
    allowed = own_cpus() if allowed is None else allowed
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = text_of(root / f"cpu{cpu}" / "topology" / "thread_siblings_list")
        cores.setdefault(siblings or f"cpu{cpu}", []).append(cpu)
    return [tuple(core) for core in cores.values()]


def gpu_bus_id(device: torch.device | None = None) -> str | None:
    """The place of a GPU (default: the current one) on the PCI bus, as sysfs spells it, "0000:dc:00.0"; None for a CPU,
    without a GPU, and where torch does not know. The only thing here that loads torch."""
    import torch

    if not torch.cuda.is_available() or (device is not None and device.type != "cuda"):
        return None
    found = torch.cuda.get_device_properties(device)
    place = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place)


def node_cpus(pci_bus_id: str | None, pci_root: Path = PCI_ROOT, node_root: Path = NODE_ROOT) -> set[int]:
    """The logical CPUs of the NUMA node that a PCI device hangs on; none if there is no such node, or nobody knows."""
    node = text_of(pci_root / pci_bus_id.lower() / "numa_node") if pci_bus_id else None
    if node is None or int(node) < 0:
        return set()
    cpus: set[int] = set()
    for part in filter(None, (text_of(node_root / f"node{node}" / "cpulist") or "").split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def cpu_quota(root: Path = CGROUP_ROOT, membership: str | None = None) -> float:
    """CPUs' worth of time that the cgroups allow this process; infinity without a limit."""
    quota = math.inf
    for folder in _groups(root, "cpu", membership):
        limit, _, period = (text_of(folder / "cpu.max") or "max").partition(" ")
        if limit == "max":
            limit, period = text_of(folder / "cpu.cfs_quota_us") or "-1", text_of(folder / "cpu.cfs_period_us") or ""
        if int(limit) > 0:
            quota = min(quota, int(limit) / int(period or 100_000))
    return quota


UNKNOWN_MEMORY = 1 << 62  # bytes, more than there are


def available_memory(
    root: Path = CGROUP_ROOT, membership: str | None = None, meminfo: Path = Path("/proc/meminfo")
) -> int:
    """Bytes that this process can still take without swapping: the host's MemAvailable within the cgroups' limits.

    `UNKNOWN_MEMORY` where neither says anything.
    """
    fields = dict(line.split(":", 1) for line in (text_of(meminfo) or "").splitlines() if ":" in line)
    kib = fields.get("MemAvailable", "").split()
    available = int(kib[0]) * 1024 if kib else UNKNOWN_MEMORY
    for folder in _groups(root, "memory", membership):
        limit = text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes") or "max"
        used = text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")
        if limit == "max" or used is None:
            continue
        stat = dict(line.split(" ", 1) for line in (text_of(folder / "memory.stat") or "").splitlines())
        reclaimable = int(stat.get("inactive_file", stat.get("total_inactive_file", "0")))
        available = min(available, max(0, int(limit) - int(used) + reclaimable))
    return available


def _groups(root: Path, controller: str, membership: str | None) -> Iterator[Path]:
    """The folders of this process's cgroup and its ancestors, v2 and v1; only those visible from this namespace."""
    text = (text_of(Path("/proc/self/cgroup")) or "") if membership is None else membership
    seen: set[Path] = set()
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        parts = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(parts), -1, -1):
            folder = top.joinpath(*parts[:depth])
            if folder not in seen and folder.is_dir():
                seen.add(folder)
                yield folder


def text_of(path: Path) -> str | None:
    """What a file of /sys or /proc says, without the white space around it; None where nobody can read it."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
