"""How the machine's parts hang together, as sysfs tells it. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from zenflow.cores import NODE_ROOT, PCI_ROOT, text_of

LINK = ("numa_node", "current_link_speed", "current_link_width")


def topology(pci_bus_id: str | None, nodes: Path = NODE_ROOT, devices: Path = PCI_ROOT) -> dict[str, str]:
    """Memory, the CPUs of every NUMA node, and the GPU's node and link; what nobody knows is left out."""
    found = {"memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"}
    for folder in sorted(nodes.glob("node[0-9]*"), key=lambda folder: int(folder.name[4:])):
        if (cpus := text_of(folder / "cpulist")) is not None:
            found[folder.name] = f"cpus {cpus}"
    if pci_bus_id is not None:
        found["gpu_bus"] = pci_bus_id
        for name in LINK:
            if (value := text_of(devices / pci_bus_id.lower() / name)) is not None:
                found[f"gpu_{name}"] = value
    return found
