"""Backward passes that can upload, in the CPU's tests as surely as on a GPU, and a look at what they took."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import Pair, make_gradients
from zenflow.uploading import Sent
from zenflow.uploads import Uploads

SHAPES = [(16, 12), (7, 13), (5,), (8, 4, 3, 2), (31, 3)]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 2, "bucket_bytes": 256}
UNCHECKED = {"upload_check": False}
LIMIT = 5.0  # seconds in which a process must end, or a device come free


def watch_uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Sent, bool]]:
    """Every upload, in order: what, and whether backward took it."""
    found: list[tuple[Sent, bool]] = []
    depth = [0]
    arrived, upload = Uploads.gradient_arrived, Uploads._upload

    def watched(self: Uploads, index: int) -> None:
        depth[0] += 1
        try:
            arrived(self, index)
        finally:
            depth[0] -= 1

    def recorded(self: Uploads, sent: Sent) -> None:
        found.append((sent, depth[0] > 0))
        upload(self, sent)

    monkeypatch.setattr(Uploads, "gradient_arrived", watched)
    monkeypatch.setattr(Uploads, "_upload", recorded)
    return found


def backward(pair: Pair, grads: Sequence[Tensor | None], passes: int = 1) -> None:
    """`passes` backward passes whose gradients are equal parts of `grads`, once the worker has finished."""
    pair.engine._pipeline.wait_for_worker()
    for parameter in pair.parameters:
        parameter.grad = None
    for _ in range(passes):
        arriving = [(p, g.to(p.device)) for p, g in zip(pair.parameters, grads, strict=True) if g is not None]
        torch.stack([(p * g).float().sum() / passes for p, g in arriving if p.requires_grad]).sum().backward()


def step(pair: Pair, grads: Sequence[Tensor | None], passes: int = 1) -> None:
    backward(pair, grads, passes)
    pair.step_on_grad()


def stream_of(steps: int, dtype: torch.dtype = torch.bfloat16, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list:
    return make_gradients(shapes, dtype, steps)


def hooks_of(parameters: Sequence[nn.Parameter]) -> int:
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in parameters)
