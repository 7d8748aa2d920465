"""`zenflow-bench memory`: the table, and the real functions behind it."""

from __future__ import annotations

import csv
from functools import partial

from zenflow.bench import bandwidth
from zenflow.bench.command import main


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
    assert (
        lines == report.splitlines()[-2:] and "commit abc" in report and "zenflow-bench memory --threads 1 2" in report
    )
    assert [row["ratio"] for row in csv.DictReader(table.splitlines())] == ["0.9", "1.25"]


def test_both_bandwidths_are_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bandwidth, "triad", partial(bandwidth.triad, n_bytes=1 << 20))
    monkeypatch.setattr(bandwidth, "pass_bandwidth", partial(bandwidth.pass_bandwidth, n_parameters=1 << 24))
    assert main(["memory", "--threads", "1", "--out", str(tmp_path)]) == 0
    threads, *figures = capsys.readouterr().out.splitlines()[-1].strip("| ").split("|")
    assert int(threads) == 1
    assert all(float(figure.strip().rstrip("%")) > 0 for figure in figures)
