"""The worker's birth and death, and what is left of it (E2, E5, E7, E9)."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import ends_within, shared_bytes, within
from tests.worker.feeding import Trainer, make_segment
from zenflow import client as client_module
from zenflow.client import WorkerClient, WorkerError
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings

LIMIT = 5.0  # seconds in which a dead worker must be noticed, and it the trainer's end


@pytest.fixture
def client():
    made = WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV], ids=lambda s: s.name)
@pytest.mark.parametrize("moment", ["idle", "mid-window"])
def test_a_killed_worker_is_noticed_and_named(trainer, moment, sent):
    t = trainer(make_segment(bucket_bytes=700))
    t.run(t.make_window())
    done = t.seq
    t.fill(t.make_window())
    if moment == "mid-window":
        t.memories[0].publish(0, 1, t.seq + 1)
        t.client.wait_done(t.seq + 1)
        done += 1
    os.kill(t.client.worker_pid, sent)
    with pytest.raises(WorkerError, match=f"killed by signal {int(sent)} .{sent.name}"):
        within(LIMIT, t.client.wait_done, done + 1)
    with pytest.raises(WorkerError, match=sent.name):
        within(LIMIT, t.client.check)
    finished = [t.memories[0].slot_record(1, bucket).finished_ns[0] > 0 for _, bucket in t.slots()]
    assert sum(finished) == done - t.seq
    assert t.memories[0].master.any(), "the trainer still reads (E2)"


def test_a_crash_in_compiled_code_leaves_its_stack(trainer):
    t = trainer(make_segment())
    os.kill(t.client.worker_pid, signal.SIGSEGV)
    with pytest.raises(WorkerError, match=r"Fatal Python error(.|\n)*worker\.py"):
        within(LIMIT, t.client.wait_done, 1)


def test_a_silent_worker_is_an_error(trainer, monkeypatch):
    t = trainer(make_segment())
    monkeypatch.setattr("zenflow.client.SILENCE_SECONDS", 0.1)  # of a started worker, which beats when it is idle
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=rf"pid {t.client.worker_pid}\) has shown no sign of life for 0.1 seconds"):
        within(LIMIT, t.client.wait_done, 1)


def test_each_sign_of_life_starts_the_silence_anew(trainer, monkeypatch):
    """A stopped worker in whose name the test beats 100 times, which takes twice as long as it may be silent."""
    t = trainer(make_segment())
    monkeypatch.setattr("zenflow.client.SILENCE_SECONDS", 0.5)
    monkeypatch.setattr("zenflow.client.LIVENESS_SECONDS", 1e-2)
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    looks = 0

    def beat():
        nonlocal looks
        looks += 1
        if looks <= 100:
            t.client.header.beat()

    with pytest.raises(WorkerError, match="no sign of life"):
        within(LIMIT, t.client.wait_done, 1, beat)
    assert looks > 100


def test_an_idle_worker_shows_life_and_what_the_trainer_checks_ends_its_wait(trainer):
    t = trainer(make_segment())
    beats = set()

    def check():
        beats.add(t.client.header.heartbeat)
        if len(beats) == 3:
            raise RuntimeError("the device is lost")

    with pytest.raises(RuntimeError, match="the device is lost"):
        within(LIMIT, t.client.wait_done, 1, check)
    t.run(t.make_window())
    t.check()


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM], ids=lambda s: s.name)
def test_what_ends_a_whole_job_leaves_the_worker_to_its_trainer(trainer, sent):
    t = trainer(make_segment())
    os.kill(t.client.worker_pid, sent)
    t.run(t.make_window())
    t.check()


def test_a_worker_that_was_started_under_a_mask_has_none():
    """As by a program that takes its signals by `sigwait`: what is sent to the worker ends it all the same."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        client = WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.kill(client.worker_pid, signal.SIGUSR1)
    with closing(client), pytest.raises(WorkerError, match="SIGUSR1"):
        within(LIMIT, client.wait_done, 1)


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSEGV], ids=lambda s: s.name)
def test_a_worker_killed_during_start_is_noticed(client, sent):
    memory = SegmentMemory.create(make_segment())
    os.kill(client.worker_pid, sent)
    with pytest.raises(WorkerError, match=sent.name):
        within(LIMIT, client.attach, memory.segment, memory)
    memory.close()


@pytest.mark.parametrize("moment", ["before-its-first-message", "whenever"])
def test_a_worker_that_cannot_start_says_why(monkeypatch, moment):
    """On a busy machine it may be over before the trainer goes on: then there is nobody to send a message to."""
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    memory, before, spawn = SegmentMemory.create(make_segment()), descriptors(), client_module._spawn

    def spawn_and_wait(*arguments):
        process = spawn(*arguments)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        return process

    if moment == "before-its-first-message":
        monkeypatch.setattr(client_module, "_spawn", spawn_and_wait)
    with (
        pytest.raises(WorkerError, match=r"exit code 1(.|\n)*encodings") as kept,
        closing(WorkerClient(settings=WorkerSettings(), cores=[0], threads=1)) as client,
    ):
        client.attach(memory.segment, memory)
    assert kept.traceback and descriptors() == before, "a client that cannot be had holds nothing, whoever holds it"
    memory.close()


def test_a_traceback_reaches_the_trainer():
    """Cores that do not exist: the worker fails in Python, long after its start has begun."""
    client = WorkerClient(settings=WorkerSettings(), cores=[100_000], threads=1)
    memory = SegmentMemory.create(make_segment())
    with pytest.raises(WorkerError, match=r"exit code 1(.|\n)*Traceback(.|\n)*sched_setaffinity"):
        client.attach(memory.segment, memory)
    client.close()
    memory.close()


