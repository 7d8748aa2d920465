"""The trainer's side of the CPU optimizer's process: start it, give it memory, wait for it, notice its end, stop it."""

from __future__ import annotations

import os
import select
import signal
import site
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path

from zenflow import native
from zenflow.arena import descriptors_needed
from zenflow.exchange import Order
from zenflow.geometry import Segment
from zenflow.header import Header
from zenflow.ring import SegmentMemory
from zenflow.signals import signals_held, wait_for
from zenflow.stand_in import StandIn
from zenflow.worker_settings import WorkerSettings

RELEASED = 1 << 62  # `done` after the worker's end: no stream may wait for what will never come
WATCH_SECONDS = 0.1
SPIN_SECONDS = 100e-6
POLL_SECONDS = 50e-6
LIVENESS_SECONDS = 20e-3
# The worker beats when it is idle, after each slot and after each arena that it maps.
SILENCE_SECONDS = 60.0
STOP_SECONDS = 5.0
END_SECONDS = 1.0
TAIL_BYTES = 8192


class WorkerError(RuntimeError):
    """The CPU optimizer's process has failed or is gone; training cannot go on with it."""


class WorkerClient:
    """One worker process. It ends with this object, with this process, or with `close()`.

    settings: see `WorkerSettings`; cores: the logical CPUs that the worker binds itself to; threads: of its pass.
    stand_in: is told of every slot that is sent.
    WorkerError if the process has ended already; one that ends later, in its start, is an error of `attach`.
    """

    def __init__(self, *, settings: WorkerSettings, cores: Sequence[int], threads: int) -> None:
        native.load()  # refuses a machine that cannot do without the compiled pass, before a process is started
        with descriptors_needed(), ExitStack() as undo:
            self.header = Header.create()
            undo.callback(self.header.close)
            self._socket, theirs = socket.socketpair()
            undo.callback(self._socket.close)
            with signals_held(), theirs:
                self._connection = Connection(os.dup(self._socket.fileno()))
                undo.callback(self._connection.close)
                self._output = os.memfd_create("zenflow-worker-stderr", os.MFD_CLOEXEC)
                undo.callback(os.close, self._output)
                shared_cores = set(cores) >= os.sched_getaffinity(0)
                self._process = _spawn(theirs.fileno(), self.header.arena.fd, self._output, shared_cores)
                undo.callback(_kill, self._process)
                self.stand_in = StandIn(self.header)
                self._watch = _Watch(self._process, self.header, self.stand_in)
                self._stop = weakref.finalize(
                    self, _stop, self._watch, self._process, self._connection, self._socket, self._output, os.getpid()
                )
                undo.pop_all()
                undo.callback(self.close)
            self._send(("start", settings, tuple(cores), threads))
            undo.pop_all()

    @property
    def worker_pid(self) -> int:
        """The process's id; it stays after the end."""
        return self._process.pid

    @property
    def busy_seconds(self) -> float:
        """Time that the worker has spent in processing slots."""
        return self.header.busy_seconds

    @property
    def done(self) -> int:
        """Slots processed; not to be trusted once `check` has something to say."""
        return self.header.done

    @property
    def done_address(self) -> int:
        """Of the word that `done` reads, for streams that wait for it."""
        return self.header.done_address

    def finished(self, seq: int) -> bool:
        """Whether the slot `seq` is processed. WorkerError if it never will be."""
        done = self.header.done
        if self._watch.dead:  # looked at afterwards: before it is, nobody but the worker raises `done`
            raise self._failure()
        return done >= seq

    @property
    def threads(self) -> int:
        """Threads of its latest pass, 0 before the first."""
        return self.header.threads

    @property
    def closed(self) -> bool:
        """Whether `close()` has run."""
        return not self._stop.alive

    def attach(self, segment: Segment, memory: SegmentMemory) -> None:
        """Hand over a segment's memory, between two windows; returns when the worker has mapped it. WorkerError."""
        memory.header = self.header
        fds = memory.fds()
        self._send(("attach", segment, len(fds)))
        try:
            socket.send_fds(self._socket, [b"\0"], fds)
        except OSError as error:
            raise self._failure() from error
        self._await(("attached", segment.index))

    def begin_exchange(self, segment: int, orders: Sequence[Order]) -> None:
        """Have the idle worker carry out `orders` in the memory of one segment; `end_exchange` waits for it."""
        self._send(("exchange", segment, list(orders)))

    def end_exchange(self, segment: int) -> None:
        """Until the worker has carried out the orders of the last `begin_exchange`. WorkerError if it never will."""
        self._await(("exchanged", segment))

    def wait_done(self, seq: int, check: Callable[[], None] | None = None) -> float:
        """Wait until the slot `seq` is processed; seconds waited.

        check: called with every look at the worker, raises when the slot can no longer arrive. WorkerError within a
        second of the worker's end, and when a living one has been given up because it showed no sign of life.
        """
        if self.finished(seq):
            return 0.0
        started = now = time.perf_counter()
        next_check = started + LIVENESS_SECONDS
        while not self.finished(seq):
            now = time.perf_counter()
            if now > next_check:
                self.check()
                if check is not None:
                    check()
                next_check = now + LIVENESS_SECONDS
            if now - started > SPIN_SECONDS:
                time.sleep(POLL_SECONDS)
        return now - started

    def check(self) -> None:
        """WorkerError, with exit code or signal and the worker's traceback, unless it is well. Takes microseconds."""
        if self.closed:
            raise WorkerError("the CPU optimizer's process has been stopped")
        if self._watch.verdict or self._process.poll() is not None or self.header.error is not None:
            raise self._failure()

    def close(self) -> None:
        """Stop the process and free its header, once; slots that it has not finished are dropped."""
        try:
            self._stop()
        finally:
            self.header.close()

    def _send(self, message: tuple) -> None:
        try:
            self._connection.send(message)
        except OSError as error:
            raise self._failure() from error

    def _await(self, expected: tuple) -> None:
        """Until the worker's next message, which must be `expected`. WorkerError if it never comes."""
        try:
            while not self._connection.poll(LIVENESS_SECONDS):
                self.check()
            answer = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failure() from error
        assert answer == expected, answer

    def _failure(self) -> WorkerError:
        """Its end is certain or near when this is called: wait for it, then tell."""
        if self.closed:
            return WorkerError("the CPU optimizer's process has been stopped")
        if self._watch.verdict:
            return WorkerError(self._watch.verdict)
        try:
            code = wait_for(self._process, END_SECONDS)
            ended = _describe(code)
        except subprocess.TimeoutExpired:
            ended = "no longer answers"
        told = self.header.error or _tail(self._output)
        return WorkerError(
            f"the CPU optimizer's process (pid {self.worker_pid}) {ended}; its last words: {told.strip() or 'none'}"
        )


