"""The decision of a step, without asking the host: finite or not, the norm, the clip factor, what each parameter does.

    sum  = sum of the partial sums of all tables                    (f64, in their order)
    inv  = 1 / grad_scale                                           (fp32; 1 without a scale)
    norm = sqrt(sum) * inv                                          (f64)
    clip = fp32(min(1, max_grad_norm / (norm + 1e-6)))              (1 without a limit, and when the step is skipped)

One program adds everything in a fixed order, so the bits are the same in every run. `norm` is finite exactly when the
gradient is, because `partial_norms` sums in float64. A scale below 1 can take a finite gradient out of fp32: then the
step is skipped if its norm is not within fp32.

Windows of a parameter in cohort c end c, c + U, c + 2U, ... steps after a common start, U being `max_steps`: at the
first step of each its count begins anew.
"""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from zenflow_kernels.control import (
    FOLD_ADD,
    FOLD_NONE,
    FOLD_OVERWRITE,
    LOG_CLIP,
    LOG_FINITE,
    LOG_INV_SCALE,
    LOG_WORDS,
    LOG_ZERO,
    STAMP_WORDS,
    StepControl,
)
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, uses_triton
from zenflow_kernels.norm import SERIAL

SUM_BLOCK = 4096  # partial sums read at once
PARAMETER_BLOCK = 1024
FP32_MAX = torch.finfo(torch.float32).max
LARGEST = tl.constexpr(FP32_MAX)
NONE, OVERWRITE, ADD = (tl.constexpr(fold) for fold in (FOLD_NONE, FOLD_OVERWRITE, FOLD_ADD))
N_STAMP, N_LOG = tl.constexpr(STAMP_WORDS), tl.constexpr(LOG_WORDS)
FINITE, CLIP, INV_SCALE, ZERO = (tl.constexpr(w) for w in (LOG_FINITE, LOG_CLIP, LOG_INV_SCALE, LOG_ZERO))


