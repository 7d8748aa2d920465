"""The worker's birth and death, and what is left of it (E2, E3, E5, E6, E7, E9, E16)."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.processes import ends_within, within
from tests.worker.feeding import Trainer, make_segment
from zenflow import client as client_module
from zenflow.client import WorkerClient, WorkerError
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings

LIMIT = 5.0  # seconds in which a dead worker must be noticed, and it the trainer's end
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])}


@pytest.fixture
def client():
    made = WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)
    yield made
    made.close()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def shared_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"RssShmem:\s+(\d+) kB", status)[1]) * 1024


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
        t.client.wait_done(1)


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


def test_global_state_of_the_trainer_is_unchanged(trainer):
    method, handlers = multiprocessing.get_start_method(allow_none=True), signal.getsignal(signal.SIGINT)
    mask = os.sched_getaffinity(0)
    t = trainer(make_segment())
    t.close()
    assert multiprocessing.get_start_method(allow_none=True) == method
    assert signal.getsignal(signal.SIGINT) is handlers and os.sched_getaffinity(0) == mask


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


SCRIPT = """
import os, signal, sys
def idle():
    while True:
        signal.sigtimedwait((), 0.1)
print("imported", flush=True)
from zenflow.client import WorkerClient
from zenflow.geometry import lay_out
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings
client = WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)
print(client.worker_pid, flush=True)
if sys.argv[1] != "importing":
    segment = lay_out(0, [(64, 64, 0)], channel_dim="column", weight_dtype="bfloat16", ring_dtype="bfloat16",
                      max_steps=4, n_groups=1, bucket_bytes=1 << 20)
    memory = SegmentMemory.create(segment)
    client.attach(segment, memory)
if sys.argv[2] == "wait" and os.fork() == 0:  # a data loader's worker, which holds copies of every descriptor
    idle()
print("up", flush=True)
if sys.argv[2] == "return":
    sys.exit(0)
if sys.argv[2] == "raise":
    raise ValueError("user error")
idle()
"""


def start(tmp_path: Path, moment: str, ending: str) -> tuple[subprocess.Popen, int]:
    """A trainer without a main guard, from its own file; its process and its worker's id."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, path, moment, ending], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, start_new_session=True, cwd=tmp_path,
    )  # fmt: skip
    assert process.stdout.readline() == "imported\n"
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("moment", ["importing", "attached"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_the_worker_goes_with_the_trainer(tmp_path, sent, moment):
    process, worker = start(tmp_path, moment, "wait")
    try:
        assert process.stdout.readline() == "up\n"
        process.send_signal(sent)
        assert ends_within(worker, LIMIT), "5 seconds later the worker is still there"
        assert process.wait(10) != 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("ending, code", [("return", 0), ("raise", 1)])
def test_a_script_that_never_closes(tmp_path, ending, code):
    """E16: without a main guard it runs once, ends as it would alone, and leaves no process."""
    process, worker = start(tmp_path, "attached", ending)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (code, "up\n")
    assert err.count("ValueError: user error") == (ending == "raise") and "leaked" not in err
    assert ends_within(worker, 0)


def test_thread_settings_of_the_trainer_do_not_reach_the_worker(monkeypatch, trainer, library):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GOMP_CPU_AFFINITY", "0")
    t = trainer(make_segment(shapes=((256, 1024, 0),)), threads=2)
    environment = Path(f"/proc/{t.client.worker_pid}/environ").read_bytes().decode().split("\0")
    assert [line for line in environment if "OMP" in line] == ["OMP_WAIT_POLICY=passive"]
    t.run(t.make_window())
    assert len(os.listdir(f"/proc/{t.client.worker_pid}/task")) == 2, "the pass has its two threads"
