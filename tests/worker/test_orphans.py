"""A worker never outlives its trainer, however that ends and whatever the worker is doing (E5, E6, E16)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.processes import ends_within, wait_until_stopped

LIMIT = 5.0  # seconds
REPOSITORY = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])}

SCRIPT = """
import os, signal, sys, threading
def idle():
    while True:
        signal.sigtimedwait((), 0.1)
print("imported", file=open("bodies", "a"))  # where a second training would say so, too, whose output nobody sees
from zenflow.client import WorkerClient
from zenflow.geometry import lay_out
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings
def make():
    made.append(WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1))
made = []
if sys.argv[3] == "thread":
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
else:
    make()
client = made[0]
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


@contextmanager
def started(folder: Path, moment: str, ending: str, starter: str = "main") -> Iterator[tuple[subprocess.Popen, int]]:
    """A trainer without a main guard, from its own file; its process and its worker's id."""
    path = folder / "train.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, path, moment, ending, starter], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=ENVIRONMENT, start_new_session=True, cwd=folder,
    )  # fmt: skip
    worker = None
    try:
        worker = int(process.stdout.readline())
        assert process.stdout.readline() == "up\n"
        yield process, worker
    finally:
        for kill, number in ((os.killpg, process.pid), (os.kill, worker)):
            with suppress(ProcessLookupError, TypeError):
                kill(number, signal.SIGKILL)
        process.communicate()


@pytest.mark.parametrize("moment", ["importing", "attached"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_the_worker_goes_with_the_trainer(tmp_path, sent, moment):
    with started(tmp_path, moment, "wait") as (process, worker):
        process.send_signal(sent)
        assert ends_within(worker, LIMIT), "5 seconds later the worker is still there"
        assert process.wait(10) != 0


def test_a_worker_that_runs_no_code_goes_with_the_trainer(tmp_path):
    """It is stopped, as good as in the middle of a long pass: the kernel has to end it."""
    with started(tmp_path, "attached", "wait") as (process, worker):
        os.kill(worker, signal.SIGSTOP)
        wait_until_stopped(worker)
        process.kill()
        assert ends_within(worker, LIMIT)


@pytest.mark.parametrize("ending", ["wait", "wait alone"])
def test_a_worker_that_a_thread_has_started_goes_with_the_trainer(tmp_path, ending):
    """The kernel's signal would come with the thread's end. So the worker has to look after its parent where a child
    holds the pipe, and to notice the pipe's end, at which there is always something to read, where none does."""
    with started(tmp_path, "attached", ending, "thread") as (process, worker):
        assert not ends_within(worker, 0)
        process.kill()
        assert ends_within(worker, LIMIT)


@pytest.mark.parametrize("ending, code", [("return", 0), ("raise", 1)])
def test_a_script_that_never_closes(tmp_path, ending, code):
    """E16: without a main guard it runs once, ends as it would alone, and leaves no process."""
    with started(tmp_path, "attached", ending) as (process, worker):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (code, "")
        assert err.count("ValueError: user error") == (ending == "raise") and "leaked" not in err
        assert ends_within(worker, 0)
        assert (tmp_path / "bodies").read_text() == "imported\n"
