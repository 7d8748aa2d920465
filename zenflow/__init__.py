"""ZenFlow: stall-free CPU offloading for full fine-tuning.

Names are loaded on first use, so that the worker process can import `zenflow.worker` without torch or Triton.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zenflow.client import WorkerError
    from zenflow.config import ZenFlowConfig
    from zenflow.optimizer import ChannelState, ZenFlow
    from zenflow.stats import Stats
    from zenflow.telemetry import StepRecord
    from zenflow.trace import Tracer

_HOME = {
    "ChannelState": "zenflow.optimizer",
    "Stats": "zenflow.stats",
    "StepRecord": "zenflow.telemetry",
    "Tracer": "zenflow.trace",
    "WorkerError": "zenflow.client",
    "ZenFlow": "zenflow.optimizer",
    "ZenFlowConfig": "zenflow.config",
}
__all__ = ["ChannelState", "Stats", "StepRecord", "Tracer", "WorkerError", "ZenFlow", "ZenFlowConfig"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'zenflow' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
