"""k and U from measured times, worked out by hand."""

from __future__ import annotations

import pytest

from tests.diagnose.making import PARAMETERS, measured
from zenflow.diagnose.advice import Advice, advise, host_need
from zenflow.diagnose.figures import Ceilings, HostMemory, Memory, summarise


def advice(card: float | None = 1e12, available: float | None = None, dtype: str = "bfloat16", **settings) -> Advice:
    """available: bytes of the host's memory that may be used."""
    memory = None if card is None else Memory(peak=10**10, activations=6 * 10**9, card=int(card))
    host = HostMemory({dtype: PARAMETERS}, None if available is None else int(available / 0.9))
    return advise(summarise(measured(memory=memory, **settings)), PARAMETERS, memory_share=0.9, host=host)


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


def test_an_accumulator_of_fp32_weights_takes_four_bytes_on_the_card():
    """k = 0.01 takes 0.12 GB, the accumulator 4 GB."""
    for usable, expected in ((14.2e9, "gpu"), (14.1e9, "host")):
        assert advice(card=usable / 0.9, dtype="float32", stall=0.05, busy=0.04).accumulate_on == expected


@pytest.mark.parametrize(
    ("window", "accumulate_on", "dtype", "each"),
    [
        (4, "gpu", "bfloat16", 16),
        (16, "gpu", "bfloat16", 16),
        (1, "host", "bfloat16", 16 + 4),
        (16, "host", "bfloat16", 16 + 4 * 16),
        (4, "gpu", "float32", 20),
        (4, "host", "float32", 12 + 8 + 8 * 4),
    ],
)
def test_host_memory_is_what_the_readme_says(window, accumulate_on, dtype, each):
    need = host_need(window, accumulate_on, {dtype: PARAMETERS})
    assert need.a_parameter == pytest.approx(each, rel=1e-5) and need.size == pytest.approx(each * 1e9, rel=1e-5)


def test_host_memory_of_two_dtypes_is_their_sum():
    need = host_need(4, "gpu", {"bfloat16": 3 * 10**8, "float32": 10**8})
    assert need.size == pytest.approx(6.8e9, rel=1e-5) and need.a_parameter == pytest.approx(17, rel=1e-5)


@pytest.mark.parametrize(
    ("available", "window", "longer"),
    # Gradients on the host: 16 + 4 U bytes a parameter, and a window's work asks for U = 8.
    [(None, 8, None), (48.1e9, 8, None), (47.9e9, 4, 8), (31.9e9, 2, 8), (20.1e9, 1, 8)],
)
def test_no_window_is_longer_than_the_host_has_memory_for(available, window, longer):
    found = advice(card=11.3e9 / 0.9, available=available, stall=0.05, busy=0.04)
    assert found.accumulate_on == "host" and found.fits and found.update_interval == window
    assert found.host.update_interval == window and found.host.size == pytest.approx((16 + 4 * window) * 1e9, rel=1e-5)
    assert (found.longer and found.longer.update_interval) == longer
    assert found.work == pytest.approx(window * 0.04 + 0.9 * 0.08)
    assert found.stall == pytest.approx(max(0.0, found.work / window - 0.05))


@pytest.mark.parametrize(("card", "needed"), [(1e12, 16e9), (11.3e9 / 0.9, 20e9)], ids=["gpu", "host"])
def test_nothing_fits_a_host_without_memory(card, needed):
    for available, fits in ((1.001 * needed, True), (0.999 * needed, False)):
        found = advice(card=card, available=available, stall=0.05, busy=0.04)
        assert found.fits == fits and found.host.size == pytest.approx(needed, rel=1e-5)


def test_with_gradients_on_the_host_every_step_s_travel():
    """U 4: 4 * 0.04 s down, 0.9 * (0.04 s up + 0.04 s busy)."""
    found = advice(card=11.3e9 / 0.9, stall=0.05, busy=0.04)
    assert found.update_interval == 8 and found.work == pytest.approx(8 * 0.04 + 0.9 * 0.08)
    assert found.overrides.endswith("engine.accumulate_on=host")


def test_without_a_card_copies_are_not_known():
    found = advice(card=None, stall=0.05, busy=0.04, ceilings=Ceilings())
    assert not found.copies_known and found.work == pytest.approx(0.9 * 0.04)
    assert found.overrides == "engine=zenflow engine.topk_ratio=0.1 engine.update_interval=1"
