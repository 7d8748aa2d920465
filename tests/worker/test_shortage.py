"""No descriptor, thread or memory left when the worker starts: an error that says so, and nothing left behind (E9)."""

from __future__ import annotations

import gc
import os
import resource
import threading

import pytest

from tests.processes import ends_within, within
from tests.shortages import descriptors_left, limit_for
from tests.worker.feeding import make_segment
from zenflow import client as client_module
from zenflow.arena import Arena
from zenflow.client import WorkerClient, WorkerError
from zenflow.ring import SegmentMemory
from zenflow.worker_settings import WorkerSettings

LIMIT = 5.0


def make_client() -> WorkerClient:
    return WorkerClient(settings=WorkerSettings(), cores=sorted(os.sched_getaffinity(0)), threads=1)


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.filterwarnings("error::ResourceWarning", "error::pytest.PytestUnraisableExceptionWarning")
def test_a_process_without_descriptors_is_told_its_limit_and_keeps_none(library: object) -> None:
    """Whichever of them is the one that is lacking."""
    before, refused = descriptors(), 0
    for count in range(30):
        try:
            with descriptors_left(count):
                client = make_client()
        except OSError as error:
            assert "left of the" in str(error) and "ulimit -n" in str(error)
            refused += 1
            assert descriptors() == before, f"with {count} descriptors left"
        else:
            client.close()
            break
    assert refused >= 6, "header, two sockets, the connection, the output, and the start itself"
    assert descriptors() == before


def test_an_arena_without_a_descriptor_is_told_the_limit() -> None:
    with descriptors_left(0), pytest.raises(OSError, match=r"left of the [\d,]+ that it may have open at once"):
        SegmentMemory.create(make_segment())


def test_where_the_memory_ends_half_way_what_was_taken_goes_back_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while somebody holds the error, whose traceback holds the arenas."""
    create, made = Arena.create, []

    def refuse_the_last(name: str, nbytes: int) -> Arena:
        if len(made) == 2:
            raise MemoryError("no more")
        made.append(create(name, nbytes))
        return made[-1]

    monkeypatch.setattr(Arena, "create", refuse_the_last)
    with pytest.raises(MemoryError, match="no more") as kept:
        SegmentMemory.create(make_segment(ring_dtype="float32"))
    assert kept.traceback and [arena.fd for arena in made] == [-1, -1]


def test_a_worker_without_descriptors_says_how_many_arrived() -> None:
    client, memory = make_client(), SegmentMemory.create(make_segment())

    def is_up() -> None:
        while not client.header.heartbeat:
            client.check()

    within(LIMIT, is_up)
    room = limit_for(client.worker_pid, 1)
    resource.prlimit(client.worker_pid, resource.RLIMIT_NOFILE, (room, room))
    with pytest.raises(WorkerError, match=rf"1 of 2 descriptors arrived; the limit \(ulimit -n\) is {room}"):
        within(LIMIT, client.attach, memory.segment, memory)
    client.close()
    memory.close()


def test_a_worker_that_nobody_could_watch_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread after the process has been started."""
    before, started = descriptors(), []
    spawn = client_module._spawn

    def noting(*args: object) -> object:
        started.append(spawn(*args))
        return started[-1]

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(client_module, "_spawn", noting)
    monkeypatch.setattr(client_module._Watch, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        make_client()
    assert ends_within(started[0].pid, 0)
    started.clear()
    assert descriptors() == before
