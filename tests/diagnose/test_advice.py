"""k and U from measured times, worked out by hand."""

from __future__ import annotations

import pytest

from tests.diagnose.making import PARAMETERS, measured
from zenflow.diagnose.advice import Advice, advise
from zenflow.diagnose.figures import Ceilings, Memory, summarise


def advice(card: float | None = 1e12, **settings) -> Advice:
    memory = None if card is None else Memory(peak=10**10, activations=6 * 10**9, card=int(card))
    return advise(summarise(measured(memory=memory, **settings)), PARAMETERS, memory_share=0.9)


@pytest.mark.parametrize(
    ("busy", "window"),
    # 0.9 * (busy + 0.08 s of copies) has to fit into U steps of 0.05 s.
    [(0.0, 2), (0.031, 2), (0.032, 4), (0.142, 4), (0.143, 8), (0.364, 8), (0.365, 16), (0.808, 16), (5.0, 16)],
)
def test_the_smallest_window_that_holds_the_work(busy, window):
    found = advice(seconds=0.1, stall=0.05, optimizer=0.01, busy=busy)
    assert (found.topk_ratio, found.update_interval, found.accumulate_on) == (0.1, window, "gpu")
    assert found.floor == pytest.approx(0.05) and found.work == pytest.approx(0.9 * (busy + 0.08))
    assert found.stall == pytest.approx(max(0.0, found.work / window - 0.05))


def test_without_work_one_step_is_enough():
    assert advice(stall=0.05, busy=0.04, moved=0.0).update_interval == 1


def test_a_stall_that_no_window_removes_is_told():
    found = advice(stall=0.05, busy=5.0)
    assert found.update_interval == 16 and found.stall == pytest.approx(0.9 * 5.08 / 16 - 0.05)


def test_k_falls_and_then_the_accumulator_leaves_until_it_fits():
    """The peak is 10 GB; k = 0.1 takes 1.2 GB, 0.05 0.6, 0.01 0.12, the accumulator 2 GB."""
    cards = {13.3e9: (0.1, "gpu"), 12.7e9: (0.05, "gpu"), 12.2e9: (0.01, "gpu"), 11.3e9: (0.1, "host")}
    cards |= {10.7e9: (0.05, "host"), 10.2e9: (0.01, "host"), 10e9: (0.01, "host")}
    for usable, expected in cards.items():
        found = advice(card=usable / 0.9, stall=0.05, busy=0.04)
        assert (found.topk_ratio, found.accumulate_on) == expected


def test_with_gradients_on_the_host_every_step_s_travel():
    """U 4: 4 * 0.04 s down, 0.9 * (0.04 s up + 0.04 s busy)."""
    found = advice(card=11.3e9 / 0.9, stall=0.05, busy=0.04)
    assert found.update_interval == 8 and found.work == pytest.approx(8 * 0.04 + 0.9 * 0.08)
    assert found.overrides.endswith("engine.accumulate_on=host")


def test_without_a_card_copies_are_not_known():
    found = advice(card=None, stall=0.05, busy=0.04, ceilings=Ceilings())
    assert not found.copies_known and found.work == pytest.approx(0.9 * 0.04)
    assert found.overrides == "engine=zenflow engine.topk_ratio=0.1 engine.update_interval=1"
