"""`Diagnosis` around a loop of one's own, and the meter under it on a clock that is set by hand."""

from __future__ import annotations

import itertools
import os
import time

import pytest
import torch

import zenflow.diagnose.meter as meter_module
from zenflow import ZenFlow
from zenflow.cores import UNKNOWN_MEMORY, physical_cores
from zenflow.diagnose import Diagnosis, ceilings, session
from zenflow.diagnose.advice import host_need
from zenflow.diagnose.figures import Ceilings
from zenflow.diagnose.meter import Meter
from zenflow.telemetry import HostClock

SYNC = {"topk_ratio": 0, "update_interval": 1, "overlap_step": False, "min_deferred_numel": 16, "worker_threads": 1}
CPU = torch.device("cpu")
SHORT = {"steps": 5, "warm_up": 2, "triad_bytes": 1 << 12}


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(37, 53), torch.nn.Linear(53, 3))


def run(network, optimizer, diagnosis, loader) -> int:
    taken = 0
    for batch in diagnosis.watch(loader):
        loss = network(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        diagnosis.step_done(loss)
        taken += 1
    return taken


def test_three_lines_around_a_loop():
    network = model()
    with ZenFlow(network.parameters(), lr=1e-2, **SYNC) as optimizer:
        run(network, optimizer, Diagnosis(optimizer, **SHORT), itertools.repeat(torch.ones(2, 37)))  # an earlier one
        diagnosis = Diagnosis(optimizer, **SHORT)
        assert run(network, optimizer, diagnosis, itertools.repeat(torch.ones(2, 37))) == 7
        report, result = diagnosis.report(), diagnosis.result()
    assert report == result.text() and "verdict: inconclusive" in report and "5 measured steps will not do" in report
    measured = result.measured
    assert len(measured.steps) == len(measured.losses) == 5 and result.figures.health.falling
    deferred = 37 * 53 + 53 * 3
    assert measured.offload.bytes_to_host >= 4 * deferred and measured.offload.pass_bytes == 28 * deferred
    assert len(measured.offload.stalls) == 5 and sum(measured.offload.stalls) > 0 and measured.offload.worker_busy > 0
    assert all(0 < step.optimizer < step.seconds for step in measured.steps)


@pytest.mark.parametrize(("window", "place"), [(2, "gpu"), (3, "host")])
def test_the_host_memory_that_is_told_is_what_zenflow_then_takes(monkeypatch, window, place):
    """Beside what is available there is what the measured optimizer has until then."""
    monkeypatch.setattr(session, "available_memory", lambda: 1000)
    network = torch.nn.Sequential(*(torch.nn.Linear(256, 512, dtype=torch.bfloat16) for _ in range(2)))
    with ZenFlow(network.parameters(), **SYNC) as optimizer:
        diagnosis = Diagnosis(optimizer, **SHORT)
        has = optimizer.stats().host_bytes
        for _ in range(7):
            for weight in network.parameters():
                weight.grad = torch.ones_like(weight)
            optimizer.step()
            diagnosis.step_done(1.0)
        host = diagnosis.result().measured.host
    assert host.available == 1000 + has and host.deferred == {"bfloat16": 2 * 256 * 512}
    settings = {"update_interval": window, "accumulate_on": place, "worker_threads": 1}
    with ZenFlow(network.parameters(), **settings) as optimizer:
        assert host_need(window, place, host.deferred).size == pytest.approx(optimizer.stats().host_bytes, rel=0.03)


def test_memory_that_nobody_tells_is_not_known(monkeypatch):
    monkeypatch.setattr(session, "available_memory", lambda: UNKNOWN_MEMORY)
    network = model()
    with ZenFlow(network.parameters(), **SYNC) as optimizer:
        diagnosis = Diagnosis(optimizer, **SHORT)
        run(network, optimizer, diagnosis, [torch.ones(2, 37)] * 7)
        assert diagnosis.result().measured.host.available is None


def test_a_slow_loader_is_found():
    def slow():
        while True:
            time.sleep(0.01)
            yield torch.ones(2, 37)

    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    diagnosis = Diagnosis(optimizer, **SHORT | {"steps": 21})
    run(network, optimizer, diagnosis, slow())
    figures = diagnosis.result().figures
    assert figures.data >= 0.01 and figures.stall is None and not diagnosis.result().measured.offloads


def test_nothing_stays_at_the_optimizer():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    diagnosis = Diagnosis(optimizer, **SHORT)
    run(network, optimizer, diagnosis, [torch.ones(2, 37)] * 9)
    diagnosis.result()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_loader_that_ends_early_gives_what_there_is():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    diagnosis = Diagnosis(optimizer, **SHORT)
    assert run(network, optimizer, diagnosis, [torch.ones(2, 37)] * 5) == 5
    assert diagnosis.result().figures.steps == 3 and diagnosis.result().figures.trainer_cpus >= 0
    diagnosis = Diagnosis(optimizer, **SHORT)
    run(network, optimizer, diagnosis, [torch.ones(2, 37)] * 2)
    with pytest.raises(RuntimeError, match="within the 2 steps of the warm-up"):
        diagnosis.report()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"topk_ratio": 0.1}, "topk_ratio is 0.1; allowed: 0"),
        ({"update_interval": 4}, "update_interval is 4; allowed: 1"),
        ({"overlap_step": True}, "overlap_step is True; allowed: False"),
    ],
)
def test_a_diagnosis_is_of_a_run_without_zenflow(change, told):
    with ZenFlow(model().parameters(), **SYNC | change) as optimizer, pytest.raises(ValueError, match=told):
        Diagnosis(optimizer)


