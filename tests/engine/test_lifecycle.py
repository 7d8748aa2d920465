"""Closing and being copied: nothing hangs, nothing is left behind, and the weights stay usable."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import (
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    environment,
    feed,
    make_gradients,
    make_parameters,
    run_steps,
    snapshot,
)
from tests.processes import ends_within, shared_bytes, shared_descriptors, shared_mappings
from tests.shared_entries import left_since, shared_entries
from zenflow import ZenFlow, client

SETTINGS = {
    "lr": 0.02, "topk_ratio": 0.3, "update_interval": 2, "full_warm_up_rounds": 0, "min_deferred_numel": 0,
    "worker_threads": 1,
}  # fmt: skip
CORES = os.sched_getaffinity(0)
LIMIT = 5.0  # seconds in which a worker must have ended


def test_close_stops_the_worker_and_keeps_the_weights(device: str) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = ZenFlow(parameters, **SETTINGS)
    run_steps(engine, parameters, 5)
    pid = engine.stats().worker_pid
    assert not ends_within(pid, 0)
    engine.close()
    assert ends_within(pid, LIMIT)
    weights = snapshot(parameters)
    engine.close()
    del engine
    gc.collect()
    for parameter, weight in zip(parameters, weights, strict=True):
        assert_same_bits(parameter, weight)
        (parameter.float().sum() * 2).backward()


def test_close_flushes_unless_told_not_to(device: str) -> None:
    """Two equal runs stopped in mid-window: `close()` equals `flush()`, `close(flush=False)` shows no more."""
    results = []
    for ending in ("flush", "close", "close-without"):
        parameters = make_parameters(dtype=torch.bfloat16, device=device)
        engine = ZenFlow(parameters, **SETTINGS)
        run_steps(engine, parameters, 5)
        before = snapshot(parameters)
        if ending == "flush":
            engine.flush()
            flushed = snapshot(parameters)
        engine.close(flush=ending == "close")
        results.append((before, snapshot(parameters)))
    for index, expected in enumerate(flushed):
        assert_same_bits(results[0][1][index], expected)
        assert_same_bits(results[1][1][index], expected)
        assert_same_bits(results[2][1][index], results[2][0][index])
    assert any(not torch.equal(a, b) for a, b in zip(results[0][0], flushed, strict=True))


@pytest.mark.parametrize("topk_ratio", [0.3, 1], ids=["worker", "no-worker"])
def test_use_after_close_is_an_error(topk_ratio: float, device: str) -> None:
    parameters = make_parameters(device=device)
    engine = ZenFlow(parameters, **{**SETTINGS, "topk_ratio": topk_ratio})
    run_steps(engine, parameters, 3)
    engine.close()
    with pytest.raises(RuntimeError, match="close"):
        run_steps(engine, parameters, 1)
    engine.zero_grad()


def test_close_before_the_first_step(device: str) -> None:
    parameters = make_parameters(device=device)
    before = snapshot(parameters)
    ZenFlow(parameters, **SETTINGS).close()
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)


def test_with_closes_and_flushes(device: str) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    with ZenFlow(parameters, **SETTINGS) as engine:
        assert isinstance(engine, torch.optim.Optimizer)
        run_steps(engine, parameters, 5)
        pid = engine.stats().worker_pid
    assert ends_within(pid, LIMIT)
    other = make_parameters(dtype=torch.bfloat16, device=device)
    with ZenFlow(other, **SETTINGS) as engine:
        run_steps(engine, other, 5)
        engine.flush()
    for parameter, twin in zip(parameters, other, strict=True):
        assert_same_bits(parameter, twin)


def test_an_exception_in_with_closes_without_flush_and_passes(device: str) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    with pytest.raises(KeyError, match="mine"), ZenFlow(parameters, **SETTINGS) as engine:
        run_steps(engine, parameters, 5)
        pid, before = engine.stats().worker_pid, snapshot(parameters)
        raise KeyError("mine")
    assert ends_within(pid, LIMIT)
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)


def test_a_trace_in_which_the_engine_is_closed_is_written(device: str, tmp_path: Path) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = ZenFlow(parameters, **SETTINGS)
    with engine.trace(tmp_path / "trace.json"):
        run_steps(engine, parameters, 5)
        engine.close()
    assert "CPU optimizer" in (tmp_path / "trace.json").read_text()


def test_an_engine_that_is_dropped_leaves_no_worker(device: str) -> None:
    parameters = make_parameters(device=device)
    engine = ZenFlow(parameters, **SETTINGS)
    run_steps(engine, parameters, 2)
    pid = engine.stats().worker_pid
    del engine
    gc.collect()
    assert ends_within(pid, LIMIT)


def test_close_gives_all_shared_memory_back() -> None:
    gc.collect()
    entries, mappings, descriptors = shared_entries(), shared_mappings(), shared_descriptors()
    nbytes = shared_bytes()
    for _ in range(3):
        parameters = make_parameters(dtype=torch.bfloat16)
        engine = ZenFlow(parameters, **SETTINGS)
        run_steps(engine, parameters, 3)
        engine.close()
        assert shared_descriptors() == descriptors
        assert shared_bytes() <= nbytes, "whoever keeps the engine"
        del engine, parameters
        gc.collect()
    assert (shared_mappings(), shared_descriptors()) == (mappings, descriptors)
    assert left_since(entries) == set()


def test_a_handler_that_raises_while_it_closes_keeps_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during `close()`, which is not called again: the worker ends all the same, and all memory goes back."""
    gc.collect()
    descriptors, nbytes, threads = shared_descriptors(), shared_bytes(), torch.get_num_threads()
    parameters = make_parameters(dtype=torch.bfloat16)
    engine = ZenFlow(parameters, **SETTINGS, core_binding=True)
    run_steps(engine, parameters, 3)
    pid, has_room = engine.stats().worker_pid, client._has_room

    def interrupted(*arguments: Any) -> bool:
        os.kill(os.getpid(), signal.SIGINT)
        return has_room(*arguments)

    monkeypatch.setattr(client, "_has_room", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.close()
    assert ends_within(pid, 0)
    assert shared_descriptors() == descriptors
    assert shared_bytes() <= nbytes
    assert (torch.get_num_threads(), os.sched_getaffinity(0)) == (threads, CORES)


E3 = """
import json, multiprocessing, os, random, signal, sys, numpy, torch
from zenflow import ZenFlow
device = sys.argv[1]
weight = torch.nn.Parameter(torch.ones(8, 12, device=device))
(weight * 2).sum().backward()  # the device is in use, and so are torch's threads
torch.optim.SGD([weight])  # the first optimizer of a process has torch set a variable for its compiler
def state():
    return {
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": [str(child) for child in multiprocessing.active_children()],
        "handlers": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "cores": sorted(os.sched_getaffinity(0)),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": list(sys.path),
        "threads": torch.get_num_threads(),
        "dtype": str(torch.get_default_dtype()),
        "draws": [str(random.getstate()), str(numpy.random.get_state()), torch.get_rng_state().tolist()],
    }
found = [state()]
engine = ZenFlow([weight], lr=0.1, topk_ratio=0.3, update_interval=1, min_deferred_numel=0, core_binding=False)
found.append(state())
for _ in range(3):
    weight.grad = torch.ones(8, 12, device=device)
    engine.step()
engine.flush()
found.append(state())
engine.close()
found.append(state())
print(json.dumps(found))
"""


def test_e3_construction_changes_no_global_state(device: str) -> None:
    """E3: it works where the device was used before; neither the start method nor anything else of the process's own
    is another one afterwards. In a process where nobody has built a ZenFlow before."""
    done = subprocess.run(
        [sys.executable, "-c", E3, device], env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    before, *others = json.loads(done.stdout)
    assert (before["start method"], before["children"]) == (None, [])
    for moment, after in zip(("built", "trained", "closed"), others, strict=True):
        for name, value in before.items():
            assert after[name] == value, f"{name} when it was {moment}"


GUARDLESS = """
import torch
from zenflow import ZenFlow
print("training starts", file=open("bodies", "a"))  # where a second one would say so, too, whose output nobody sees
weight = torch.nn.Parameter(torch.ones(8, 12))
engine = ZenFlow([weight], lr=0.1, topk_ratio=0.3, update_interval=1, min_deferred_numel=0, worker_threads=1)
for _ in range(4):
    weight.grad = torch.ones(8, 12)
    engine.step()
print("trained", engine.stats().worker_pid, flush=True)
"""


@pytest.mark.parametrize("ending", ["not-closed", "raises"])
def test_e16_a_script_without_a_main_guard_trains_once(ending: str, tmp_path: Path) -> None:
    """E16: it works, its body runs once, and no worker outlives it though nobody closed it."""
    script = tmp_path / "train.py"
    script.write_text(GUARDLESS + ("1 / 0" if ending == "raises" else ""))
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == (1 if ending == "raises" else 0), done.stderr
    assert (tmp_path / "bodies").read_text() == "training starts\n"
    (line,) = done.stdout.splitlines()
    assert ends_within(int(line.split()[1]), LIMIT)
    if ending == "raises":
        assert "ZeroDivisionError" in done.stderr
    else:
        assert done.stderr == ""


PATHS = """
import sys
sys.path += {folders}
import os, torch
from zenflow import ZenFlow
weight = torch.nn.Parameter(torch.ones(8, 12))
with ZenFlow([weight], lr=0.1, topk_ratio=0.3, update_interval=1, min_deferred_numel=0, worker_threads=1) as engine:
    for _ in range(3):
        weight.grad = torch.ones(8, 12)
        engine.step()
"""


def test_the_worker_finds_its_packages_where_the_script_says(tmp_path: Path) -> None:
    """In an environment without any; nothing that lies beside the script is taken for a module."""
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    (script.parent / "sitecustomize.py").write_text("open('imported', 'w')")
    (script.parent / "socket.py").write_text("")
    script.write_text(PATHS.format(folders=[entry for entry in sys.path if entry]))
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=300)
    done = subprocess.run(
        [str(tmp_path / "bare" / "bin" / "python"), "-P", str(script)],
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


def test_copies_and_pickles_are_refused(device: str, build: Builder) -> None:
    engine = build(make_parameters(device=device), topk_ratio=0.3)
    with pytest.raises(TypeError, match="state_dict|copied|copy"):
        copy.deepcopy(engine)
    with pytest.raises(TypeError, match="state_dict|pickle"):
        pickle.dumps(engine)


def test_a_forked_child_that_drops_the_engine_does_no_harm(device: str, build: Builder) -> None:
    """A data loader's worker inherits the engine and ends; the trainer's own goes on."""
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), lr=0.02, topk_ratio=0.3)
    stream = make_gradients(dtype=torch.bfloat16, steps=11)
    for grads in stream[:5]:
        pair.step(grads)
    child = os.fork()
    if child == 0:
        if device == "cpu":  # torch itself aborts where a forked child frees CUDA memory
            pair.engine.__dict__.clear()
            gc.collect()
        os._exit(0)
    ended = ends_within(child, LIMIT)
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == 0
    for grads in stream[5:]:
        pair.step(grads)
    pair.check_state()


