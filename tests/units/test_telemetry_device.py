"""The device's clock: stalls are what other streams took, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

from tests.units.timing import SLEEP_CYCLES
from zenflow.telemetry import Telemetry

pytestmark = pytest.mark.gpu


def slept_seconds(stream: torch.cuda.Stream) -> float:
    """What `_sleep(SLEEP_CYCLES)` takes: the median of three, after one that wakes the device."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(5)]
    with torch.cuda.stream(stream):
        for event in events:
            event.record()
            torch.cuda._sleep(SLEEP_CYCLES)
    torch.cuda.synchronize()
    pairs = zip(events[1:-1], events[2:], strict=True)
    return sorted(first.elapsed_time(last) / 1e3 for first, last in pairs)[1]


def test_a_stall_is_what_another_stream_took(forbidden_synchronisation) -> None:
    """The compute stream waits for a sleep elsewhere in every step; the host is never made to wait."""
    device, other = torch.device("cuda"), torch.cuda.Stream()
    expected = slept_seconds(other)
    telemetry, weight = Telemetry(device), torch.ones(1009, device=device).mul_(1.5).add_(1.0)
    torch.cuda.synchronize()
    forbidden_synchronisation()
    for number in range(7):
        weight.mul_(1.5)
        telemetry.begin_step(number, 0.0, 0.0)
        weight.add_(1.0)
        with telemetry.stall():
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                torch.cuda._sleep(SLEEP_CYCLES)
            torch.cuda.current_stream().wait_stream(other)
        telemetry.end_step(1)
    queued = telemetry.records()
    torch.cuda.set_sync_debug_mode("default")
    assert len(queued) < 7, "the host waited for the device"
    records = telemetry.records(wait=True)
    assert [record.step for record in records] == list(range(7))
    for record in records:
        assert expected / 2 < record.stall_seconds < expected * 2
        assert record.host_seconds < expected
    for record in records[1:]:
        parts = record.compute_seconds + record.optimizer_seconds + record.stall_seconds
        assert record.seconds == pytest.approx(parts, abs=1e-4)
        assert record.optimizer_seconds + record.compute_seconds < expected
    assert telemetry.stall_seconds() == pytest.approx(sum(record.stall_seconds for record in records))


def test_work_that_was_queued_before_is_no_stall() -> None:
    device = torch.device("cuda")
    expected = slept_seconds(torch.cuda.current_stream())
    telemetry = Telemetry(device)
    for number in range(3):
        torch.cuda._sleep(SLEEP_CYCLES)
        telemetry.begin_step(number, 0.0, 0.0)
        with telemetry.stall():
            pass
        telemetry.end_step(None)
    first, *others = telemetry.records(wait=True)
    assert first.compute_seconds is None
    for record in others:
        assert expected / 2 < record.compute_seconds < expected * 2
    assert telemetry.stall_seconds() < expected / 2


def test_events_come_from_a_small_pool() -> None:
    telemetry = Telemetry(torch.device("cuda"))
    for number in range(201):
        telemetry.begin_step(number, 0.0, 0.0)
        with telemetry.stall():
            pass
        telemetry.end_step(None)
        torch.cuda.synchronize()
    telemetry.records(wait=True)
    assert len(telemetry._clock._free) <= 16
