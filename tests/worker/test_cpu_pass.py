"""The compiled pass and the torch fallback: the same bits, whatever the dtype, shape, threads and cut (B1, B10, I6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.worker.feeding import SimulatedMatrix, to_bits
from zenflow import native
from zenflow.cpu_pass import plan_update, refresh, update_piece
from zenflow.geometry import Matrix

SHAPES = [(1, 1), (7, 1), (1, 7), (8, 1), (1, 15), (41, 25), (3, 1025), (1000, 3), (257, 259), (2, 40_009), (0, 5)]
STEPS = np.array([[1e-2, 0.9, 0.99, 1e-8, 0.1], [3e-3, 0.9, 0.99, 1e-8, 0.1], [7e-3, 0.9, 0.99, 1e-8, 0.1]])


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


def encode(values, dtype):
    return to_bits(values, "bfloat16") if dtype == "bfloat16" else values


def updated(library, rows, cols, dim, grad_dtype, out_dtype, threads=1, cuts=()):
    """Bits of everything that the pass writes, when the rows are cut at `cuts`."""
    by_column = dim == "column"
    steps = np.arange(cols if by_column else rows, dtype=np.int32) * 5
    arrays = [*state(rows, cols), encode(awkward(rows, cols), grad_dtype)]
    out = None if out_dtype is None else np.full(rows * cols, 0xAAAA, dtype=np.uint16)
    for start, stop in zip((0, *cuts), (*cuts, rows), strict=True):
        span = slice(start * cols, stop * cols)
        update = plan_update(STEPS, steps if by_column else steps[start:stop], "linear")
        update_piece(
            *(x[span] for x in arrays), None if out is None else out[span], update,
            rows=stop - start, cols=cols, by_column=by_column, out_dtype=out_dtype, threads=threads, library=library,
        )  # fmt: skip
    return [x.view(np.uint32) for x in arrays[:3]] + ([] if out is None else [out])


def simulated(rows, cols, dim, grad_dtype, out_dtype):
    matrix = SimulatedMatrix(Matrix(rows, cols, dim, 0, 0, 0), "float32", np.zeros((rows, cols), np.float32))
    matrix.master, matrix.exp_avg, matrix.exp_avg_sq = (x.reshape(rows, cols) for x in state(rows, cols))
    matrix.t[:] = np.arange(len(matrix.t)) * 5
    grad = awkward(rows, cols)
    if grad_dtype == "bfloat16":
        grad = (encode(grad, "bfloat16").astype(np.uint32) << 16).view(np.float32)
    matrix.window(STEPS, grad.reshape(rows, cols), "linear")
    results = [x.ravel().view(np.uint32) for x in (matrix.master, matrix.exp_avg, matrix.exp_avg_sq)]
    return results + ([] if out_dtype is None else [to_bits(matrix.master.ravel(), out_dtype)])


@pytest.mark.parametrize("out_dtype", [None, "bfloat16", "float16"], ids=str)
@pytest.mark.parametrize("grad_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dim", ["column", "row"])
def test_both_passes_equal_the_simulation(library, dim, grad_dtype, out_dtype):
    for rows, cols in SHAPES:
        with np.errstate(over="ignore", invalid="ignore"):
            expected = simulated(rows, cols, dim, grad_dtype, out_dtype)
        for chosen, threads in ((library, 1), (library, 2), (None, 1)):
            found = updated(chosen, rows, cols, dim, grad_dtype, out_dtype, threads)
            for got, wanted in zip(found, expected, strict=True):
                np.testing.assert_array_equal(got, wanted, err_msg=f"{rows} x {cols}, {threads} threads, {chosen}")


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
@pytest.mark.parametrize("dim", ["column", "row"])
def test_cuts_change_no_bit(library, dim, compiled):
    chosen = library if compiled else None
    for rows, cols in ((41, 25), (103, 1025)):
        whole = updated(chosen, rows, cols, dim, "bfloat16", "bfloat16")
        for cuts in ((1,), (13, 40)):
            found = updated(chosen, rows, cols, dim, "bfloat16", "bfloat16", 2, cuts)
            for got, wanted in zip(found, whole, strict=True):
                np.testing.assert_array_equal(got, wanted)


def test_nothing_is_written_outside_the_piece(library):
    rows, cols, edge = 19, 257, 64
    arrays = [np.full(rows * cols + 2 * edge, 7, dtype=np.float32) for _ in range(4)]
    out = np.full(rows * cols + 2 * edge, 0xAAAA, dtype=np.uint16)
    inside = slice(edge, edge + rows * cols)
    update = plan_update(STEPS, np.zeros(cols, np.int32), "linear")
    update_piece(
        *(x[inside] for x in arrays), out[inside], update,
        rows=rows, cols=cols, by_column=True, out_dtype="bfloat16", threads=2, library=library,
    )  # fmt: skip
    for x, canary in [*((x, 7) for x in arrays), (out, 0xAAAA)]:
        assert (x[:edge] == canary).all() and (x[-edge:] == canary).all()
    assert not (arrays[0][inside] == 7).any() and not (out[inside] == 0xAAAA).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_equals_torch_on_every_upper_half(library, dtype):
    """All 2^16 upper halves with lower halves at, below and above the ties of both types."""
    upper = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    lower = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    values = (upper | np.array(lower, dtype=np.uint32)).ravel().view(np.float32)
    expected = torch.from_numpy(values).to(getattr(torch, dtype))
    number = ~expected.isnan()
    for chosen in (library, None):
        out = np.zeros(values.size, dtype=np.uint16)
        refresh(values, out, dtype, 1, chosen)
        found = torch.from_numpy(out).view(expected.dtype)
        assert torch.equal(found.isnan(), ~number)
        assert torch.equal(found.view(torch.int16)[number], expected.view(torch.int16)[number])
        assert len(np.unique(out[~number.numpy()])) == 1, "one NaN for all"


@pytest.mark.parametrize(
    "scale, lr, decay",
    [
        ("linear", 7e-3 * 3, (1 - 1e-3) * (1 - 3e-4) * (1 - 7e-4)),
        ("none", 7e-3, 1 - 7e-4),
        (2.5, 7e-3 * 2.5, 1 - 7e-4),
    ],
    ids=str,
)
def test_factors_of_the_last_counted_step(scale, lr, decay):
    update = plan_update(STEPS, np.array([0, 1, 10**6], dtype=np.int32), scale)
    first = np.array([1 / (1 - 0.9), 1 / (1 - 0.9**2), 1]).astype(np.float32)
    second = np.array([1 / (1 - 0.99) ** 0.5, 1 / (1 - 0.99**2) ** 0.5, 1]).astype(np.float32)
    np.testing.assert_array_equal(update.step_size, np.float32(lr) * first)
    np.testing.assert_array_equal(update.denom_scale, second)
    expected = np.array([0.9, 1 - 0.9, 0.99, 1 - 0.99, 1e-8, decay, 3]).astype(np.float32)
    np.testing.assert_array_equal(update.constants, expected)


def test_zero_gradients_under_linear_decay_like_every_step(library):
    """C10: a thousand steps of decay in 250 windows, factor e^-0.1, on the fp32 master."""
    master, zeros = np.ones(64, dtype=np.float32), [np.zeros(64, dtype=np.float32) for _ in range(3)]
    steps = np.array([[1e-2, 0.9, 0.999, 1e-8, 0.01]] * 4)
    for window in range(250):
        update = plan_update(steps, np.full(64, window, np.int32), "linear")
        update_piece(
            master, *zeros, None, update,
            rows=1, cols=64, by_column=True, out_dtype=None, threads=1, library=library,
        )  # fmt: skip
    np.testing.assert_allclose(master, np.exp(-0.1), rtol=2e-5)


def test_switched_off(monkeypatch):
    native.load.cache_clear()
    monkeypatch.setenv("ZENFLOW_NATIVE", "0")
    try:
        assert native.load() is None
        word = np.array([5], dtype=np.uint64)
        native.store_release(word.ctypes.data, 1 << 63)
        assert native.load_acquire(word.ctypes.data) == int(word[0]) == 1 << 63
    finally:
        native.load.cache_clear()


def test_without_a_compiler_it_says_so_once(monkeypatch, caplog, tmp_path):
    native.load.cache_clear()
    monkeypatch.setenv("ZENFLOW_NATIVE", "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    try:
        with caplog.at_level("WARNING", logger="zenflow"):
            assert native.load() is None
            assert native.load() is None
        assert [record.message for record in caplog.records if "no C compiler" in record.message] == [
            caplog.records[0].message
        ]
    finally:
        native.load.cache_clear()


@pytest.mark.parametrize("missing", ["switched-off", "compiler"])
def test_processors_that_do_not_order_plain_accesses_need_the_compiled_pass(monkeypatch, missing, tmp_path):
    native.load.cache_clear()
    monkeypatch.setattr(native.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("ZENFLOW_NATIVE", "0" if missing == "switched-off" else "1")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    try:
        with pytest.raises(RuntimeError, match=r"needs a C compiler on this machine \(aarch64\)"):
            native.load()
    finally:
        native.load.cache_clear()


def test_the_cache_is_private_and_the_build_atomic(library, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = native.cache_folder()
    assert folder == tmp_path / "zenflow" and folder.stat().st_mode & 0o077 == 0
    path = native.build()
    assert list(folder.iterdir()) == [path]
    stamp = path.stat().st_mtime_ns
    assert native.build() == path and path.stat().st_mtime_ns == stamp
    folder.chmod(0o777)
    assert native.cache_folder() != folder, "a folder that others can write must not be used"


def test_a_failed_build_leaves_nothing(library, monkeypatch, tmp_path):
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "--no-such-flag"))
    with pytest.raises(native.subprocess.CalledProcessError):
        native.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_word_of_cc_is_run_and_makes_a_library_of_its_own(library, monkeypatch, tmp_path):
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$1" >> "{tmp_path}/log"\nexec "$@"\n')
    wrapper.chmod(0o755)
    cache = tmp_path / "cache"
    cache.mkdir()
    for words in ("cc", "cc -g"):
        monkeypatch.setenv("CC", f"'{wrapper}' {words}")
        native.build(cache)
    assert (tmp_path / "log").read_text() == "cc\ncc\n"
    assert len(list(cache.iterdir())) == 2


def test_a_cc_that_is_no_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "'gcc")
    with pytest.raises(OSError, match=r"CC is \"'gcc\", which is no shell command"):
        native.build(tmp_path)
