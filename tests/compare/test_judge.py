"""Every verdict from numbers made for it, and the cautions: what must never be concluded."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from tests.compare.making import judged, run
from zenflow.compare.criteria import MET, MISSED, OPEN
from zenflow.compare.judge import ADOPT, REJECT, UNKNOWN, Check, judge, pairs_of
from zenflow.compare.text import report


def states(judgement) -> list[str]:
    return [item.state for item in judgement.criteria]


def test_all_four_met_is_adopted():
    found = judged()
    assert found.verdict == ADOPT and states(found) == [MET] * 4 and len(found.reasons) == 4
    assert found.criteria[0].difference.mean == pytest.approx(0.503, abs=1e-3)
    assert any("longer run" in remark for remark in found.remarks)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"speeds": (0.9, 0.91, 0.89)}, [MISSED, MET, MET, MISSED], id="slower"),
        pytest.param({"speeds": (1.01, 1.02, 1.0)}, [MISSED, MET, MET, MET], id="a gain too small to be worth it"),
        pytest.param({"stalls": (0.06, 0.061, 0.06)}, [MET, MISSED, MET, MET], id="waits more"),
        pytest.param({"losses": (3.0, 3.01, 3.0)}, [MET, MET, MISSED, MISSED], id="loss much worse"),
        pytest.param({"losses": (2.2, 2.21, 2.2)}, [MET, MET, MISSED, MET], id="worse after the same steps"),
    ],
)
def test_one_missed_criterion_is_enough_to_refuse(settings, expected):
    found = judged(**settings)
    assert found.verdict == REJECT and states(found) == expected
    assert all("is not" in reason for reason in found.reasons) and len(found.reasons) == expected.count(MISSED)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        pytest.param({"speeds": (1.03, 1.08, 1.05)}, [OPEN, MET, MET, MET], id="speed"),
        pytest.param({"stalls": (0.0, 0.08, 0.02)}, [MET, OPEN, MET, MET], id="waiting"),
        pytest.param({"losses": (1.9, 2.2, 2.0)}, [MET, MET, OPEN, MET], id="loss"),
    ],
)
def test_an_interval_that_holds_its_limit_is_not_enough_evidence(settings, expected):
    found = judged(**settings)
    assert found.verdict == UNKNOWN and states(found) == expected
    assert all("is not shown" in reason for reason in found.reasons)


@pytest.mark.parametrize("speed", [0.1, 10.0])
def test_one_seed_proves_nothing(speed):
    found = judged((speed,), (0.0,), (2.0,))
    assert found.verdict == UNKNOWN and states(found) == [OPEN] * 4
    assert "(one seed)" in found.reasons[0] and any("at least 3" in remark for remark in found.remarks)


def test_two_seeds_that_agree_closely_may():
    assert judged((1.5, 1.501), (0.001, 0.001), (2.0, 2.0)).verdict == ADOPT


def test_less_waiting_alone_never_adopts():
    """A device that is fuller used, with nothing gained in tokens a second, is no success."""
    found = judged(speeds=(1.0, 1.001, 1.0), stalls=(0.0, 0.0, 0.0))
    assert found.criteria[1].state == MET and found.verdict == REJECT


def test_speed_does_not_pay_for_quality():
    assert judged(speeds=(5.0, 5.01, 5.0), losses=(2.3, 2.31, 2.3)).verdict == REJECT


def test_more_steps_in_the_same_time_do_not_hide_a_worse_loss_after_the_same_steps():
    found = judged(losses=(2.2, 2.21, 2.2))
    assert found.criteria[3].difference.mean < 0 < found.criteria[2].difference.mean and found.verdict == REJECT


def test_memory_traffic_and_cpu_are_no_criteria():
    """Less traffic and less CPU use leave the verdict as it is: they are told, and are no success of their own."""
    plain = judged(speeds=(1.0, 1.01, 1.0))
    changed = judged(
        speeds=(1.0, 1.01, 1.0),
        changes={"bytes_to_host": 0.0, "bytes_to_device": 0.0, "trainer_cpus": 0.0, "peak_bytes": 1},
    )
    assert changed == plain and plain.verdict == REJECT


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (Check("b", "saving the weights", False, "state['w'] differs"), REJECT),
        (Check("a", "training", False, "held-out loss 2 -> 3"), UNKNOWN),
        (Check("b", "training", True, "held-out loss 4 -> 2"), ADOPT),
    ],
)
def test_function_comes_before_speed(check, verdict):
    found = judged(checks=[check])
    assert found.verdict == verdict
    if not check.works:
        assert found.reasons[0] == f"{check.side}: {check.name} does not work: {check.seen}."


@pytest.mark.parametrize(("side", "verdict"), [("a", UNKNOWN), ("b", REJECT)])
@pytest.mark.parametrize("runs", [[], [run("a", 0)]], ids=["no run", "one side's"])
def test_without_a_pair_function_alone_decides(side, verdict, runs):
    found = judge(runs, [Check(side, "checkpoint", False, "damaged")], min_gain=0.05, max_loss_rise=0.02)
    assert found.verdict == verdict and found.criteria == ()
    assert found.reasons == (f"{side}: checkpoint does not work: damaged.",)
    assert any("are not compared" in remark for remark in found.remarks)
    text = report(found, runs, [Check(side, "checkpoint", False, "damaged")], {"a": "x", "b": "y"}, {})
    assert ("## 3." in text) == bool(runs) and "## Criteria" not in text


def test_an_unstable_run_of_b_refuses_it():
    found = judged(changes={"faults": ("3 of 100 losses are not finite",)})
    assert found.verdict == REJECT and found.reasons == ("b: seed 2: 3 of 100 losses are not finite.",)


def test_a_loss_that_is_not_a_number_leaves_quality_open():
    broken = run("b", 2, 1.5, 0.001)
    last = replace(broken.curve[-1], loss=math.nan)
    found = judged(changes={"curve": (*broken.curve[:-1], last)})
    assert states(found)[2] == OPEN and "not finite" in found.reasons[0] and found.verdict == UNKNOWN


def test_different_weights_or_batches_are_no_pair():
    for name in ("weights", "order"):
        with pytest.raises(ValueError, match=f"seed 5: the {name} are .* in a and other in b"):
            pairs_of([run("a", 5), run("b", 5, **{name: "other"})])


def test_pairs_follow_the_seeds_whatever_the_order_of_the_runs():
    runs = [run("b", 1), run("a", 0), run("a", 1), run("b", 0)]
    assert [(a.side, a.seed, b.side, b.seed) for a, b in pairs_of(runs)] == [("a", 1, "b", 1), ("a", 0, "b", 0)]


def test_an_engine_without_offload_waits_for_nothing():
    runs = [run(side, seed, stall=None if side == "b" else 0.04) for seed in range(3) for side in "ab"]
    found = judge(runs, [], min_gain=0.05, max_loss_rise=0.02)
    assert found.criteria[1].state == MET and found.criteria[1].difference.mean == pytest.approx(-0.4)


def test_the_same_settings_twice_are_remarked_on():
    assert any("is noise" in remark for remark in judged(same=True).remarks)


def test_a_gain_is_told_as_measured_and_nothing_is_promised():
    found = judged()
    runs = [run(side, seed) for seed in range(3) for side in "ab"]
    text = report(found, runs, [], {"a": "engine=zero_offload", "b": "engine=zenflow"}, {"torch": "2"})
    assert text.startswith("# adopt\n") and "promises nothing" in text
    assert not re.search(r"\d\s?x\b|times faster|speed-?up", text)


def test_the_limits_are_the_user_s():
    assert judged(min_gain=0.6).verdict == REJECT
    assert judged(losses=(2.2, 2.21, 2.2), max_loss_rise=0.2).verdict == ADOPT


def test_every_score_of_a_task_has_its_column():
    """Matthews and F1 as well as accuracy: quality is no loss alone."""
    curve = [replace(point, scores={"accuracy": 0.75, "matthews": 0.5}) for point in run("a", 0).curve]
    runs = [run("a", 0, curve=tuple(curve)), run("b", 0)]
    text = report(judged(), runs, [], {"a": "x", "b": "y"}, {})
    (place,) = [place for place, line in enumerate(text.splitlines()) if "loss after" in line]
    titles, first, other = ([cell.strip() for cell in text.splitlines()[place + down].split("|")] for down in (0, 2, 3))
    found = [dict(zip(titles, cells, strict=True)) for cells in (first, other)]
    assert [(row["accuracy after"], row["matthews after"]) for row in found] == [("0.750", "0.500"), ("-", "-")]
