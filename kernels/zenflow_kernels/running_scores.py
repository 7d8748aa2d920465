"""Scores of channels over several steps, kept on the device.

    s = score of the step's gradient      (f32, `importance.py`), times f for magnitude, (s * f) * f for square
    f = inv_scale * clip                  (so it is the score of the gradient that the step applies)

    sum       kept = s                          at the first counted step of the parameter's window
              kept = kept + s                   at the later ones
    average   kept = kept + rate * (s - kept)   at every counted step; begins at 0

All channels of a matrix begin their average together, so what 0 weighs in it is one factor for all, and no order
changes. A step that was skipped, or in which a parameter has no gradient, changes nothing: `control.fold` says so on
the device. Nor does a score that is not finite: it counts as 0 in a sum, and an average stays what it is. fp32, each
operation rounded on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from zenflow_kernels.control import FOLD_NONE, FOLD_OVERWRITE, StepControl
from zenflow_kernels.dispatch import EXACT, on_device, tl, triton, uses_triton
from zenflow_kernels.importance import (
    IMPORTANCES,
    PLACE,
    RUNS_AT_ONCE,
    SUM_BLOCK,
    RunPlan,
    Told,
    add_runs,
    channel_scores_reference,
    launch_runs,
    matrix_field,
)
from zenflow_kernels.numerics import round_to_fp32
from zenflow_kernels.table import ALIGN_BYTES, Table

NONE, OVERWRITE = tl.constexpr(FOLD_NONE), tl.constexpr(FOLD_OVERWRITE)


@triton.jit(do_not_specialize=["matrix_ptr", "fold_ptr"])
def _keep_scores_kernel(
    runs_ptr, fields_ptr, matrix_ptr, fold_ptr, inv_scale_ptr, clip_ptr,
    kept_ptr,
    rate,
    SQUARE: tl.constexpr, AVERAGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    matrix, place, mask, score = add_runs(runs_ptr, fields_ptr, matrix_ptr, BLOCK_R, BLOCK_C)  # [BLOCK_C]
    fold = tl.load(fold_ptr + matrix_field(fields_ptr, matrix, PLACE))
    factor = tl.load(inv_scale_ptr) * tl.load(clip_ptr)
    score = score * factor
    if SQUARE:
        score = score * factor
    finite = (score - score) == 0
    kept = tl.load(kept_ptr + place, mask=mask, other=0.0)  # [BLOCK_C]
    if AVERAGE:
        new = tl.where(finite, kept + rate * (score - kept), kept)
    else:
        new = tl.where(fold == OVERWRITE, 0.0, kept) + tl.where(finite, score, 0.0)
    tl.store(kept_ptr + place, tl.where(fold == NONE, kept, new), mask=mask)


@dataclass(frozen=True)
class _Launch:
    """Matrices of one kind whose rows are made of vectors of `multiple` elements; `kept`: their scores, fp32 `[n]`."""

    kind: str
    multiple: int
    kept: Tensor
    n_runs: int
    told: Told


class RunningScores:
    """The scores of those matrices of a table that have selected channels and others; zero at first.

    `scores`: by entry, fp32 `[channels]`, or None. They are views of memory that never moves, and may be written.
    `importance`: "square" or "magnitude". `rate`: what the newest step weighs in the average, over 0 to 1, rounded to
    fp32; None: the sum over a window. Raises ValueError for anything else.
    """

    def __init__(self, table: Table, importance: str, rate: float | None = None) -> None:
        if importance not in IMPORTANCES:
            raise ValueError(f"importance must be one of {IMPORTANCES}, got {importance!r}")
        if rate is not None and not 0 < rate <= 1:
            raise ValueError(f"rate must be over 0 and at most 1, or None, got {rate}")
        self.table, self.importance = table, importance
        self.rate = None if rate is None else round_to_fp32([rate])[0]
        self.scores: list[Tensor | None] = [None] * len(table.entries)
        groups: dict[tuple[str, int], list[int]] = {}
        vector = ALIGN_BYTES // table.weight_dtype.itemsize
        for number, entry in enumerate(table.entries):
            if entry.slot is not None and entry.selected and entry.weight.numel():
                multiple = vector if entry.shape[1] % vector == 0 else 1
                groups.setdefault((entry.kind, multiple), []).append(number)
        self._launches = [self._planned(*group, numbers) for group, numbers in groups.items()]

    def _planned(self, kind: str, multiple: int, numbers: list[int]) -> _Launch:
        entries, device = [self.table.entries[number] for number in numbers], self.table.device
        plan = RunPlan.of([entry.shape for entry in entries], numbers, kind, pinned=False)
        kept = torch.zeros(plan.n_scores, dtype=torch.float32, device=device)
        for number, scores in zip(numbers, kept.split([entry.channels for entry in entries]), strict=True):
            self.scores[number] = scores
        return _Launch(kind, multiple, kept, plan.n_runs, plan.on(device))

    def clear(self) -> None:
        """Begin anew with zeros."""
        for launch in self._launches:
            launch.kept.zero_()

    def add(self, control: StepControl) -> None:
        """Take in the gradients that are bound to the table, as `control` has decided on the step; waits for nothing.

        Two launches for each kind and alignment of the rows, whatever the number of matrices.
        """
        if not uses_triton(self.table.grad_ptrs):
            return self.add_reference(control)
        with on_device(self.table.grad_ptrs):
            for launch in self._launches:
                self._launch(launch, control)

    def _launch(self, launch: _Launch, control: StepControl) -> None:
        runs, table, told = launch.kept.new_empty(launch.n_runs), self.table, launch.told
        launch_runs(
            told, table.grad_ptrs, runs,
            launch.kind, self.importance, table.weight_dtype, launch.multiple if table.grads_aligned else 1,
        )  # fmt: skip
        _keep_scores_kernel[(told.sum_matrix.numel(),)](
            runs, told.fields, told.sum_matrix, control.fold[table.first :], control.inv_scale, control.clip,
            launch.kept,
            self.rate or 0.0,
            SQUARE=self.importance == "square", AVERAGE=self.rate is not None,
            BLOCK_R=RUNS_AT_ONCE, BLOCK_C=SUM_BLOCK,
            **EXACT,
        )  # fmt: skip

    def add_reference(self, control: StepControl) -> None:
        """The same by torch; it asks the device nothing either."""
        factor = control.inv_scale * control.clip
        for number, kept in enumerate(self.scores):
            grad = self.table.grad(number)
            if kept is None or grad is None:
                continue
            score = channel_scores_reference(grad, self.table.entries[number].kind, self.importance) * factor
            if self.importance == "square":
                score = score * factor
            fold, finite = control.fold[self.table.first + number], score.isfinite()
            if self.rate is None:
                new = torch.where(fold == FOLD_OVERWRITE, 0.0, kept) + torch.where(finite, score, 0.0)
            else:
                new = torch.where(finite, kept + (score - kept) * self.rate, kept)
            kept.copy_(torch.where(fold == FOLD_NONE, kept, new))
