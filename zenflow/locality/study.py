"""Gradients watched step by step: how much of their squared norm few channels hold, and whether these stay the same.

A channel's score in a step is the sum of the squares of its gradient, as the selection has it. Of a step only the
scores are looked at, and of earlier steps only which channels were selected is kept: 4 bytes a selected channel, for as
many steps as the longest lag. No gradient is kept.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import Parameter
from zenflow_kernels.importance import grouped_scores

from zenflow.locality.config import LocalitySettings
from zenflow.matrices import count_selected, matrix_shape
from zenflow.training.errors import InputError

DIMS = ("column", "row")
CURVE = np.geomspace(0.001, 1.0, 61)  # shares of the channels at which the whole curve is known


@dataclass(frozen=True)
class Subject:
    """A parameter matrix `[rows, cols]`, seen as its columns or its rows (`dim`)."""

    name: str
    rows: int
    cols: int
    dim: str

    @property
    def kind(self) -> str:
        """The name with * for each number, as "layer.*.attention.query"."""
        return ".".join("*" if part.isdigit() else part for part in self.name.removesuffix(".weight").split("."))

    @property
    def channels(self) -> int:
        """How many there are."""
        return self.cols if self.dim == "column" else self.rows


@dataclass(frozen=True)
class Taken:
    """What a step added: the squared norm of all channels, and of each of the top shares, float64 `[shares]`."""

    total: float
    tops: np.ndarray


class Track:
    """One matrix in one direction over all steps: sums of the steps' figures, and the latest selections.

    Sums over the steps (`steps` of them had a gradient): `shares` `[shares]` and `curve` `[61]` of the squared norm's
    share in the top channels, `weight` of the matrix's share in that of all matrices. Sums over pairs of steps a lag
    apart, `[lags]`: `overlap`, the share of the earlier selection that is selected again; `held`, the share of the
    later step's squared norm in the earlier selection; `pairs`, their number.
    """

    def __init__(self, subject: Subject, settings: LocalitySettings) -> None:
        self.subject = subject
        self.tops = [count_selected(share, subject.channels) for share in settings.shares]
        self.selected = count_selected(settings.topk_ratio, subject.channels)
        self.steps, self.weight = 0, 0.0
        self.shares, self.curve = np.zeros(len(self.tops)), np.zeros(len(CURVE))
        self.overlap, self.held, self.pairs = np.zeros((3, len(settings.lags)))
        self._lags = settings.lags
        self._late: deque[np.ndarray | None] = deque(maxlen=max(settings.lags))  # the latest selection first

    def add(self, scores: np.ndarray | None) -> Taken | None:
        """Take a step's scores, float64 `[channels]`, or None for none. None if there is no finite norm above zero."""
        total = 0.0 if scores is None else float(scores.sum())
        if not 0 < total < math.inf:
            self._late.appendleft(None)
            return None
        order = np.argsort(-scores, kind="stable")  # ties go to the lower index, as in a selection
        summed = np.concatenate(([0.0], np.cumsum(scores[order])))
        places = CURVE * self.subject.channels
        self.steps += 1
        self.shares += summed[self.tops] / total
        self.curve += np.interp(places, np.arange(len(summed)), summed) / total
        chosen = order[: self.selected].astype(np.int32)
        self._look_back(scores / total, chosen)
        self._late.appendleft(chosen)
        return Taken(total, summed[self.tops])

    def _look_back(self, portions: np.ndarray, chosen: np.ndarray) -> None:
        """Compare with the selections of earlier steps; `portions` of this step's squared norm sum up to 1."""
        again = np.zeros(len(portions), dtype=bool)
        again[chosen] = True
        for place, lag in enumerate(self._lags):
            before = self._late[lag - 1] if lag <= len(self._late) else None
            if before is not None:
                self.overlap[place] += again[before].mean()
                self.held[place] += portions[before].sum()
                self.pairs[place] += 1


class Study:
    """Watches the gradients of all matrices of at least `settings.min_numel` elements.

    `tracks`: those of the columns, then those of the rows, in the parameters' order. `overall`, by "column" and "row":
    a step's share of the squared norm of all matrices together in the top channels of each, `[shares]` a step. `steps`
    counts the calls of `observe`, `empty` those in which no matrix had a finite gradient.

    Errors: InputError if there is no such matrix.
    """

    def __init__(self, weights: Iterable[tuple[str, Parameter]], settings: LocalitySettings) -> None:
        self.settings = settings
        self._weights = [
            (name, weight)
            for name, weight in weights
            if weight.requires_grad and weight.dim() >= 2 and weight.numel() >= settings.min_numel
        ]
        if not self._weights:
            raise InputError(
                f"locality.min_numel is {settings.min_numel}, and no trainable matrix has so many elements; give less."
            )
        self.tracks = [
            Track(Subject(name, *matrix_shape(weight), dim), settings) for dim in DIMS for name, weight in self._weights
        ]
        self.overall: dict[str, list[np.ndarray]] = {dim: [] for dim in DIMS}
        self.steps = self.empty = 0

    @property
    def matrices(self) -> int:
        """How many are watched."""
        return len(self._weights)

    @property
    def numel(self) -> int:
        """Their elements together."""
        return sum(weight.numel() for _, weight in self._weights)

    @torch.no_grad()
    def observe(self) -> None:
        """Take the gradients of a step, between backward and the optimizer's step; waits for the device."""
        self.steps += 1
        for dim in DIMS:
            tracks = [track for track in self.tracks if track.subject.dim == dim]
            taken = [track.add(scores) for track, scores in zip(tracks, self._scores(dim), strict=True)]
            found = [(track, one) for track, one in zip(tracks, taken, strict=True) if one is not None]
            if not found:
                continue
            total = sum(one.total for _, one in found)
            for track, one in found:
                track.weight += one.total / total
            self.overall[dim].append(sum(one.tops for _, one in found) / total)
        self.empty = self.steps - len(self.overall[DIMS[0]])

    def _scores(self, dim: str) -> list[np.ndarray | None]:
        """Of each matrix, float64 `[channels]` on the host, by one copy; None where it has no gradient."""
        grads = [weight.grad for _, weight in self._weights]
        matrices = [grad.reshape(matrix_shape(grad)).contiguous() for grad in grads if grad is not None]
        if not matrices:
            return [None] * len(grads)
        scores = grouped_scores(matrices, dim, "square")
        together = torch.cat(scores).cpu().double().numpy()
        parts = iter(np.split(together, np.cumsum([len(one) for one in scores])[:-1]))
        return [None if grad is None else next(parts) for grad in grads]
