"""The command itself, on a tiny model: real children, real tests, real files."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.processes import ends_within
from zenflow import ZenFlowConfig
from zenflow.bench import command
from zenflow.bench.children import environment, module_command, run_job
from zenflow.bench.command import main
from zenflow.bench.hog import hog
from zenflow.bench.jobs import plain_job
from zenflow.bench.measure import measure
from zenflow.bench.processes import family
from zenflow.bench.registry import CONTESTANTS, Job
from zenflow.bench.traffic import Traffic
from zenflow.copy_streams import TURN_BYTES
from zenflow.trace_view import read_events, spans_of

SMALL = ["step", "--shape", "tiny", "--batch", "2", "--length", "16", "--windows", "2", "--device", "cpu"]
JOB = Job("floor", "floor", "tiny", batch=1, length=8, warm_up=1, steps=1, window=1, device="cpu")


@pytest.fixture
def tests(tmp_path):
    def write(body: str) -> list[str]:
        path = tmp_path / "test_it.py"
        path.write_text(f"def test_it(): {body}")
        return ["--tests", str(path)]

    return write


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / "step.csv", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_floor_zenflow_and_a_peer_that_breaks(tmp_path, tests, monkeypatch, capsys):
    """The peer's fault costs its own row alone, and says why."""
    peer = tmp_path / "peers" / "deepspeed"
    peer.mkdir(parents=True)
    (peer / "__init__.py").write_text("raise RuntimeError('this build has\\nno such op')")
    monkeypatch.syspath_prepend(peer.parent)
    monkeypatch.setenv("PYTHONPATH", str(peer.parent), prepend=os.pathsep)
    words = [*SMALL, *tests("pass"), "--trainers", "zenflow", "deepspeed-offload", "--zenflow", "U=2,worker_threads=1"]
    code = main([*words, "--selection", "--trace", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr()
    assert code == 1
    first, ours, broken, last, selecting = rows(tmp_path / "out")
    assert (first["label"], last["label"]) == ("floor, at the start", "floor, at the end")
    assert float(first["ratio"]) + float(last["ratio"]) == pytest.approx(2)
    assert float(ours["mean_ms"]) > 0
    assert float(ours["floor_ms"]) == float(ours["own_floor_ms"]) > 0 and float(ours["launch_ms"]) > 0
    assert float(ours["ratio"]) == pytest.approx(float(ours["mean_ms"]) / float(ours["own_floor_ms"]))
    assert not first["own_floor_ms"]
    assert int(ours["steps"]) == 4 and int(ours["window"]) == 2
    assert 0 < float(ours["to_host_m"]) < 0.6
    assert float(ours["worker_ms_a_window"]) > 0
    assert float(ours["loss_first"]) == float(first["loss_first"])
    assert all(math.isfinite(float(row[name])) for row in (first, ours, last) for name in ("loss_first", "loss_last"))
    assert broken["error"] == "RuntimeError: this build has ... no such op"
    assert broken["ratio"] == ""
    assert selecting["table"] == "selection" and float(selecting["first_exchange_ms"]) > 0 and not selecting["error"]
    assert ours["torch"] and ours["cpu"] and ours["sources"] and ours["command"].startswith("zenflow-bench step")
    assert "tiny zenflow U=2,worker_threads=1:" in printed.err
    assert printed.out.startswith((tmp_path / "out" / "step.md").read_text())
    assert "x floor" in printed.out and "no such op" in printed.out
    assert (tmp_path / "out" / "step.png").stat().st_size > 5000
    (trace,) = (tmp_path / "out" / "traces").glob("*.json")
    assert trace.name == "zenflow_U=2_worker_threads=1.json" and trace.with_suffix(".png").stat().st_size > 5000
    assert len([span for span in spans_of(read_events(trace))["GPU compute"] if "optimizer step" in span["name"]]) == 6
    about = json.loads(trace.read_text())["otherData"]
    assert (about["command"], about["trainer"]) == (ours["command"], "zenflow U=2,worker_threads=1")
    assert "/" not in ours["command"].replace(".../", ""), "where it lies is none of what it shows"
    assert str(tmp_path) not in trace.read_text() and sys.executable not in trace.read_text()
    shown = (tmp_path / "out" / "step.md").read_text().partition("## Traces")[2]
    assert "### zenflow U=2,worker_threads=1" in shown and "CPU optimizer  busy" in shown


def test_a_trace_is_made_on_request_alone_and_not_of_others(tmp_path, tests):
    words = [*SMALL, *tests("pass"), "--trainers", "adamw", "zenflow", "--zenflow", "U=2"]
    for more, made in (([], []), (["--trace"], ["zenflow_U=2.json"])):
        assert main([*words, *more, "--out", str(tmp_path / f"out{len(more)}")]) == 0
        assert [path.name for path in tmp_path.glob(f"out{len(more)}/traces/*.json")] == made


def test_the_floor_is_measured_around_what_leaves_its_model_as_it_was(monkeypatch):
    """Peers keep their hooks: forward and backward alone are there no more."""
    job = replace(JOB, trainer="adamw", floor_steps=2)
    assert [len(measure(job)[name]) for name in ("floor_ms", "launch_ms")] == [2, 2]
    monkeypatch.setitem(CONTESTANTS, "adamw", replace(CONTESTANTS["adamw"], leaves=False))
    assert [len(measure(job)[name]) for name in ("floor_ms", "launch_ms")] == [1, 1]
    assert measure(JOB)["floor_ms"] == []


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        ([], {"torch-offload": 20, "adamw": 20, "sync": 20}),
        (["--peer-windows", "2"], {"torch-offload": 4, "adamw": 20}),
    ],
)
def test_a_peer_takes_as_many_steps_as_are_asked_for(words, steps):
    args = command._parser().parse_args(["step", "--zenflow", "U=2", *words])
    assert {trainer: plain_job(args, trainer).steps for trainer in steps} == steps


