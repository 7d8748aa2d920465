"""Measurements made by hand: 100 steps of 100 ms on a card, of which the tests change what they are about."""

from __future__ import annotations

from typing import Any

from zenflow.diagnose.figures import Ceilings, HostMemory, Measured, Memory, Offload, StepParts

PARAMETERS = 1_000_000_000


def measured(
    *,
    seconds: float = 0.1,
    data: float = 0.0,
    stall: float = 0.0,
    optimizer: float = 0.01,
    steps: int = 100,
    busy: float = 0.0,
    moved: float = 2e9,
    **changes: Any,
) -> Measured:
    """`optimizer` is the device's own part; `stall` None is an optimizer without records; `moved` bytes each way."""
    known = stall is not None
    defaults = {
        "engine": "zero_offload",
        "device": "card",
        "offloads": True,
        "parameters": PARAMETERS,
        "steps": [StepParts(seconds, data, optimizer + (stall or 0.0))] * steps,
        "losses": [4.0 - 0.01 * number for number in range(steps)],
        "wall": seconds * steps,
        "trainer_cpu": 2 * seconds * steps,
        "trainer_cpus": 4,
        "worker_cpu": 8 * seconds * steps,
        "worker_cpus": 12,
        "offload": Offload([stall] * steps, moved, moved, busy, 28e9) if known else None,
        "host": HostMemory({"bfloat16": PARAMETERS}, None) if known else None,
        "ceilings": Ceilings(50e9, 50e9, 100e9),
        "memory": Memory(peak=10_000_000_000, activations=6_000_000_000, card=20_000_000_000),
    }
    return Measured(**(defaults | changes))
