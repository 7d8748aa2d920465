"""Which path an op takes, and Triton itself where it is installed.

Without Triton every module still imports, and CPU tensors take the references.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:

    class _Absent:
        """Lets the kernels' definitions execute; none of them can be launched."""

        @staticmethod
        def jit(function: Callable | None = None, **_: Any) -> Callable:
            return function if function is not None else lambda decorated: decorated

        @staticmethod
        def constexpr(value: Any) -> Any:
            return value

    triton = tl = _Absent

FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# The numerics contract: no fused multiply-add, and no flushing of denormals inside division and square root.
EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}

_interpreting = False


def triton_dtype(dtype: torch.dtype) -> Any:
    """Triton's name for a torch dtype."""
    return getattr(tl, str(dtype).removeprefix("torch."))


def register_limit(registers: int) -> dict[str, int]:
    """Launch options by which a thread has no more registers; none where the compiler does not know them, for AMD."""
    return {"maxnreg": registers} if torch.version.hip is None else {}


def uses_triton(tensor: Tensor) -> bool:
    """True for CUDA tensors, and for every tensor inside `interpreted()`."""
    if not (tensor.is_cuda or _interpreting):
        return False
    if not hasattr(triton, "cdiv"):
        raise RuntimeError(f"tensors on {tensor.device} need Triton: install triton >= 3.6")
    return True


@contextmanager
def interpreted() -> Iterator[None]:
    """Send CPU tensors through the Triton kernels; TRITON_INTERPRET=1 must have been set before they were imported."""
    global _interpreting
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("interpreted() needs TRITON_INTERPRET=1, set before zenflow_kernels is imported")
    before, _interpreting = _interpreting, True
    try:
        yield
    finally:
        _interpreting = before


@contextmanager
def on_device(tensor: Tensor) -> Iterator[None]:
    """Launch on the tensor's own GPU and leave the current device as it was; nothing for CPU tensors."""
    if tensor.is_cuda:
        with torch.cuda.device(tensor.device):
            yield
    else:
        yield
