"""The arithmetic of the tables, on numbers whose results are known."""

from __future__ import annotations

import csv
from dataclasses import replace
from typing import Any

import pytest

from zenflow.bench import tables
from zenflow.bench.figures import compare, row_of, selection_row, without_ratios
from zenflow.bench.picture import split
from zenflow.bench.registry import Job

JOB = Job("zenflow", "zenflow U=4", "1.5B", batch=8, length=512, warm_up=8, steps=40, window=4)
PARAMETERS = 1000


def result(mean_ms: float, **changes: Any) -> dict[str, Any]:
    base = {
        "parameters": PARAMETERS,
        "device": "cpu",
        "mean_ms": mean_ms,
        "floor_ms": [],
        "launch_ms": [],
        "step_ms": [mean_ms] * 40,
        "first_step_ms": 900.0,
        "first_totals": {},
        "totals": {},
        "host_bytes": None,
        "worker_threads": None,
        "peak_bytes": 50_000,
        "host_growth_bytes": 2_000,
        "machine_growth_bytes": 3_000,
        "loss_first": 12.5,
        "loss_last": 11.5,
    }
    return base | changes


def named(trainer: str) -> Job:
    return replace(JOB, trainer=trainer, label=trainer)


TOTALS = {
    "stall_seconds": 0.2,
    "host_wait_seconds": 0.08,
    "bytes_to_host": 40 * 500,
    "bytes_to_device": 40 * 600,
    "worker_busy_seconds": 4.0,
    "windows": 40,  # of cohorts, one a step
    "skipped_steps": 0,
}


def test_a_row_counts_by_step_window_and_parameter():
    times = [100.0] * 37 + [130.0, 140.0, 150.0]
    row = row_of(JOB, result(128.0, step_ms=times, totals=TOTALS, host_bytes=16_000))
    assert row["median_ms"] == 100.0
    assert row["p95_ms"] == 130.0
    assert row["max_ms"] == 150.0
    assert row["stall_ms"] == pytest.approx(5.0)
    assert row["host_wait_ms"] == pytest.approx(2.0)
    assert row["to_host_m"] == pytest.approx(0.25)
    assert row["to_device_m"] == pytest.approx(0.3)
    assert row["worker_ms_a_window"] == pytest.approx(400.0)
    assert row["host_bytes_a_parameter"] == 16.0
    assert row["tokens_a_second"] == pytest.approx(32_000)


def test_what_a_trainer_does_not_count_is_none():
    row = row_of(named("torchao"), result(128.0))
    names = ("stall_ms", "to_host_m", "to_device_m", "worker_ms_a_window", "host_bytes_a_parameter", "skipped_steps")
    assert [row[name] for name in names] == [None] * 6


def contest() -> list[dict[str, Any]]:
    return [
        row_of(named("floor"), result(110.0)),
        row_of(named("adamw"), result(130.0, peak_bytes=62_000)),
        row_of(JOB, result(120.0, totals=TOTALS, peak_bytes=53_200, host_growth_bytes=18_000)),
        row_of(named("sync"), result(400.0, totals=TOTALS | {"stall_seconds": 10.0})),
        row_of(named("torchao"), {"error": "not installed"}),
        row_of(named("floor"), result(90.0, peak_bytes=50_400)),
    ]


def test_ratios_are_to_the_mean_of_both_floors():
    rows = compare(contest())
    assert [row.get("ratio") for row in rows] == [1.1, 1.3, 1.2, 4.0, None, 0.9]
    assert [row.get("gpu_bytes_over_floor") for row in rows] == [0.0, 12.0, 3.2, 0.0, None, 0.4]
    assert rows[2]["process_bytes_over_floor"] == 16.0
    assert rows[2]["machine_bytes_over_floor"] == 0.0


def test_a_row_with_its_own_floor_is_compared_with_that():
    """Before and after its trainer: 92 and 100 ms; sync's were 80 ms, where the other floors' mean is 100."""
    rows = contest()
    rows[2] = row_of(JOB, result(120.0, totals=TOTALS, floor_ms=[92.0, 100.0], launch_ms=[60.0, 70.0]))
    rows[3] = row_of(named("sync"), result(400.0, totals=TOTALS, floor_ms=[80.0]))
    compared = compare(rows)
    assert [row.get("floor_ms") for row in compared] == [100.0, 100.0, 96.0, 80.0, None, 100.0]
    assert [row.get("ratio") for row in compared] == [1.1, 1.3, 1.25, 5.0, None, 0.9]
    assert compared[2]["launch_ms"] == 65.0
    assert compared[2]["stall_removed"] == pytest.approx(1 - 24 / 320)