def test_the_step_table_has_both_windows_and_all_that_keeps_its_gradients_on_the_host():
    args = command._parser().parse_args(["step"])
    assert [variant.settings.get("deferred_rule") or variant.settings.get("accumulate_on") or variant.window
            for variant in args.zenflow] == [4, 8, 4, "host", "replay"]  # fmt: skip
    configs = [ZenFlowConfig(**variant.settings) for variant in args.zenflow]
    assert [(config.stagger, config.predicts) for config in configs[1:4]] == [
        (True, True),
        (False, False),
        (True, True),
    ]


def test_torch_s_adamw_on_the_host_trains_as_on_the_device():  # G8
    here, there = (measure(replace(JOB, trainer=trainer)) for trainer in ("adamw", "torch-offload"))
    assert there["loss_first"] == here["loss_first"]
    assert (
        there["loss_last"] == pytest.approx(here["loss_last"], rel=1e-3) and there["loss_last"] != there["loss_first"]
    )


def test_torch_s_adamw_on_the_host_is_measured_unless_trainers_are_chosen():  # G8
    for contestants in (command._parser().parse_args(["step"]).trainers, list(CONTESTANTS)):
        assert {"adamw", "torch-offload", "sync", "zenflow"} <= set(contestants)


MEASURED = {
    "parameters": 1000,
    "device": "cpu",
    "mean_ms": 10.0,
    "floor_ms": [],
    "launch_ms": [],
    "step_ms": [10.0] * 8,
    "first_step_ms": 50.0,
    "first_totals": {},
    "totals": {},
    "host_bytes": None,
    "worker_threads": None,
    "peak_bytes": None,
    "host_growth_bytes": 0,
    "machine_growth_bytes": 0,
    "loss_first": 6.0,
    "loss_last": 6.0,
}


