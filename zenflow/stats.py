"""Counters and clocks of a run: what moved, and how long the GPU stood still for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stats:
    """Totals since construction, times in seconds, traffic in bytes; the four counts go on from a loaded state.

    `windows` counts those that end together as one. `grad_norm` is the last step's norm of the unscaled gradient before
    clipping. `stall_seconds` is device time between the end of the work that was queued and the arrival of the result
    that it waited for, `selection_seconds` the same for the exchange of owners; on the CPU they are the wall time of
    these sections. `host_wait_seconds` is the time in which the trainer's thread waited for the worker. `host_bytes` is
    the shared memory of ring, shadow and the worker's state, and its header, each mapping once. `worker_busy_seconds`
    and `worker_pid` are 0 and None where nothing is deferred.
    """

    steps: int
    windows: int
    selections: int
    skipped_steps: int
    grad_norm: float
    stall_seconds: float
    selection_seconds: float
    host_wait_seconds: float
    bytes_to_host: int
    bytes_to_device: int
    host_bytes: int
    worker_busy_seconds: float
    worker_threads: int
    worker_pid: int | None
