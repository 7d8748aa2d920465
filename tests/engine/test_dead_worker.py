"""E2, E7: a worker that is killed is noticed and named, no call hangs on it, and all that it held is freed."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

from tests.engine.driving import environment, make_parameters, run_steps
from tests.processes import ends_within, shared_bytes, shared_descriptors, shared_mappings, within
from zenflow import WorkerError, ZenFlow
from zenflow.storage import HostWord

SETTINGS = {
    "lr": 0.02, "topk_ratio": 0.3, "update_interval": 2, "full_warm_up_rounds": 0, "min_deferred_numel": 0,
    "worker_threads": 1,
}  # fmt: skip
LIMIT = 5.0  # seconds in which a dead worker must be noticed


def run_on(engine: ZenFlow, parameters: list[nn.Parameter]) -> None:
    """Steps until one raises, or for LIMIT seconds."""
    start = time.monotonic()
    while time.monotonic() - start < LIMIT:
        run_steps(engine, parameters, 1)


@pytest.mark.parametrize("moment", ["idle", "mid-window", "busy"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
def test_e7_a_killed_worker_is_an_error_with_its_exit_code(moment: str, overlap: bool, device: str) -> None:
    """E7: an exception within 5 s that names the exit code; then closing frees everything."""
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    with ZenFlow(parameters, **SETTINGS) as first:  # what CUDA itself maps, once for all
        run_steps(first, parameters, 1)
    del first
    gc.collect()
    mappings, descriptors, nbytes = shared_mappings(), shared_descriptors(), shared_bytes()
    engine = ZenFlow(parameters, **{**SETTINGS, "update_interval": 4, "overlap_step": overlap})
    run_steps(engine, parameters, {"idle": 0, "mid-window": 6, "busy": 4}[moment])
    pid = engine.stats().worker_pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        within(LIMIT, run_on, engine, parameters)
    assert issubclass(WorkerError, RuntimeError)
    engine.close(flush=False)
    assert ends_within(pid, LIMIT)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    assert shared_descriptors() == descriptors
    assert shared_bytes() <= nbytes, "whoever keeps the engine"
    del engine, parameters
    gc.collect()
    assert (shared_mappings(), shared_descriptors()) == (mappings, descriptors)


def test_e7_a_dead_worker_is_noticed_long_before_the_window_ends(device: str) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = ZenFlow(parameters, **SETTINGS | {"update_interval": 1000})
    run_steps(engine, parameters, 2)
    pid = engine.stats().worker_pid
    os.kill(pid, signal.SIGKILL)
    assert ends_within(pid, LIMIT)
    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        run_steps(engine, parameters, 10)
    engine.close(flush=False)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20], ids=["buckets", "one-bucket"])
def test_the_last_slot_of_all_is_missed_though_nothing_follows_it(
    bucket_bytes: int, overlap: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `ready` is lost, and the trainer waits for that very slot."""
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = ZenFlow(parameters, **SETTINGS | {"bucket_bytes": bucket_bytes, "overlap_step": overlap})
    storage = engine._pipeline.storages[-1]
    last, publish = storage.segment.buckets[-1].index, storage.memory.publish
    lost = torch.zeros(1, dtype=torch.int64, pin_memory=device != "cpu").numpy()
    for slots in storage.slots:
        slots[last] = HostWord(lost, storage.weights.device)
    monkeypatch.setattr(storage.memory, "publish", lambda at, *word: None if at == last else publish(at, *word))
    run_steps(engine, parameters, 1)
    with pytest.raises(WorkerError, match=r"exit code 1(.|\n)*TornSlotError: slot \d+ has not come, but its window"):
        within(LIMIT, engine.flush)
    engine.close(flush=False)


@pytest.mark.parametrize("call", ["flush", "close", "state_dict", "channel_state"])
def test_e7_no_call_hangs_on_a_dead_worker(call: str, device: str) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = ZenFlow(parameters, **SETTINGS)
    run_steps(engine, parameters, 3)
    os.kill(engine.stats().worker_pid, signal.SIGKILL)

    def use() -> None:
        engine.channel_state(parameters[0]) if call == "channel_state" else getattr(engine, call)()
        engine.flush()

    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        within(LIMIT, use)
    engine.close(flush=False)


E2 = """
import os, signal, sys, torch
from tests.shared_entries import left_since, shared_entries
from zenflow import WorkerError, ZenFlow
weight = torch.nn.Parameter(torch.ones(8, 12))
entries = shared_entries()
engine = ZenFlow([weight], lr=0.1, topk_ratio=0.3, update_interval=1, min_deferred_numel=0, worker_threads=1)
for _ in range(3):
    weight.grad = torch.ones(8, 12)
    engine.step()
pipeline = engine._pipeline
pipeline.wait_for_worker()
before = [flat.clone() for flat in pipeline.storages[0].state]
if sys.argv[1] == "killed":
    os.kill(engine.stats().worker_pid, signal.SIGKILL)
else:
    pipeline.client._connection.send(("stop",))
pipeline.client._process.wait()
print([torch.equal(flat, kept) and flat.any().item() for flat, kept in zip(pipeline.storages[0].state, before)])
try:
    engine.step()
except WorkerError as error:
    print(error)
engine.close(flush=False)
print(bool(weight.isfinite().all()), sorted(left_since(entries)))
"""


@pytest.mark.parametrize(
    "ending, said", [("killed", "was killed by signal 9 (SIGKILL)"), ("leaves", "ended with exit code 0")]
)
def test_e2_the_trainer_can_read_after_the_worker_is_gone(ending: str, said: str) -> None:
    """E2: the worker exits first, struck down or in good order; masters, moments and weights are readable, nothing is
    left in /dev/shm, and no leak is reported."""
    done = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", E2, ending],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    state, error, left, _ = done.stdout.split("\n")
    assert (state, left) == ("[True, True, True]", "True []")
    assert said in error
    assert "leak" not in done.stderr
    assert "Warning" not in done.stderr
