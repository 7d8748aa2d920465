"""What goes to the worker at its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker needs to know beside the slots."""

    deferred_lr_scale: str | float = "linear"  # "linear" | "none" | factor; of `accumulate` only
    deferred_rule: str = "accumulate"  # "accumulate" | "replay", which needs a ring with a lane a step
    adapt_threads: bool = False  # take no more threads than each window's time asks for, see `Pace`
    weight_prediction: float = 0.0  # a of the windows that are to be predicted