@triton.jit(do_not_specialize=["n_partials", "n_params", "position", "row", "limit_bits", "window", "max_steps"])
def _close_step_kernel(
    partials_ptr, present_ptr, grad_scale_ptr, found_inf_ptr,
    finite_ptr, clip_ptr, inv_scale_ptr, norm_ptr, skipped_ptr,
    window_log_ptr, cohort_ptr, count_ptr, fold_ptr, advance_ptr,
    n_partials, n_params, position, row, limit_bits, window, max_steps,
    HAS_LIMIT: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_FOUND: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    sums = tl.zeros([BLOCK], dtype=tl.float64)
    for offset in range(0, n_partials, BLOCK):
        offs = offset + tl.arange(0, BLOCK)
        sums += tl.load(partials_ptr + offs, mask=offs < n_partials, other=0.0)  # [BLOCK]
    norm = tl.sqrt(tl.sum(sums, axis=0))

    inv_scale = tl.full((), 1.0, tl.float32)
    if HAS_SCALE:
        inv_scale = tl.div_rn(inv_scale, tl.load(grad_scale_ptr).to(tl.float32))
    norm = norm * inv_scale.to(tl.float64)
    finite = (norm - norm) == 0
    if HAS_SCALE:
        finite = finite & ((inv_scale <= 1) | (norm <= LARGEST))
    if HAS_FOUND:
        finite = finite & (tl.load(found_inf_ptr) == 0)
    clip = tl.full((), 1.0, tl.float32)
    if HAS_LIMIT:
        limit = limit_bits.to(tl.int64).to(tl.float64, bitcast=True)
        factor = limit / (norm + 1e-6)
        clip = tl.where(finite & (factor < 1), factor, 1.0).to(tl.float32)

    tl.store(finite_ptr, finite.to(tl.int32))
    tl.store(clip_ptr, clip)
    tl.store(inv_scale_ptr, inv_scale)
    tl.store(norm_ptr, norm.to(tl.float32))
    tl.store(skipped_ptr, tl.load(skipped_ptr) + tl.where(finite, 0, 1))
    log_ptr = window_log_ptr + N_STAMP + N_LOG * row
    tl.store(log_ptr + FINITE, finite.to(tl.int32))
    tl.store(log_ptr + CLIP, clip.to(tl.int32, bitcast=True))
    tl.store(log_ptr + INV_SCALE, inv_scale.to(tl.int32, bitcast=True))
    tl.store(log_ptr + ZERO, 0)
    offs_s = tl.arange(0, N_STAMP)
    stamp = (window.to(tl.int64) >> (32 * offs_s)).to(tl.int32)  # [N_STAMP]: low word, high word
    tl.store(window_log_ptr + offs_s, stamp)
    tl.store(window_log_ptr + N_STAMP + N_LOG * max_steps + offs_s, stamp)

    for offset in range(0, n_params, BLOCK_P):
        offs = offset + tl.arange(0, BLOCK_P)
        mask = offs < n_params
        counted = tl.where(tl.load(present_ptr + offs, mask=mask, other=0) != 0, finite.to(tl.int32), 0)  # [BLOCK_P]
        late = position - tl.load(cohort_ptr + offs, mask=mask, other=1)
        begins = (position == 0) | ((late >= 0) & (late % max_steps == 0))
        count = tl.where(begins, 0, tl.load(count_ptr + offs, mask=mask, other=0))
        advance = tl.load(advance_ptr + offs, mask=mask, other=0)
        fold = tl.where(count == 0, OVERWRITE, ADD)
        tl.store(fold_ptr + offs, tl.where(counted == 0, NONE, fold), mask=mask)
        tl.store(count_ptr + offs, count + counted, mask=mask)
        tl.store(advance_ptr + offs, advance + counted, mask=mask)


def close_step(
    control: StepControl,
    partials: Tensor,
    present: Tensor,
    *,
    window: int,
    position: int,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """Decide this step from the partial sums of all tables and write it into `control`.

    `partials` f64 `[n]`; `present` int32 `[P]`, 1 where the parameter has a gradient; `window` the number of the
    next window that ends and `position` the number of steps since all windows began together, or that less any
    multiple of U as long as U remain. `grad_scale` and `found_inf` are GradScaler's, one element each, read on the
    device. A step is finite if the norm is, where `grad_scale` is below 1 also within fp32, and `found_inf` is 0; then
    every present parameter folds (overwriting at its first counted step of the window) and its count and advance grow
    by 1.
    """
    if not 0 <= position < 2 * control.max_steps:
        raise ValueError(f"position must be in [0, {2 * control.max_steps}), got {position}")
    if present.dtype != torch.int32 or present.shape != control.count.shape:
        raise ValueError(
            f"present must be torch.int32 {tuple(control.count.shape)}, got {tuple(present.shape)} of {present.dtype}"
        )
    scaler = {"grad_scale": grad_scale, "found_inf": found_inf}
    if not uses_triton(partials):
        return close_step_reference(
            control, partials, present, window=window, position=position, max_grad_norm=max_grad_norm, **scaler
        )
    with on_device(partials):
        _close_step_kernel[(1,)](
            partials, present,
            control.inv_scale if grad_scale is None else grad_scale, control.finite if found_inf is None else found_inf,
            control.finite, control.clip, control.inv_scale, control.norm, control.skipped,
            control.window_log, control.cohort, control.count, control.fold, control.advance,
            partials.numel(), present.numel(), position, position % control.max_steps,
            _float64_bits(max_grad_norm), window, control.max_steps,
            HAS_LIMIT=max_grad_norm is not None, HAS_SCALE=grad_scale is not None, HAS_FOUND=found_inf is not None,
            BLOCK=SUM_BLOCK, BLOCK_P=PARAMETER_BLOCK,
            num_warps=8, **EXACT,
        )  # fmt: skip


def _float64_bits(value: float | None) -> int:
    """A launch argument would be rounded to fp32; its bits are not."""
    return 0 if value is None else struct.unpack("<q", struct.pack("<d", value))[0]


def close_step_reference(
    control: StepControl,
    partials: Tensor,
    present: Tensor,
    *,
    window: int,
    position: int,
    max_grad_norm: float | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    """The same decision by torch operations, on any device."""
    one = torch.ones(1, dtype=torch.float32, device=partials.device)
    total = torch.stack([piece.sum() for piece in partials.split(SERIAL)]).sum().view(1)
    inv = one if grad_scale is None else one / grad_scale.view(1).float()
    norm = total.sqrt() * inv.double()
    finite = torch.isfinite(norm)
    if grad_scale is not None:
        finite = finite & ((inv <= 1) | (norm <= FP32_MAX))
    if found_inf is not None:
        finite = finite & (found_inf.view(1) == 0)
    clip = one
    if max_grad_norm is not None:
        clip = torch.where(finite, (max_grad_norm / (norm + 1e-6)).clamp(max=1.0).float(), one)
    control.finite.copy_(finite)
    control.clip.copy_(clip)
    control.inv_scale.copy_(inv)
    control.norm.copy_(norm)
    control.skipped.add_(~finite)
    log = control.window_log[STAMP_WORDS:-STAMP_WORDS].view(-1, LOG_WORDS)[position % control.max_steps]
    log[LOG_FINITE].copy_(finite.view(()))
    log[LOG_CLIP].copy_(control.clip.view(torch.int32).view(()))
    log[LOG_INV_SCALE].copy_(control.inv_scale.view(torch.int32).view(()))
    log[LOG_ZERO].zero_()
    words = torch.tensor([window], dtype=torch.int64, device="cpu").view(torch.int32).to(log.device)
    control.window_log[:STAMP_WORDS].copy_(words)
    control.window_log[-STAMP_WORDS:].copy_(words)
    late = position - control.cohort
    begins = (late >= 0) & (late % control.max_steps == 0)
    control.count.masked_fill_(begins if position else torch.ones_like(begins), 0)
    counted = (present != 0) & finite
    first = torch.where(control.count == 0, FOLD_OVERWRITE, FOLD_ADD)
    control.fold.copy_(torch.where(counted, first, FOLD_NONE))
    control.count.add_(counted)
    control.advance.add_(counted)