def test_an_engine_built_in_a_thread_outlives_it(device: str, build: Builder) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    pairs: list[Pair] = []
    thread = threading.Thread(target=lambda: pairs.append(Pair(build, parameters, lr=0.02, topk_ratio=0.3)))
    thread.start()
    thread.join()
    for grads in make_gradients(dtype=torch.bfloat16, steps=9):
        pairs[0].step(grads)
    pairs[0].check_state()


def test_two_engines_side_by_side(device: str, build: Builder) -> None:
    """Each has its own worker and memory; together they do what each does alone."""
    alone = make_parameters(dtype=torch.bfloat16, device=device)
    run_steps(build(alone, lr=0.02, topk_ratio=0.3), alone, 9)
    pairs = [make_parameters(dtype=torch.bfloat16, device=device) for _ in range(2)]
    engines = [build(parameters, lr=0.02, topk_ratio=0.3) for parameters in pairs]
    for grads in make_gradients(SHAPES, torch.bfloat16, 9):
        for engine, parameters in zip(engines, pairs, strict=True):
            feed(parameters, grads)
            engine.step()
    assert engines[0].stats().worker_pid != engines[1].stats().worker_pid
    for parameters in pairs:
        for parameter, expected in zip(parameters, alone, strict=True):
            assert_same_bits(parameter, expected)
