"""Phase 5: the worker's results go from the shadow straight into the weights, under the last backward pass before they
are due.

A hook on each deferred parameter sees its gradient arrive. Once all gradients of a bucket exist, backward needs its
weights no more, and the upload stream takes the bucket over as soon as the worker has finished it. From then until
`step()` the weights are in transit; `step()` queues what backward could not take and writes the selected channels over.

That is right only if no weight is used after its gradient exists. So a bucket is taken in backward only when the number
of its gradients a step is known, and a gradient that comes once more is an error. What no hook can see (a detached use,
a second pass through a retained graph) is tried once: instead of a bucket's first upload its weights become NaN, and if
that reaches a gradient, uploads stay in `step()`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zenflow.arrivals import Arrivals
from zenflow.client import WorkerClient
from zenflow.config import ZenFlowConfig
from zenflow.driver import ask, current_stream_number, stream_words
from zenflow.geometry import Bucket
from zenflow.storage import ParamRecord, Pins, SegmentStorage, tell_autograd
from zenflow.telemetry import Telemetry
from zenflow.trace import Tracer, span

logger = logging.getLogger("zenflow")

TRIES = 3  # of the check: a gradient may be non-finite for reasons of its own


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


class Uploads:
    """The results that are on their way, and the hooks that let them land.

    `pending`: what has been sent and is not visible. `records` is the pipeline's own list and grows with it.
    """

    def __init__(
        self, config: ZenFlowConfig, device: torch.device, records: list[ParamRecord], telemetry: Telemetry
    ) -> None:
        self.pending: list[Sent] = []
        self.tracer: Tracer | None = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._client: WorkerClient | None = None
        self._words = stream_words(device)
        self._done = 0  # the worker's `done` word, as the device sees it
        self._pins = Pins(device)
        self._device = device
        self._records = records
        self._telemetry = telemetry
        self._config = config
        self._in_backward = config.upload == "backward"
        self._passes = config.backward_passes_per_step
        self._tries = TRIES if config.upload_check else 0
        self._arrivals = Arrivals(config.update_interval)
        self._queued: set[Sent] = set()
        self._poisoned: set[int] = set()  # records whose buckets are being tried
        self._passed: set[int] = set()
        self._failed: set[int] = set()  # of those that have not passed
        self._held: set[int] = set()  # records whose weights are in transit
        self._begun = False  # all gradients of some bucket exist, so that it may have been taken
        self._jobs: dict[int, list[_Job]] = {}  # by the index of a record in the job's bucket
        self._handles: list[Any] = []
        self.hooks = 0  # sets of hooks that have been removed
        # A hook lives as long as its parameter, which may outlive an optimizer that nobody closes.
        weakref.finalize(self, _remove, self._handles)

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
        self._remove_hooks()
        self._pins.release()

    # Between two steps

    def due(self, step: int) -> list[Sent]:
        """What is pending and has to be visible at the end of step `step`."""
        return [sent for sent in self.pending if sent.due <= step]

    def prepare(self, step: int) -> None:
        """Set the hooks that the backward passes of step `step`, the coming one, need."""
        self._remove_hooks()
        self._arrivals.begin_step()
        if not self._in_backward:
            return
        due = self.due(step)
        landing = {index for sent in due for index in sent.storage.members[sent.bucket.index]}
        watched = [r for r in self._records if r.index in landing or self._passes_of(r) is None]
        watched = [record for record in watched if record.storage is not None and record.param.requires_grad]
        if not watched:
            return
        self._plan_jobs(due)
        if due:
            _mention_compilation()
        me = weakref.ref(self)
        for record in watched:
            hook = partial(_on_gradient, me, self.hooks, record.index)
            self._handles.append(record.param.register_post_accumulate_grad_hook(hook))

    def state_dict(self) -> dict[str, Any]:
        """What this run has learned of its model, by index of the records: when gradients come, and what was tried."""
        return {
            "fell_back": self._config.upload == "backward" and not self._in_backward,
            "tries": self._tries,
            "passed": sorted(self._passed),
            "failed": sorted(self._failed),
            "arrivals": self._arrivals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what another run has learned of the same model, whatever its buckets were."""
        self._in_backward = self._config.upload == "backward" and not state["fell_back"]
        self._tries = TRIES if self._config.upload_check else 0
        if state["tries"] or state["fell_back"]:  # else that run did not check
            self._tries = min(self._tries, state["tries"])
        self._passed, self._failed = set(state["passed"]), set(state["failed"])
        self._arrivals.load_state_dict(state["arrivals"])

    def _passes_of(self, record: ParamRecord) -> int | None:
        """Gradients of a parameter a step; 0 if they vary, None if that is not known yet."""
        return self._arrivals.usual(record.index) if self._passes is None else self._passes

    def _plan_jobs(self, due: Sequence[Sent]) -> None:
        self._jobs = {}
        for sent in due:
            members = sent.storage.members[sent.bucket.index]
            if all(self._passes_of(self._records[index]) for index in members):
                job = _Job(sent, len(members))
                for index in members:
                    self._jobs.setdefault(index, []).append(job)

    def ignore_gradients(self) -> None:
        """Those that come before the next `prepare` are nobody's, as after a step that was broken off."""
        self._remove_hooks()

    def gradient_arrived(self, index: int) -> None:
        """One more gradient of a parameter has been accumulated in this step's backward passes."""
        count = self._arrivals.count(index)
        jobs = self._jobs.get(index)
        if not jobs:
            return
        passes = self._passes_of(self._records[index])
        if count > passes:
            self._refuse_late_gradient(index, count, passes, jobs)
        elif count == passes:
            stream = current_stream_number(self._device)
            for job in jobs:
                job.left -= 1
                # Gradients from several streams: this one's event would not cover them all.
                job.late |= job.stream not in (None, stream)
                job.stream = stream
                if job.left == 0 and not job.late:
                    self._begun = True
                    self._take_over(job.sent)

    def _refuse_late_gradient(self, index: int, count: int, passes: int, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.late = True
        if index in self._held:
            raise RuntimeError(
                f"gradient {count} of {self._records[index].name} in this step came after its weights were replaced, "
                f"at {passes}: backward_passes_per_step must be the number of gradients that a parameter gets before "
                "each step(); a loop that varies it, or drops gradients without a step() or the optimizer's "
                "zero_grad(), needs upload='step'"
            )

    def _take_over(self, sent: Sent) -> None:
        members = sent.storage.members[sent.bucket.index]
        if any(self._records[index].is_foreign for index in members):
            return  # step() finds out first what has become of these weights
        if self._tries and not self._passed.issuperset(members):
            self._poisoned.update(members)
            self._held.update(members)
            sent.storage.weights[sent.bucket.start : sent.bucket.stop].fill_(float("nan"))
        elif self._may_wait(sent):
            if self.stream is not None:
                compute = torch.cuda.current_stream(self._device)
                self.stream.wait_event(_record(sent.storage.gradients_exist[sent.bucket.index], compute))
            self._held.update(members)
            tell_autograd(self._records[index] for index in members)
            self._upload(sent)

    def _may_wait(self, sent: Sent) -> bool:
        """Whether an upload can be queued now without holding this thread until the worker is done."""
        return self._words is not None or self._client.finished(sent.seq)

    def _upload(self, sent: Sent) -> None:
        """Queue one bucket; `done` is awaited by the stream where that is possible, else by this thread."""
        if self._words is not None:
            self._words.wait(self.stream, self._done, sent.seq)
        elif not self._client.finished(sent.seq):
            # On the CPU the trainer's thread is the device: while it waits, nothing is computed.
            with self._telemetry.stall() if self.stream is None else nullcontext():
                waited = self._client.wait_done(sent.seq, partial(ask, self.stream))
            self._telemetry.add(host_wait_seconds=waited)
        self._copy(sent)

    def _copy(self, sent: Sent) -> None:
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
        self._queued.add(sent)

    # In `step()`

    @property
    def in_transit(self) -> bool:
        """Whether some weights already are the next ones, or NaN, between a backward pass and its `step()`."""
        return bool(self._held)

    @property
    def arrived(self) -> bool:
        """Whether gradients have come since the last step, as far as hooks are there to see them."""
        return self._arrivals.any

    @property
    def begun(self) -> bool:
        """Whether backward has come so far that weights can be in transit; the worker's pace does not enter."""
        return self._begun

    def holds(self, record: ParamRecord) -> bool:
        """Whether the weights of one parameter are in transit, all or some."""
        return record.index in self._held

    def end_backward(self, is_finite: Callable[[], bool]) -> None:
        """The gradients of this step are complete: learn from them; `is_finite` asks the device about them."""
        self._remove_hooks()
        self._arrivals.end_step()
        if self._poisoned and is_finite():
            self._passed |= self._poisoned
            self._failed -= self._poisoned
            # Others may have failed in between, whose windows end in other steps.
            self._tries = self._tries if self._failed else TRIES
        elif self._poisoned:
            self._failed |= self._poisoned
            self._tries -= 1
            if not self._tries:
                self._in_backward = False
                logger.warning(
                    "weights are used again after their gradient exists (a detached use, a retained graph, or "
                    "reentrant checkpointing), or gradients overflow all the time: uploads stay in step(), as with "
                    "upload='step'; upload_check found it, at the price of %d skipped steps",
                    TRIES,
                )

    def queue_rest(self, wanted: Sequence[Sent]) -> None:
        """Queue those of these uploads that backward has not."""
        self._remove_hooks()
        rest = [sent for sent in wanted if sent not in self._queued]
        if rest:
            self._follow_compute()
        for sent in rest:
            self._upload(sent)

    def rescue(self) -> None:
        """Leave no weights in transit though the worker has failed: they take what its shadow holds.

        Of two shadows that which the worker has not in hand: what was visible before.
        """
        self._follow_compute()
        for sent in self.pending:
            members = sent.storage.members[sent.bucket.index]
            if sent not in self._queued and not self._held.isdisjoint(members):
                self._copy(replace(sent, turn=sent.turn ^ 1))

    def land(self, queued: Sequence[Sent]) -> None:
        """What the compute stream does from now on sees these uploads, all that are queued."""
        if queued and self.stream is not None:
            compute = torch.cuda.current_stream(self._device)
            with self._telemetry.stall(), span(self.tracer, "GPU compute", "stall", compute):
                compute.wait_stream(self.stream)
        self._remove_hooks()
        landed = set(queued)
        for sent in landed:
            sent.storage.shows_prediction = sent.predicted
        self.pending = [sent for sent in self.pending if sent not in landed]
        self._queued, self._held, self._poisoned, self._begun = set(), set(), set(), False

    def _follow_compute(self) -> None:
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))

    def _remove_hooks(self) -> None:
        _remove(self._handles)
        self.hooks += 1
        self._jobs = {}


@dataclass(eq=False)
class _Job:
    """One bucket in a backward pass that may upload: how many of its parameters still lack a gradient."""

    sent: Sent
    left: int
    late: bool = False  # step() has to take it
    stream: int | None = None  # that all gradients so far came on


@cache
def _mention_compilation() -> None:
    """Once a process, if torch.compile has compiled anything in it."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is not None and dynamo.counters["frames"].get("ok"):
        logger.info(
            "under torch.compile the gradients of a graph all appear when its backward ends: "
            "uploads are right, but find little to overlap with"
        )


def _on_gradient(uploads: weakref.ref[Uploads], hooks: int, index: int, _: Tensor) -> None:
    # A hook lives as long as its parameter: it must not keep the optimizer. Where another hook of the parameter has
    # called step() or zero_grad(), a removed one still runs: the gradient went with that step.
    if (me := uploads()) is not None and me.hooks == hooks:
        me.gradient_arrived(index)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()


def _record(event: torch.cuda.Event, stream: torch.cuda.Stream) -> torch.cuda.Event:
    event.record(stream)
    return event
