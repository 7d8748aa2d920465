"""Phase 5, the copies: from a shadow straight into the weights, on a copy stream of their own.

A copy waits for the worker's `done`, on the stream where the driver can do that, else in this thread; whoever queues
it has to see that nobody needs the old weights any more (`uploads.py`).
"""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from zenflow.client import WorkerClient
from zenflow.driver import ask, stream_words
from zenflow.geometry import Bucket
from zenflow.pins import Pins
from zenflow.storage import SegmentStorage
from zenflow.telemetry import Telemetry
from zenflow.trace import Tracer, span


@dataclass(frozen=True, eq=False)
class Sent:
    """A bucket whose window has been sent to the worker and is not visible yet."""

    storage: SegmentStorage
    bucket: Bucket
    seq: int
    turn: int  # which of the bucket's two slot records holds the window
    window: int
    due: int  # the step at whose end it becomes visible
    predicted: bool = False  # its shadow may hold a prediction instead of the rounded masters

    @property
    def members(self) -> tuple[int, ...]:
        """Indices of the records that have weights in the bucket."""
        return self.storage.members[self.bucket.index]


class Uploader:
    """The upload stream; `stream` is None on a CPU, where a copy is done when it is queued."""

    def __init__(self, device: torch.device, telemetry: Telemetry) -> None:
        self.tracer: Tracer | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._client: WorkerClient | None = None
        self._words = stream_words(device)
        self._done = 0  # the worker's `done` word, as the device sees it
        self._pins = Pins(device)
        self._device = device
        self._telemetry = telemetry

    def follow(self, client: WorkerClient) -> None:
        """Take results of this worker; its header is page-locked so that streams can wait for `done`."""
        self._client = client
        if self._words is not None:
            self._pins.add(torch.from_numpy(client.header.arena.array(np.uint8, 0, client.header.arena.nbytes)))
            # Also when nobody calls close(), and before the client's own end, which unmaps the header.
            weakref.finalize(client, self._pins.release)
            self._done = self._words.device_address(client.done_address)

    def close(self) -> None:
        """Unlock the worker's header, before it is freed; the worker has ended or will not be waited for."""
        self._pins.release()

    def may_wait(self, sent: Sent) -> bool:
        """Whether an upload can be queued now without holding this thread until the worker is done. WorkerError."""
        return self._client.finished(sent.seq) or self._words is not None

    def follow_compute(self) -> None:
        """What is queued from now on comes after all that the compute stream has to do now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def follow_gradients(self, sent: Sent) -> None:
        """What is queued from now on comes after a bucket's gradients, the last of which has just been queued."""
        if self.stream is not None:
            compute = torch.cuda.current_stream(self._device)
            self.stream.wait_event(_record(sent.storage.gradients_exist[sent.bucket.index], compute))

    def upload(self, sent: Sent) -> None:
        """Queue one bucket; `done` is awaited by the stream where that is possible, else by this thread.

        WorkerError once the worker is known to be dead: who stands in for it has looked for slots before that.
        """
        finished = self._client.finished(sent.seq)
        if self._words is not None:
            self._words.wait(self.stream, self._done, sent.seq)
        elif not finished:
            # On the CPU the trainer's thread is the device: while it waits, nothing is computed.
            with self._telemetry.stall() if self.stream is None else nullcontext():
                waited = self._client.wait_done(sent.seq, partial(ask, self.stream))
            self._telemetry.add(host_wait_seconds=waited)
        self.copy(sent)

    def copy(self, sent: Sent) -> None:
        """Queue one bucket, whatever its shadow holds."""
        storage, bucket = sent.storage, sent.bucket
        part = slice(bucket.start, bucket.stop)
        weights, shadow = storage.weights[part], storage.shadow(sent.turn)[part]
        with span(self.tracer, "upload", f"bucket {bucket.index}", self.stream, window=sent.window):
            if self._words is not None:
                self._words.copy_to_device(self.stream, weights, shadow)
            else:
                with torch.cuda.stream(self.stream):
                    weights.copy_(shadow, non_blocking=True)
        if self.stream is not None:
            _record(storage.uploaded[bucket.index], self.stream)
        self._telemetry.add(bytes_to_device=shadow.nbytes)

    def restore(self, sent: Sent) -> None:
        """Queue what is kept of a bucket, rounded, in the place of a result that will not come."""
        kept = sent.storage.kept(sent.bucket, sent.turn)
        with torch.cuda.stream(self.stream):
            sent.storage.weights[sent.bucket.start : sent.bucket.stop].copy_(kept, non_blocking=True)

    def wait_for_uploads(self) -> None:
        """What the compute stream does from now on sees all that is queued here."""
        if self.stream is not None:
            compute = torch.cuda.current_stream(self._device)
            with self._telemetry.stall(), span(self.tracer, "GPU compute", "stall", compute):
                compute.wait_stream(self.stream)


def _record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> torch.cuda.Event:
    event.record(stream)
    return event
