"""Where every deferred element lives: matrices, pieces, buckets and segments.

A *segment* is some matrices of one device and dtype whose windows end together: one flat storage of `numel` elements
for the weights, one for the accumulator, and in shared memory a ring (one such storage a lane), shadows and the
worker's state of the same geometry; lanes of the ring are the shadows where a result fits in the place of its gradient.
Its matrices lie in it one after another, in reverse registration order, each start aligned. A *bucket* is a contiguous
range of the flat storage, the unit that is copied and handed to the worker; a matrix larger than a bucket is cut
between rows, so a bucket holds *pieces*.

Plain data, picklable, importable without torch: the worker receives it over a pipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zenflow.config import ZenFlowConfig

ALIGN_BYTES = 256
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Matrix:
    """One deferred parameter seen as `[rows, cols]`; its channels are its columns or its rows."""

    rows: int
    cols: int
    channel_dim: str  # "column" | "row"
    offset: int  # first element in the flat storage
    step_offset: int  # first entry in the segment's per-channel step counts
    group: int  # index of its param group

    @property
    def channels(self) -> int:
        return self.cols if self.channel_dim == "column" else self.rows

    @property
    def numel(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Piece:
    """Rows `[row_start, row_stop)` of one matrix, contiguous from `offset` in the flat storage."""

    matrix: int  # index in Segment.matrices
    row_start: int
    row_stop: int
    offset: int
    last: bool  # ends the matrix: its step counts advance when this piece has been updated


@dataclass(frozen=True)
class Bucket:
    """Elements `[start, stop)` of the flat storage (padding between matrices included)."""

    index: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Segment:
    """Deferred matrices of one device, dtype and cohort, and the order in which their buckets travel."""

    index: int
    numel: int
    weight_dtype: str  # "float32" | "bfloat16" | "float16"
    ring_dtype: str  # "float32" | "bfloat16" | "float16"
    max_steps: int  # the longest window, in steps
    n_groups: int  # param groups that exist when the segment is laid out
    matrices: tuple[Matrix, ...]
    buckets: tuple[Bucket, ...]
    keeps_steps: bool = False  # the ring holds each step's raw gradient, of two windows, not a window's clipped sum
    predicted: bool = False  # results are shown as predictions

    @property
    def shadows(self) -> int:
        """How often the host holds what is shown: once, and not at all for fp32 weights, whose shadow is the master.

        A prediction cannot be told from the master: there it is twice, for windows in turn, so that what is visible
        stays while the worker writes what comes next.
        """
        return 2 if self.predicted else int(self.weight_dtype != "float32")

    @property
    def in_place(self) -> bool:
        """Whether the worker writes what is shown over the gradient that it has just read: lanes are shadows, too."""
        fits = ITEM_BYTES[self.ring_dtype] == ITEM_BYTES[self.weight_dtype]
        return self.shadows > 0 and fits and not self.keeps_steps

    @property
    def lanes(self) -> int:
        """Gradients that the ring has room for side by side."""
        if self.keeps_steps:
            return 2 * self.max_steps
        return self.shadows if self.in_place else 1

    def lane(self, turn: int, step: int) -> int:
        """The lane of the step in place `step` (from 0) of a window whose slot records are those of `turn` (0 or 1)."""
        return turn * self.max_steps + step if self.keeps_steps else turn % self.lanes

    @property
    def n_channels(self) -> int:
        """Entries of the per-channel step counts, all matrices together."""
        return sum(matrix.channels for matrix in self.matrices)


def lay_out_for(
    config: ZenFlowConfig, index: int, shapes: Sequence[tuple[int, int, int]], weight_dtype: str, n_groups: int
) -> Segment:
    """`lay_out` with what these settings say of matrices of one dtype."""
    on_host, ring_dtype = config.accumulate_on == "host", config.ring_dtype
    if on_host:
        ring_dtype = weight_dtype
    elif ring_dtype == "auto":
        ring_dtype = "bfloat16" if weight_dtype == "bfloat16" else "float32"
    return lay_out(
        index,
        shapes,
        channel_dim=config.channel_dim,
        weight_dtype=weight_dtype,
        ring_dtype=ring_dtype,
        max_steps=config.update_interval,
        n_groups=n_groups,
        bucket_bytes=config.bucket_bytes,
        keeps_steps=on_host,
        predicted=config.predicts,
    )


def lay_out(
    index: int,
    shapes: Sequence[tuple[int, int, int]],
    *,
    channel_dim: str,
    weight_dtype: str,
    ring_dtype: str,
    max_steps: int,
    n_groups: int,
    bucket_bytes: int,
    keeps_steps: bool = False,
    predicted: bool = False,
) -> Segment:
    """Place matrices `(rows, cols, group)`, none of them empty, in the order in which they shall travel.

    A bucket holds at most `bucket_bytes` of weights, or one row where a row is larger. keeps_steps, predicted: see
    `Segment`.
    """
    assert all(rows > 0 and cols > 0 for rows, cols, _ in shapes), shapes
    item = ITEM_BYTES[weight_dtype]
    align, capacity = ALIGN_BYTES // item, max(1, bucket_bytes // item)
    matrices: list[Matrix] = []
    pieces: list[Piece] = []
    offset = step_offset = 0
    for number, (rows, cols, group) in enumerate(shapes):
        matrix = Matrix(rows, cols, channel_dim, offset, step_offset, group)
        matrices.append(matrix)
        rows_per_piece = max(1, capacity // cols)
        for row in range(0, rows, rows_per_piece):
            stop = min(rows, row + rows_per_piece)
            pieces.append(Piece(number, row, stop, offset + row * cols, stop == rows))
        step_offset += matrix.channels
        offset += -(-matrix.numel // align) * align
    buckets = _pack(matrices, pieces, capacity)
    return Segment(
        index, offset, weight_dtype, ring_dtype, max_steps, n_groups, tuple(matrices), buckets, keeps_steps, predicted
    )


def _pack(matrices: list[Matrix], pieces: list[Piece], capacity: int) -> tuple[Bucket, ...]:
    buckets: list[Bucket] = []
    held: list[Piece] = []

    def stop_of(piece: Piece) -> int:
        return piece.offset + (piece.row_stop - piece.row_start) * matrices[piece.matrix].cols

    for piece in pieces:
        if held and stop_of(piece) - held[0].offset > capacity:
            buckets.append(Bucket(len(buckets), held[0].offset, stop_of(held[-1]), tuple(held)))
            held = []
        held.append(piece)
    if held:
        buckets.append(Bucket(len(buckets), held[0].offset, stop_of(held[-1]), tuple(held)))
    return tuple(buckets)
