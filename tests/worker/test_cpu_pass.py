"""The compiled pass and the torch fallback: the same bits, whatever the dtype, shape, threads and cut (B1, B10, I6)."""

from __future__ import annotations

import platform

import numpy as np
import pytest
import torch

from tests.worker.feeding import MIXED_STEPS, STEPS, SimulatedMatrix, encode, quantize, to_bits
from zenflow import native
from zenflow.cpu_pass import LARGEST, Arrays, Plan, SegmentPass, make_lanes, plan_replay, plan_update
from zenflow.geometry import ITEM_BYTES, Matrix, Piece

SHAPES = [
    *((1, 1), (7, 1), (1, 7), (8, 1), (1, 63), (63, 1), (41, 25), (3, 1025), (1025, 3), (257, 259), (2, 40_009)),
]
ONE_LANE = make_lanes([0], [1.0], [1.0])
RULES = ["accumulate", "replay"]


def awkward(rows, cols, seed=0):
    """Normal numbers with subnormal, signed zero, tiny and large ones among them."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(rows * cols, dtype=np.float32)
    special = np.array([0.0, -0.0, 1e-45, -3e-39, 1e-20, 1e18, 65504, 65520, 6.1e-5, 5.9e-8, 2.98e-8], dtype=np.float32)
    places = random.random(rows * cols) < 0.3
    values[places] = random.choice(special, places.sum())
    return values


def state(rows, cols):
    """master, exp_avg, exp_avg_sq after some updates."""
    return [awkward(rows, cols, 1), awkward(rows, cols, 2) * np.float32(0.1), awkward(rows, cols, 3) ** 2]


def gradients(rows, cols, dtype, count):
    """Numbers that the dtype holds, `[count, rows, cols]`."""
    with np.errstate(over="ignore"):
        grads = quantize(awkward(rows * count, cols, 4), dtype)
    grads[np.isinf(grads)] = 1
    return grads.reshape(count, rows, cols)


def channel_steps(rows, cols, dim, uniform=False):
    channels = cols if dim == "column" else rows
    return np.full(channels, 41, np.int32) if uniform else np.arange(channels, dtype=np.int32) * 5


def cut_pieces(rows, cols, cuts=()):
    edges = zip((0, *cuts), (*cuts, rows), strict=True)
    return [Piece(0, start, stop, start * cols, stop == rows) for start, stop in edges]


def unwritten(count, out_dtype):
    """Room for so many rounded weights."""
    if out_dtype is None:
        return None
    bits = np.full(count, 0xAAAAAAAA, dtype=np.uint32)
    return bits.view(np.float32) if out_dtype == "float32" else bits.astype(np.uint16)


def run_pass(library, arrays, rows, cols, dim, plan, threads=1, cuts=(), apart=False):
    """The pass over one matrix, its pieces in one bucket, or in one each; bits of all that it writes."""
    pieces = cut_pieces(rows, cols, cuts)
    buckets = [[piece] for piece in pieces] if apart else [pieces]
    work = SegmentPass(arrays, [Matrix(rows, cols, dim, 0, 0, 0)], buckets, threads=threads, library=library)
    work.set_plan(0, plan)
    for bucket in range(len(buckets)):
        work.run(bucket)
    written = [x.view(np.uint32) for x in (arrays.master, arrays.exp_avg, arrays.exp_avg_sq)]
    return written if arrays.out is None else [*written, arrays.out.view(f"u{arrays.out.itemsize}")]


def updated(library, rows, cols, dim, grad_dtype, out_dtype, uniform=False, prediction=0.0, **kinds):
    """`run_pass` with a window's sum in a ring of one lane; `uniform`: all channels have one t, told as such."""
    t = channel_steps(rows, cols, dim, uniform)
    ring = encode(gradients(rows, cols, grad_dtype, 1), grad_dtype)
    plan = Plan(plan_update(STEPS, t[:1] if uniform else t, "linear"), ONE_LANE, prediction)
    arrays = Arrays(*state(rows, cols), ring, unwritten(rows * cols, out_dtype), grad_dtype, out_dtype)
    return run_pass(library, arrays, rows, cols, dim, plan, **kinds)


