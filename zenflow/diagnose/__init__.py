"""`zenflow-diagnose` and its library form: what a training step waits for, before anything is changed about it.

`Diagnosis` is loaded on first use: the arithmetic (`numbers`, `health`, `figures`, `advice`, `verdict`) needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zenflow.diagnose.session import Diagnosis

__all__ = ["Diagnosis"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'zenflow.diagnose' has no attribute {name!r}")
    from zenflow.diagnose.session import Diagnosis

    return Diagnosis