@pytest.fixture
def raising_in(monkeypatch):
    """`raising_in(name)`: SIGTERM, whose handler raises KeyError, comes at that function's end; what it returned."""

    def ring(*_):
        raise KeyError("SIGTERM")

    def interrupt(name):
        called, returned = getattr(client_module, name), []

        def interrupted(*arguments):
            returned.append(called(*arguments))
            os.kill(os.getpid(), signal.SIGTERM)
            return returned[-1]

        monkeypatch.setattr(client_module, name, interrupted)
        return returned

    before = signal.signal(signal.SIGTERM, ring)
    yield interrupt
    signal.signal(signal.SIGTERM, before)


def test_a_handler_that_raises_during_the_start_leaves_no_worker(raising_in):
    """Nor one that has ended and that nobody has waited for, whoever holds the error."""
    before, spawned = descriptors(), raising_in("_spawn")
    with pytest.raises(KeyError, match="SIGTERM") as kept:
        WorkerClient(settings=WorkerSettings(), cores=[0], threads=1)
    assert kept.traceback and spawned[0].returncode is not None and descriptors() == before


def test_a_handler_that_raises_during_the_end_does_not_break_it_off(raising_in, client):
    before, pid = descriptors(), client.worker_pid
    raising_in("_has_room")
    with pytest.raises(KeyError, match="SIGTERM"):
        client.close()
    assert not Path(f"/proc/{pid}").exists()
    assert descriptors() == before - 4, "two of the socket, the output and the header"


def test_close_is_idempotent_and_ends_the_worker(trainer):
    t = trainer(make_segment())
    pid = t.client.worker_pid
    assert not t.client.closed
    t.close()
    t.close()
    assert t.client.closed and ends_within(pid, 0)
    with pytest.raises(WorkerError, match="has been stopped"):
        t.client.check()
    with pytest.raises(WorkerError, match="has been stopped"):
        within(LIMIT, t.client.wait_done, 1)


def test_a_stopped_worker_is_killed(monkeypatch, client):
    monkeypatch.setattr("zenflow.client.STOP_SECONDS", 0.1)
    os.kill(client.worker_pid, signal.SIGSTOP)
    client.close()
    assert ends_within(client.worker_pid, 0)


def test_the_worker_ends_with_its_client():
    client = WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)
    pid = client.worker_pid
    del client
    assert ends_within(pid, 0)


def test_twenty_times_in_one_process_leave_nothing():
    """E9, and E2's leaks: descriptors and shared memory as before, /dev/shm unused."""

    def once():
        t = Trainer(make_segment(shapes=((256, 1024, 0),)))
        t.run(t.make_window())
        views = t.memories[0].master, t.memories[0].shadow
        t.close()
        return views

    def mapped_in_shm() -> int:
        return Path("/proc/self/maps").read_text().count("/dev/shm")

    elsewhere = mapped_in_shm()  # of other libraries in this process
    once()
    before, memory = descriptors(), shared_bytes()
    kept = [once() for _ in range(20)]
    assert descriptors() == before
    assert mapped_in_shm() == elsewhere
    assert shared_bytes() <= memory + (1 << 20), "views of 20 closed runs hold no memory"
    assert len(kept) == 20


def test_signals_for_the_trainer_do_not_reach_the_worker(trainer):
    t = trainer(make_segment())
    assert os.getsid(t.client.worker_pid) == t.client.worker_pid, "its own session: no Ctrl-C from the terminal"
    os.kill(t.client.worker_pid, signal.SIGINT)
    t.run(t.make_window())
    t.check()


def test_the_worker_is_small_and_bound(trainer, library):
    """No torch, Triton or user code in it; its threads on its core."""
    core = max(os.sched_getaffinity(0))
    t = trainer(make_segment())
    client = WorkerClient(settings=WorkerSettings(), cores=[core], threads=1)
    memory = SegmentMemory.create(make_segment())
    client.attach(memory.segment, memory)
    maps = Path(f"/proc/{t.client.worker_pid}/maps").read_text()
    assert "adamw-" in maps and "torch" not in maps and "triton" not in maps
    assert os.sched_getaffinity(client.worker_pid) == {core}
    client.close()
    memory.close()


def test_a_worker_started_from_a_thread_outlives_the_thread():
    made: list[Trainer] = []
    thread = threading.Thread(target=lambda: made.append(Trainer(make_segment())))
    thread.start()
    thread.join()
    made[0].run(made[0].make_window())
    made[0].check()
    made[0].close()


def test_a_forked_copy_of_the_trainer_leaves_the_worker_and_its_memory_alone(trainer):
    """As with forked data loaders: the copy closes everything and ends."""
    t = trainer(make_segment())
    child = os.fork()
    if child == 0:
        try:
            t.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert t.memories[0].master.any()
    t.run(t.make_window())
    t.check()


def test_thread_settings_of_the_trainer_do_not_reach_the_worker(monkeypatch, trainer, library):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    t = trainer(make_segment(shapes=((256, 1024, 0),)), threads=2)
    environment = Path(f"/proc/{t.client.worker_pid}/environ").read_bytes().decode().split("\0")
    assert [line for line in environment if "OMP" in line] == ["OMP_WAIT_POLICY=passive"]
    t.run(t.make_window())
    assert len(os.listdir(f"/proc/{t.client.worker_pid}/task")) == 2, "the pass has its two threads"