def simulated(rows, cols, dim, out_dtype, uniform, update, prediction=0.0):
    """What the same must be, by numpy: `update` is called with the matrix."""
    matrix = SimulatedMatrix(Matrix(rows, cols, dim, 0, 0, 0), "float32", np.zeros((rows, cols), np.float32))
    matrix.master, matrix.exp_avg, matrix.exp_avg_sq = (x.reshape(rows, cols) for x in state(rows, cols))
    matrix.t[:] = channel_steps(rows, cols, dim, uniform)
    matrix.shown, old = [matrix.master], matrix.master
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        update(matrix)
        matrix.show(old, prediction)
        results = [x.ravel().view(np.uint32) for x in (matrix.master, matrix.exp_avg, matrix.exp_avg_sq)]
        return results + ([] if out_dtype is None else [to_bits(matrix.shown[0].ravel(), out_dtype)])


def same(found, expected, message=""):
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, wanted, err_msg=message)


@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float16"], ids=str)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", ["column", "row"])
def test_both_passes_equal_the_simulation(library, dim, grad_dtype, out_dtype):
    for number, (rows, cols) in enumerate(SHAPES):
        uniform = bool(number % 2)
        total = gradients(rows, cols, grad_dtype, 1)[0]
        expected = simulated(
            rows,
            cols,
            dim,
            out_dtype,
            uniform,
            lambda matrix: matrix.window(STEPS, total, "linear"),  # noqa: B023
        )
        for chosen, threads in ((library, 1), (library, 2), (library, 5), (None, 1)):
            found = updated(chosen, rows, cols, dim, grad_dtype, out_dtype, uniform, threads=threads)
            same(found, expected, f"{rows} x {cols}, {threads} threads, {chosen}")


