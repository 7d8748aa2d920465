"""The order of streams on a GPU: no waiting where none is promised, and the right bits when a stream is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.engine.driving import Builder, Pair, feed, make_gradients, make_parameters

pytestmark = pytest.mark.gpu

SHAPES = [(1024, 2048), (517, 1000), (64,)]
SLOW = 50_000_000  # cycles: tens of milliseconds, longer than every copy of a window


@contextmanager
def no_synchronisation() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("clip", [None, 1.0], ids=["no-clip", "clip"])
def test_a_step_that_does_not_select_never_synchronises(clip: float | None, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, "cuda")
    engine = build(parameters, lr=0.01, topk_ratio=0.1, update_interval=3, select_interval=1000, max_grad_norm=clip)
    for step, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 14), start=1):
        feed(parameters, grads)
        for group in engine.param_groups:
            group["lr"] = 0.01 / step
        if step < 4:  # the first selection asks once; the first window's end compiles
            engine.step()
            continue
        with no_synchronisation():
            engine.step()


@pytest.mark.parametrize("slow", ["copies", "compute"])
@pytest.mark.parametrize("overlap_step", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_slow_stream_changes_no_bit(slow: str, overlap_step: bool, dtype: torch.dtype, build: Builder) -> None:
    """Fold after the last copy, copy after the fold, upload after the worker, own writes after the upload."""
    settings = {"topk_ratio": 0.3, "update_interval": 2, "select_interval": 6, "overlap_step": overlap_step}
    pair = Pair(build, make_parameters(SHAPES, dtype, "cuda"), lr=0.02, bucket_bytes=1 << 20, **settings)
    stream = pair.engine._pipeline._copies if slow == "copies" else torch.cuda.current_stream()
    for grads in make_gradients(SHAPES, dtype, 9):
        feed(pair.parameters, grads)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLOW)
        pair.step_on_grad()
    pair.check_state()


def test_the_device_that_is_current_does_not_matter(build: Builder) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, "cuda:1"), lr=0.02, topk_ratio=0.3, update_interval=2)
    for grads in make_gradients(SHAPES, torch.bfloat16, 7):
        pair.step(grads)
        assert torch.cuda.current_device() == 0
    pair.check_state()
