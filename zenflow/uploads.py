"""Phase 5, what is due: the worker's results go into the weights, under the last backward pass before they are due.

A hook on each deferred parameter sees its gradient arrive. Once all gradients of a bucket exist, backward needs its
weights no more, and the upload stream takes the bucket over as soon as the worker has finished it (`uploading.py`).
From then until `step()` the weights are in transit; `step()` queues what backward could not take and writes the
selected channels over.

That is right only if no weight is used after its gradient exists. So a bucket is taken in backward only when the number
of its gradients a step is known, and a gradient that comes once more is an error. What no hook can see (a detached use,
a second pass through a retained graph) is tried once (`upload_check.py`); if it happens, uploads stay in `step()`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zenflow.arrivals import Arrivals
from zenflow.config import ZenFlowConfig
from zenflow.driver import current_stream_number
from zenflow.param_record import ParamRecord, tell_autograd
from zenflow.storage import SegmentStorage
from zenflow.turn import Turn, untraced
from zenflow.upload_check import UploadCheck
from zenflow.uploading import Sent, Uploader

logger = logging.getLogger("zenflow")


class Uploads:
    """The results that are on their way, and the hooks that let them land.

    `pending`: what has been sent and is not visible; `loaded_hyper`: of those results that came with a loaded state,
    the scalars of the steps behind them, float64 `[n, 5]`, by index of the records (`outside.pending_hyper`). `records`
    is the pipeline's own list and grows with it.
    """

    def __init__(
        self,
        config: ZenFlowConfig,
        device: torch.device,
        records: list[ParamRecord],
        uploader: Uploader,
        turn: Turn,
    ) -> None:
        self.pending: list[Sent] = []
        self.loaded_hyper: dict[int, np.ndarray] = {}
        self.check = UploadCheck(config.upload_check)
        self.turn = turn
        self._uploader = uploader
        self._device = device
        self._records = records
        self._config = config
        self._in_backward = config.upload == "backward"
        self._passes = config.backward_passes_per_step
        self._arrivals = Arrivals(config.update_interval)
        self._queued: set[Sent] = set()
        self._held: set[int] = set()  # records whose weights are in transit
        self._begun = False  # all gradients of some bucket exist, so that it may have been taken
        self._jobs: dict[int, list[_Job]] = {}  # by the index of a record in the job's bucket
        self._handles: list[Any] = []
        self.hooks = 0  # sets of hooks that have been removed
        # A hook lives as long as its parameter, which may outlive an optimizer that nobody closes.
        weakref.finalize(self, _remove, self._handles)

    def due(self, step: int) -> list[Sent]:
        """What is pending and has to be visible at the end of step `step`."""
        return [sent for sent in self.pending if sent.due <= step]

    def pending_storages(self) -> set[SegmentStorage]:
        """Segments for which a result has been sent for and is not visible yet."""
        return {sent.storage for sent in self.pending}

    def prepare(self, step: int) -> None:
        """Set the hooks that the backward passes of step `step`, the coming one, need."""
        self.remove_hooks()
        self._arrivals.begin_step()
        if not self._in_backward:
            return
        due = self.due(step)
        landing = {index for sent in due for index in sent.members}
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
            **self.check.state_dict(),
            "arrivals": self._arrivals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what another run has learned of the same model, whatever its buckets were."""
        self._in_backward = self._config.upload == "backward" and not state["fell_back"]
        # Without a try left and without having fallen back, that run did not check.
        self.check.load_state_dict(state, checked=bool(state["tries"] or state["fell_back"]))
        self._arrivals.load_state_dict(state["arrivals"])

    def _passes_of(self, record: ParamRecord) -> int | None:
        """Gradients of a parameter a step; 0 if they vary, None if that is not known yet."""
        return self._arrivals.usual(record.index) if self._passes is None else self._passes

    def _plan_jobs(self, due: Sequence[Sent]) -> None:
        self._jobs = {}
        for sent in due:
            if all(self._passes_of(self._records[index]) for index in sent.members):
                job = _Job(sent, len(sent.members))
                for index in sent.members:
                    self._jobs.setdefault(index, []).append(job)

    def remove_hooks(self) -> None:
        """Gradients that come before the next `prepare` are nobody's, as after a step that was broken off."""
        _remove(self._handles)
        self.hooks += 1
        self._jobs = {}

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
        if any(self._records[index].is_foreign for index in sent.members):
            return  # step() finds out first what has become of these weights
        if self.check.poison(sent):
            self._held.update(sent.members)
        elif self._uploader.may_wait(sent):
            self._uploader.follow_gradients(sent)
            self._held.update(sent.members)
            tell_autograd(self._records[index] for index in sent.members)
            self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        self._uploader.upload(sent)
        self._queued.add(sent)

    @property
    def in_transit(self) -> bool:
        """Whether some weights already are the next ones, or NaN, between a backward pass and its `step()`, or in one
        that was broken off."""
        return bool(self._held or self._queued)

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
        self.remove_hooks()
        self._arrivals.end_step()
        if not self.check.end_backward(is_finite):
            self._in_backward = False

    def queue_rest(self, wanted: Sequence[Sent]) -> None:
        """Queue those of these uploads that backward has not."""
        self.remove_hooks()
        rest = [sent for sent in wanted if sent not in self._queued]
        if rest:
            self._uploader.follow_compute()
        for sent in rest:
            self._upload(sent)

    def rescue(self) -> None:
        """Leave no weights in transit though the worker has failed: no result of it is waited for any more."""
        self._uploader.follow_compute()
        for sent in self.pending:
            if sent not in self._queued and not self._held.isdisjoint(sent.members):
                self._uploader.restore(sent)

    def land(self, queued: Sequence[Sent]) -> None:
        """What the compute stream does from now on sees these uploads, all that are queued."""
        if queued:
            self._uploader.wait_for_uploads()
        self.remove_hooks()
        landed = set(queued)
        for sent in landed:
            sent.storage.shows_prediction = sent.predicted
        self.pending = [sent for sent in self.pending if sent not in landed]
        pending = self.pending_storages()
        self.loaded_hyper = {i: hyper for i, hyper in self.loaded_hyper.items() if self._records[i].storage in pending}
        self.check.forget_poison()
        self._queued, self._held, self._begun = set(), set(), False


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


@untraced
def _on_gradient(uploads: weakref.ref[Uploads], hooks: int, index: int, _: Tensor) -> None:
    # A hook lives as long as its parameter: it must not keep the optimizer. Where another hook of the parameter has
    # called step() or zero_grad(), a removed one still runs: the gradient went with that step. A forked copy of the
    # process has weights of its own, into which no results go.
    me = uploads()
    if me is not None and not me.turn.is_foreign:
        with me.turn.lock:
            if me.hooks == hooks:
                me.gradient_arrived(index)


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
