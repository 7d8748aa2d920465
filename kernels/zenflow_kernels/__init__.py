"""ZenFlow's kernels: one op, one file, each with its mathematics, Triton kernel, launcher and torch reference.

CUDA tensors take the Triton kernels, CPU tensors the references; `interpreted()` sends CPU tensors through the kernels
in Triton's interpreter (tests). Names are resolved on first use, so `zenflow_kernels.numerics` imports without Triton.
`zenflow_kernels.fused_step` is the module; its function of the same name is imported from there.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "adamw_": "numerics",
    "pack_hyper": "numerics",
    "channel_scores": "importance",
    "select_channels": "topk",
    "gather_channels": "gather",
    "scatter_channels_": "scatter",
    "Entry": "table",
    "Table": "table",
    "StepControl": "control",
    "close_step": "norm",
    "partial_norms": "norm",
    "write_masters": "fused_step",
    "row_fingerprints": "fingerprint",
    "interpreted": "dispatch",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