def test_a_row_below_its_own_floor_says_so_and_removes_no_stall():
    rows = contest()
    rows[2] = row_of(JOB, result(90.0, totals=TOTALS, floor_ms=[100.0]))
    below = compare(rows)[2]
    assert below["ratio"] == 0.9 and "below its own floor" in below["note"] and "stall_removed" not in below


def test_stall_removed_is_measured_against_sync():
    rows = compare(contest())
    assert rows[2]["stall_removed"] == pytest.approx(1 - 20 / 300)
    assert rows[2]["stall_removed_clock"] == pytest.approx(0.98)
    assert rows[3]["stall_removed"] == 0.0
    assert "stall_removed" not in rows[0] | rows[1] | rows[4]


def test_stall_removed_needs_a_sync_that_stalls():
    rows = [row if row["trainer"] != "sync" else row | {"mean_ms": 100.0, "stall_ms": 0.0} for row in contest()]
    assert compare(rows)[2]["stall_removed"] is None
    assert compare(rows)[2]["stall_removed_clock"] is None
    failed = [row if row["trainer"] != "sync" else row_of(named("sync"), {"error": "x"}) for row in contest()]
    assert "stall_removed" not in compare(failed)[2]


def test_no_floor_no_ratio():
    rows = compare([row_of(named("floor"), {"error": "x"}), row_of(JOB, result(120.0))])
    assert not any("ratio" in row for row in rows)


def test_red_tests_leave_times_alone():
    shown = without_ratios(compare(contest()))
    assert not any(name in row for row in shown for name in ("ratio", "stall_removed", "stall_removed_clock"))
    assert shown[2]["mean_ms"] == 120.0
    assert "x floor" not in tables.report(shown, [])


SELECTING = replace(JOB, label="zenflow U=4, selecting", warm_up=24, steps=72)


def selecting(selections: int = 3) -> dict[str, Any]:
    """Three periods: a light window after each selection, four ordinary ones, one that ends with a selection."""
    period = [90.0] * 4 + [100.0] * 19 + [500.0]
    totals = {"selections": selections, "selection_seconds": 0.45}
    return result(115.0, step_ms=period * 3, totals=totals, first_totals={"selection_seconds": 0.25})


def test_what_a_selection_costs():
    row = selection_row(SELECTING, selecting())
    assert row["ordinary_ms"] == 100.0
    assert row["extra_ms"] == pytest.approx(400 - 40)
    assert row["selecting_step_ms"] == pytest.approx(400)
    assert row["exchange_ms"] == pytest.approx(150)
    assert row["first_exchange_ms"] == pytest.approx(250)
    assert row["a_step_at_100_ms"] == pytest.approx(3.6)
    assert row["a_step_at_1000_ms"] == pytest.approx(0.36)


def test_a_selection_that_did_not_run_is_no_figure():
    assert selection_row(SELECTING, selecting(2))["error"] == "2 selections ran in 3 periods"
    assert selection_row(SELECTING, {"error": "it broke"})["error"] == "it broke"


def test_the_table_is_aligned_and_says_why_a_row_is_empty():
    text = tables.report(compare(contest()), ["# heading"])
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(line) for line in lines}) == 1
    (broken,) = (line for line in lines if line.startswith("| torchao"))
    assert broken.rstrip("| ").endswith("not installed")
    (ours,) = (line for line in lines if line.startswith("| zenflow"))
    cells = [cell.strip() for cell in ours.strip("|").split("|")]
    assert cells[:7] == ["zenflow U=4", "120.0", "1.200", "100.0", "120.0", "120.0", "5.00"]
    assert {"93.3%", "98.0%", "0.250", "0.300", "3.20"} <= set(cells)


def test_csv_has_every_figure_and_the_machine(tmp_path):
    tables.write_csv(compare(contest()), {"gpu": "some GPU", "commit": "abc"}, tmp_path / "step.csv")
    with open(tmp_path / "step.csv", encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 6
    assert float(lines[2]["ratio"]) == 1.2
    assert lines[4]["error"] == "not installed"
    assert {line["gpu"] for line in lines} == {"some GPU"}


@pytest.mark.parametrize(
    ("mean_ms", "stall_ms", "parts"),
    [(120.0, 5.0, (100.0, 15.0, 5.0)), (120.0, None, (100.0, 20.0, 0.0)), (90.0, 5.0, (90.0, 0.0, 0.0))],
    ids=["stalls", "no clock", "below the floor"],
)
def test_the_bar_adds_up(mean_ms, stall_ms, parts):
    assert split({"mean_ms": mean_ms, "stall_ms": stall_ms, "floor_ms": 100.0}) == parts
    assert sum(parts) == mean_ms
