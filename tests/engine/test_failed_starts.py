"""A start that fails leaves the model as it was, and can be tried again (E1, E7)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

import pytest
import torch

from tests.engine.driving import DTYPES, Builder, Pair, assert_same_bits, make_gradients, make_parameters, snapshot
from zenflow import WorkerError, arena, client

SHAPES = [(16, 12), (5,), (7, 13)]


def kill_the_worker(patch: pytest.MonkeyPatch) -> None:
    spawn = client._spawn

    def spawning(*args: object) -> subprocess.Popen:
        process = spawn(*args)
        process.kill()
        return process

    patch.setattr(client, "_spawn", spawning)


def lack_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(arena, "available_memory", lambda: 1000)


@pytest.mark.parametrize(
    "cause, error, said",
    [
        (kill_the_worker, WorkerError, "SIGKILL"),
        (lack_memory, MemoryError, r"needs [\d,]+ bytes of host memory, 1,000 bytes are available"),
    ],
    ids=["worker-killed", "no-memory"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_failed_start_changes_nothing_and_the_next_one_trains(
    dtype: str,
    cause: Callable[[pytest.MonkeyPatch], None],
    error: type[BaseException],
    said: str,
    device: str,
    build: Builder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parameters = make_parameters(SHAPES, DTYPES[dtype], device)
    before, descriptors = snapshot(parameters), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        cause(patch)
        with pytest.raises(error, match=said):
            build(parameters, topk_ratio=0.3)
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)
    if device == "cpu":
        assert len(os.listdir("/proc/self/fd")) == descriptors
    pair = Pair(build, parameters, lr=0.02, topk_ratio=0.3, update_interval=2)
    for grads in make_gradients(SHAPES, DTYPES[dtype], 5):
        pair.step(grads)
    pair.check_state()
    assert all(torch.isfinite(parameter).all() for parameter in parameters)