def _spawn(control: int, header: int, output: int, shared_cores: bool) -> subprocess.Popen:
    """A fresh interpreter that shares nothing with this one but the descriptors; never a fork that runs user code."""
    if not sys.executable:
        raise RuntimeError("sys.executable is empty: the CPU optimizer's process needs a Python interpreter to start")
    starter = "main" if threading.current_thread() is threading.main_thread() else "thread"
    arguments = [str(control), str(header), str(os.getpid()), starter]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "zenflow.worker", *arguments],
        stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        pass_fds=(control, header), env=_environment(shared_cores), start_new_session=True,
    )  # fmt: skip


def _environment(shared_cores: bool) -> dict[str, str]:
    """This process's environment; thread settings meant for the trainer's cores are left out."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_", "KMP_"))}
    # Where this process found what the worker needs: a script may have named folders in which no interpreter looks.
    folders = [Path(find_spec(name).origin).parent.parent for name in ("zenflow", "zenflow_kernels", "numpy", "torch")]
    installed = {Path(folder) for folder in (*site.getsitepackages(), site.getusersitepackages())}
    added = [str(folder) for folder in dict.fromkeys(folders) if folder not in installed]
    env["PYTHONPATH"] = os.pathsep.join([*added, *filter(None, [env.get("PYTHONPATH")])])
    env["OPENBLAS_NUM_THREADS"] = "1"
    if shared_cores:
        # A thread that spins at the end of a parallel region takes the core from the one it waits for.
        env["OMP_WAIT_POLICY"] = "passive"
    else:
        env["OMP_PROC_BIND"] = "true"  # a thread a core; unbound, two of them meet on one now and then
    return env


class _Watch(threading.Thread):
    """Looks after the worker while the trainer's threads, and the device's streams, may be waiting for it.

    When it has ended, or shows no sign of life for SILENCE_SECONDS, it is `dead`: its `stand_in` takes over, then
    `done` is raised to RELEASED so that everything that waits goes on and can ask. `verdict`: why a living one was
    given up.
    """

    def __init__(self, process: subprocess.Popen, header: Header, stand_in: StandIn) -> None:
        super().__init__(name="zenflow-watch", daemon=True)
        self.verdict = ""
        self.dead = False
        self.stopped = threading.Event()
        self._process, self._header, self._stand_in = process, header, stand_in
        self.start()

    def run(self) -> None:
        beat, silent = self._header.heartbeat, 0
        while not self.stopped.wait(WATCH_SECONDS):
            if self._process.poll() is None:
                last, beat = beat, self._header.heartbeat
                # Counted in looks, not by the clock: where both processes were suspended, nobody was silent.
                silent = silent + 1 if beat == last else 0
                if silent * WATCH_SECONDS <= SILENCE_SECONDS:
                    continue
                self.verdict = (
                    f"the CPU optimizer's process (pid {self._process.pid}) has shown no sign of life for "
                    f"{SILENCE_SECONDS:g} seconds: it is stopped or stuck"
                )
                _kill(self._process)
            self.dead = True
            try:
                self._stand_in.take_over(self.stopped)
            finally:
                native.store_release(self._header.done_address, RELEASED)
            return


def _stop(
    watch: _Watch,
    process: subprocess.Popen,
    connection: Connection,
    control: socket.socket,
    output: int,
    owner: int,
) -> None:
    """Ask, wait, then kill. In a forked copy of the owner nothing but the copy's descriptors goes."""
    with signals_held():
        if os.getpid() == owner:
            watch.stopped.set()
            watch.join()
            try:
                if _has_room(connection):  # a stopped worker may not have read what was sent before
                    connection.send(("stop",))
                process.wait(STOP_SECONDS)
            except (OSError, subprocess.TimeoutExpired):
                _kill(process)
        connection.close()
        control.close()
        os.close(output)


def _has_room(connection: Connection) -> bool:
    """Whether a small message can be sent without waiting for the other side to read."""
    poller = select.poll()
    poller.register(connection.fileno(), select.POLLOUT)
    return bool(poller.poll(0))


def _kill(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()


def _describe(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by signal {-code} ({signal.Signals(-code).name})"


def _tail(output: int) -> str:
    size = os.fstat(output).st_size
    return os.pread(output, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
