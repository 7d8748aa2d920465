"""The `device` of a kernel test: Triton's interpreter on CPU tensors, or a GPU.

The interpreter truncates where fp32 becomes bf16; here its cast is replaced by one that rounds to nearest even, and a
canary decides whether its bf16 can be trusted at all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from zenflow_kernels.dispatch import interpreted, tl, triton


@triton.jit
def _canary_kernel(a_ptr, b_ptr, sum_ptr, less_ptr):
    a, b = tl.load(a_ptr).to(tl.float32), tl.load(b_ptr).to(tl.float32)
    tl.store(sum_ptr, (a + b).to(tl.bfloat16))
    tl.store(less_ptr, (a < b).to(tl.int32))


@functools.cache
def _patch_interpreter() -> None:
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_rounding_to_even(self, source, target):
        before, after = source.dtype.scalar, target.scalar
        if (before, after) == (tl.float32, tl.bfloat16):
            bits = np.ascontiguousarray(source.data, dtype=np.float32).view(np.uint32)
            rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            nan = (bits & 0x7FFFFFFF) > 0x7F800000
            return TensorHandle(np.where(nan, (bits >> 16) | 0x40, rounded).astype(np.uint16), after)
        if (before, after) == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), after)
        return cast(self, source, target)

    InterpreterBuilder.cast_impl = cast_rounding_to_even


def bf16_sum_and_order(a: float, b: float, device: str) -> tuple[float, bool]:
    """`bf16(a + b)` and `a < b`, from bf16 inputs, by a kernel."""
    left, right = (torch.tensor([value], dtype=torch.bfloat16, device=device) for value in (a, b))
    total, less = torch.zeros_like(left), torch.zeros(1, dtype=torch.int32, device=device)
    _canary_kernel[(1,)](left, right, total, less)
    return total.item(), bool(less.item())


# a, b, their sum in bf16; the last two are ties, which go to the even neighbour: below once, above once.
CANARIES = [(2.5, 2.0, 4.5), (-5.0, -2.0, -7.0), (128.0, 0.5, 128.0), (129.0, 0.5, 130.0)]


@functools.cache
def _bf16_fault() -> str | None:
    for a, b, total in CANARIES:
        got = bf16_sum_and_order(a, b, "cpu")
        if got != (total, a < b):
            return f"the interpreter's bf16 is broken: {a} + {b} and {a} < {b} give {got}"
    return None


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device on which the ops of a test run as Triton kernels."""
    if request.param == "cuda":
        yield "cuda"
        torch.cuda.empty_cache()
        return
    if torch.cuda.is_available():
        pytest.skip("with a GPU the kernels are compiled, not interpreted")
    _patch_interpreter()
    with interpreted(), np.errstate(all="ignore"):
        yield "cpu"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def dtype(request: pytest.FixtureRequest, device: str) -> torch.dtype:
    """A weight dtype; bf16 is skipped, with the reason, where the interpreter cannot do it."""
    if request.param == torch.bfloat16 and device == "cpu" and _bf16_fault():
        pytest.skip(_bf16_fault())
    return request.param


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, and the largest integer, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
