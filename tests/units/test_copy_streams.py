"""Copies in one order, on two streams in turn."""

from __future__ import annotations

import torch

from zenflow.copy_streams import CopyStreams


class NotedStream:
    """A stream that knows what it has been made to wait for."""

    def __init__(self, name: str) -> None:
        self.name, self.waits = name, []

    def wait_stream(self, other: NotedStream) -> None:
        self.waits.append(other.name)


def test_each_stream_waits_for_the_other_before_its_turn(monkeypatch):
    """What is queued later is done later, whatever stream it is on."""
    made = iter("ab")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: NotedStream(next(made)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: NotedStream("compute"))
    copies = CopyStreams(torch.device("cuda", 0))
    first, second = copies.all
    copies.follow_compute()
    assert copies.stream is first and first.waits == ["compute"] and second.waits == []
    copies.take_turns()
    assert copies.stream is second and second.waits == ["a"]
    copies.take_turns()
    assert copies.stream is first and first.waits == ["compute", "b"]
    assert copies.all == (first, second)


def test_a_cpu_has_none():
    copies = CopyStreams(torch.device("cpu"))
    copies.follow_compute()
    copies.take_turns()
    assert copies.stream is None and copies.all == ()
