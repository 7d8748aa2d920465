"""AdamW in the one written order of operations that every implementation in this project follows.

    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * (g * g)
    p = p * decay
    p = p - step_size * (m / (sqrt(v) * denom_scale + eps))

Each multiplication, addition, subtraction, division and square root is rounded to fp32 on its own, so that C, Triton
and torch give the same bits. `decay = 1 - lr * weight_decay`, `step_size = lr * first[t]`, `denom_scale = second[t]`,
where `first[t] = 1 / (1 - beta1**t)` and `second[t] = 1 / sqrt(1 - beta2**t)` come from one fp32 table; the constants
are computed in float64 and rounded to fp32 once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

HYPER = ("lr", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "decay")
HYPER_WIDTH = 8  # floats a row of the hyperparameter table; those beyond HYPER keep rows aligned and are 0

CHUNK_PER_THREAD = 32768  # elements; torch's own grain, so that a chunk occupies every thread and stays in cache


def round_to_fp32(values: list[float]) -> list[float]:
    """Each value rounded to the nearest fp32 number, as Python floats."""
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).tolist()


def pack_hyper(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float) -> list[float]:
    """One row of the hyperparameter table, in the order of `HYPER`: computed in float64, rounded to fp32 once."""
    row = {
        "lr": lr,
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "eps": eps,
        "decay": 1 - lr * weight_decay,
    }
    return round_to_fp32([row[name] for name in HYPER]) + [0.0] * (HYPER_WIDTH - len(HYPER))


def chunks(rows: int, cols: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Cut `[rows, cols]` into pieces of at most `limit` elements: blocks of whole rows, or parts of one row."""
    if rows == 0 or cols == 0:
        return
    high, wide = max(1, limit // cols), min(cols, limit)
    for row in range(0, rows, high):
        for col in range(0, cols, wide):
            yield slice(row, row + high), slice(col, col + wide)


def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    step_size: Tensor,
    denom_scale: Tensor,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    eps: float,
    decay: float,
) -> None:
    """One AdamW update of `master`, `exp_avg` and `exp_avg_sq` in place, by torch on the CPU or a GPU.

    All four are fp32 `[rows, cols]` or `[n]`; `step_size` and `denom_scale` are fp32 and broadcast against them
    (`[1, cols]` or `[rows, 1]` for a factor a channel). The floats must already be fp32 numbers (`pack_hyper`).
    Raises ValueError for another dtype, whose arithmetic would not follow the written order.
    """
    shape = master.shape if master.dim() == 2 else (1, master.numel())
    tensors = (master, exp_avg, exp_avg_sq, grad, step_size, denom_scale)
    for tensor in tensors:
        if tensor.dtype != torch.float32:
            raise ValueError(f"adamw_ works on torch.float32 tensors, got {tensor.dtype}")
    master, exp_avg, exp_avg_sq, grad = (tensor.view(shape) for tensor in tensors[:4])
    step_size, denom_scale = step_size.broadcast_to(shape), denom_scale.broadcast_to(shape)
    limit = CHUNK_PER_THREAD * torch.get_num_threads() if master.device.type == "cpu" else max(1, master.numel())
    scratch = master.new_empty(min(limit, master.numel()))
    wide_scratch = scratch.new_empty(scratch.shape, dtype=torch.float64)
    for piece in chunks(*shape, limit):
        p, m, v, g = master[piece], exp_avg[piece], exp_avg_sq[piece], grad[piece]
        work, wide = scratch[: p.numel()].view(p.shape), wide_scratch[: p.numel()].view(p.shape)
        m.mul_(beta1).add_(torch.mul(g, one_minus_beta1, out=work))
        v.mul_(beta2).add_(torch.mul(g, g, out=work).mul_(one_minus_beta2))
        # torch's fp32 square root is not correctly rounded on the CPU; float64's, rounded to fp32, is.
        work.copy_(wide.copy_(v).sqrt_()).mul_(denom_scale[piece]).add_(eps)
        p.mul_(decay).sub_(torch.div(m, work, out=work).mul_(step_size[piece]))
