"""The CPU optimizer's arithmetic: one window's updates of a bucket, compiled or in torch, bit for bit the same.

The deferred rule `accumulate` (README): over the n steps of the window that were counted for a parameter, one AdamW
update with the mean gradient; t += 1; the learning rate of the last counted step times n under "linear", times 1 under
"none", times a given factor; decoupled decay is the product over the n steps under "linear", else the last step's.
The deferred rule `replay`: n AdamW updates, each with its own step's gradient, learning rate and decay; t += n.

Gradients come from the ring's lanes: one lane with the window's clipped sum, or one a step with the raw gradient, whose
effective gradient is `(g * inv_scale) * clip`. Sums are taken in fp32 in the order of the steps. Gradients are finite,
but a sum may have left its dtype: its mean then counts as the largest fp32 number. What AdamW makes of that, v = inf
and no step, it makes of every mean above 1.8e19, so the weights are those of the exact one.

What goes out, maybe into the gradient's place, is the rounded master or, of a window whose result is shown late under
`weight_prediction: a`, the rounded `new + a * (new - old)`: the master after the window's update, and a times what that
update has changed, decay included, each operation rounded to fp32. The master itself stays what it is. Of a matrix
without a counted step it is the master.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from zenflow.bias import bias_table
from zenflow.geometry import ITEM_BYTES, Matrix, Piece
from zenflow.native import ARRAYS, GRAD_KINDS, LANE, OUT_KINDS, PIECE, PLAN, Native

if TYPE_CHECKING:  # imported where the compiled pass is missing only
    from torch import Tensor


LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Update:
    """The factors of one update, or of n in a row, which put an axis of n before each shape.

    step_size and denom_scale fp32 `[channels]`, or `[1]` for one t of all channels. constants fp32 `[7]`: beta1,
    1 - beta1, beta2, 1 - beta2, eps, decay, the number that the gradient is divided by; from float64, rounded once.
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


def plan_replay(hyper: np.ndarray, channel_step: np.ndarray) -> Update:
    """The n updates that `replay` makes of a window: factors fp32 `[n, channels]`, constants fp32 `[n, 7]`.

    hyper and channel_step as for `plan_update`.
    """
    updates = [plan_update(hyper[step : step + 1], channel_step + step, "none") for step in range(len(hyper))]
    return Update(
        np.stack([update.step_size for update in updates]),
        np.stack([update.denom_scale for update in updates]),
        np.stack([update.constants for update in updates]),
    )


def make_lanes(offsets: Sequence[int], inv_scale: Sequence[float], clip: Sequence[float]) -> np.ndarray:
    """The gradients that a plan reads, as `LANE` records in order of their steps; offsets in bytes into the ring."""
    lanes = np.empty(len(offsets), dtype=LANE)
    lanes["offset"], lanes["inv_scale"], lanes["clip"] = offsets, inv_scale, clip
    return lanes


