"""From measurements to figures, with sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.diagnose.making import measured
from zenflow.diagnose.figures import Ceilings, StepParts, summarise


def test_the_parts_of_a_step_add_up():
    figures = summarise(measured(seconds=0.1, data=0.02, stall=0.03, optimizer=0.01))
    parts = (figures.data, figures.compute, figures.optimizer, figures.stall)
    assert parts == pytest.approx((0.02, 0.04, 0.01, 0.03)) and sum(parts) == pytest.approx(figures.mean)
    assert (figures.data_share, figures.stall_share) == pytest.approx((0.2, 0.3))
    assert (figures.idle_share, figures.busy_share) == pytest.approx((0.5, 0.5))


def test_median_and_p95_are_of_the_steps_and_steady_ones_leave_the_data_out():
    steps = [StepParts(0.1, 0.0, 0.01)] * 9 + [StepParts(1.1, 1.0, 0.01)] * 2
    figures = summarise(replace(measured(), steps=steps))
    assert figures.median == pytest.approx(0.1) and figures.p95 == pytest.approx(1.1)
    assert figures.steady_p95 == pytest.approx(0.1)


def test_idle_times_are_those_of_single_steps():
    steps = [StepParts(0.1, 0.01, 0.05)] * 9 + [StepParts(1.1, 0.02, 0.9)]
    made = replace(measured(stall=0.0, steps=10), steps=steps)
    made = replace(made, offload=replace(made.offload, stalls=[0.04] * 9 + [0.8]))
    figures = summarise(made)
    assert (figures.idle_median, figures.idle_p95) == pytest.approx((0.05, 0.82))
    assert (figures.stall, figures.usual_stall) == pytest.approx((0.116, 0.04))
    assert summarise(replace(made, offload=replace(made.offload, stalls=[0.04] * 9))).idle_p95 is None
    assert summarise(measured(stall=None)).idle_median is None
    assert summarise(measured(stall=None, offloads=False, data=0.03)).idle_median == pytest.approx(0.03)


def test_cpu_bandwidth_and_traffic():
    figures = summarise(measured(seconds=0.1, stall=0.05, busy=0.4, moved=2e9))
    assert (figures.trainer_cpus, figures.worker_cpus) == pytest.approx((2, 8))
    assert figures.pass_bandwidth == pytest.approx(70e9) and figures.pass_share == pytest.approx(0.7)
    assert figures.achieved_bandwidth == pytest.approx(40e9)
    assert (figures.to_host, figures.to_device) == pytest.approx((0.04, 0.04))


def test_memory_is_sixteen_bytes_a_parameter_and_the_activations():
    assert summarise(measured()).adamw_bytes == 22_000_000_000


def test_what_cannot_be_had_is_none():
    figures = summarise(measured(stall=None, memory=None, ceilings=Ceilings(), worker_cpu=None))
    names = ("stall", "stall_share", "worker_cpus", "bytes_to_host", "achieved_bandwidth", "to_host", "worker_busy")
    assert [getattr(figures, name) for name in (*names, "pass_bandwidth", "peak", "adamw_bytes")] == [None] * 10


def test_a_worker_that_did_nothing_has_no_bandwidth():
    assert summarise(measured(busy=0.0)).pass_bandwidth is None
