"""`--steps`: what runs gave up to a step, those that ended early included."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.making import config, end_early, lines, make, write_lines
from zenflow.report.runs import LeftOut, Run, read

LOSSES = {0: 4.0, 2: 3.0, 4: 2.0, 6: 1.0}


@pytest.fixture
def runs(tmp_path) -> Path:
    """Of 6 steps: two AdamW runs, the second ended after 5, and three of ZenFlow at 2 s a step, after 6, 4 and 3."""
    folder = tmp_path / "runs"
    for seed in (0, 1):
        losses = {step: loss + 0.5 * seed for step, loss in LOSSES.items()}
        make(folder / f"adamw{seed}", losses, [1.0, 1.0, 1.0, 1.0, 9.0, 9.0], seed=seed, engine={}, steps=6)
    end_early(folder / "adamw1", 5)
    for seed, last in ((0, 6), (1, 4), (2, 3)):
        losses = {0: 4.0, 2: 3.5, 4: 2.5 + 0.5 * seed, 6: 0.5}
        made = make(folder / f"zenflow{seed}", losses, 2.0, seed=seed, steps=6, device="cpu")
        if last < 6:
            end_early(made, last)
    return folder


def test_every_run_that_came_so_far_counts(report, runs, no_pictures):
    outcome = report(runs, "--steps", 4)
    assert outcome.code == 0 and "4 runs in 1 comparison" in outcome.text and "1 run left out" in outcome.text
    assert (
        "Note: Unfinished: 2 of 4 runs, with 4 to 5 of 6 steps; all figures are of the first 4 steps, as "
        "--steps asks. Traffic in M and stalls between two steps, which only a summary holds, are left out."
        in outcome.text
    )
    row = outcome.setting("zenflow")
    assert (row["runs"], row["left_out"], row["seeds"], row["equal_steps"]) == ("2", "1", "0 1", "4")
    assert float(row["loss_at_equal_steps_mean"]) == 2.75 and float(row["final_loss_mean"]) == 2.75
    assert float(row["best_loss_mean"]) == 2.75 and float(row["training_seconds_mean"]) == 8.0
    assert float(row["loss_at_equal_steps_vs_baseline_percent"]) == pytest.approx(100 * (2.75 / 2.25 - 1))
    # AdamW is at step 4 after 4 s, when ZenFlow is at step 2.
    assert row["equal_seconds"] == "4.0" and float(row["loss_at_equal_seconds_mean"]) == 3.5
    assert float(row["loss_at_equal_seconds_vs_baseline_percent"]) == pytest.approx(100 * (3.5 / 2.25 - 1))
    assert float(row["tokens_per_second_mean"]) == 5.0 and float(row["stall_share_mean"]) == pytest.approx(0.2)
    assert row["m_to_host_mean"] == "" and "to host M" not in outcome.text


def test_a_row_says_whether_its_run_is_whole(report, runs, no_pictures):
    rows = {Path(row["folder"]).name: row for row in report(runs, "--steps", 4).rows("report")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "adamw0": "whole",
        "adamw1": "unfinished",
        "zenflow0": "whole",
        "zenflow1": "unfinished",
        "zenflow2": "left out",
    }
    assert rows["adamw1"]["reason"] == "unfinished: 5 of 6 steps; interrupted" and rows["adamw1"]["steps"] == "4"
    assert rows["zenflow2"]["reason"] == "unfinished: 3 of 6 steps; interrupted"


def test_without_it_nothing_is_taken_of_unfinished_runs(report, runs, no_pictures):
    outcome = report(runs)
    assert "2 runs in 1 comparison" in outcome.text and "3 runs left out" in outcome.text
    assert "--steps" not in outcome.text and outcome.setting("zenflow")["left_out"] == "2"


def test_runs_none_of_which_ended_are_compared(report, runs, no_pictures):
    for name in ("adamw0", "zenflow0"):
        end_early(runs / name, 5)
    outcome = report(runs, "--steps", 4)
    assert "Unfinished: 4 of 4 runs, with 4 to 5 of 6 steps" in outcome.text
    assert float(outcome.setting("zenflow")["loss_at_equal_steps_mean"]) == 2.75


def test_whole_runs_are_cut_too_and_said_to_be_whole(report, tmp_path, no_pictures):
    make(tmp_path / "runs" / "0", LOSSES, steps=6)
    outcome = report(tmp_path / "runs", "--steps", 2)
    assert "Note: All of the runs are whole; all figures are of the first 2 steps, as --steps asks." in outcome.text
    assert float(outcome.setting("zenflow")["final_loss_mean"]) == 3.0


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        (3, "no evaluation after step 3; there are those after 2, 4"),
        (6, "unfinished: 5 of 6 steps; interrupted"),
        (7, "unfinished: 5 of 6 steps; interrupted"),
    ],
)
def test_why_a_run_is_not_compared(tmp_path, steps, why):
    found = read(end_early(make(tmp_path / "run", LOSSES, steps=6), 5), steps)
    assert isinstance(found, LeftOut) and found.reason == why


def test_a_shorter_run_is_not_compared(tmp_path):
    found = read(make(tmp_path / "run", LOSSES, steps=6), 8)
    assert isinstance(found, LeftOut) and found.reason == "ended after its 6 steps, before step 8"


def test_what_comes_later_does_not_count(tmp_path):
    """A loss that is no number is a reason to leave a run out where it is within the steps alone."""
    made = make(tmp_path / "run", LOSSES | {6: float("nan")}, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], steps=6)
    found = read(made, 4)
    assert (
        isinstance(found, Run) and found.seconds == 10.0 and (found.made, found.upto, found.unfinished) == (6, 4, None)
    )
    assert [(point.step, point.seconds) for point in found.evaluations] == [(0, 0.0), (2, 3.0), (4, 10.0)]
    assert isinstance(read(made, 6), LeftOut) and isinstance(read(made), LeftOut)


def test_totals_are_those_of_the_lines(tmp_path):
    made = make(tmp_path / "run", LOSSES, [1.0, 1.0, 2.0, 4.0, 4.0, 4.0], steps=6)
    text = (made / "metrics.jsonl").read_text().splitlines()
    lines = [line.replace('"stall_seconds"', f'"worker_busy_seconds": {0.5 * n}, "skipped_steps": {n}, "stall_seconds"')
             for n, line in enumerate(text)]  # fmt: skip
    (made / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    places = [n for n, line in enumerate(lines) if "worker_busy_seconds" in line][:4]
    summary = read(made, 4).summary
    assert summary["stall_share"] == pytest.approx(0.2) and summary["skipped_steps"] == places[-1]
    assert summary["worker_busy_share"] == pytest.approx(0.5 * sum(places) / 8.0)
    assert summary["m_to_host_per_step"] is None and summary["stall_seconds_per_step"] is None
    assert (summary["device"], summary["torch"]) == ("cpu, 1 thread", "2.10.0")


def test_steps_that_were_made_twice_are_counted_up_to_the_last(tmp_path):
    made = make(tmp_path / "run", LOSSES, steps=6)
    write_lines(
        made, [*map(json.loads, (made / "metrics.jsonl").read_text().splitlines()), *lines(config(steps=6), {})[-4:]]
    )
    assert [read(made, upto).repeated for upto in (2, 4, 6, None)] == [0, 2, 4, 4]


@pytest.mark.parametrize(
    ("machines", "names"),
    [
        (["NVIDIA H200", None], ["zenflow"]),
        ([None, None], ["zenflow"]),
        (["NVIDIA H200", "NVIDIA B200", None], ["NVIDIA B200", "NVIDIA H200", "not recorded"]),
    ],
    ids=["as the whole one", "nowhere", "one of two"],
)
def test_an_unfinished_run_s_machine_is_that_of_the_others(report, tmp_path, no_pictures, machines, names):
    for seed, machine in enumerate(machines):
        made = make(
            tmp_path / "runs" / str(seed), LOSSES, steps=6, seed=seed, device="cuda", totals={"device": machine}
        )
        if machine is None:
            end_early(made, 4)
    assert [row["setting"] for row in report(tmp_path / "runs", "--steps", 4).rows("groups")] == names


def test_if_no_run_came_so_far_the_report_says_why_and_fails(report, runs, no_pictures):
    outcome = report(runs, "--steps", 900)
    assert outcome.code == 1 and "none of 5 runs can be compared after 900 steps; report.md says why" in outcome.error
    assert "ended after its 6 steps, before step 900" in outcome.text


@pytest.mark.parametrize("word", ["0", "-1", "1.5", "many"])
def test_a_number_of_steps_is_1_or_more(report, runs, word):
    outcome = report(runs, f"--steps={word}")
    assert outcome.code == 2 and f"--steps: {word!r}; allowed: an integer >= 1" in outcome.error
