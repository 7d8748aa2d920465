"""SIGTERM, SIGINT, SIGHUP at any moment: the step ends, the run is saved, the exit code says so, nobody is left."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zenflow.training.run as running
from tests.commands import ENVIRONMENT, Outcome
from tests.experiments.interrupted import TINY, ZENFLOW, assert_same_run, contents, make_text, told
from tests.processes import ends_within
from zenflow.client import WorkerError
from zenflow.disk import DiskFullError
from zenflow.signals import Stopped, StopRequest, exit_code, signals_held
from zenflow.training.checkpoints import all_of, step_of
from zenflow.training.engines import ZenFlowRun
from zenflow.training.loop import Loop

NUMBERS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    return (*TINY, *ZENFLOW, *make_text(tmp_path / "text.txt"))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """They are what they were, whatever a run did."""
    before = [signal.getsignal(number) for number in NUMBERS]
    yield
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.fixture
def interrupting(monkeypatch) -> Callable[..., None]:
    """`interrupting(owner, name, number, when)`: a signal in each call of a method for whose arguments `when` holds."""

    def wrap(owner: object, name: str, number: int, when: Callable[..., bool] = lambda *_: True) -> None:
        called = getattr(owner, name)

        def wrapped(*arguments: object, **named: object) -> object:
            if when(*arguments):
                os.kill(os.getpid(), number)
            return called(*arguments, **named)

        monkeypatch.setattr(owner, name, wrapped)

    return wrap


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


@pytest.mark.parametrize("number", NUMBERS)
def test_the_step_ends_and_is_saved_and_the_rest_follows(command, words, interrupting, monkeypatch, number):
    """F16, E5: also with no checkpoint asked for; wandb's exit code and the worker's end are those of the run."""
    settings, before = (*words, "save_model=true"), children()
    whole = command(*settings, folder=Path("whole").absolute())
    with monkeypatch.context() as patched:
        interrupting(Loop, "_step", number, lambda loop, step: step == 7)
        stopped = command(*settings)
        patched.undo()
    assert stopped.code == 128 + number
    assert children() <= before
    assert [step_of(path) for path in all_of(stopped.folder)] == [7]
    assert [line["step"] for line in stopped.metrics() if "loss" in line] == list(range(1, 8))
    name = signal.Signals(number).name
    assert f"interrupted by {name} after step 7, which is saved" in (stopped.folder / "train.log").read_text()
    assert f"\nzenflow-train resume={stopped.folder}\n" in stopped.out
    monkeypatch.undo()
    resumed = command(f"resume={stopped.folder}", folder=stopped.folder)
    assert resumed.code == 0
    assert_same_run(resumed, whole)


@pytest.mark.parametrize("last", [False, True], ids=["between", "last"])
def test_an_evaluation_is_given_up_and_made_later(command, words, interrupting, monkeypatch, last):
    settings = (*words, "save_model=true", "evaluate_every=5")
    whole = command(*settings, folder=Path("whole").absolute())
    interrupting(Loop, "_evaluate", signal.SIGTERM, lambda loop, step: step == (12 if last else 5))
    stopped = command(*settings)
    assert stopped.code == 143
    assert told(stopped) == told(whole)[: -1 if last else 6]
    monkeypatch.undo()
    resumed = command(f"resume={stopped.folder}", folder=stopped.folder)
    assert resumed.code == 0
    assert_same_run(resumed, whole)


def test_before_the_first_step_nothing_is_saved_or_left(command, words, interrupting):
    """E6: while the CPU process starts."""
    before = children()
    interrupting(running, "build_engine", signal.SIGTERM)
    stopped = command(*words)
    assert stopped.code == 143 and "before the first step" in stopped.out
    assert children() <= before
    assert all_of(stopped.folder) == []


def test_after_the_last_step_the_run_is_finished(command, words, interrupting):
    interrupting(running, "_finish", signal.SIGTERM)
    assert command(*words).code == 0


def test_wandb_learns_the_exit_code(command, kept, words, interrupting, monkeypatch):
    interrupting(Loop, "_step", signal.SIGTERM, lambda loop, step: step == 2)
    stopped = command(*words, "tracking=offline")
    assert stopped.code == 143
    first = kept(stopped.folder)
    assert first.exit_code == 143
    (path,) = stopped.folder.glob("wandb/offline-run-*")
    path.rename(stopped.folder / "wandb" / "first")
    monkeypatch.undo()
    resumed = command(f"resume={stopped.folder}", folder=stopped.folder)
    second = kept(resumed.folder)
    assert (second.id, second.exit_code) == (first.id, 0)
    told_of = [line["step"] for part in (first, second) for line in part.history if "loss" in line]
    assert told_of == list(range(1, 13))


def test_a_sweep_ends_with_the_job_that_runs_and_goes_on(command, words, interrupting, monkeypatch):
    sweep = ("-m", *words, "resume=auto", "seed=0,1,2")
    interrupting(Loop, "_step", signal.SIGTERM, lambda loop, step: step == 3 and loop._config.seed == 1)
    stopped = command(*sweep)
    assert stopped.code == 143
    assert (stopped.folder / "0" / "summary.json").exists() and not (stopped.folder / "2").exists()
    assert [step_of(path) for path in all_of(stopped.folder / "1")] == [3]
    assert "interrupted" in (stopped.folder / "summary.txt").read_text()
    first = contents(stopped.folder / "0")
    monkeypatch.undo()
    assert command(*sweep).code == 0
    assert contents(stopped.folder / "0") == first
    for job in ("0", "1", "2"):
        lines = [line["step"] for line in Outcome(0, "", "", stopped.folder).metrics(job) if "loss" in line]
        assert lines == list(range(1, 13))


def test_a_sweep_that_is_stopped_between_two_jobs_makes_no_third(command, words, interrupting):
    interrupting(running, "_finish", signal.SIGTERM)
    stopped = command("-m", *words, "engine.topk_ratio=0.1,0.2")
    assert stopped.code == 143
    assert (stopped.folder / "0" / "summary.json").exists() and not (stopped.folder / "1").exists()


@pytest.mark.parametrize("earlier", [False, True], ids=["nothing", "step 4"])
def test_what_cannot_be_saved_is_said(command, words, interrupting, monkeypatch, earlier):
    """A full disk at the worst moment: the exit code is the signal's, and the last checkpoint is named, if any."""
    from zenflow import checkpoint_folder

    def full(path: Path, needed: int) -> None:
        if step_of(path) != 4:
            raise DiskFullError(errno.ENOSPC, f"no room: {needed:,} bytes needed, 3 available", str(path))

    monkeypatch.setattr(checkpoint_folder, "check_room", full)
    interrupting(Loop, "_step", signal.SIGTERM, lambda loop, step: step == 6)
    stopped = command(*words, *(["checkpoint_every=4"] if earlier else []))
    assert stopped.code == 143 and "3 available" in stopped.out
    assert "could NOT be saved" in stopped.out
    assert ("goes on from step_00000004" if earlier else "there is no checkpoint") in stopped.out


