"""`zenflow-bench memory`: the table, and the real functions behind it."""

from __future__ import annotations

import csv
from functools import partial

import pytest

from zenflow.bench import bandwidth
from zenflow.bench.command import main
from zenflow.bench.session import what_is_measured


def test_the_ratio_is_of_the_pass_to_the_triad(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bandwidth, "triad", {1: 10.0, 2: 20.0}.__getitem__)
    monkeypatch.setattr(bandwidth, "pass_bandwidth", {1: 9.0, 2: 25.0}.__getitem__)
    assert main(["memory", "--threads", "1", "2", "--out", str(tmp_path), "--commit", "abc"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["1 thread", "2 threads"]
    lines = printed.out.splitlines()[-2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells == [["1", "10.0", "9.0", "90.0%"], ["2", "20.0", "25.0", "125.0%"]]
    report, table = ((tmp_path / name).read_text() for name in ("memory.md", "memory.csv"))
    assert lines == report.splitlines()[-2:] and "commit abc" in report
    assert "`zenflow-bench memory --threads 1 2`" in report.splitlines()
    rows = list(csv.DictReader(table.splitlines()))
    assert [row["ratio"] for row in rows] == ["0.9", "1.25"]
    assert {row["command"] for row in rows} == {"zenflow-bench memory --threads 1 2"}


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ("step --out here --shape 3B", "step --shape 3B"),
        ("step --out=here --commit=abc --batch=2", "step --batch=2"),
        ("kernels --ops fused_step --out here --commit abc --quick", "kernels --ops fused_step --quick"),
        ("step --zenflow U=4 --trace --contention 8 12", "step --zenflow U=4 --trace --contention 8 12"),
    ],
)
def test_where_the_result_is_kept_is_no_part_of_the_command(words, left):
    assert " ".join(what_is_measured(words.split())) == left


def test_an_option_has_one_name(capsys, tmp_path):
    with pytest.raises(SystemExit):
        main(["memory", "--threads", "1", "--com", "abc", "--out", str(tmp_path)])
    assert "--com" in capsys.readouterr().err


def test_both_bandwidths_are_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bandwidth, "triad", partial(bandwidth.triad, n_bytes=1 << 20))
    monkeypatch.setattr(bandwidth, "pass_bandwidth", partial(bandwidth.pass_bandwidth, n_parameters=1 << 24))
    assert main(["memory", "--threads", "1", "--out", str(tmp_path)]) == 0
    threads, *figures = capsys.readouterr().out.splitlines()[-1].strip("| ").split("|")
    assert int(threads) == 1
    assert all(float(figure.strip().rstrip("%")) > 0 for figure in figures)
