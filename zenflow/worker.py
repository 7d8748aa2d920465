"""The CPU optimizer's process: `python -m zenflow.worker`, started by `zenflow.client`, which speaks its protocol.

It takes slots in order of their sequence numbers, updates master and moments of every channel in them, writes the
rounded weights to the shadow, and raises `done`. It imports torch only where the compiled pass is missing, never the
user's program, and ends with the trainer: by the kernel's signal, by the parent's id, or by the end of the pipe.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import select
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection

import numpy as np

from zenflow import native
from zenflow.cpu_pass import Update, plan_update, refresh, update_piece
from zenflow.geometry import Matrix, Piece, Segment
from zenflow.ring import Header, SegmentMemory, Slot, TornSlotError, WorkerSettings

SPIN_NS = 200_000
# (idle since, poll interval), seconds: within training the wait is between buckets, then between windows.
POLLS = ((0.0, 50e-6), (0.1, 200e-6), (2.0, 2e-3))
_PR_SET_PDEATHSIG = 1


class Worker:
    """The loop: slots when they are ready, else messages, else sleep.

    control: the socket of messages and descriptors; header: the counters that the trainer reads; parent: the trainer's
    id. connection: messages of `control`; settings, threads: as the trainer has sent them; library: the compiled pass,
    if there is one; position: in `route`, the slot that is due; done: slots processed; running: false ends the loop.
    """

    def __init__(self, control: socket.socket, header: Header, parent: int) -> None:
        self.control, self.header, self.parent = control, header, parent
        self.connection = Connection(os.dup(control.fileno()))
        self.settings, self.threads = WorkerSettings(), 1
        self.library = native.load()
        self.route: list[tuple[SegmentMemory, int]] = []  # a window: every bucket of every segment, in sending order
        self.last: list[int] = []  # sequence number that each slot of the route carried last
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
        memory, bucket = self.route[self.position]
        ready = memory.ready(bucket)
        if ready == self.done + 1:
            return True
        if ready != self.last[self.position]:
            raise TornSlotError(
                f"segment {memory.segment.index}, bucket {bucket}: ready is {ready} while slot {self.done + 1} is due"
            )
        return False

    def _check_order(self) -> None:
        """A later slot must not be ready before an earlier one: then the earlier one has been lost."""
        if self.position + 1 >= len(self.route):
            return
        memory, bucket = self.route[self.position + 1]
        if memory.ready(bucket) == self.done + 2 and not self._arrived():
            raise TornSlotError(f"slot {self.done + 2} (bucket {bucket}) is ready before slot {self.done + 1}")

    def _process(self) -> None:
        started = time.perf_counter_ns()
        memory, bucket = self.route[self.position]
        slot = memory.read_slot(bucket, self.done + 1)
        pieces = memory.segment.buckets[bucket].pieces
        # All plans before the first pass: a pass leaves nothing of the interpreter in the caches, and its threads wait.
        plans = [self._plan(memory, slot, piece) for piece in pieces]
        for piece, plan in zip(pieces, plans, strict=True):
            self._update(memory, piece, plan)
            self.header.beat()
        self.done += 1
        self.last[self.position] = self.done
        self.position = (self.position + 1) % len(self.route)
        self.header.finish(self.done, time.perf_counter_ns() - started)

    def _plan(self, memory: SegmentMemory, slot: Slot, piece: Piece) -> Update | None:
        """The piece's update, None if no step was counted for its matrix."""
        matrix = memory.segment.matrices[piece.matrix]
        counted = slot.counted[:, piece.matrix]
        if not counted.any():
            return None
        steps = _channel_steps(memory, matrix)
        if matrix.channel_dim == "row":
            steps = steps[piece.row_start : piece.row_stop]
        return plan_update(slot.hyper[counted, matrix.group], steps, self.settings.deferred_lr_scale)

    def _update(self, memory: SegmentMemory, piece: Piece, plan: Update | None) -> None:
        segment = memory.segment
        matrix = segment.matrices[piece.matrix]
        rows, cols = piece.row_stop - piece.row_start, matrix.cols
        span = slice(piece.offset, piece.offset + rows * cols)
        master, shadow = memory.master[span], None if memory.shadow is None else memory.shadow[span]
        out_dtype = None if shadow is None else segment.weight_dtype
        if plan is None:
            refresh(master, shadow, out_dtype, self.threads, self.library)
            return
        update_piece(
            master, memory.exp_avg[span], memory.exp_avg_sq[span], _gradient(memory)[span], shadow, plan,
            rows=rows, cols=cols, by_column=matrix.channel_dim == "column",
            out_dtype=out_dtype, threads=self.threads, library=self.library,
        )  # fmt: skip
        if piece.last:
            # Every piece of the matrix, in this bucket or an earlier one, has its plan from the old count.
            _channel_steps(memory, matrix)[:] += 1

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

    def _start(self, settings: WorkerSettings, cores: tuple[int, ...], threads: int) -> None:
        # Before the first parallel region: threads inherit the mask.
        os.sched_setaffinity(0, cores)
        self.settings, self.threads = settings, threads
        if self.library is None:
            import torch

            torch.set_num_threads(threads)

    def _attach(self, segment: Segment, n_fds: int) -> None:
        assert self.position == 0, "a segment can only be attached between two windows"
        _, fds, _, _ = socket.recv_fds(self.control, 1, n_fds)
        memory = SegmentMemory.attach(segment, fds)
        for arena in memory.arenas:
            arena.populate(self.threads)
        self.route += [(memory, bucket.index) for bucket in segment.buckets]
        self.last += [0] * len(segment.buckets)
        self.connection.send(("attached", segment.index))


def _channel_steps(memory: SegmentMemory, matrix: Matrix) -> np.ndarray:
    return memory.channel_step[matrix.step_offset : matrix.step_offset + matrix.channels]


def _gradient(memory: SegmentMemory) -> np.ndarray:
    return memory.ring.view(np.float32 if memory.segment.ring_dtype == "float32" else np.uint16)


def main(arguments: list[str]) -> int:
    """`control fd, header fd, parent's process id, "main" if its main thread started this process`."""
    control, header_fd, parent = (int(value) for value in arguments[:3])
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
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
