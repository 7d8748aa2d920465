"""Where deferred elements live: every row in exactly one piece, every piece in exactly one bucket."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import pytest

from zenflow.geometry import ALIGN_BYTES, ITEM_BYTES, Segment, lay_out

SHAPES = {
    "one-element": [(1, 1)],
    "primes": [(7, 13), (31, 3), (1, 101), (101, 1)],
    "even": [(8, 8), (16, 4), (32, 32)],
    "huge-rows": [(3, 5000), (1, 9999), (2, 3)],
    "tall": [(5000, 3), (4099, 2)],
    "many": [(1 + i % 7, 1 + (i * 5) % 11) for i in range(60)],
    "large-between-small": [(2, 2), (257, 129), (2, 2), (3, 1)],
}
BUCKET_BYTES = [1, 256, 1024, 4096, 1 << 26]


def placed(shapes: list[tuple[int, int, int]], index: int = 0, **changes: Any) -> Segment:
    settings = {
        "channel_dim": "row", "weight_dtype": "bfloat16", "ring_dtype": "float32",
        "max_steps": 6, "n_groups": 1, "bucket_bytes": 64,
    }  # fmt: skip
    return lay_out(index, shapes, **settings | changes)


def laid_out(name: str, dtype: str, bucket_bytes: int, channel_dim: str = "column") -> Segment:
    shapes = [(rows, cols, number % 3) for number, (rows, cols) in enumerate(SHAPES[name])]
    kinds = {"channel_dim": channel_dim, "weight_dtype": dtype, "bucket_bytes": bucket_bytes}
    return placed(shapes, index=4, n_groups=3, **kinds)


@pytest.fixture(params=SHAPES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=BUCKET_BYTES, ids=lambda n: f"bucket={n}")
def bucket_bytes(request: pytest.FixtureRequest) -> int:
    return request.param


def test_matrices_are_aligned_in_order_and_disjoint(name: str, dtype: str) -> None:
    segment = laid_out(name, dtype, 1024)
    end = 0
    for matrix, (rows, cols) in zip(segment.matrices, SHAPES[name], strict=True):
        assert (matrix.rows, matrix.cols, matrix.numel) == (rows, cols, rows * cols)
        assert matrix.offset * ITEM_BYTES[dtype] % ALIGN_BYTES == 0
        assert end <= matrix.offset < end + ALIGN_BYTES // ITEM_BYTES[dtype]
        end = matrix.offset + matrix.numel
    assert segment.numel >= end
    assert segment.numel * ITEM_BYTES[dtype] % ALIGN_BYTES == 0
    assert [matrix.group for matrix in segment.matrices] == [number % 3 for number in range(len(SHAPES[name]))]


def test_pieces_cover_every_row_exactly_once(name: str, dtype: str, bucket_bytes: int) -> None:
    segment = laid_out(name, dtype, bucket_bytes)
    seen = [[0] * matrix.rows for matrix in segment.matrices]
    for bucket in segment.buckets:
        for piece in bucket.pieces:
            matrix = segment.matrices[piece.matrix]
            assert 0 <= piece.row_start < piece.row_stop <= matrix.rows
            assert piece.offset == matrix.offset + piece.row_start * matrix.cols
            for row in range(piece.row_start, piece.row_stop):
                seen[piece.matrix][row] += 1
    assert all(count == 1 for rows in seen for count in rows)


def test_the_last_piece_of_each_matrix_and_no_other_is_marked(name: str, dtype: str, bucket_bytes: int) -> None:
    segment = laid_out(name, dtype, bucket_bytes)
    pieces = [piece for bucket in segment.buckets for piece in bucket.pieces]
    for number, matrix in enumerate(segment.matrices):
        own = [piece for piece in pieces if piece.matrix == number]
        assert [piece.row_start for piece in own] == [0, *(piece.row_stop for piece in own[:-1])]
        assert [piece.last for piece in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].row_stop == matrix.rows


def test_buckets_are_ordered_disjoint_and_within_the_limit(name: str, dtype: str, bucket_bytes: int) -> None:
    segment = laid_out(name, dtype, bucket_bytes)
    item, end = ITEM_BYTES[dtype], 0
    assert [bucket.index for bucket in segment.buckets] == list(range(len(segment.buckets)))
    for bucket in segment.buckets:
        assert bucket.pieces
        assert end <= bucket.start < bucket.stop <= segment.numel
        end = bucket.stop
        first, last = bucket.pieces[0], bucket.pieces[-1]
        cols = segment.matrices[last.matrix].cols
        assert bucket.start == first.offset
        assert bucket.stop == last.offset + (last.row_stop - last.row_start) * cols
        one_row = len(bucket.pieces) == 1 and first.row_stop - first.row_start == 1
        assert (bucket.stop - bucket.start) * item <= bucket_bytes or one_row


def test_nothing_is_cut_where_one_bucket_holds_all(name: str, dtype: str) -> None:
    segment = laid_out(name, dtype, 1 << 30)
    assert len(segment.buckets) == 1
    assert len(segment.buckets[0].pieces) == len(SHAPES[name])


def test_bucket_size_moves_no_matrix(name: str, dtype: str) -> None:
    layouts = [laid_out(name, dtype, size) for size in BUCKET_BYTES]
    assert all(layout.matrices == layouts[0].matrices for layout in layouts)
    assert all(layout.numel == layouts[0].numel for layout in layouts)


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_step_counts_of_matrices_follow_one_another(name: str, channel_dim: str) -> None:
    segment = laid_out(name, "bfloat16", 256, channel_dim)
    expected = 0
    for matrix, (rows, cols) in zip(segment.matrices, SHAPES[name], strict=True):
        assert matrix.channels == (cols if channel_dim == "column" else rows)
        assert matrix.step_offset == expected
        expected += matrix.channels
    assert segment.n_channels == expected


@pytest.mark.parametrize(
    "kinds, expected",
    [
        ({}, [0, 0, 0, 0]),
        ({"ring_dtype": "bfloat16"}, [0, 0, 0, 0]),
        ({"ring_dtype": "bfloat16", "predicted": True}, [0, 0, 1, 1]),
        ({"predicted": True}, [0, 0, 0, 0]),
        ({"keeps_steps": True}, [0, 5, 6, 11]),
        ({"keeps_steps": True, "ring_dtype": "bfloat16", "predicted": True}, [0, 5, 6, 11]),
    ],
    ids=str,
)
def test_a_window_and_a_step_have_a_lane(kinds: dict[str, Any], expected: list[int]) -> None:
    segment = placed([(3, 5, 0)], **kinds)
    assert segment.lanes == max(expected) + 1
    assert [segment.lane(turn, step) for turn, step in ((0, 0), (0, 5), (1, 0), (1, 5))] == expected


def test_windows_of_one_step_have_two_lanes_where_steps_are_kept() -> None:
    segment = placed([(3, 5, 0)], max_steps=1, keeps_steps=True, ring_dtype="bfloat16")
    assert segment.lanes == 2 and not segment.in_place


IN_PLACE = {
    "bf16": ({"ring_dtype": "bfloat16"}, True),
    "bf16-in-fp32": ({}, False),
    "fp16": ({"weight_dtype": "float16"}, False),
    "fp16-in-bf16": ({"weight_dtype": "float16", "ring_dtype": "bfloat16"}, True),
    "fp32": ({"weight_dtype": "float32"}, False),
    "steps": ({"ring_dtype": "bfloat16", "keeps_steps": True}, False),
    "predicted-bf16": ({"ring_dtype": "bfloat16", "predicted": True}, True),
    "predicted-fp32": ({"weight_dtype": "float32", "predicted": True}, True),
    "predicted-fp32-in-bf16": ({"weight_dtype": "float32", "ring_dtype": "bfloat16", "predicted": True}, False),
    "predicted-steps": ({"ring_dtype": "bfloat16", "keeps_steps": True, "predicted": True}, False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_result_takes_its_gradients_place_where_it_fits(name: str) -> None:
    """Where both are as large, the ring holds one window's sum, and there is something to be shown but the master."""
    kinds, expected = IN_PLACE[name]
    assert placed([(3, 5, 0)], **kinds).in_place == expected


@pytest.mark.parametrize("shape", [(0, 5, 0), (5, 0, 0)])
def test_empty_matrices_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        placed([shape])


def test_no_matrices_is_an_empty_segment() -> None:
    segment = placed([], max_steps=1)
    assert (segment.numel, segment.n_channels, segment.buckets) == (0, 0, ())


def test_more_than_two_to_the_31_elements() -> None:
    segment = placed([(3, 1 << 30, 0), (5, 7, 0)], channel_dim="column", bucket_bytes=1 << 26)
    assert [bucket.stop for bucket in segment.buckets[:3]] == [1 << 30, 1 << 31, 3 << 30]
    assert segment.matrices[1].offset == 3 << 30


def test_a_segment_travels_over_a_pipe() -> None:
    segment = laid_out("primes", "float16", 256)
    assert pickle.loads(pickle.dumps(segment)) == segment


def test_geometry_imports_without_torch() -> None:
    script = "import sys; from zenflow.geometry import lay_out; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0
