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
from zenflow.ring import SegmentMemory, TornSlotError, WorkerSettings

SPIN_NS = 200_000
# (idle since, poll interval), seconds: within training the wait is between buckets, then between windows.
POLLS = ((0.0, 50e-6), (0.1, 200e-6), (2.0, 2e-3))
_PR_SET_PDEATHSIG = 1


class Worker:
    """The loop: slots when they are ready, else messages, else sleep.

    control: the socket of messages and descriptors; header: the counters that the trainer reads; parent: the trainer's
    id. connection: messages of `control`; settings, threads: as the trainer has sent them; library: the compiled pass,
    if there is one; pace: the threads of each window; position: in `route`, the place whose slot is due; done: slots
    processed; running: false ends it.
    """

    def __init__(self, control: socket.socket, header: Header, parent: int) -> None:
        self.control, self.header, self.parent = control, header, parent
        self.connection = Connection(os.dup(control.fileno()))
        self.settings, self.threads = WorkerSettings(), 1
        self.pace = Pace(1, adapt=False)
        self.library = native.load()
        self.route: list[Place] = []  # a window: every bucket of every segment, in sending order
        self.position = 0
        self.done = 0
        self.running = True

    def run(self) -> None:
        """Until the trainer says stop or is gone."""
        idle_since = time.monotonic_ns()
        while self.running:
            if self.route and self._arrived():
                self._process()
                self._receive(0)
                idle_since = time.monotonic_ns()
                continue
            idle = time.monotonic_ns() - idle_since
            if idle > SPIN_NS or not self.route:
                self._check_order()
                self._receive(next(poll for since, poll in reversed(POLLS) if idle >= since * 1e9))

    def _arrived(self) -> bool:
        place = self.route[self.position]
        ready = place.ready()
        if ready == self.done + 1:
            return True
        if ready != place.last[place.turn]:
            raise TornSlotError(
                f"segment {place.work.memory.segment.index}, bucket {place.bucket}: ready is {ready} "
                f"while slot {self.done + 1} is due"
            )
        return False

    def _check_order(self) -> None:
        """A later slot must not be ready before an earlier one: then the earlier one has been lost."""
        if not self.route:
            return
        place = self.route[self.position]
        if place.ready(later=True) != place.last[place.turn ^ 1] and not self._arrived():
            raise TornSlotError(f"bucket {place.bucket}: the next window is ready before slot {self.done + 1}")
        if self.position + 1 >= len(self.route):
            return
        place = self.route[self.position + 1]
        if place.ready() == self.done + 2 and not self._arrived():
            raise TornSlotError(f"slot {self.done + 2} (bucket {place.bucket}) is ready before slot {self.done + 1}")

    def _process(self) -> None:
        started = time.monotonic_ns()
        place = self.route[self.position]
        if self.position == 0:
            self._take_threads(self.pace.begin(started, place.work.memory.is_urgent(place.turn)))
        place.work.process(place.bucket, self.done + 1, place.turn)
        self.done += 1
        finished = place.finish(self.done, started)
        self.position = (self.position + 1) % len(self.route)
        self.pace.worked(finished - started)
        self.header.beat()
        self.header.finish(self.done, finished - started)

    def _take_threads(self, threads: int) -> None:
        for work in {place.work: None for place in self.route}:
            work.set_threads(threads)
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
        assert self.position == 0, "a segment can only be attached between two windows"
        _, fds, _, _ = socket.recv_fds(self.control, 1, n_fds)
        if len(fds) < n_fds:  # the kernel drops those for which this process has no room
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise RuntimeError(f"{len(fds)} of {n_fds} descriptors arrived; the limit (ulimit -n) is {limit}")
        memory = SegmentMemory.attach(segment, fds)
        for arena in memory.arenas:
            arena.populate(self.threads)
            self.header.beat()
        work = SegmentWork(memory, self.settings, threads=self.threads, library=self.library)
        self.route += [Place(work, bucket.index) for bucket in segment.buckets]
        self.connection.send(("attached", segment.index))

    def _exchange(self, segment: int, orders: list[exchange.Order]) -> None:
        memory = next(p.work.memory for p in self.route if p.work.memory.segment.index == segment)
        exchange.carry_out(memory, orders, self.threads, self.library)
        self.header.beat()
        self.connection.send(("exchanged", segment))


class Place:
    """A bucket in the route; turn: of the slot that is due; last: the number that each turn's slot carried last."""

    def __init__(self, work: SegmentWork, bucket: int) -> None:
        self.work, self.bucket = work, bucket
        self.turn, self.last = 0, [0, 0]
        records = [work.memory.slot_record(turn, bucket) for turn in (0, 1)]
        self._times = [(record.started_ns, record.finished_ns) for record in records]

    def ready(self, later: bool = False) -> int:
        """The `ready` word of the slot that is due, or of the bucket's next one."""
        return self.work.memory.ready(self.bucket, self.turn ^ later)

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
