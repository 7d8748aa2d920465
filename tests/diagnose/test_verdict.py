"""Every verdict from numbers made for it, and the cautions: what must never be concluded."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.diagnose.making import PARAMETERS, measured
from zenflow.config import ZenFlowConfig
from zenflow.diagnose.figures import Ceilings, HostMemory, Memory, StepParts
from zenflow.diagnose.result import Result
from zenflow.diagnose.verdict import (
    COMPUTE,
    DATA,
    INCONCLUSIVE,
    MEMORY_RICH,
    OFFLOAD,
    UNHEALTHY,
    Thresholds,
    Verdict,
)

ROOMY = Memory(peak=10_000_000_000, activations=6_000_000_000, card=80_000_000_000)


def verdict(**settings) -> Verdict:
    return Result.of(measured(**settings)).verdict


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param({"stall": 0.05, "busy": 0.04}, OFFLOAD, id="waits for the CPU"),
        pytest.param({"data": 0.05}, DATA, id="waits for batches"),
        pytest.param({}, COMPUTE, id="waits for nothing"),
        pytest.param({"offloads": False, "stall": None, "engine": "adamw"}, COMPUTE, id="AdamW on the device"),
        pytest.param({"stall": 0.05, "busy": 0.04, "memory": ROOMY}, MEMORY_RICH, id="AdamW fits"),
        pytest.param({"losses": [math.nan] * 100}, UNHEALTHY, id="losses are not finite"),
        pytest.param({"losses": [1 + 0.1 * step for step in range(100)]}, UNHEALTHY, id="the loss rises"),
        pytest.param({"validation_before": 2.0, "validation_after": math.nan}, UNHEALTHY, id="no held-out loss"),
        pytest.param({"skipped_steps": 50}, UNHEALTHY, id="steps are skipped"),
        pytest.param({"steps": 19, "stall": 0.05}, INCONCLUSIVE, id="too few steps"),
        pytest.param({"stall": None, "optimizer": 0.05}, INCONCLUSIVE, id="an offload without records"),
    ],
)
def test_each_verdict(settings, kind):
    assert verdict(**settings).kind == kind


@pytest.mark.parametrize(("waiting", "kind"), [(2, INCONCLUSIVE), (49, INCONCLUSIVE), (51, OFFLOAD)])
def test_a_device_that_waits_in_few_steps_does_not_keep_waiting(waiting, kind):
    """ "Keeps waiting after backward": two pauses of 5 s are no bottleneck, however large their share is."""
    stall = 5.0 if waiting == 2 else 0.04
    steps = [StepParts(0.1, 0.0, 0.05)] * (100 - waiting) + [StepParts(0.1 + stall, 0.0, 0.05 + stall)] * waiting
    made = measured(stall=0.0, busy=0.04, steps=100)
    made = replace(made, steps=steps, offload=replace(made.offload, stalls=[0.0] * (100 - waiting) + [stall] * waiting))
    found = Result.of(made, Thresholds(noise=2.0))
    assert found.figures.stall_share > 0.1 and found.verdict.kind == kind
    if kind == INCONCLUSIVE:
        assert "the wait of few steps" in found.verdict.reason and found.verdict.advice is None


def test_uneven_steps_give_no_verdict_however_much_is_waited_for():
    steps = [StepParts(0.1, 0.0, 0.06)] * 90 + [StepParts(0.2, 0.0, 0.06)] * 10
    found = Result.of(replace(measured(stall=0.05, busy=0.04), steps=steps)).verdict
    assert found.kind == INCONCLUSIVE and "2.00 times their median" in found.reason and found.advice is None


def test_a_loader_that_stalls_now_and_then_is_data_bound_and_not_noise():
    steps = [StepParts(0.1, 0.0, 0.01)] * 90 + [StepParts(1.1, 1.0, 0.01)] * 10
    assert Result.of(replace(measured(), steps=steps)).verdict.kind == DATA


@pytest.mark.parametrize(("stall", "kind"), [(0.00999, COMPUTE), (0.0101, OFFLOAD)])
def test_the_threshold_of_the_stall(stall, kind):
    assert verdict(stall=stall, busy=0.04).kind == kind


@pytest.mark.parametrize(("data", "stall", "kind"), [(0.03, 0.02, DATA), (0.02, 0.03, OFFLOAD)])
def test_of_two_waits_the_longer_is_blamed_and_the_other_is_told(data, stall, kind):
    found = verdict(data=data, stall=stall, busy=0.04)
    assert found.kind == kind
    (told,) = [remark for remark in found.remarks if "of a step" in remark]
    assert ("CPU or PCIe" in told) == (kind == DATA)


def test_a_waiting_loader_is_never_advised_zenflow():  # "ZenFlow does not solve it"
    found = verdict(data=0.05, stall=0.02, busy=0.04)
    assert found.kind == DATA and found.advice is None and "does not change this wait" in found.next


def test_enough_memory_means_no_offload_at_all():
    found = verdict(stall=0.05, busy=0.04, memory=ROOMY)
    assert "Do not offload at all" in found.next and found.advice is None
    tight = Memory(peak=10**10, activations=6 * 10**9, card=24 * 10**9)  # 22 of 24 GB are over 90%
    assert verdict(stall=0.05, busy=0.04, memory=tight).kind == OFFLOAD


def test_a_sick_loss_comes_before_any_speed():
    found = verdict(stall=0.05, busy=0.04, losses=[2.0] * 50 + [math.inf] + [2.0] * 49)
    assert found.kind == UNHEALTHY and found.advice is None


@pytest.mark.parametrize("settings", [{}, {"data": 0.05}, {"stall": 0.05, "busy": 0.04}, {"steps": 5}])
def test_utilisation_decides_nothing(settings):
    """A high one is no better training, a low one no reason: it is told, with that caution."""
    without = verdict(**settings)
    for utilisation in (0.0, 0.5, 1.0):
        found = verdict(**settings, utilisation=utilisation)
        assert (found.kind, found.reason, found.next) == (without.kind, without.reason, without.next)
        assert f"by NVML {utilisation:.0%}; that alone says nothing about speed or quality" in found.remarks[-1]
    assert "busy" in without.remarks[-1] and "says nothing about speed or quality" in without.remarks[-1]


def test_slow_pcie_alone_is_no_reason():
    """Much traffic that is hidden under compute: the device does not wait, so there is nothing to mend."""
    assert verdict(stall=0.0, busy=0.09, moved=2.4e9).kind == COMPUTE


def test_no_factor_is_promised():
    found = verdict(stall=0.05, busy=0.04)
    words = " ".join((found.reason, found.next, *found.remarks))
    assert "estimate" in words and "zenflow-compare" in words and "not gone" in words
    assert not re.search(r"\d\s*(x|times)\b|faster|speed-?up", words)


@pytest.mark.parametrize("settings", [{}, {"data": 0.05}, {"stall": 0.05, "busy": 0.04}, {"steps": 5}])
def test_what_it_holds_for_is_always_said(settings):
    assert "this model, batch, length, machine" in verdict(**settings).remarks[0]


def test_the_wait_is_told_by_its_parts_and_k_is_no_pruning():
    """Slow copies alone are no reason, and what is deferred is not dropped."""
    found = verdict(stall=0.05, busy=0.04)
    assert "the CPU's pass takes 40.0 ms, the copies at their best 40.0 ms down and 40.0 ms up" in found.reason
    assert "No gradient is dropped" in found.next and "held-out loss before U grows" in found.next
    without = Result.of(replace(measured(stall=0.05, busy=0.04), ceilings=Ceilings())).verdict
    assert "the CPU's pass takes 40.0 ms." in without.reason


def test_one_step_is_not_called_steps():
    found = Result.of(measured(steps=1, stall=0.05, busy=0.04))
    assert found.verdict.reason == "1 measured step will not do; at least 20 are needed."
    assert found.text().startswith("zero_offload on card, 1000.0M parameters, 1 step\n")
    assert "Only 1 step measured; 100 to 500 are advised." in found.verdict.remarks
    waiting = verdict(stall=0.05, busy=0.04, moved=0.0)
    assert waiting.advice.update_interval == 1 and "a window of 1 step, whose own work" in waiting.next


def test_few_steps_are_remarked_on():
    assert any("Only 20 steps" in remark for remark in verdict(steps=20).remarks)
    assert not any("Only" in remark for remark in verdict(steps=100).remarks)


def test_a_loss_that_does_not_fall_is_remarked_on():
    found = verdict(losses=[2.0] * 100)
    assert found.kind == COMPUTE and any("does not fall" in remark for remark in found.remarks)


@pytest.mark.parametrize(("after", "told"), [(1.9, False), (2.0, False), (2.1, True)])
def test_a_held_out_loss_that_rises_is_remarked_on(after, told):
    remarks = verdict(validation_before=2.0, validation_after=after).remarks
    assert any("held-out loss rises" in remark for remark in remarks) == told


def test_the_first_try_changes_no_more_than_k_and_u():
    assert "with all else as it is at first" in verdict(stall=0.05, busy=0.04).next


CRAMPED = Memory(peak=10**10, activations=6 * 10**9, card=12_500_000_000)  # no room for an accumulator


@pytest.mark.parametrize(
    ("memory", "available", "told"),
    [
        pytest.param({}, None, "It takes 16.0 bytes of host memory a deferred parameter, 16.0 GB in all; how much is "
        "available is not known.", id="not known"),
        pytest.param({}, 100e9, "16.0 GB in all; 100.0 GB are available. By", id="enough"),
        pytest.param({"memory": CRAMPED}, 100e9, "accumulate_on=host, with all else as it is at first. It takes 48.0 "
        "bytes of host memory a deferred parameter, 48.0 GB in all; 100.0 GB are available. By", id="gradients, too"),
        pytest.param({"memory": CRAMPED}, 50e9, "engine.update_interval=4 engine.accumulate_on=host, with all else as "
        "it is at first. It takes 32.0 bytes of host memory a deferred parameter, 32.0 GB in all; 50.0 GB are "
        "available. Windows of 8 steps would hide more, but take 48.0 bytes of host memory a deferred parameter, "
        "48.0 GB in all, more than 90% of that. By", id="a shorter window"),
    ],
)  # fmt: skip
def test_a_proposal_says_what_host_memory_it_takes(memory, available, told):
    host = HostMemory({"bfloat16": PARAMETERS}, available)
    found = verdict(stall=0.05, busy=0.04, host=host, **memory)
    assert found.kind == OFFLOAD and told in found.next and found.advice.fits


@pytest.mark.parametrize(("memory", "needed"), [({}, 16), ({"memory": CRAMPED}, 20)], ids=["gpu", "host"])
def test_what_the_host_has_no_memory_for_is_not_proposed(memory, needed):
    found = verdict(stall=0.05, busy=0.04, host=HostMemory({"bfloat16": PARAMETERS}, 17e9), **memory)
    assert found.kind == OFFLOAD and found.advice is None and "engine=zenflow" not in found.next
    told = f"it takes {needed}.0 bytes of host memory a deferred parameter, {needed}.0 GB in all"
    assert found.next.endswith(f"{told}, more than 90% of the 17.0 GB available.")


def test_an_estimate_leaves_the_warm_up_out_and_says_so():
    told = "once the first 4 steps (full_warm_up_rounds), each as slow as one of this run, are over."
    assert ZenFlowConfig().full_warm_up_rounds == 4 and told in verdict(stall=0.05, busy=0.04).next


def test_held_out_scores_are_told_beside_the_loss():
    scores = {"scores_before": {"accuracy": 0.5, "matthews": 0.0}, "scores_after": {"accuracy": 0.75, "matthews": 0.5}}
    text = Result.of(measured(validation_before=2.0, validation_after=1.0, **scores)).text()
    for name, course in (("accuracy", "0.500 -> 0.750"), ("matthews", "0.000 -> 0.500")):
        assert re.search(rf"held-out {name} +{course}", text)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        pytest.param({}, INCONCLUSIVE, id="starved"),
        pytest.param({"trainer_cpu": 0.49 * 300}, INCONCLUSIVE, id="just below half a core"),
        pytest.param({"trainer_cpu": 0.51 * 300}, COMPUTE, id="half a core"),
        pytest.param({"device": "card"}, COMPUTE, id="a GPU computes, whatever the CPU does"),
        pytest.param({"trainer_cpu": 0.2 * 300, "trainer_cpus": 0.3}, COMPUTE, id="all of a small quota"),
        pytest.param({"data": 2.9}, DATA, id="a trainer that waits needs no core"),
    ],
)
def test_a_trainer_on_the_cpu_that_did_not_get_it_has_no_verdict(settings, kind):
    starved = {"device": "cpu", "memory": None, "seconds": 3.0, "trainer_cpu": 0.08 * 300, "trainer_cpus": 2}
    found = verdict(**(starved | settings))
    assert found.kind == kind
    if not settings:
        assert found.reason == "The trainer had 0.08 of 2 CPUs: other programs use this machine."


def test_thresholds_can_be_chosen():
    assert Result.of(measured(stall=0.05, busy=0.04), Thresholds(stall_share=0.6)).verdict.kind == COMPUTE