@dataclass(frozen=True)
class Plan:
    """What happens to one matrix in a window: one update with the mean of all lanes, or n updates with a lane each."""

    update: Update
    lanes: np.ndarray  # LANE [n]
    prediction: float = 0.0  # so many times is the master's change added to what goes out; rounded to fp32
    row: tuple[float, ...] = field(init=False)  # as a PLAN record, which refers to the arrays above

    def __post_init__(self) -> None:
        object.__setattr__(self, "prediction", float(np.float32(self.prediction)))
        update, count = self.update, self.update.constants.size // 7
        assert len(self.lanes) >= 1 and count in (1, len(self.lanes)), (count, len(self.lanes))
        arrays = update.constants, update.step_size, update.denom_scale, self.lanes
        addresses = [array.ctypes.data for array in arrays]
        row = (*addresses, count, len(self.lanes), update.step_size.size // count, self.prediction)
        object.__setattr__(self, "row", row)

    @property
    def advance(self) -> int:
        """What it adds to t."""
        return self.update.constants.size // 7


@dataclass(frozen=True)
class Arrays:
    """The flat arrays of one segment, `[numel]` each, the ring `[lanes * numel]`.

    master, exp_avg, exp_avg_sq fp32; ring uint8, elements of `ring_dtype`; out uint16, the bits of `out_dtype`
    (bfloat16 or float16), or fp32 with float32, or None with None; it may be the lane that the plans read, whose
    elements are as large then. The pass is fastest where all start at a cache line.
    """

    master: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    ring: np.ndarray
    out: np.ndarray | None
    ring_dtype: str
    out_dtype: str | None


class SegmentPass:
    """The pass over a segment, a bucket at a time, in place; neither `threads`, the cut nor `library` changes a bit.

    buckets: each one's pieces, ascending in the flat arrays; library: None for torch, on the threads that it has.
    """

    def __init__(
        self,
        arrays: Arrays,
        matrices: Sequence[Matrix],
        buckets: Sequence[Sequence[Piece]],
        *,
        threads: int,
        library: Native | None,
    ) -> None:
        self.arrays, self.matrices, self.buckets = arrays, matrices, buckets
        self.threads, self.library = threads, library
        self.out = arrays.out
        self.plans: list[Plan | None] = [None] * len(matrices)
        flat = arrays.master, arrays.exp_avg, arrays.exp_avg_sq, arrays.ring
        out = 0 if arrays.out is None else arrays.out.ctypes.data
        kinds = GRAD_KINDS[arrays.ring_dtype], OUT_KINDS[arrays.out_dtype]
        in_place = arrays.out is not None and np.may_share_memory(arrays.ring, arrays.out)
        self._arrays = np.array([(*(array.ctypes.data for array in flat), out, *kinds, in_place)], dtype=ARRAYS)
        self._pieces = [np.array([self._piece(piece) for piece in pieces], dtype=PIECE) for pieces in buckets]
        self._plans = np.zeros(len(matrices), dtype=PLAN)
        addresses = [pieces.ctypes.data for pieces in self._pieces]
        self._calls = [
            (self._arrays.ctypes.data, address, len(pieces), self._plans.ctypes.data)
            for address, pieces in zip(addresses, self._pieces, strict=True)
        ]

    def _piece(self, piece: Piece) -> tuple[int, ...]:
        matrix = self.matrices[piece.matrix]
        rows = piece.row_stop - piece.row_start
        return piece.matrix, piece.offset, rows, matrix.cols, piece.row_start, matrix.channel_dim == "column"

    def write_to(self, out: np.ndarray) -> None:
        """From now on the rounded weights go to another array like `arrays.out`."""
        self.out = out
        self._arrays["out"] = out.ctypes.data

    def set_plan(self, matrix: int, plan: Plan | None) -> None:
        """What `run` does to the matrix from now on; None: nothing but writing the rounded master to `out`."""
        self.plans[matrix] = plan
        self._plans[matrix] = (0,) * len(PLAN) if plan is None else plan.row

    def run(self, bucket: int) -> None:
        """Update master and moments of the bucket's pieces by their matrices' plans, and write what is to be seen."""
        if self.library is not None:
            self.library.run_pass(*self._calls[bucket], self.threads)
            return
        for piece in self.buckets[bucket]:
            self._run_in_torch(piece)

    def _run_in_torch(self, piece: Piece) -> None:
        import torch
        from zenflow_kernels.numerics import chunks

        matrix, plan, arrays = self.matrices[piece.matrix], self.plans[piece.matrix], self.arrays
        shape = piece.row_stop - piece.row_start, matrix.cols
        span = slice(piece.offset, piece.offset + shape[0] * shape[1])
        state = [torch.from_numpy(x[span]).view(shape) for x in (arrays.master, arrays.exp_avg, arrays.exp_avg_sq)]
        grads = [] if plan is None else [self._lane_in_torch(lane["offset"], span).view(shape) for lane in plan.lanes]
        updates = [] if plan is None else list(_updates_in_torch(plan, matrix, piece))
        for part in chunks(*shape, 1 << 20):
            cut = [x[part] for x in state]
            old = cut[0].clone() if plan is not None and plan.prediction else None
            if plan is not None:
                scaled = (
                    (grad[part].float() * float(lane["inv_scale"])) * float(lane["clip"])
                    for grad, lane in zip(grads, plan.lanes, strict=True)
                )
                _apply_in_torch(cut, scaled, updates, part)
            if self.out is not None:
                shown = cut[0] if old is None else cut[0] + plan.prediction * (cut[0] - old)
                out = torch.from_numpy(self.out[span]).view(getattr(torch, arrays.out_dtype)).view(shape)
                round_to(out[part], shown)

    def _lane_in_torch(self, offset: int, span: slice) -> Tensor:
        import torch

        item = ITEM_BYTES[self.arrays.ring_dtype]
        lane = self.arrays.ring[offset + span.start * item : offset + span.stop * item]
        return torch.from_numpy(lane).view(getattr(torch, self.arrays.ring_dtype))


def round_to(out: Tensor, values: Tensor) -> None:
    """`out` takes fp32 `values` of its shape, on the CPU, in its own dtype: what the compiled pass writes."""
    out.copy_(values)
    out[out != out] = float("nan")  # one NaN for all: torch's vector and scalar code write different ones


def _updates_in_torch(plan: Plan, matrix: Matrix, piece: Piece) -> Iterator[tuple]:
    """step_size, denom_scale (fp32, expanded to the piece) and constants (floats) of each update."""
    import torch

    by_column, update, count = matrix.channel_dim == "column", plan.update, plan.advance
    rows = piece.row_stop - piece.row_start
    for step_size, denom_scale, constants in zip(
        update.step_size.reshape(count, -1),
        update.denom_scale.reshape(count, -1),
        update.constants.reshape(count, -1).tolist(),
        strict=True,
    ):
        own = slice(piece.row_start, piece.row_stop) if len(step_size) > 1 and not by_column else slice(None)
        shape = (1, -1) if by_column else (-1, 1)
        factors = (torch.from_numpy(x[own]).view(shape).expand(rows, matrix.cols) for x in (step_size, denom_scale))
        yield (*factors, constants)


def _apply_in_torch(
    state: list[Tensor], grads: Iterator[Tensor], updates: list[tuple], part: tuple[slice, slice]
) -> None:
    from zenflow_kernels.numerics import adamw_

    for step_size, denom_scale, constants in updates:
        beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, n = constants
        grad = next(grads)
        if len(updates) == 1:
            for other in grads:
                grad = grad + other
        adamw_(
            *state, (grad / n).clamp(-LARGEST, LARGEST), step_size=step_size[part], denom_scale=denom_scale[part],
            beta1=beta1, one_minus_beta1=one_minus_beta1, beta2=beta2, one_minus_beta2=one_minus_beta2,
            eps=eps, decay=decay,
        )  # fmt: skip
