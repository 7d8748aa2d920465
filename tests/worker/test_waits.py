"""Every wait in trainer and worker ends when the other side is gone, and none goes by a clock that can be set (E7)."""

from __future__ import annotations

import ast
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import zenflow
from tests.processes import ends_within, within
from tests.worker.feeding import make_segment
from zenflow.client import RELEASED, WorkerError

LIMIT = 5.0
DISK = ("checkpoint_folder", "background_save")  # they wait for files, and for a thread of their own that writes them
ROOT = Path(zenflow.__file__).parent
SOURCES = [path for path in sorted([*ROOT.glob("*.py"), *ROOT.glob("training/*.py")]) if path.stem not in DISK]
BLOCKING = {
    *("sleep", "wait", "join", "poll", "recv", "recv_fds", "recv_bytes", "select", "acquire", "result", "communicate"),
    *("synchronize", "waitpid", "accept", "lock", "flock"),
}
# What ends each wait of engine and training. A new one belongs here, with its reason.
ENDS = {
    ("client", "wait_done"): "sleeps 50 us at most; asks after the process every 20 ms",
    ("client", "check"): "Popen.poll, which never waits",
    ("client", "_await"): "asks after the process every 20 ms; a message that was begun ends with it",
    ("client", "run"): "0.1 s at a time; it is what looks after the process",
    ("stand_in", "_arrives"): "1 ms at a time, 30 s at most, and no longer than the watch",
    ("client", "_stop"): "the watch ends within 0.1 s; the process is killed after 5 s",
    ("client", "_has_room"): "0 s",
    ("client", "_kill"): "for a process that has been sent SIGKILL",
    ("signals", "wait_for"): "a moment at a time, up to what the caller says",
    ("worker", "_receive"): "2 ms at most, then it asks after the parent; a message that was begun ends with it",
    ("worker", "_attach"): "the descriptors follow their message, or the pipe ends",
    ("folder_lock", "_take"): "20 ms at a time, a minute at most",
    ("own_lock", "take"): "flock that is told not to wait",
    ("own_lock", "close"): "flock that lets go, which never waits",
    ("driver", "stream_words"): "a stream of its own, on which nothing waits for the worker",
    ("sending", "finish_copies"): "the device waits for the worker alone, and the watch releases it",
    ("migration", "_order"): "as finish_copies",
    ("migration", "run_and_put_back"): "as finish_copies",
    ("predictions", "replace_predictions"): "as finish_copies",
    ("pins", "release"): "as finish_copies; before the watch is stopped",
    ("telemetry", "wait"): "as finish_copies",
    ("telemetry", "_all_reached"): "as finish_copies",
    ("trace", "_align"): "as finish_copies",
    ("training/metrics", "read"): "as finish_copies",
    ("training/checkpoints", "_settle"): "for the thread that writes files",
    ("training/peers", "__exit__"): "for a process that has been sent SIGKILL",
}


def waits(path: Path) -> Iterator[tuple[str, str]]:
    """Modules and functions that call something that may block, by the call's name."""
    module = path.relative_to(ROOT).with_suffix("").as_posix()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    others = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and "zenflow" not in node.module]
    imported = {alias.asname or alias.name: alias.name for node in others for alias in node.names}
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in ast.walk(function):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute | ast.Name):
                continue
            if isinstance(node.func, ast.Name):
                name, owner = imported.get(node.func.id), None
            else:
                name, owner = node.func.attr, node.func.value
            if name == "join" and (node.args or isinstance(owner, ast.Constant)):
                continue  # of strings and paths
            if name in BLOCKING and not (name == "wait" and len(node.args) > 1):  # a stream waits, not its thread
                yield module, function.name


def test_every_wait_has_an_end() -> None:
    found = {place for path in SOURCES for place in waits(path)}
    assert found - ENDS.keys() == set(), "say in ENDS what ends these"
    assert ENDS.keys() - found == set(), "these wait no more"


def clocks(source: str) -> set[str]:
    """Clocks that somebody can set, however a module comes by them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & {"time.time", "time.time_ns", "time.CLOCK_REALTIME", "datetime", "datetime.datetime"}


def test_no_wait_goes_by_the_wall_clock() -> None:
    """`time.time()` jumps when somebody sets it."""
    assert {path: clocks(path.read_text(encoding="utf-8")) for path in SOURCES} == dict.fromkeys(SOURCES, set())
    for source in ("from time import time as now", "import time\ntime.time_ns()", "from datetime import datetime"):
        assert clocks(source), source


def fill(pipe: socket.socket) -> None:
    """Until the other side would have to read first."""
    with pytest.raises(BlockingIOError):
        while True:
            pipe.send(b"\0" * 4096, socket.MSG_DONTWAIT)


def test_a_worker_that_has_stopped_reading_does_not_hold_up_the_end(trainer, monkeypatch) -> None:
    t = trainer(make_segment())
    monkeypatch.setattr("zenflow.client.STOP_SECONDS", 0.1)
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    fill(t.client._socket)
    within(LIMIT, t.client.close)
    assert ends_within(t.client.worker_pid, 0)


def test_a_worker_that_has_stopped_reading_is_noticed_by_who_sends(trainer, monkeypatch) -> None:
    t = trainer(make_segment())
    monkeypatch.setattr("zenflow.client.SILENCE_SECONDS", 0.1)
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    fill(t.client._socket)
    with pytest.raises(WorkerError, match="no sign of life"):
        within(LIMIT, t.client.begin_exchange, 0, [])


def test_a_worker_that_dies_before_it_answers_is_noticed(trainer) -> None:
    t = trainer(make_segment())
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    t.client.begin_exchange(0, [])
    os.kill(t.client.worker_pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="SIGKILL"):
        within(LIMIT, t.client.end_exchange, 0)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=lambda s: s.name)
def test_streams_are_let_go_though_nobody_asks_after_the_worker(trainer, monkeypatch, sent) -> None:
    """A stream waits for `done` alone: on a device the trainer's thread may be waiting for that stream."""
    t = trainer(make_segment())
    t.fill(t.make_window())
    monkeypatch.setattr("zenflow.client.SILENCE_SECONDS", 0.1)
    os.kill(t.client.worker_pid, sent)

    def as_a_stream() -> None:
        while t.client.header.done < RELEASED:
            os.sched_yield()

    within(LIMIT, as_a_stream)
    with pytest.raises(WorkerError, match="SIGKILL|no sign of life"):
        t.client.finished(1)
