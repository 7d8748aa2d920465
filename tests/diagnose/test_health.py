"""What a loss may do, and what it may not."""

from __future__ import annotations

import math
import random

import pytest

from zenflow.diagnose.health import examine

GAUSS = random.Random(1).gauss
NOISE = [GAUSS(0, 1) for _ in range(100)]
FALLING = [4.0 - 0.02 * step + 0.05 * noise for step, noise in enumerate(NOISE)]


def test_a_falling_loss_is_healthy():
    health = examine(FALLING)
    assert health.falling and not health.faults and health.spikes == 0
    assert health.change == pytest.approx(-0.02 * 99, rel=0.02) and health.noise == pytest.approx(0.05, rel=0.3)
    assert health.first == pytest.approx(3.91, abs=0.05) and health.last == pytest.approx(2.11, abs=0.05)


def test_nothing_given_is_no_fault():
    health = examine([])
    assert not health.faults and not health.falling and health.first is None


def test_a_flat_loss_is_no_fault_and_not_falling():
    health = examine([2.0] * 7)
    assert not health.faults and not health.falling and health.spikes == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_loss_that_is_not_finite_is_a_fault(bad):
    health = examine([*FALLING[:50], bad, *FALLING[51:]])
    assert health.not_finite == 1 and health.faults == ("1 of 100 losses are not finite",)
    assert math.isfinite(health.first + health.last + health.change + health.noise)


def test_only_bad_losses():
    assert examine([math.nan] * 3).faults == ("3 of 3 losses are not finite",)


def test_a_rising_loss_is_a_fault_beyond_its_noise():
    (fault,) = examine(FALLING[::-1]).faults
    assert fault == "the loss rises by 2.01 over 100 steps"
    noisy = [2.0 + 0.002 * step + 0.5 * noise for step, noise in enumerate(NOISE)]
    assert not examine(noisy).faults


def test_spikes_are_counted_and_many_are_a_fault():
    few = list(FALLING)
    for step in (10, 20, 30):
        few[step] += 5
    assert examine(few).spikes == 3 and not examine(few).faults
    for step in (40, 50, 60):
        few[step] += 5
    assert examine(few).spikes == 6 and "6 of 100 losses stand" in examine(few).faults[0]


def test_a_fast_start_is_no_spike():
    health = examine([2.0 + 4.0 * 0.8**step + 0.01 * noise for step, noise in enumerate(NOISE)])
    assert health.spikes == 0 and not health.faults and health.falling


def test_skipped_steps_are_a_fault_beyond_a_share():
    assert not examine(FALLING, skipped_steps=5).faults
    assert examine(FALLING, skipped_steps=6).faults == ("6 steps had to be skipped for a gradient that was not finite",)
    assert examine([4.0, 3.0], skipped_steps=1).faults == (
        "1 step had to be skipped for a gradient that was not finite",
    )
