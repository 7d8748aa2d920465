"""The faults that strike inside the trainer's process, each with what must come of it."""

from __future__ import annotations

import random
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from tests.processes import ends_within
from tests.shortages import descriptors_left
from zenflow import WorkerError, ZenFlow, arena, client
from zenflow.ring import SegmentMemory
from zenflow.signals import signals_held

# What the error of a detected fault must say.
SAYS = {
    "kill": r"killed by signal \d+ \(SIG\w+\)",
    "kill in a step": r"killed by signal \d+ \(SIG\w+\)",
    "kill at start": r"killed by signal \d+ \(SIG\w+\)",
    "stop for good": "has shown no sign of life",
    "flip a bit": r"exit code 1(.|\n)*TornSlotError: slot \d+ .* is torn or out of order",
    "foreign ready": r"exit code 1(.|\n)*TornSlotError: .*ready is \d+ while slot \d+ is due",
    "lost slot": r"exit code 1(.|\n)*TornSlotError: .*(is ready before slot \d+|ready is \d+ while slot \d+ is due|"
    r"slot \d+ has not come)",
    "worker error": r"exit code 1(.|\n)*Traceback(.|\n)*_exchange",
    "no descriptors": "Too many open files|descriptors",
    "no memory": r"needs [\d,]+ bytes of host memory, [\d,]+ bytes are available",
}
DEADLY = (signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
SILENCE = client.SILENCE_SECONDS
GRACE = 5.0  # seconds in which a signal must have ended a process
SHORT_SILENCE = 0.3  # seconds: instead of a minute, where the worker has been stopped for good


class Striker:
    """Strikes one engine; `struck`: when the worker was killed, CLOCK_MONOTONIC."""

    def __init__(self, engine: ZenFlow) -> None:
        self.engine = engine
        self.struck: float | None = None
        self._threads: list[threading.Thread] = []

    @property
    def _client(self) -> client.WorkerClient:
        return self.engine._pipeline.client

    def strike(self, kind: str, draw: random.Random) -> None:
        """Let it happen now, or during the coming step."""
        getattr(self, "_" + kind.replace(" ", "_"))(draw)

    def end(self) -> None:
        """Nothing strikes any more; a worker that was stopped runs again, or is gone."""
        for thread in self._threads:
            thread.join()
        self._threads = []
        if self.struck is not None:
            ends_within(self._client.worker_pid, GRACE)  # a signal takes its time
        client.SILENCE_SECONDS = SILENCE

    def _in_a_thread(self, call: object, *args: object) -> None:
        with signals_held():  # an interrupt in the middle leaves a thread that cannot be waited for
            self._threads.append(threading.Thread(target=call, args=args))
            self._threads[-1].start()

    def _signal(self, number: int) -> None:
        self._client._process.send_signal(number)  # never to a process that has ended and been waited for

    def _kill(self, draw: random.Random) -> None:
        self._signal(draw.choice(DEADLY))
        self.struck = time.monotonic()

    def _kill_in_a_step(self, draw: random.Random) -> None:
        def later(seconds: float) -> None:
            time.sleep(seconds)
            self._kill(draw)

        self._in_a_thread(later, draw.random() * 3e-3)

    def _stop_for_good(self, draw: random.Random) -> None:
        client.SILENCE_SECONDS = SHORT_SILENCE
        self._signal(signal.SIGSTOP)

    def _stop_worker(self, draw: random.Random) -> None:
        self._pause(1, draw.random() * 0.2)

    def _slow_worker(self, draw: random.Random) -> None:
        self._in_a_thread(self._pause, draw.randint(3, 20), draw.random() * 0.01)

    def _pause(self, times: int, seconds: float) -> None:
        for _ in range(times):
            self._signal(signal.SIGSTOP)
            time.sleep(seconds)
            self._signal(signal.SIGCONT)
            time.sleep(seconds / 4)

    def _worker_error(self, draw: random.Random) -> None:
        """A segment that it does not know."""
        self._client.begin_exchange(99, [])

    def _flip_a_bit(self, draw: random.Random) -> None:
        """In what checksum and stamps cover of a window's record, as one of its slots is published."""

        def flip(memory: object, bucket: int, turn: int, seq: int) -> int:
            fields, record = memory.layout.window.fields, memory.windows[turn : turn + 1].view(np.uint8)
            (_, crc), (words, log) = fields["crc"], fields["device_log"]
            stamps = [*range(log, log + 8), *range(log + words.itemsize - 8, log + words.itemsize)]
            record[draw.choice([*range(crc + 8), *stamps])] ^= np.uint8(1 << draw.randrange(8))
            return seq

        self._at_a_slot(draw, flip)

    def _foreign_ready(self, draw: random.Random) -> None:
        self._at_a_slot(draw, lambda memory, bucket, turn, seq: seq + draw.randint(1, 1000))

    def _lost_slot(self, draw: random.Random) -> None:
        self._at_a_slot(draw, lambda memory, bucket, turn, seq: None)

    def _at_a_slot(self, draw: random.Random, tamper: object) -> None:
        """`tamper` with a slot of the next window, before its `ready`; it gives the number to publish, or None."""
        memory, bucket = draw.choice(route(self.engine))
        publish = memory.publish

        def tampering(at: int, turn: int, seq: int) -> None:
            if at != bucket:
                publish(at, turn, seq)
                return
            del memory.publish
            number = tamper(memory, at, turn, seq)
            if number is not None:
                publish(at, turn, number)

        memory.publish = tampering


def route(engine: ZenFlow) -> list[tuple[SegmentMemory, int]]:
    """Buckets, in the order in which they travel."""
    return [(s.memory, bucket.index) for s in engine._pipeline.storages for bucket in s.segment.buckets]


def can_strike(engine: ZenFlow) -> bool:
    """Whether there is what it needs: a worker."""
    return bool(route(engine))


@contextmanager
def killing(draw: random.Random) -> Iterator[None]:
    """The worker of an optimizer that is built meanwhile dies at some moment of its start, or soon after."""
    spawn, threads = client._spawn, []

    def kill_later(process: subprocess.Popen) -> None:
        time.sleep(draw.random() * 0.5)
        process.send_signal(draw.choice(DEADLY))
        ends_within(process.pid, GRACE)

    def spawning(*args: object) -> subprocess.Popen:
        process = spawn(*args)
        threads.append(threading.Thread(target=kill_later, args=(process,)))
        threads[-1].start()
        return process

    client._spawn = spawning
    try:
        yield
    finally:
        client._spawn = spawn
        for thread in threads:
            thread.join()


@contextmanager
def bad_start(kind: str, draw: random.Random) -> Iterator[None]:
    """What an optimizer meets that is built meanwhile: no descriptors, no memory, or its worker's death."""
    if kind == "kill at start":
        with killing(draw):
            yield
        return
    if kind == "no memory":
        available, arena.available_memory = arena.available_memory, lambda: draw.randrange(4096)
        try:
            yield
        finally:
            arena.available_memory = available
        return
    with descriptors_left(draw.randint(0, 14)):
        yield


def is_named(kind: str, error: BaseException) -> bool:
    """Whether this error is the one that the fault deserves."""
    allowed = (WorkerError,) if kind not in ("no descriptors", "no memory") else (WorkerError, OSError, MemoryError)
    return isinstance(error, allowed) and re.search(SAYS[kind], str(error)) is not None
