"""Results in the place of their gradients: the bits that they have elsewhere, whatever threads, cuts and library."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.feeding import STEPS, encode, make_segment
from tests.worker.test_cpu_pass import (
    SHAPES,
    channel_steps,
    gradients,
    run_pass,
    same,
    state,
    unwritten,
)
from zenflow.cpu_pass import Arrays, Plan, make_lanes, plan_update
from zenflow.geometry import ITEM_BYTES
from zenflow.ring import SegmentMemory
from zenflow.ring_layout import bytes_of, sizes_of
from zenflow.worker_settings import WorkerSettings

KINDS = [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float16"), ("float32", "float32")]


def in_place(library, rows, cols, dim, grad_dtype, out_dtype, lane, prediction, counted, elsewhere, **kinds):
    """The pass with the gradient in one lane of two, and its result there or elsewhere; the other lane, too."""
    numel, item = rows * cols, ITEM_BYTES[grad_dtype]
    ring = encode(np.concatenate([gradients(rows, cols, grad_dtype, 2).ravel(), np.zeros(64)]).astype("f4"), grad_dtype)
    lanes = make_lanes([lane * numel * item], [1.0], [1.0])
    plan = Plan(plan_update(STEPS, channel_steps(rows, cols, dim), "linear"), lanes, prediction) if counted else None
    bits = np.float32 if out_dtype == "float32" else np.uint16
    out = unwritten(numel, out_dtype) if elsewhere else ring.view(bits)[lane * numel : (lane + 1) * numel]
    other = (lane ^ 1) * numel * item
    kept = ring[other : other + numel * item].copy()
    arrays = Arrays(*state(rows, cols), ring, out, grad_dtype, out_dtype)
    found = run_pass(library, arrays, rows, cols, dim, plan, **kinds)
    np.testing.assert_array_equal(ring[other : other + numel * item], kept, "the other lane")
    return found


@pytest.mark.parametrize("counted", [True, False], ids=["counted", "nothing-counted"])
@pytest.mark.parametrize("prediction", [0.0, 0.7])
@pytest.mark.parametrize("grad_dtype, out_dtype", KINDS)
def test_a_result_in_place_is_that_of_a_place_of_its_own(library, grad_dtype, out_dtype, prediction, counted):
    for number, (rows, cols) in enumerate(SHAPES):
        dim, lane = ("column", "row")[number % 2], number // 2 % 2
        given = rows, cols, dim, grad_dtype, out_dtype, lane, prediction, counted
        expected = in_place(library, *given, elsewhere=True)
        for chosen, threads, cuts in ((library, 1, ()), (library, 5, ()), (library, 2, (rows // 2,)), (None, 1, ())):
            cuts = cuts if rows > 1 else ()
            found = in_place(chosen, *given, elsewhere=False, threads=threads, cuts=cuts, apart=bool(cuts))
            same(found, expected, f"{rows} x {cols}, {threads} threads, {chosen}")


@pytest.mark.parametrize("native", ["1", "0"], ids=["compiled", "torch"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_lanes_take_gradients_and_results_in_turn(trainer, monkeypatch, channel_dim, native):
    """With and without predictions, as many lanes as shadows; the fourth window's results are shown at once, and a
    matrix has windows without a counted step, whose gradient must not be shown."""
    monkeypatch.setenv("ZENFLOW_NATIVE", native)
    segments = [
        make_segment(
            2 * index + predicted, weight_dtype=out, ring_dtype=grad, predicted=predicted, channel_dim=channel_dim,
            bucket_bytes=700,
        )
        for index, (grad, out) in enumerate(KINDS)
        for predicted in (False, True)
    ]  # fmt: skip
    assert [segment.in_place for segment in segments] == [True] * 6 + [False, True]
    t = trainer(*segments, settings=WorkerSettings(weight_prediction=0.7))
    t.run_predicted()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_of_predictions_each_turns_lane_is_its_shadow(dtype):
    """And nothing else: one lane is written while the other keeps what is visible."""
    made = SegmentMemory.create(make_segment(weight_dtype=dtype, ring_dtype=dtype, predicted=True))
    numel, item = made.segment.numel, 4 if dtype == "float32" else 2
    assert made.ring.nbytes == made.shadow.nbytes == 2 * numel * item and len(made.fds()) == 2
    for turn in (0, 1):
        made.shadow_of(turn)[:] = turn + 1
        lane = made.ring[made.segment.lane(turn, 0) * numel * item :][: numel * item]
        assert lane.ctypes.data == made.shadow_of(turn).ctypes.data and lane.ctypes.data % 64 == 0
    assert (made.shadow_of(0) == 1).all() and (made.shadow_of(1) == 2).all()
    made.close()


@pytest.mark.parametrize(
    "weight, ring, kinds, own",
    [
        ("bfloat16", "bfloat16", {}, 2), ("float16", "bfloat16", {}, 2), ("bfloat16", "float32", {}, 6),
        ("float32", "float32", {}, 4), ("float32", "bfloat16", {}, 2), ("bfloat16", "bfloat16", {"predicted": True}, 4),
        ("bfloat16", "float32", {"predicted": True}, 8), ("float32", "float32", {"predicted": True}, 8),
        ("float32", "bfloat16", {"predicted": True}, 10), ("bfloat16", "bfloat16", {"keeps_steps": True}, 18),
        ("bfloat16", "bfloat16", {"keeps_steps": True, "predicted": True}, 20),
    ],
)  # fmt: skip
def test_what_ring_and_shadow_take_of_the_host(weight, ring, kinds, own):
    """Bytes a parameter besides the 12 of master and moments: the state's arena alone grows with anything else."""
    shapes = ((512, 1024, 0),)
    made = make_segment(shapes=shapes, weight_dtype=weight, ring_dtype=ring, **kinds)
    sizes, offsets = sizes_of(made)
    assert sum(sizes) - sizes[1] - offsets["ring"] == own * 512 * 1024
    assert 0 <= sizes[1] - 12 * 512 * 1024 < 32768
    assert bytes_of(made) == sum(sizes)
