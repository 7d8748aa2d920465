"""The contestants that need nothing but this project: the floor, AdamW on the device, and ZenFlow itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from torch import Tensor, nn

from zenflow.bench.registry import Job
from zenflow.bench.traffic import Traffic


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Forward and backward of one batch of token numbers `[batch, length]`; the loss, detached, on the device."""
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


class Floor:
    """Forward and backward alone. Also what every contestant has: a step, totals so far, an end."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        self.model = model
        device = next(model.parameters()).device
        self._traffic = None if job.copies is None else Traffic(job.copies, device)

    def step(self, tokens: Tensor) -> Tensor:
        """One whole training step; the detached loss, without waiting for the device."""
        if self._traffic is not None:
            self._traffic.top_up()
        loss = backward(self.model, tokens)
        self.model.zero_grad(set_to_none=True)
        return loss

    def totals(self) -> dict[str, float]:
        """Counters and clocks since construction (bytes, seconds, counts) under the names of `zenflow.Stats`."""
        return {} if self._traffic is None else self._traffic.totals()

    def close(self) -> None:
        """Give back what outlives the process's memory."""


class OnDevice(Floor):
    """torch's fused AdamW with fp32 masters, all on the device."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        super().__init__(model, job)
        self._optimizer = self._build(model, job)

    def _build(self, model: nn.Module, job: Job) -> Any:
        from zenflow.training.engines import AdamW

        return AdamW(model.parameters(), job.clip, lr=job.lr, weight_decay=0.01)

    def step(self, tokens: Tensor) -> Tensor:
        loss = backward(self.model, tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss


class OnHost(OnDevice):
    """torch's fused AdamW with fp32 masters, all on the host, between pinned copies."""

    def _build(self, model: nn.Module, job: Job) -> Any:
        from zenflow.training.cpu_adamw import OffloadedAdamW

        return OffloadedAdamW(model.parameters(), job.clip, lr=job.lr, weight_decay=0.01)


class Offloaded(Floor):
    """ZenFlow with the job's settings."""

    def __init__(self, model: nn.Module, job: Job) -> None:
        from zenflow import ZenFlow

        super().__init__(model, job)
        settings = {"max_grad_norm": job.clip, **job.settings}
        self._optimizer = ZenFlow(model.parameters(), lr=job.lr, weight_decay=0.01, **settings)

    def step(self, tokens: Tensor) -> Tensor:
        loss = backward(self.model, tokens)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss

    def totals(self) -> dict[str, float]:
        stats = self._optimizer.stats()
        values = {item.name: getattr(stats, item.name) for item in fields(stats)}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}

    @contextmanager
    def trace(self, job: Job) -> Iterator[None]:
        """Records the steps inside its block in the job's file."""
        with self._optimizer.trace(job.trace) as tracer:
            tracer.about |= {"command": job.command, "trainer": job.label}
            yield

    def close(self) -> None:
        self._optimizer.close(flush=False)
