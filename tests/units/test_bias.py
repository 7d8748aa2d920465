"""The one table of bias corrections that both halves read."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zenflow.bias import bias_table, saturation

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.0, 0.0), (0.0, 0.99), (0.95, 0.5), (0.999, 0.9999), (0.5, 0.999)]
IDS = [f"beta1={first}-beta2={second}" for first, second in BETAS]


@pytest.mark.parametrize(("beta1", "beta2"), BETAS, ids=IDS)
def test_factors_are_the_float64_formula_rounded_once(beta1: float, beta2: float) -> None:
    table = bias_table(beta1, beta2, 1000)
    steps = np.arange(1, len(table))
    first = [np.float32(1 / (1 - math.pow(beta1, int(t)))) for t in steps]
    second = [np.float32(1 / math.sqrt(1 - math.pow(beta2, int(t)))) for t in steps]
    assert table.dtype == np.float32
    np.testing.assert_array_equal(table[1:, 0], np.array(first))
    np.testing.assert_array_equal(table[1:, 1], np.array(second))


@pytest.mark.parametrize(("beta1", "beta2"), BETAS, ids=IDS)
def test_both_factors_are_exactly_one_where_the_table_saturates(beta1: float, beta2: float) -> None:
    last = max(saturation(beta1), saturation(beta2))
    table = bias_table(beta1, beta2, 10**9)
    assert len(table) == last + 1
    assert table[-1].tolist() == [1.0, 1.0]
    for t in (last, last + 1, 10 * last):
        assert np.float32(1 / (1 - beta1**t)) == 1
        assert np.float32(1 / math.sqrt(1 - beta2**t)) == 1


@pytest.mark.parametrize("highest_step", [0, 1, 2, 255, 256, 257, 1000, 4095, 4096, 100_000])
def test_clamped_lookup_is_right_for_every_step_up_to_the_bound(highest_step: int) -> None:
    beta1, beta2 = 0.9, 0.999
    table = bias_table(beta1, beta2, highest_step)
    assert len(table) >= 2
    for t in {1, 2, highest_step // 2, highest_step - 1, highest_step} - {0, -1}:
        first, second = table[min(t, len(table) - 1)]
        assert first == np.float32(1 / (1 - beta1**t))
        assert second == np.float32(1 / math.sqrt(1 - beta2**t))


def test_a_longer_table_begins_with_the_shorter_one() -> None:
    short, long = bias_table(0.9, 0.999, 10), bias_table(0.9, 0.999, 5000)
    assert len(long) > len(short)
    np.testing.assert_array_equal(long[: len(short)], short)


def test_few_tables_are_ever_made() -> None:
    """The bound grows by one every step of a run: only where a longer table is needed may one be computed."""
    tables: list[np.ndarray] = []
    for highest_step in range(1, 3000):
        table = bias_table(0.9, 0.98, highest_step)
        if not any(table is known for known in tables):
            tables.append(table)
    assert len(tables) <= 5


def test_the_table_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        bias_table(0.9, 0.98, 10)[1, 0] = 0.0


def test_row_zero_is_neutral() -> None:
    assert bias_table(0.9, 0.999, 1)[0].tolist() == [1.0, 1.0]
