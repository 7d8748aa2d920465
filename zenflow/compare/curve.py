"""What one run of a side showed, and its held-out loss at a time. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Point:
    """An evaluation: after `step` steps and `seconds` of training, on the device's clock, evaluations left out."""

    step: int
    seconds: float
    loss: float
    scores: dict[str, float] = field(default_factory=dict)  # the task's, as accuracy and Matthews


@dataclass(frozen=True)
class Run:
    """One run. Seconds, bytes and CPU are means a step after the warm-up; `place` is the run's number in the session.

    `weights` and `order` are digests of the weights before the first step and of all training batches.
    """

    side: str
    seed: int
    place: int
    weights: str
    order: str
    median: float
    p95: float
    mean: float
    tokens_per_second: float
    data: float  # waiting for batches
    stall: float | None  # waiting for CPU or PCIe; None for an engine whose state is on the device
    trainer_cpus: float
    worker_cpus: float | None
    bytes_to_host: float | None
    bytes_to_device: float | None
    worker_busy: float | None
    peak_bytes: int | None
    skipped_steps: int
    curve: tuple[Point, ...]
    faults: tuple[str, ...] = field(default=())  # of the training loss

    @property
    def scores(self) -> dict[str, float]:
        """The task's after the last step, by name."""
        return self.curve[-1].scores

    @property
    def idle(self) -> float:
        """Seconds a step in which the device waited for data, CPU or PCIe."""
        return self.data + (self.stall or 0.0)

    @property
    def seconds(self) -> float:
        """Of training, from the first step to the last."""
        return self.curve[-1].seconds

    def loss_at(self, seconds: float) -> float:
        """The held-out loss after so much training, on the straight line between the evaluations beside it."""
        before = self.curve[0]
        for point in self.curve[1:]:
            if point.seconds >= seconds:
                part = (seconds - before.seconds) / (point.seconds - before.seconds)
                return before.loss + part * (point.loss - before.loss)
            before = point
        return before.loss
