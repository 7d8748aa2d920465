"""Plans of a window: matrices with one t share theirs, t moves when a matrix ends."""

from __future__ import annotations

import numpy as np
import pytest

from tests.worker.feeding import GROUPS, MAX_STEPS, make_segment
from zenflow.planning import WindowPlans
from zenflow.ring import SegmentMemory, Slot
from zenflow.worker_settings import WorkerSettings

SHAPES = ((7, 63, 0), (1, 63, 0), (9, 5, 1), (5, 1025, 0), (7, 3, 0))


@pytest.fixture
def memory():
    made = SegmentMemory.create(make_segment(shapes=SHAPES, keeps_steps=True))
    yield made
    made.close()


def plans(memory, counted, turn=1, rule="accumulate"):
    hyper = np.full((MAX_STEPS, GROUPS, 5), (1e-3, 0.9, 0.99, 1e-8, 0.1))
    factors = np.arange(MAX_STEPS, dtype=np.float32)
    counted, places = np.array(counted, dtype=bool), np.arange(MAX_STEPS)
    slot = Slot(hyper, counted, clip=factors + 1, inv_scale=factors + 10, places=places, predict=False)
    spans = [slice(m.step_offset, m.step_offset + m.channels) for m in memory.segment.matrices]
    bounds = [np.array([extreme(memory.channel_step[span]) for span in spans]) for extreme in (np.min, np.max)]
    window = WindowPlans(memory, WorkerSettings(deferred_rule=rule), slot, turn, *bounds)
    return [window.plan(number) for number in range(len(SHAPES))]


def test_one_t_needs_one_factor_and_is_shared_by_group_presence_and_t(memory):
    counted = np.ones((MAX_STEPS, len(SHAPES)))
    counted[1, 3] = 0
    memory.channel_step[memory.segment.matrices[4].step_offset :] = 8
    found = plans(memory, counted)
    assert found[0] is found[1]
    assert len({id(plan) for plan in found}) == 4, "another group, another presence, another t"
    assert all(plan.update.step_size.size == 1 for plan in found)


def test_channels_with_their_own_t_get_their_own_factors(memory):
    memory.channel_step[3] = 5
    found = plans(memory, np.ones((MAX_STEPS, len(SHAPES))))
    assert [plan.update.step_size.size for plan in found] == [63, 1, 1, 1, 1]
    step_size = found[0].update.step_size
    assert step_size[3] != step_size[0] == found[1].update.step_size[0]


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("rule, advance", [("accumulate", 1), ("replay", 2)])
def test_lanes_are_those_of_the_counted_steps(memory, turn, rule, advance):
    counted = np.zeros((MAX_STEPS, len(SHAPES)))
    counted[[1, 3], 0] = 1
    found = plans(memory, counted, turn, rule)
    lane_bytes = 2 * memory.segment.numel
    assert found[0].lanes.tolist() == [
        ((turn * MAX_STEPS + 1) * lane_bytes, 11.0, 2.0),
        ((turn * MAX_STEPS + 3) * lane_bytes, 13.0, 4.0),
    ]
    assert found[0].advance == advance
    assert found[1:] == [None] * 4
