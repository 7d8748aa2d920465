"""The factors of a window's update, by hand: of the mean under `accumulate`, of each step under `replay`."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.feeding import MIXED_STEPS, STEPS
from zenflow.cpu_pass import plan_replay, plan_update


def test_factors_of_replay():
    update = plan_replay(MIXED_STEPS, np.array([0, 7], dtype=np.int32))
    assert (update.step_size.shape, update.denom_scale.shape, update.constants.shape) == ((3, 2), (3, 2), (3, 7))
    for step, (lr, beta1, beta2, eps, rate) in enumerate(MIXED_STEPS.tolist()):
        first = np.array([1 / (1 - beta1 ** (t + step + 1)) for t in (0, 7)]).astype(np.float32)
        second = np.array([1 / (1 - beta2 ** (t + step + 1)) ** 0.5 for t in (0, 7)]).astype(np.float32)
        np.testing.assert_array_equal(update.step_size[step], np.float32(lr) * first)
        np.testing.assert_array_equal(update.denom_scale[step], second)
        expected = np.array([beta1, 1 - beta1, beta2, 1 - beta2, eps, 1 - lr * rate, 1]).astype(np.float32)
        np.testing.assert_array_equal(update.constants[step], expected)


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