def test_red_tests_leave_no_ratio(tmp_path, tests, monkeypatch, capsys):
    monkeypatch.setattr("zenflow.bench.step_session.run_job", lambda *_: MEASURED)
    code = main([*SMALL, *tests("assert False"), "--trainers", "floor", "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert code == 1
    assert "NO RATIOS" in printed and "1 failed" in printed
    assert "mean ms" in printed and "x floor" not in printed
    assert all(float(row["mean_ms"]) > 0 and "ratio" not in row for row in rows(tmp_path / "out"))


def test_the_floor_and_launching_beside_a_hog(tmp_path, tests, monkeypatch):
    """The hog works while both are measured; launching is the same model at batch 1."""
    seen = []

    def measured(job: Job, *_: object) -> dict:
        seen.append((job.label, job.batch, bool(_benches())))
        return MEASURED | {"mean_ms": 10.0 + 5 * (job.batch == 1) + 10 * seen[-1][2]}

    monkeypatch.setattr("zenflow.bench.step_session.run_job", measured)
    monkeypatch.setattr("zenflow.bench.contention.physical_cores", lambda: [(0,), (1,)])
    words = [*SMALL, *tests("pass"), "--trainers", "floor", "--contention", "1", "--hog-matrices", "1"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    names = ["floor alone", "floor beside 1 thread"]
    assert seen[2:] == [
        (f"{name}{more}", size, name != names[0]) for name in names for more, size in (("", 2), (", launching", 1))
    ]
    alone, beside = [row for row in rows(tmp_path / "out") if row["table"] == "contention"]
    assert (alone["mean_ms"], alone["launch_ms"], alone["ratio"]) == ("10.0", "15.0", "1.0")
    assert (beside["ratio"], float(beside["launch_ratio"])) == ("2.0", pytest.approx(25 / 15))
    assert float(beside["hog_gb_per_s"]) > 0 and not alone["hog_gb_per_s"]


@pytest.mark.parametrize("copies", ["to host", "up"])
def test_copies_need_a_gpu_and_a_direction(copies):
    with pytest.raises(ValueError, match=f"copies are '{copies}' on cpu; allowed: 'to host' or 'to device' on a GPU"):
        Traffic(copies, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ["to host", "to device"])
def test_copies_go_on_beside_the_steps(copies):
    traffic = Traffic(copies, torch.device("cuda"))
    while traffic.totals()["copied_bytes"] < 1 << 30:
        traffic.top_up()
    torch.cuda.synchronize()
    assert traffic.totals()["copied_bytes"] % TURN_BYTES == 0


def test_a_child_that_takes_too_long_is_killed(tmp_path):
    assert run_job(JOB, tmp_path / "job.log", timeout=0.05) == {"error": "killed after 0.05 s"}
    assert not _benches()


def test_a_child_that_dies_without_a_word_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("zenflow.bench.children.module_command", lambda: ["/bin/sh", "-c", "echo gone >&2; exit 3"])
    result = run_job(JOB, tmp_path / "job.log", timeout=300)
    assert result == {"error": "the process ended with exit code 3 without a result: gone"}


def test_the_hog_works_until_it_is_let_go(tmp_path):
    with hog([min(os.sched_getaffinity(0))], 1, tmp_path / "hog.log", matrices=1) as busy:
        assert len(_benches()) == 1
    assert not _benches()
    assert busy.gb_per_s[0] > 0


def _benches() -> list[int]:
    """Children of this test that run a part of the command."""
    found = []
    for pid in family(os.getpid())[1:]:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"zenflow.bench" in words:
            found.append(pid)
    return found


def test_a_hog_that_cannot_work_is_told(tmp_path):
    nowhere = hog([10**5], 1, tmp_path / "hog.log", matrices=1)
    with pytest.raises(RuntimeError, match="the memory hog failed: OSError"), nowhere:
        pytest.fail("it started")


def test_a_run_that_is_ended_takes_its_child_with_it(tmp_path, tests):
    words = [*SMALL, *tests("pass"), "--trainers", "floor", "--out", str(tmp_path / "out")]
    command = subprocess.Popen(
        [*module_command(), *words], stderr=subprocess.PIPE, text=True, env=environment(), cwd=tmp_path
    )
    assert command.stderr.readline().startswith("tests: ")
    while not (children := family(command.pid)[1:]):
        assert command.poll() is None
    command.terminate()
    assert command.wait(30) == 128 + signal.SIGTERM
    command.stderr.close()
    assert all(ends_within(child, 10) for child in children)


def test_a_job_survives_its_journey():
    assert Job(**json.loads(json.dumps(asdict(JOB)))) == JOB
