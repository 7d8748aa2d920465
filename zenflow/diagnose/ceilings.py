"""What this machine gives at best: pinned copies each way, and host memory."""

from __future__ import annotations

import logging
import time

import torch

from zenflow.cores import available_memory
from zenflow.diagnose.figures import Ceilings

log = logging.getLogger(__name__)
COPY_BYTES = 256 << 20
COPY_SECONDS = 0.5  # each way
TRIAD_SHARE = 16  # one of so many parts of the available memory is what each of its three arrays may take


def measure(device: torch.device, threads: int, triad_bytes: int) -> Ceilings:
    """The ceilings in bytes a second; None where there is no PCIe, or no compiler for the pass over memory.

    threads: of the CPU optimizer. triad_bytes: of each of three arrays; several times the caches, or they are measured.
    Takes some seconds, and wants the machine to itself.
    """
    to_host = to_device = None
    if device.type == "cuda":
        pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
        to_host, to_device = (_copy_bandwidth(*pair, device) for pair in ((pinned, there), (there, pinned)))
    return Ceilings(to_host, to_device, _triad(threads, triad_bytes))


def _copy_bandwidth(target: torch.Tensor, source: torch.Tensor, device: torch.device) -> float:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    started, copies = time.perf_counter(), 0
    while time.perf_counter() - started < COPY_SECONDS:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize(device)
        copies += 1
    return copies * COPY_BYTES / (time.perf_counter() - started)


def _triad(threads: int, n_bytes: int) -> float | None:
    from zenflow.bench.bandwidth import triad

    n_bytes = min(n_bytes, available_memory() // TRIAD_SHARE) // 64 * 64
    try:
        return 1e9 * triad(threads, max(64, n_bytes))
    except RuntimeError as error:
        log.info("no ceiling for host memory: %s", error)
        return None
