"""`--split`: a comparison for each value of a setting, each with a baseline of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.report.making import make


@pytest.fixture
def sweep(tmp_path) -> Path:
    """AdamW and two k at two learning rates: losses after the last step 2, 2.2 and 2.5, and 1, 1.5 and 0.9."""
    losses = {0.1: (2.0, 2.2, 2.5), 2e-5: (1.0, 1.5, 0.9)}
    for lr, after in losses.items():
        changes = [{"engine": {}}, {"engine__topk_ratio": 0.1}, {"engine__topk_ratio": 0.5}]
        for place, (change, loss) in enumerate(zip(changes, after, strict=True)):
            make(tmp_path / "runs" / f"{lr}_{place}", {0: 4.0, 4: loss}, 1.0 + place, optimizer__lr=lr, **change)
    return tmp_path / "runs"


def headings(text: str) -> list[str]:
    return re.findall("^## (.* on .*)$", text, flags=re.M)


def differences(outcome) -> dict[tuple[str, str], tuple[str, float]]:
    """Baseline and percent at equal steps, by comparison and setting."""
    column = "loss_at_equal_steps_vs_baseline_percent"
    rows = outcome.rows("groups")
    return {(row["study"], row["setting"]): (row["baseline"], pytest.approx(float(row[column]))) for row in rows}


def test_each_value_has_its_baseline(report, sweep, no_pictures):
    outcome = report(sweep, "--split", "optimizer.lr")
    low, high = "tiny on stdlib, lr 2e-5", "tiny on stdlib, lr 0.1"
    assert headings(outcome.text) == [low, high]
    assert differences(outcome) == {
        (low, "adamw"): ("adamw", 0.0),
        (low, "zenflow, k 0.1"): ("adamw", 50.0),
        (low, "zenflow, k 0.5"): ("adamw", -10.0),
        (high, "adamw"): ("adamw", 0.0),
        (high, "zenflow, k 0.1"): ("adamw", 10.0),
        (high, "zenflow, k 0.5"): ("adamw", 25.0),
    }
    assert "6 runs in 2 comparisons" in outcome.text and "best of" not in outcome.text
    assert len(outcome.rows("report")) == 6


def test_what_an_engine_has_no_use_for_keeps_it_out_of_no_comparison(report, sweep, no_pictures):
    """AdamW has no k: both k are compared with it, at the better learning rate unless that is split, too."""
    outcome = report(sweep, "--split", "engine.topk_ratio")
    assert headings(outcome.text) == ["tiny on stdlib, k 0.1", "tiny on stdlib, k 0.5"]
    assert outcome.text.count("Without engine.topk_ratio, and so in several comparisons: 2 runs.") == 2
    assert "6 runs in 2 comparisons" in outcome.text and len(outcome.rows("report")) == 8
    found = differences(outcome)
    assert found["tiny on stdlib, k 0.5", "zenflow, lr 0.1"] == ("adamw, lr 2e-5", 150.0)
    both = report(sweep, "--split", "engine.topk_ratio", "--split", "optimizer.lr")
    words = [f"tiny on stdlib, k {k}, lr {lr}" for k in (0.1, 0.5) for lr in ("2e-5", "0.1")]
    assert headings(both.text) == words
    assert differences(both)[words[3], "zenflow"] == ("adamw", 25.0)


def test_a_value_without_adamw_has_no_baseline(report, sweep, no_pictures):
    make(sweep / "more", {0: 4.0, 4: 3.0}, optimizer__lr=0.5)
    text = report(sweep, "--split", "optimizer.lr").text
    assert text.count("The baseline is “adamw”") == 2 and text.count("AdamW was not run") == 1


def test_tasks_stay_apart_and_a_value_in_a_title_is_there_once(report, sweep, no_pictures):
    make(sweep / "other", {0: 4.0, 4: 3.0}, model__layers=3, optimizer__lr=0.1)
    text = report(sweep, "--split", "optimizer.lr", "--split", "model.layers").text
    assert headings(text) == [
        "tiny on stdlib, layers 2, lr 2e-5",
        "tiny on stdlib, layers 2, lr 0.1",
        "tiny on stdlib, layers 3, lr 0.1",
    ]


def test_a_value_that_all_have_is_one_comparison_that_names_it(report, sweep, no_pictures):
    assert headings(report(sweep, "--split", "batch_size").text) == ["tiny on stdlib, batch_size 8"]


@pytest.mark.parametrize("key", ["lr", "optimizer.rate", "seed", "optimizer", ""])
def test_an_unknown_key_is_refused_with_what_is_allowed(report, sweep, key):
    outcome = report(sweep, "--split", "optimizer.lr", "--split", key)
    assert outcome.code == 1 and not outcome.folder.exists()
    expected = f"split {key} is no setting of these runs; allowed: engine, engine.topk_ratio, optimizer.lr."
    assert outcome.error.strip() == f"zenflow-report: {expected}"


def test_each_comparison_has_its_pictures(report, sweep):
    pytest.importorskip("matplotlib")
    stems = ["loss_seconds", "loss_steps", "pareto", "step_time"]
    assert report(sweep, "--split", "optimizer.lr").pictures() == sorted(stems + [f"{stem}-2" for stem in stems])
