"""Phase 3: what goes to the worker, on copy streams of its own, under the next step's compute.

At a window's end each bucket's accumulator travels to the ring, behind the fold that completes it and behind the upload
that empties the shadow which the worker will write next, or which the lane itself is; the slot's `ready` word follows
on the same stream. With `accumulate_on: host` every step's raw gradients travel instead, and the window's end sends the
words alone.

The copies are in one order, but on two streams in turn (`copy_streams.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from zenflow.client import WorkerClient
from zenflow.copy_streams import TURN_BYTES, CopyStreams
from zenflow.driver import ask, stream_words
from zenflow.param_record import ParamRecord
from zenflow.storage import SegmentStorage
from zenflow.telemetry import Telemetry
from zenflow.trace import Tracer, span
from zenflow.uploading import Sent


@dataclass(frozen=True)
class Windows:
    """Windows that end together, in the segments of different cohorts.

    number: of all of them; lengths: steps, by cohort; end: the last step's place in the device's log, plus 1. hyper
    float64 `[steps, groups, 5]` and present bool `[steps, records]`, of the latest steps. due: the step at whose end
    their results become visible; urgent: little time is left for them, so the worker shall take all its threads;
    predict: they are shown as predictions.
    """

    number: int
    lengths: Mapping[int, int]
    end: int
    hyper: np.ndarray
    present: np.ndarray
    due: int
    urgent: bool
    predict: bool


class Sender:
    """The copy streams and the order of slots. `sent`: slots sent since the worker started."""

    def __init__(self, device: torch.device, telemetry: Telemetry) -> None:
        self.sent = 0
        self.client: WorkerClient | None = None
        self.tracer: Tracer | None = None
        self._copies = CopyStreams(device)
        self._device = device
        self._telemetry = telemetry
        self._words = stream_words(device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None
        # Raw gradients that may still be on their way: record, gradient and its version when it was sent.
        self._leaving: list[tuple[ParamRecord, weakref.ref[Tensor], int]] = []

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The copy stream whose turn it is, which follows the other; None on a CPU."""
        return self._copies.stream

    def wait_for_copies(self) -> None:
        """There is one accumulator and one log: the next step's decision waits until they are sent."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)

    def check_gradients(self) -> None:
        """ValueError naming a gradient that was changed in place while it may have been on its way to the ring.

        Only the host knows of such a change, and never when the device carried it out; so it is an error for good.
        """
        for record, reference, version in self._leaving:
            grad = reference()
            if grad is not None and grad._version != version:
                raise ValueError(
                    f"the gradient of {record.name} was changed in place after step(), while it was being copied to "
                    "the CPU optimizer (accumulate_on='host'); allowed is the optimizer's own zero_grad(), or "
                    "grad = None, before the next backward()"
                )

    def release_gradients(self) -> None:
        """What the compute stream does from now on may overwrite the gradients that have been sent."""
        self.check_gradients()
        if self._leaving:
            torch.cuda.current_stream(self._device).wait_stream(self.stream)
        self._leaving = []

    def send_gradients(self, records: Iterable[ParamRecord], grads: Sequence[Tensor | None], place: int) -> None:
        """Queue the raw gradients of one step for their lanes in the ring; `place`: the step's in the device's log."""
        travelling = [record for record in records if record.storage is not None and grads[record.index] is not None]
        self._copies.follow_compute()
        sent, self._leaving = 0, []
        for part in _turns(travelling, grads):
            self._copies.take_turns()
            with torch.cuda.stream(self.stream), span(self.tracer, "copy to ring", f"step {place}", self.stream):
                for record in part:
                    grad = grads[record.index]
                    lane = record.lane(record.storage.memory.turn(0), place)
                    lane.copy_(grad.view(record.weight.shape), non_blocking=True)
                    if self.stream is not None:
                        # Its memory is not given to others before the copy is done, whenever it is let go of.
                        grad.record_stream(self.stream)
                        self._leaving.append((record, weakref.ref(grad), grad._version))
                    sent += grad.nbytes
        self._telemetry.add(bytes_to_host=sent)

    def send_windows(self, storages: Sequence[SegmentStorage], windows: Windows, window_log: Tensor) -> list[Sent]:
        """Queue all buckets of those segments in whose cohorts windows end."""
        storages = [storage for storage in storages if storage.cohort in windows.lengths]
        if not storages:
            return []
        self._free_records(storages)
        ready = self._ready_words(sum(len(storage.segment.buckets) for storage in storages))
        self._copies.follow_compute()  # which has made the words, too
        sent: list[Sent] = []
        for storage in storages:
            self._send_segment(storage, windows, window_log, sent, ready)
        if self._copied is not None:
            self._copied.record(self.stream)
        self.sent += len(sent)
        return sent

    def _send_segment(
        self, storage: SegmentStorage, windows: Windows, window_log: Tensor, sent: list[Sent], ready: Tensor
    ) -> None:
        memory = storage.memory
        trace_worker(self.tracer, storage, memory.turn(0))
        # Of a cohort that began in the middle of a window there may be fewer steps; its matrices had no gradients then.
        steps = min(windows.lengths[storage.cohort], len(windows.hyper))
        latest = slice(len(windows.hyper) - steps, None)
        hyper, present = windows.hyper[latest], windows.present[latest, storage.indices]
        first = (windows.end - steps) % storage.segment.max_steps
        for bucket in storage.segment.buckets:
            seq = self.sent + len(sent) + 1
            turn = memory.write_slot(
                bucket.index, seq, windows.number, steps, hyper, present, windows.urgent, first, windows.predict
            )
            sent.append(Sent(storage, bucket, seq, turn, windows.number, windows.due, windows.predict))
            self._copies.take_turns()
            with torch.cuda.stream(self.stream):
                if bucket.index == 0:
                    self._copy(storage.logs[turn], window_log)
                if self.stream is not None:
                    # The worker answers `ready` by writing the shadow, and a lane may be one: only once the last upload
                    # has left it, and what was visible before that upload is needed no more.
                    self.stream.wait_event(storage.uploaded[bucket.index])
                if storage.accumulator is not None:
                    self._send_sum(sent[-1])
                self._raise_ready(sent[-1], ready[len(sent) - 1 :])
            self.client.stand_in.add(sent[-1])

    def finish_copies(self) -> None:
        """Until all that was queued is on the host."""
        if self.stream is not None:
            self.stream.synchronize()

    def _free_records(self, storages: Sequence[SegmentStorage]) -> None:
        """Wait until the worker has read the records that these windows take: those of the windows before the last."""
        last = max(storage.memory.last_seq(storage.memory.turn(0)) for storage in storages)
        if last:
            self.wait_done(last)

    def wait_done(self, seq: int) -> None:
        """Until the worker has processed slot `seq`."""
        self._telemetry.add(host_wait_seconds=self.client.wait_done(seq, partial(ask, self.stream)))

    def _send_sum(self, item: Sent) -> None:
        storage, bucket = item.storage, item.bucket
        with span(self.tracer, "copy to ring", f"bucket {bucket.index}", self.stream, window=item.window):
            part = slice(bucket.start, bucket.stop)
            self._copy(storage.lane(item.turn, 0)[part], storage.accumulator[part])

    def _copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)
        self._telemetry.add(bytes_to_host=target.nbytes)

    def _raise_ready(self, item: Sent, word: Tensor) -> None:
        """Behind the payload: by the stream itself, by a copy where the driver cannot, by this thread on the CPU.

        Behind the last of a window comes the word which says so, in the same way.
        """
        storage, is_last = item.storage, item.bucket is item.storage.segment.buckets[-1]
        targets = [storage.slots[item.turn][item.bucket.index], *([storage.ends[item.turn]] if is_last else ())]
        if self._words is not None:
            for target in targets:
                self._words.write(self.stream, target.address, item.seq)
        elif self.stream is not None:
            for target in targets:
                target.value.copy_(word[:1], non_blocking=True)
        else:
            storage.memory.publish(item.bucket.index, item.turn, item.seq)
            if is_last:
                storage.memory.end_window(item.turn, item.seq)

    def _ready_words(self, count: int) -> Tensor:
        """The coming sequence numbers on the device, int64 `[count]`; empty unless they have to be copied."""
        if self._words is not None or self.stream is None:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        numbers = torch.arange(self.sent + 1, self.sent + 1 + count, dtype=torch.int64, device="cpu")
        words = numbers.pin_memory().to(self._device, non_blocking=True)
        for stream in self._copies.all:
            words.record_stream(stream)
        return words


def _turns(records: Iterable[ParamRecord], grads: Sequence[Tensor | None]) -> Iterator[list[ParamRecord]]:
    """Those records in their order, so many at a time that their gradients fill `TURN_BYTES`."""
    part, nbytes = [], 0
    for record in records:
        part.append(record)
        nbytes += grads[record.index].nbytes
        if nbytes >= TURN_BYTES:
            yield part
            part, nbytes = [], 0
    if part:
        yield part


def trace_worker(tracer: Tracer | None, storage: SegmentStorage, turn: int) -> None:
    """Add to a trace when the worker had the slots of `turn` in hand, which it has finished and will take anew."""
    if tracer is None:
        return
    slots = storage.memory.slots[turn]
    window = int(storage.memory.windows["window"][turn])
    for bucket, (started, finished) in enumerate(zip(slots["started_ns"], slots["finished_ns"], strict=True)):
        if started >= tracer.began_ns:
            tracer.host_span("CPU optimizer", f"bucket {bucket}", int(started), int(finished), window=window)
