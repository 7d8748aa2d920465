"""The CPU optimizer's arithmetic: one window's update of one piece, compiled or in torch, bit for bit the same.

The deferred rule `accumulate` (README): over the n steps of the window that were counted for a parameter, one AdamW
update with the mean gradient; t += 1; the learning rate of the last counted step times n under "linear", times 1 under
"none", times a given factor; decoupled decay is the product over the n steps under "linear", else the last step's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from zenflow.bias import bias_table
from zenflow.native import Native

if TYPE_CHECKING:  # imported where the compiled pass is missing only
    from torch import Tensor

NARROW, WIDE = 256, 2048  # columns: shorter rows are joined until a run is as long as the second


@dataclass(frozen=True)
class Update:
    """The factors of one update: step_size and denom_scale fp32, one a channel; constants fp32 `[7]`.

    constants: beta1, 1 - beta1, beta2, 1 - beta2, eps, decay, n; computed in float64, rounded once.
    """

    step_size: np.ndarray
    denom_scale: np.ndarray
    constants: np.ndarray


def plan_update(hyper: np.ndarray, channel_step: np.ndarray, lr_scale: str | float) -> Update:
    """The update that `accumulate` makes of a window.

    hyper: float64 `[n, 5]`, n >= 1, the counted steps' lr, beta1, beta2, eps, weight decay; channel_step: int32, the
    updates that each channel has received so far; lr_scale: "linear", "none" or a factor.
    """
    n, steps = len(hyper), hyper.tolist()
    lr, beta1, beta2, eps, weight_decay = steps[-1]
    decay = 1 - lr * weight_decay
    if lr_scale == "linear":
        lr *= n
        decay = 1.0
        for step in steps:
            decay *= 1 - step[0] * step[4]
    elif lr_scale != "none":
        lr *= float(lr_scale)
    t = channel_step.astype(np.int64) + 1
    table = bias_table(beta1, beta2, int(t.max(initial=1)))
    factors = table.take(t, axis=0, mode="clip")
    constants = np.array([beta1, 1 - beta1, beta2, 1 - beta2, eps, decay, n], dtype=np.float64).astype(np.float32)
    return Update(np.float32(lr) * factors[:, 0], factors[:, 1].copy(), constants)


def update_piece(
    master: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    grad: np.ndarray,
    out: np.ndarray | None,
    update: Update,
    *,
    rows: int,
    cols: int,
    by_column: bool,
    out_dtype: str | None,
    threads: int,
    library: Native | None,
) -> None:
    """Update contiguous rows `[rows, cols]` of a matrix in place, all arrays flat.

    master, exp_avg, exp_avg_sq fp32; grad: the sum over the window's steps, fp32, or bf16 as uint16; out: None, or
    uint16 that receives the master rounded to `out_dtype`. The bits depend on neither `threads`, the cut nor `library`.
    """
    arrays = master, exp_avg, exp_avg_sq, grad, out
    if rows * cols == 0:
        return
    if library is None:
        _update_in_torch(arrays, update, rows, cols, by_column, out_dtype)
        return
    factors = update.step_size, update.denom_scale
    if not by_column and cols < NARROW:
        factors, rows, cols, by_column = tuple(np.repeat(x, cols) for x in factors), 1, rows * cols, True
    kinds = {"constants": update.constants, "out_dtype": out_dtype, "by_column": by_column, "threads": threads}
    joined = min(rows, WIDE // cols) if by_column and cols < NARROW else 1
    body = rows - rows % joined
    wide = tuple(np.tile(x, joined) for x in factors) if joined > 1 else factors
    library.adamw(*_cut(arrays, 0, body * cols), *wide, rows=body // joined, cols=cols * joined, **kinds)
    if body < rows:
        library.adamw(*_cut(arrays, body * cols, rows * cols), *factors, rows=rows - body, cols=cols, **kinds)


def refresh(
    master: np.ndarray, out: np.ndarray | None, out_dtype: str | None, threads: int, library: Native | None
) -> None:
    """out = the master rounded to `out_dtype`: what a piece shows in a window that does not update it."""
    if out is None or out_dtype is None:
        return
    if library is not None:
        library.round(master, out, out_dtype, threads)
        return
    import torch

    _round(torch.from_numpy(master), torch.from_numpy(out).view(getattr(torch, out_dtype)))


def _cut(arrays: tuple[np.ndarray | None, ...], start: int, stop: int) -> list[np.ndarray | None]:
    return [None if x is None else x[start:stop] for x in arrays]


def _update_in_torch(
    arrays: tuple[np.ndarray | None, ...], update: Update, rows: int, cols: int, by_column: bool, out_dtype: str | None
) -> None:
    import torch
    from zenflow_kernels.numerics import adamw_, chunks

    master, exp_avg, exp_avg_sq, grad, out = (None if x is None else torch.from_numpy(x) for x in arrays)
    if grad.dtype == torch.uint16:
        grad = grad.view(torch.bfloat16)
    if out is not None:
        out = out.view(getattr(torch, out_dtype)).view(rows, cols)
    state = [x.view(rows, cols) for x in (master, exp_avg, exp_avg_sq)]
    shape = (1, cols) if by_column else (rows, 1)
    step_size, denom_scale = (
        torch.from_numpy(x).view(shape).expand(rows, cols) for x in (update.step_size, update.denom_scale)
    )
    beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, n = update.constants.tolist()
    constants = {"beta1": beta1, "one_minus_beta1": one_minus_beta1, "beta2": beta2, "one_minus_beta2": one_minus_beta2}
    for piece in chunks(rows, cols, 1 << 20):
        mean = grad.view(rows, cols)[piece].float() / n
        cut = [x[piece] for x in state]
        factors = {"step_size": step_size[piece], "denom_scale": denom_scale[piece]}
        adamw_(*cut, mean, **factors, **constants, eps=eps, decay=decay)
        if out is not None:
            _round(cut[0], out[piece])


def _round(master: Tensor, out: Tensor) -> None:
    """Round to nearest even; one NaN for all, because torch's vector and scalar code write different ones."""
    out.copy_(master)
    out[out != out] = float("nan")