@pytest.mark.parametrize("bad", [{"steps": 0}, {"warm_up": 0}])
def test_numbers_of_steps_are_checked(bad):
    with pytest.raises(ValueError, match="allowed: integers >= 1"):
        Diagnosis(torch.optim.AdamW(model().parameters()), **bad)


def test_the_meter_leaves_the_warm_up_out(monkeypatch):
    """Each look at the clock is one second later: 2 for a wait, 2 for an optimizer's step, 1 for the end."""
    seconds = itertools.count()
    monkeypatch.setattr(meter_module, "clock_of", lambda device: HostClock(lambda: float(next(seconds))))
    meter = Meter(CPU, warm_up=1, steps=2)
    for _ in range(4):
        with meter.waiting():
            pass
        with meter.optimizing():
            pass
        with meter.waiting():
            pass
        meter.end_step()
    assert [(part.seconds, part.data, part.optimizer) for part in meter.parts()] == [(7.0, 2.0, 1.0)] * 2
    assert meter.full and not meter.measuring


def test_an_evaluation_is_no_part_of_a_step(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(meter_module, "clock_of", lambda device: HostClock(lambda: float(next(seconds))))
    meter = Meter(CPU, warm_up=0, steps=3)
    meter.resume()
    for number in range(3):
        with meter.optimizing():
            pass
        meter.end_step()
        if number == 1:
            meter.pause()
            spent = meter.wall
            for _ in range(100):
                next(seconds)
            assert meter.wall == spent
            meter.resume()
    assert [(part.seconds, part.optimizer) for part in meter.parts()] == [(3.0, 1.0)] * 3
    assert meter.wall > spent


def test_a_wait_that_ends_in_an_error_is_not_counted():
    meter = Meter(CPU, warm_up=1, steps=1)
    meter.end_step()
    with pytest.raises(KeyError), meter.waiting():
        raise KeyError
    meter.end_step()
    assert meter.parts()[0].data == 0.0


@pytest.mark.skipif(len(physical_cores()) < 2, reason="with one core, trainer and worker share it")
def test_memory_is_measured_on_all_cpus_and_the_binding_comes_back(monkeypatch):
    before, seen = os.sched_getaffinity(0), []
    monkeypatch.setattr(ceilings, "measure", lambda *_: seen.append(os.sched_getaffinity(0)) or Ceilings())
    network = model()
    with ZenFlow(network.parameters(), **SYNC, core_binding=True) as optimizer:
        bound = os.sched_getaffinity(0)
        diagnosis = Diagnosis(optimizer, **SHORT)
        run(network, optimizer, diagnosis, [torch.ones(2, 37)] * 7)
        measured = diagnosis.result().measured
        assert bound < before and seen == [before] and os.sched_getaffinity(0) == bound
        assert measured.trainer_cpus <= len(bound) and measured.worker_cpus >= 1
    assert os.sched_getaffinity(0) == before
