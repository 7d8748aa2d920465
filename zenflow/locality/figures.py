"""A study's figures: a row a matrix and direction, and their spread over the matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from zenflow.locality.study import DIMS, Study, Track

Row = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Over the matrices, each counted once."""

    median: float
    p10: float
    p90: float
    count: int


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that there are; None if there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    p10, median, p90 = (float(value) for value in np.percentile(known, (10, 50, 90)))
    return Spread(median, p10, p90, len(known))


def top_name(share: float) -> str:
    """The field of a row that holds the share of the squared norm in the top `share` of the channels."""
    return f"top_{share:g}"


def overlap_name(lag: int) -> str:
    """The field with the share of a selection that is selected again after `lag` steps."""
    return f"overlap_{lag}"


def held_name(lag: int) -> str:
    """The field with the share of the squared norm that a selection holds after `lag` steps."""
    return f"held_{lag}"


def matrix_rows(study: Study) -> list[Row]:
    """A row for each matrix that had a gradient, and for each direction; shares from 0 to 1, None where unknown.

    `weight` is the matrix's mean share in the squared norm of all matrices.
    """
    return [_row(track, study) for track in study.tracks if track.steps]


def _row(track: Track, study: Study) -> Row:
    subject, settings, seen = track.subject, study.settings, study.steps - study.empty
    row: Row = {
        "matrix": subject.name,
        "kind": subject.kind,
        "dim": subject.dim,
        "rows": subject.rows,
        "cols": subject.cols,
        "selected": track.selected,
        "steps": track.steps,
        "weight": track.weight / seen,
    }
    for share, held in zip(settings.shares, track.shares, strict=True):
        row[top_name(share)] = float(held) / track.steps
    for lag, overlap, held, pairs in zip(settings.lags, track.overlap, track.held, track.pairs, strict=True):
        row[overlap_name(lag)] = float(overlap / pairs) if pairs else None
        row[held_name(lag)] = float(held / pairs) if pairs else None
    return row


def share_rows(study: Study, rows: Sequence[Row]) -> list[Row]:
    """A row for each direction and share: the spread over the matrices, and `overall`, which big gradients lead."""
    found = []
    for dim in DIMS:
        overall = np.mean(study.overall[dim], axis=0)
        for place, share in enumerate(study.settings.shares):
            values = spread(row[top_name(share)] for row in rows if row["dim"] == dim)
            found.append({"dim": dim, "share": share, **vars(values), "overall": float(overall[place])})
    return found


def survival_rows(study: Study, rows: Sequence[Row]) -> list[Row]:
    """A row for each direction and each lag for which the run was long enough: spreads of `overlap` and `held`."""
    found = []
    for dim in DIMS:
        for lag in study.settings.lags:
            for_dim = [row for row in rows if row["dim"] == dim]
            overlap, held = (spread(row[name(lag)] for row in for_dim) for name in (overlap_name, held_name))
            if overlap is not None:
                parts = {f"held_{name}": value for name, value in vars(held).items()}
                found.append({"dim": dim, "lag": lag, **vars(overlap), **parts})
    return found


def kind_rows(study: Study, rows: Sequence[Row]) -> list[Row]:
    """A row for each kind of layer and direction: medians over its matrices, and its `weight` in the squared norm."""
    fields = [name(value) for name, value in _fields(study)]
    kinds = dict.fromkeys((row["kind"], row["dim"]) for row in rows)
    found = []
    for kind, dim in sorted(kinds, key=lambda pair: (DIMS.index(pair[1]), pair[0])):
        members = [row for row in rows if (row["kind"], row["dim"]) == (kind, dim)]
        medians = {name: spread(row[name] for row in members) for name in fields}
        found.append(
            {"kind": kind, "dim": dim, "matrices": len(members), "weight": sum(row["weight"] for row in members)}
            | {name: None if value is None else value.median for name, value in medians.items()}
        )
    return found


def _fields(study: Study) -> list[tuple[Callable[[Any], str], Any]]:
    shares = [(top_name, share) for share in study.settings.shares]
    return shares + [(name, lag) for lag in study.settings.lags for name in (overlap_name, held_name)]


def curves(study: Study) -> dict[str, np.ndarray]:
    """By direction, float64 `[matrices, 61]`: the share of the squared norm in the top `CURVE` of the channels."""
    return {
        dim: np.stack([track.curve / track.steps for track in study.tracks if track.subject.dim == dim and track.steps])
        for dim in DIMS
    }