@pytest.mark.parametrize("out_dtype", [None, "bfloat16"], ids=str)
@pytest.mark.parametrize("grad_dtype, lanes", [("float32", 1), ("bfloat16", 1), ("float32", 3), ("bfloat16", 3)])
def test_a_sum_that_overflows_moves_no_weight_as_its_exact_mean_would(library, grad_dtype, lanes, out_dtype):
    """Three gradients of 3e38, or their sum in the ring, which is infinite; their neighbours notice nothing."""
    rows, cols, places = 5, 7, [3, 20]
    grads = gradients(rows, cols, grad_dtype, lanes).reshape(lanes, -1)
    results = []
    for value in (3e38 if lanes > 1 else np.inf, 2e38, 0.0):
        grads[:, places[0]], grads[:, places[1]] = quantize(np.array([value, -value], dtype=np.float32), grad_dtype)
        ring = encode(grads, grad_dtype)
        offsets = [lane * rows * cols * ITEM_BYTES[grad_dtype] for lane in range(lanes)]
        plan = Plan(
            plan_update(STEPS, channel_steps(rows, cols, "column"), "linear"),
            make_lanes(offsets, [1.0] * lanes, [1.0] * lanes),
        )
        for chosen in (library, None):
            out = None if out_dtype is None else np.zeros(rows * cols, dtype=np.uint16)
            arrays = Arrays(*state(rows, cols), ring, out, grad_dtype, out_dtype)
            results.append(run_pass(chosen, arrays, rows, cols, "column", plan))
    overflowed, in_torch, exact, _, zero, _ = results
    same(overflowed, in_torch)
    master, exp_avg, exp_avg_sq = (array.view(np.float32) for array in overflowed[:3])
    assert np.isfinite(master).all() and np.isfinite(exp_avg).all()
    assert np.isinf(exp_avg_sq[places]).all() and (exp_avg[places] * [1, -1] > 1e36).all()
    if lanes == 1:  # a sum of 2e38 has a mean that no fp32 sum overflows
        same([overflowed[0], overflowed[2]], [exact[0], exact[2]])
    decayed = (state(rows, cols)[0] * plan.update.constants[5])[places]
    np.testing.assert_array_equal(master[places], decayed)
    others = np.setdiff1d(np.arange(rows * cols), places)
    same([array[others] for array in overflowed], [array[others] for array in zero])


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("prediction", [0.3, 1e-50], ids=str)
def test_predictions_equal_the_simulation_and_stay_out_of_the_masters(library, prediction, out_dtype):
    """With a factor that fp32 does not hold, so that its rounding shows, and one that is 0 in fp32."""
    for number, (rows, cols) in enumerate(SHAPES):
        dim, uniform = ("row", "column")[number % 2], number % 3 == 0
        total = gradients(rows, cols, "bfloat16", 1)[0]
        expected = simulated(
            rows, cols, dim, out_dtype, uniform,
            lambda matrix: matrix.window(STEPS, total, "linear"),  # noqa: B023
            prediction,
        )  # fmt: skip
        plain = updated(library, rows, cols, dim, "bfloat16", out_dtype, uniform)
        same(expected[:3], plain[:3])
        assert rows * cols < 100 or prediction < 0.1 or not np.array_equal(expected[3], plain[3])
        for chosen, threads, cuts in ((library, 1, ()), (library, 3, (rows // 2,)), (None, 1, (rows // 2,))):
            kinds = {"prediction": prediction, "threads": threads, "cuts": cuts}
            found = updated(chosen, rows, cols, dim, "bfloat16", out_dtype, uniform, **kinds)
            same(found, expected, f"{rows} x {cols}, {threads} threads, {chosen}")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_what_replay_predicts_is_the_change_of_the_whole_window(library, compiled):
    rows, cols, item = 41, 1025, 41 * 1025 * 2
    t = channel_steps(rows, cols, "column")
    lanes = make_lanes([0, item, 2 * item], np.ones(3), np.ones(3))
    grads, arrays = lane_arrays(rows, cols, "bfloat16", "float32", [0, 1, 2], 3)
    plan = Plan(plan_replay(MIXED_STEPS, t), lanes, 1.5)
    found = run_pass(library if compiled else None, arrays, rows, cols, "column", plan)
    expected = simulated(
        rows, cols, "column", "float32", False, lambda matrix: matrix.replay(MIXED_STEPS, list(grads)), 1.5
    )
    same(found, expected)


def lane_arrays(rows, cols, grad_dtype, out_dtype, counted, n_lanes):
    """A ring with gradients in the lanes `counted` and NaN in the others."""
    lanes = np.full((n_lanes, rows, cols), np.nan, dtype=np.float32)
    lanes[counted] = gradients(rows, cols, grad_dtype, len(counted))
    out = unwritten(rows * cols, out_dtype)
    return lanes, Arrays(*state(rows, cols), encode(lanes, grad_dtype), out, grad_dtype, out_dtype)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dim", ["column", "row"])
def test_lanes_equal_the_simulation_and_uncounted_ones_are_not_read(library, dim, grad_dtype, rule):
    """Scale factors whose products are inexact, so that the order of both roundings shows."""
    inv_scale, clip = np.array([1 / 3, 0.7, 1], np.float32), np.array([0.1, 1, 1 / 7], np.float32)
    for number, (rows, cols) in enumerate(SHAPES):
        uniform, item, counted = bool(number % 2), rows * cols * ITEM_BYTES[grad_dtype], [1, 3, 4][: 1 + number % 3]
        n, out_dtype = len(counted), (None, "bfloat16", "float16")[number % 3]
        t, steps = channel_steps(rows, cols, dim, uniform), MIXED_STEPS[:n]
        t = t[:1] if uniform else t
        update = plan_replay(steps, t) if rule == "replay" else plan_update(steps, t, "linear")
        plan = Plan(update, make_lanes([item * lane for lane in counted], inv_scale[:n], clip[:n]))

        def expect(matrix, lanes, counted=counted, steps=steps):
            effective = [(lanes[lane] * inv_scale[i]) * clip[i] for i, lane in enumerate(counted)]
            if rule == "replay":
                matrix.replay(steps, effective)
            else:
                matrix.window(steps, np.cumsum(effective, axis=0, dtype=np.float32)[-1], "linear")

        lanes, _ = lane_arrays(rows, cols, grad_dtype, out_dtype, counted, 6)
        expected = simulated(rows, cols, dim, out_dtype, uniform, lambda m: expect(m, lanes))  # noqa: B023
        for chosen, threads, cuts in ((library, 1, ()), (library, 3, (rows // 2,)), (None, 1, (rows // 2,))):
            _, arrays = lane_arrays(rows, cols, grad_dtype, out_dtype, counted, 6)
            found = run_pass(chosen, arrays, rows, cols, dim, plan, threads, cuts)
            same(found, expected, f"{rows} x {cols}, {threads} threads, {chosen}")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("dim", ["column", "row"])
def test_cuts_and_threads_change_no_bit(library, dim, compiled):
    chosen = library if compiled else None
    for rows, cols in ((41, 25), (103, 1025)):
        whole = updated(chosen, rows, cols, dim, "bfloat16", "bfloat16")
        for cuts in ((1,), (13, 40)):
            for apart, threads in ((True, 2), (False, 1), (False, 2), (False, 7)):
                same(
                    updated(chosen, rows, cols, dim, "bfloat16", "bfloat16", threads=threads, cuts=cuts, apart=apart),
                    whole,
                )


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("offset", [0, 1, 5, 31, 32])
def test_nothing_is_written_outside_the_piece_wherever_out_starts(library, offset, out_dtype):
    """Streamed stores need whole cache lines: `offset` elements past one, the bits are the same."""
    rows, cols, edge = 19, 2570, 64
    arrays = [np.full(rows * cols + 2 * edge, 7, dtype=np.float32) for _ in range(3)]
    room = unwritten(rows * cols + 4 * edge, out_dtype)
    start = -room.ctypes.data % 64 // room.itemsize + edge + offset
    inside, out_inside = slice(edge, edge + rows * cols), slice(start, start + rows * cols)
    for x, values in zip(arrays, state(rows, cols), strict=True):
        x[inside] = values
    ring = encode(gradients(rows, cols, "bfloat16", 1), "bfloat16")
    plan = Plan(plan_update(STEPS, np.arange(cols, dtype=np.int32) * 5, "linear"), ONE_LANE, 0.5)
    work = Arrays(*(x[inside] for x in arrays), ring, room[out_inside], "bfloat16", out_dtype)
    found = run_pass(library, work, rows, cols, "column", plan, threads=2)
    same(found, updated(None, rows, cols, "column", "bfloat16", out_dtype, prediction=0.5))
    for x in arrays:
        assert (x[:edge] == 7).all() and (x[-edge:] == 7).all()
    bits = room.view(np.uint16)
    before, after = (place * room.itemsize // 2 for place in (start, start + rows * cols))
    assert (bits[:before] == 0xAAAA).all() and (bits[after:] == 0xAAAA).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
@pytest.mark.parametrize(
    "flags",
    [["-march=x86-64"], ["-march=x86-64", "-U__SSE2__"], ["-march=native", "-mno-avx512f"]],
    ids=["128-bit", "unstreamed", "256-bit"],
)
def test_every_way_to_stream_gives_the_same_bits(library, monkeypatch, tmp_path, flags):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, *flags))
    other = native.Native(native.build(tmp_path))
    assert other.path != library.path
    for out_dtype in ("bfloat16", "float16", "float32"):
        for rows, cols in ((63, 1), (103, 1025)):
            shape = rows, cols, "row", "float16", out_dtype
            same(updated(other, *shape, threads=2), updated(library, *shape))


def rounded(library, values, dtype):
    """The masters as a window without a counted step shows them."""
    out = unwritten(values.size, dtype)
    arrays = Arrays(values, values, values, np.zeros(0, np.uint8), out, "float32", dtype)
    run_pass(library, arrays, 1, values.size, "column", None, threads=2)
    return out


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_equals_torch_on_every_upper_half(library, dtype):
    """All 2^16 upper halves with lower halves at, below and above the ties of both types."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    values = (upper | np.array(lower, dtype=np.uint32)).ravel().view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    number = ~expected.isnan()
    for chosen in (library, None):
        out = rounded(chosen, values, dtype)
        found = torch.from_numpy(out).view(expected.dtype)
        assert torch.equal(found.isnan(), ~number)
        integer = getattr(torch, f"int{8 * out.itemsize}")
        assert torch.equal(found.view(integer)[number], expected.view(integer)[number])
        assert len(np.unique(out.view(f"u{out.itemsize}")[~number.numpy()])) == 1, "one NaN for all"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_16_bit_gradient_is_read_exactly(library, dtype):
    """With beta1 = 0 and a first moment of -0, the new one is the gradient: subnormals and signed zeros; infinities are
    the largest numbers."""
    words = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(words).view(getattr(torch, dtype)).float().clamp(-LARGEST, LARGEST).numpy()
    number = ~np.isnan(expected)
    update = plan_replay(np.array([[1e-3, 0.0, 0.99, 1e-8, 0.0]]), np.zeros(1, np.int32))
    for chosen in (library, None):
        master, first, second = (np.full(words.size, fill, dtype=np.float32) for fill in (1, -0.0, 1))
        arrays = Arrays(master, first, second, words.view(np.uint8), None, dtype, None)
        run_pass(chosen, arrays, 1, words.size, "column", Plan(update, ONE_LANE))
        np.testing.assert_array_equal(first.view(np.uint32)[number], expected.view(np.uint32)[number])
        assert np.isnan(first[~number]).all()


def test_replay_is_one_update_after_another(library):
    """n updates in one pass, with n sets of scalars, are n passes with one each."""
    rows, cols, item = 41, 1025, 41 * 1025 * 2
    t, clip = channel_steps(rows, cols, "row"), np.array([1, 0.3, 0.9], dtype=np.float32)
    _, together = lane_arrays(rows, cols, "bfloat16", "bfloat16", [0, 1, 2], 3)
    _, apart = lane_arrays(rows, cols, "bfloat16", "bfloat16", [0, 1, 2], 3)
    lanes = make_lanes([0, item, 2 * item], np.ones(3), clip)
    found = run_pass(library, together, rows, cols, "row", Plan(plan_replay(MIXED_STEPS, t), lanes))
    for step in range(3):
        plan = Plan(plan_update(MIXED_STEPS[step : step + 1], t + step, "none"), lanes[step : step + 1])
        expected = run_pass(library, apart, rows, cols, "row", plan)
    same(found, expected)


def test_zero_gradients_under_linear_decay_like_every_step(library):
    """C10: a thousand steps of decay in 250 windows, factor e^-0.1, on the fp32 master."""
    arrays = Arrays(
        np.ones(64, dtype=np.float32), *(np.zeros(64, dtype=np.float32) for _ in range(2)), np.zeros(256, np.uint8),
        None, "float32", None,
    )  # fmt: skip
    steps = np.array([[1e-2, 0.9, 0.999, 1e-8, 0.01]] * 4)
    for window in range(250):
        update = plan_update(steps, np.full(64, window, np.int32), "linear")
        run_pass(library, arrays, 1, 64, "column", Plan(update, ONE_LANE))
    master = arrays.master
    np.testing.assert_allclose(master, np.exp(-0.1), rtol=2e-5)
