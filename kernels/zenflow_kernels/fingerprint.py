"""A fingerprint of each row's deferred weights, by which a change from outside is told from none.

    fingerprint[r] = sum over deferred columns c of bits(w[r, c]) * multiplier(c)      (mod 2**64)

`bits` is the weight's memory as a signed integer, `multiplier` an odd 64-bit hash of the column. Integer addition wraps
and associates, so any order gives the same number; two rows that differ in one element always differ in it, others
except for a chance of about 2**-64. One read of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zenflow_kernels.channels import check_matrix
from zenflow_kernels.dispatch import on_device, tl, triton, uses_triton

BLOCK_R, BLOCK_C = 4, 1024
REFERENCE_ELEMENTS = 1 << 20  # that the reference widens to int64 at once
FACTORS = (-7046029254386353131, -4658895280553007687)  # odd, 64 bits, of splitmix64
FIRST, SECOND = tl.constexpr(FACTORS[0]), tl.constexpr(FACTORS[1])


@triton.jit(do_not_specialize=["rows", "cols"])
def _fingerprint_kernel(
    bits_ptr, slot_ptr,
    fingerprint_ptr,
    rows, cols,
    HAS_SLOT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    total = tl.zeros([BLOCK_R], dtype=tl.int64)
    for start in range(0, cols, BLOCK_C):
        c = start + tl.arange(0, BLOCK_C)
        counts = c < cols
        if HAS_SLOT:
            counts = counts & (tl.load(slot_ptr + c, mask=counts, other=0) < 0)
        mixed = (c.to(tl.int64) + 1) * FIRST
        mixed = (mixed ^ (mixed >> 31)) * SECOND
        multiplier = (mixed ^ (mixed >> 29)) | 1
        mask = (r < rows)[:, None] & counts[None, :]
        bits = tl.load(bits_ptr + r[:, None] * cols + c[None, :], mask=mask, other=0).to(tl.int64)  # [BLOCK_R, BLOCK_C]
        total += tl.sum(bits * multiplier[None, :], axis=1)
    tl.store(fingerprint_ptr + r, total, mask=r < rows)


def row_fingerprints(weight: Tensor, slot: Tensor | None) -> Tensor:
    """int64 `[rows]` of `weight`, contiguous `[rows, cols]` of fp32, bf16 or fp16.

    `slot` int32 `[cols]`: columns with a slot (>= 0) are selected and left out; None takes every column.
    """
    check_matrix("weight", weight)
    rows, cols = weight.shape
    if slot is not None and (slot.shape != (cols,) or slot.dtype != torch.int32):
        raise ValueError(f"slot must be torch.int32 [{cols}], got {tuple(slot.shape)} of {slot.dtype}")
    if not uses_triton(weight) or weight.numel() == 0:
        return row_fingerprints_reference(weight, slot)
    fingerprints = torch.empty(rows, dtype=torch.int64, device=weight.device)
    with on_device(weight):
        _fingerprint_kernel[(-(-rows // BLOCK_R),)](
            weight.view(_bits_dtype(weight)), slot,
            fingerprints,
            rows, cols,
            HAS_SLOT=slot is not None, BLOCK_R=BLOCK_R, BLOCK_C=BLOCK_C,
        )  # fmt: skip
    return fingerprints


def row_fingerprints_reference(weight: Tensor, slot: Tensor | None) -> Tensor:
    """The same numbers by torch, a block of rows at a time."""
    rows, cols = weight.shape
    mixed = torch.arange(1, cols + 1, dtype=torch.int64, device=weight.device) * FACTORS[0]
    mixed = (mixed ^ (mixed >> 31)) * FACTORS[1]
    multiplier = (mixed ^ (mixed >> 29)) | 1
    if slot is not None:
        multiplier = torch.where(slot < 0, multiplier, 0)
    fingerprints = torch.empty(rows, dtype=torch.int64, device=weight.device)
    step = max(1, REFERENCE_ELEMENTS // max(1, cols))
    for start in range(0, rows, step):
        bits = weight[start : start + step].view(_bits_dtype(weight)).to(torch.int64)
        torch.sum(bits * multiplier, dim=1, out=fingerprints[start : start + step])
    return fingerprints


def _bits_dtype(weight: Tensor) -> torch.dtype:
    return torch.int32 if weight.element_size() == 4 else torch.int16
