"""What only a GPU shows: its own clock, its memory, and PCIe."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

from zenflow import ZenFlow
from zenflow.diagnose import Diagnosis
from zenflow.diagnose.meter import Meter

pytestmark = pytest.mark.gpu
CYCLES = 2_000_000_000  # of the device's clock: about a second


@pytest.mark.parametrize("busy", [True, False])
def test_a_wait_counts_only_while_the_device_has_nothing_to_do(busy):
    device = torch.device("cuda", 0)
    meter = Meter(device, warm_up=0, steps=1)
    torch.cuda.synchronize()
    meter.resume()
    if busy:
        torch.cuda._sleep(CYCLES)
    with meter.waiting():
        time.sleep(0.05)
    meter.end_step()
    (part,) = meter.parts()
    assert part.data < 0.01 if busy else part.data > 0.04
    assert part.data <= part.seconds


def test_an_offload_is_measured_with_its_traffic_and_memory():
    torch.manual_seed(0)
    network = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to("cuda", torch.bfloat16)
    batch = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    with ZenFlow(network.parameters(), topk_ratio=0, update_interval=1, overlap_step=False) as optimizer:
        diagnosis = Diagnosis(optimizer, steps=20, warm_up=3, triad_bytes=1 << 24)
        for inputs in diagnosis.watch(itertools.repeat(batch)):
            loss = network(inputs).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            diagnosis.step_done(loss)
        figures, measured = diagnosis.result().figures, diagnosis.result().measured
    parts = (figures.data, figures.compute, figures.optimizer, figures.stall)
    assert sum(parts) == pytest.approx(figures.mean, rel=1e-3) and figures.stall > 0
    assert figures.bytes_to_host >= 2 * 4 * 1024**2 and figures.bytes_to_device >= 2 * 4 * 1024**2
    assert measured.ceilings.to_host > 1e9 and measured.ceilings.to_device > 1e9 and figures.to_host > 0
    assert 0 < measured.memory.activations < figures.peak < figures.card
    assert figures.adamw_bytes > 16 * measured.parameters and "PCIe" in diagnosis.report()
