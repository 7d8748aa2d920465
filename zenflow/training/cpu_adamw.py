"""Offload as torch has it: fp32 masters and moments on the host, torch's fused AdamW there, and the device waits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn import Parameter

from zenflow.training.engines import AdamW


class OffloadedAdamW(AdamW):
    """What ZenFlow has to beat, tuned: pinned copies that are queued at once, one fused pass, which also clips.

    A step sends the gradients to the host, waits for them, updates there with all of torch's threads, and sends rounded
    masters back. The norm is taken on the device in fp32. On the host 16 bytes a parameter (masters, moments, gradients
    in fp32), and 2 more for bf16 weights. A non-finite gradient is not skipped (as in torch).
    """

    def __init__(self, params: Iterable[Parameter], max_grad_norm: float | None, **settings: Any) -> None:
        super().__init__(params, max_grad_norm, **settings)
        self._travelling = [
            torch.empty(weight.shape, dtype=weight.dtype, device="cpu", pin_memory=weight.is_cuda)
            for weight in self._weights
        ]
        self._gradients = [
            buffer if buffer.dtype is torch.float32 else torch.empty_like(buffer, dtype=torch.float32)
            for buffer in self._travelling
        ]

    @staticmethod
    def _new_master(weight: Parameter) -> Parameter:
        return Parameter(weight.detach().to("cpu", torch.float32, copy=True))

    @torch.no_grad()
    def step(self) -> None:
        places = [place for place, weight in enumerate(self._weights) if weight.grad is not None]
        gradients = [self._weights[place].grad for place in places]
        if not gradients:
            return
        norm = torch.linalg.vector_norm(
            torch.stack([torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients])
        )
        for place, gradient in zip(places, gradients, strict=True):
            self._travelling[place].copy_(gradient, non_blocking=True)
        self._norm = norm.cpu()  # which waits for the copies, too: they are on the same stream
        for master in self._masters:
            master.grad = None
        for place in places:
            self._masters[place].grad = self._gradients[place]
            if self._gradients[place] is not self._travelling[place]:
                self._gradients[place].copy_(self._travelling[place])
        # The fused pass divides by `grad_scale` as it reads, so clipping takes no pass of its own.
        self.optimizer.grad_scale = ((self._norm + 1e-6) / self._max_grad_norm).clamp(min=1.0)
        self.optimizer.step()
        for place in places:
            self._travelling[place].copy_(self._masters[place])
            self._weights[place].copy_(self._travelling[place], non_blocking=True)
