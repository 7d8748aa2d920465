"""All state of one optimizer. What happens to it is in files of its own.

`step.py` says how the phases hang together and makes a step; `window_end.py`: what the end of a window adds, in a step
and in `flush()`; `visible.py`: results come into the weights; `owners.py`: selections; `layout.py`: parameters get
their place; `outside.py`: weights that others have changed; `tracing.py`; `closing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from zenflow_kernels.control import StepControl
from zenflow_kernels.table import Table

from zenflow.client import WorkerClient
from zenflow.config import ZenFlowConfig
from zenflow.cores import CorePlan
from zenflow.norm_order import NormOrder
from zenflow.param_record import ParamRecord
from zenflow.scalars import StepScalars
from zenflow.scores import Scores
from zenflow.sending import Sender
from zenflow.stats import Stats
from zenflow.storage import SegmentStorage
from zenflow.telemetry import Telemetry
from zenflow.trace import Tracer
from zenflow.turn import Turn
from zenflow.uploading import Sent, Uploader
from zenflow.uploads import Uploads
from zenflow.window import WindowClock


class Pipeline:
    """Records, tables, storages, the worker, and the clock that drives them."""

    def __init__(
        self, config: ZenFlowConfig, device: torch.device, turn: Turn, telemetry: Telemetry | None = None
    ) -> None:
        """turn: the optimizer's; telemetry: of the pipeline that this one replaces, if it does."""
        self.config = config
        self.device = device
        self.clock = WindowClock(
            update_interval=config.update_interval,
            select_interval=config.select_interval_steps,
            full_warm_up_rounds=config.full_warm_up_rounds,
            visible_after=config.visible_after_steps,
        )
        self.records: list[ParamRecord] = []
        self.tables: list[Table] = []
        self.storages: list[SegmentStorage] = []
        self.control = StepControl.create(0, config.update_interval, device)
        self.partials = torch.zeros(0, dtype=torch.float64, device=device)
        self.norm_order = NormOrder()
        self.scalars = StepScalars(device)
        self.scores = Scores(config)
        self.client: WorkerClient | None = None
        self.cores: CorePlan | None = None
        self.telemetry = Telemetry(device) if telemetry is None else telemetry
        self.tracer: Tracer | None = None
        self.gap = ExitStack()  # the span between two steps, while tracing
        self.sender = Sender(device, self.telemetry)
        self.uploader = Uploader(device, self.telemetry)
        self.uploads = Uploads(config, device, self.records, self.uploader, turn)
        # One row a step of the longest running window; in the first, one tuple a group.
        self.hyper_log: list[list[tuple[float, ...]]] = []
        self.present_log: list[list[bool]] = []
        self.logged = 0  # the window number in the device's log
        self.stepping = False  # see `in_one_piece`
        self.highest_t = 0  # no channel's t is above it
        self.counters = dict.fromkeys(("windows", "selections"), 0)
        self.grads: list[Tensor | None] = []  # of the step that runs, one a record

    def stats(self) -> Stats:
        """Counters and clocks since construction; waits for the device to finish what is queued."""
        client, telemetry = self.client, self.telemetry
        shared = sum(storage.host_bytes for storage in self.storages)
        return Stats(
            steps=self.clock.state.step,
            windows=self.counters["windows"],
            selections=self.counters["selections"],
            skipped_steps=int(self.control.skipped.item()),
            grad_norm=float(self.control.norm.item()),
            stall_seconds=telemetry.stall_seconds(),
            selection_seconds=telemetry.selection_seconds(),
            host_wait_seconds=telemetry.host_wait_seconds,
            bytes_to_host=telemetry.bytes_to_host,
            bytes_to_device=telemetry.bytes_to_device,
            host_bytes=shared + (0 if client is None else client.header.arena.nbytes),
            worker_busy_seconds=0.0 if client is None else client.busy_seconds,
            worker_threads=0 if client is None else client.threads,
            worker_pid=None if client is None else client.worker_pid,
        )

    @contextmanager
    def in_one_piece(self) -> Iterator[None]:
        """A step, flush or load: `stepping` stays True after one that was broken off; nothing goes on from there."""
        self.stepping = True
        yield
        self.stepping = False

    @property
    def compute_stream(self) -> torch.cuda.Stream | None:
        """The device's current stream; None on the CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None

    def is_finite(self) -> bool:
        """Ask the device about this step; waits for it."""
        return bool(self.control.finite.item())

    def wait_for_worker(self) -> None:
        """Until the worker has finished all that was sent; nothing becomes visible."""
        if self.client is not None and self.sender.sent:
            self.sender.wait_done(self.sender.sent)

    def prepare_backward(self) -> None:
        """Tell the uploads which backward passes come next."""
        self.uploads.prepare(self.clock.state.step + 1)

    def running_steps(self, cohort: int) -> int:
        """Steps so far in a cohort's running window, as many as the logs have."""
        return min(self.clock.length(cohort), len(self.hyper_log))

    def finished(self, storage: SegmentStorage, turn: int, predicted: bool = False) -> list[Sent]:
        """A segment's shadow as a result for which the worker has nothing to do, due when its last window's is."""
        last, due = self.sender.sent, self.clock.due(storage.cohort)
        return [Sent(storage, bucket, last, turn, 0, due, predicted) for bucket in storage.segment.buckets]
