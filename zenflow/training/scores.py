"""How good predictions are, by the names under which a run records them: what GLUE defines for its tasks.

All are of two int64 `[samples]` tensors, or float ones for the two correlations, and computed exactly or in float64. A
score that has no value, as of predictions that are all alike, is 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def accuracy(predicted: Tensor, true: Tensor) -> float:
    """The share of right classes."""
    return (predicted == true).sum().item() / true.numel()


def matthews(predicted: Tensor, true: Tensor) -> float:
    """Matthews' correlation of two classes, from -1 to 1; for more classes Gorodkin's, which equals it for two."""
    classes = 1 + int(max(predicted.max(), true.max()))
    guessed, actual = (torch.bincount(part, minlength=classes).tolist() for part in (predicted, true))
    samples, right = true.numel(), int((predicted == true).sum())
    # Integers: exact, where products of four counts may pass 2**53.
    above = right * samples - sum(a * b for a, b in zip(guessed, actual, strict=True))
    below = (samples**2 - sum(count**2 for count in guessed)) * (samples**2 - sum(count**2 for count in actual))
    return above / below**0.5 if below else 0.0


def f1(predicted: Tensor, true: Tensor) -> float:
    """The harmonic mean of precision and recall of class 1."""
    hits = int(((predicted == 1) & (true == 1)).sum())
    named = int((predicted == 1).sum()) + int((true == 1).sum())
    return 2 * hits / named if named else 0.0


def pearson(predicted: Tensor, true: Tensor) -> float:
    """The linear correlation, from -1 to 1."""
    x, y = (part.double() - part.double().mean() for part in (predicted, true))
    scale = x.norm() * y.norm()
    return (x @ y / scale).item() if scale != 0 else 0.0


def spearman(predicted: Tensor, true: Tensor) -> float:
    """The correlation of the ranks; equal values share the mean of theirs."""
    return pearson(_ranks(predicted), _ranks(true))


def _ranks(values: Tensor) -> Tensor:
    _, group, sizes = values.unique(return_inverse=True, return_counts=True)  # sorted
    last = sizes.cumsum(0).double()
    return (last - (sizes - 1) / 2)[group]


SCORES: dict[str, Callable[[Tensor, Tensor], float]] = {
    score.__name__: score for score in (accuracy, matthews, f1, pearson, spearman)
}
