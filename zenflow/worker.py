"""The CPU optimizer's process: `python -m zenflow.worker`, started by `zenflow.client`, which speaks its protocol.

It takes slots in order of their sequence numbers, updates master and moments of every channel in them, writes the
rounded weights to the shadow, and raises `done`. It imports torch only where the compiled pass is missing, never the
user's program, and ends with the trainer: by the kernel's signal, by the parent's id, or by the end of the pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection

from zenflow import exchange, native
from zenflow.geometry import Segment
from zenflow.header import Header
from zenflow.pace import Pace
from zenflow.planning import SegmentWork
from zenflow.ring import SegmentMemory, TornSlotError
from zenflow.worker_settings import WorkerSettings

SPIN_NS = 200_000
# (idle since, poll interval), seconds: within training the wait is between buckets, then between windows.
POLLS = ((0.0, 50e-6), (0.1, 200e-6), (2.0, 2e-3))
_PR_SET_PDEATHSIG = 1


class Worker:
    """The loop: slots when they are ready, else messages, else sleep.

    control: the socket of messages and descriptors; header: the counters that the trainer reads; parent: the trainer's
    id. connection: messages of `control`; settings, threads: as the trainer has sent them; library: the compiled pass,
    if there is one; pace: the threads of each window; segments: the places of each, by bucket; due: the next place in a
    segment that has begun, None between two; done: slots processed; running: false ends it.
    """

    def __init__(self, control: socket.socket, header: Header, parent: int) -> None:
        self.control, self.header, self.parent = control, header, parent
        self.connection = Connection(os.dup(control.fileno()))
        self.settings, self.threads = WorkerSettings(), 1
        self.pace = Pace(1, adapt=False)
        self.library = native.load()
        self.segments: list[list[Place]] = []
        self.due: Place | None = None
        self.window = 0, False  # the latest slot's window, and whether it was urgent
        self.done = 0
        self.running = True

    def run(self) -> None:
        """Until the trainer says stop or is gone."""
        idle_since = time.monotonic_ns()
        while self.running:
            place = self._arrived()
            if place is not None:
                self._process(place)
                self._receive(0)
                idle_since = time.monotonic_ns()
                continue
            idle = time.monotonic_ns() - idle_since
            if idle > SPIN_NS or not self.segments:
                self._check_order()
                self._receive(next(poll for since, poll in reversed(POLLS) if idle >= since * 1e9))

    def _candidates(self) -> list[Place]:
        """Where the next slot may come: in the segment that has begun, or else at the beginning of any."""
        return [places[0] for places in self.segments] if self.due is None else [self.due]

    def _arrived(self) -> Place | None:
        """The place whose slot is the next one, if that is ready. TornSlotError where another has come in its stead."""
        next_slot, strangers = self.done + 1, []
        for place in self._candidates():
            ready = place.ready()
            if ready == next_slot:
                return place
            if ready != place.last[place.turn]:
                strangers.append((place, ready))
        for place, ready in strangers:
            # Slots become ready in their order: a later one that is, is so after the next one, which was looked at
            # before it came.
            if ready > next_slot and (first := self._find(next_slot)) is not None:
                return first
            raise TornSlotError(
                f"segment {place.work.memory.segment.index}, bucket {place.bucket}: ready is {ready} "
                f"while slot {next_slot} is due"
            )
        return None

    def _find(self, seq: int) -> Place | None:
        return next((place for place in self._candidates() if place.ready() == seq), None)

    def _check_order(self) -> None:
        """Neither a later slot nor the window's end may come before the slot that is due: then that has been lost, or
        another has come in its stead since the last look, which `_arrived` names."""
        next_slot = self.done + 1
        for place in self._candidates():
            following, last = self._following(place), place.work.memory.sent(place.turn)
            if following is not None and following.ready() == next_slot + 1 and self._arrived() is None:
                raise TornSlotError(
                    f"slot {next_slot + 1} (bucket {following.bucket}) is ready before slot {next_slot}"
                )
            if last >= next_slot and self._arrived() is None:
                raise TornSlotError(f"slot {next_slot} has not come, but its window has been sent, up to slot {last}")

    def _following(self, place: Place) -> Place | None:
        """The next place in the same segment."""
        places = next(places for places in self.segments if places[0].work is place.work)
        return places[place.bucket + 1] if place.bucket + 1 < len(places) else None

    def _process(self, place: Place) -> None:
        started = time.monotonic_ns()
        memory = place.work.memory
        window = memory.window(place.turn), memory.is_urgent(place.turn)
        if window != self.window:
            self.window = window
            self._take_threads(self.pace.begin(started, memory.is_urgent(place.turn)))
        place.work.process(place.bucket, self.done + 1, place.turn)
        self.done += 1
        finished = place.finish(self.done, started)
        self.due = self._following(place)
        self.pace.worked(finished - started)
        self.header.beat()
        self.header.finish(self.done, finished - started)

    def _take_threads(self, threads: int) -> None:
        for places in self.segments:
            places[0].work.set_threads(threads)
        self.header.threads = threads

    def _receive(self, timeout: float) -> None:
        """Handle a message if one comes within `timeout` seconds; end if the trainer is gone."""
        if not select.select([self.connection], [], [], timeout)[0]:
            self.header.beat()
            if os.getppid() != self.parent:
                self.running = False
            return
        try:
            kind, *content = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.running = False
            return
        if kind == "stop":
            self.running = False
        elif kind == "start":
            self._start(*content)
        elif kind == "attach":
            self._attach(*content)
        elif kind == "exchange":
            self._exchange(*content)

    def _start(self, settings: WorkerSettings, cores: tuple[int, ...], threads: int) -> None:
        # Before the first parallel region: threads inherit the mask.
        os.sched_setaffinity(0, cores)
        self.settings, self.threads = settings, threads
        self.pace = Pace(threads, settings.adapt_threads)
        if self.library is None:
            import torch

            torch.set_num_threads(threads)

    def _attach(self, segment: Segment, n_fds: int) -> None:
        assert self.due is None, "a segment can only be attached between two windows"
        _, fds, _, _ = socket.recv_fds(self.control, 1, n_fds)
        if len(fds) < n_fds:  # the kernel drops those for which this process has no room
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise RuntimeError(f"{len(fds)} of {n_fds} descriptors arrived; the limit (ulimit -n) is {limit}")
        memory = SegmentMemory.attach(segment, fds)
        for arena in memory.arenas:
            arena.populate(self.threads)
            self.header.beat()
        work = SegmentWork(memory, self.settings, threads=self.threads, library=self.library)
        self.segments.append([Place(work, bucket.index) for bucket in segment.buckets])
        self.connection.send(("attached", segment.index))

    def _exchange(self, segment: int, orders: list[exchange.Order]) -> None:
        memories = (places[0].work.memory for places in self.segments)
        memory = next(memory for memory in memories if memory.segment.index == segment)
        exchange.carry_out(memory, orders, self.threads, self.library)
        self.header.beat()
        self.connection.send(("exchanged", segment))


class Place:
    """A bucket's slots; turn: of the slot that is due; last: the number that each turn's slot carried last."""

    def __init__(self, work: SegmentWork, bucket: int) -> None:
        self.work, self.bucket = work, bucket
        self.turn, self.last = 0, [0, 0]
        records = [work.memory.slot_record(turn, bucket) for turn in (0, 1)]
        self._times = [(record.started_ns, record.finished_ns) for record in records]

    def ready(self) -> int:
        """The `ready` word of the slot that is due."""
        return self.work.memory.ready(self.bucket, self.turn)

    def finish(self, seq: int, started: int) -> int:
        """Note the times of the slot that has been processed, and take the other turn; CLOCK_MONOTONIC now, in ns."""
        finished = time.monotonic_ns()
        for word, value in zip(self._times[self.turn], (started, finished), strict=True):
            word[0] = value
        self.last[self.turn] = seq
        self.turn ^= 1
        return finished


def main(arguments: list[str]) -> int:
    """`control fd, header fd, parent's process id, "main" if its main thread started this process`."""
    control, header_fd, parent = (int(value) for value in arguments[:3])
    faulthandler.enable()
    # Sent to a whole job, they are the trainer's to answer, which needs this process to save; it ends with its trainer.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if arguments[3] == "main":
        # Fires when the starting *thread* ends, so only the main thread's children may ask for it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 0
    header = Header.attach(header_fd)
    try:
        Worker(socket.socket(fileno=control), header, parent).run()
    except BaseException:
        header.fail(traceback.format_exc())
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    # Nothing is left to tear down, and with torch loaded the interpreter would take a second over it.
    os._exit(code)