SECOND = """
import os, signal, experiments.train
from zenflow.training.engines import ZenFlowRun
from zenflow.training.loop import Loop
from zenflow.training.run_state import RunState
step = Loop._step
def stepped(loop, number):
    step(loop, number)
    if number == 3:
        print(*open(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read().split(), flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
Loop._step = stepped
def gather(state, step, **how):
    os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("alive")
RunState.gather = gather
experiments.train.main()
"""


def test_a_second_signal_ends_at_once(words, tmp_path):
    """E5: without another line of Python; the worker is gone, too."""
    done = subprocess.run(
        [sys.executable, "-c", SECOND, *words, "hydra.run.dir=here"],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGINT and "alive" not in done.stderr
    (worker,) = re.findall(r"^(\d+)$", done.stdout, flags=re.M)
    assert ends_within(int(worker), 5)
    assert all_of(tmp_path / "here") == []


def test_a_request_is_a_number_until_the_block_ends():
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: seen.append(number))
    try:
        with StopRequest() as request:
            assert request.number is None
            with signals_held():
                os.kill(os.getpid(), signal.SIGTERM)
                assert request.number is None
            assert request.number == signal.SIGTERM and seen == []
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_closed_terminal_ends_nothing_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and request.number is None
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_exit_codes_are_those_of_shells():
    assert [exit_code(Stopped(number, "")) for number in NUMBERS] == [130, 143, 129]
    assert exit_code(KeyboardInterrupt()) == 130


def test_a_state_that_cannot_be_had_is_said_too(command, words, interrupting, monkeypatch):
    """As where the same signal has ended the CPU process."""

    def gone(*_: object) -> None:
        raise WorkerError("the CPU optimizer was killed by signal 15 (SIGTERM)")

    monkeypatch.setattr(ZenFlowRun, "state_dict", gone)
    interrupting(Loop, "_step", signal.SIGTERM, lambda loop, step: step == 2)
    stopped = command(*words)
    assert stopped.code == 143 and "killed by signal 15" in stopped.out and "could NOT be saved" in stopped.out
