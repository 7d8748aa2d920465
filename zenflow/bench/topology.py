"""How the machine's parts hang together, as sysfs tells it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from zenflow.cores import NODE_ROOT, PCI_ROOT

LINK = ("numa_node", "current_link_speed", "current_link_width")


def topology(pci_bus_id: str | None, nodes: Path = NODE_ROOT, devices: Path = PCI_ROOT) -> dict[str, str]:
    """Memory, the CPUs of every NUMA node, and the GPU's node and link; what nobody knows is left out."""
    found = {"memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"}
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        if (cpus := _read(folder / "cpulist")) is not None:
            found[folder.name] = f"cpus {cpus}"
    if pci_bus_id is not None:
        found["gpu_bus"] = pci_bus_id
        for name in LINK:
            if (value := _read(devices / pci_bus_id.lower() / name)) is not None:
                found[f"gpu_{name}"] = value
    return found


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def pci_bus_id(device: Any = None) -> str | None:
    """The place of a GPU (the current one) on the PCI bus, as sysfs spells it; None without one. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(device)
    return f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
