"""Copies that keep one direction of PCIe busy, for measuring what else suffers from it."""

from __future__ import annotations

from collections import deque

import torch

from zenflow.copy_streams import TURN_BYTES, CopyStreams

QUEUED_SECONDS = 0.3  # of copying that are always queued: longer than a step
FASTEST = 64e9  # bytes a second, to know how many chunks that takes at most


class Traffic:
    """Copies of 64 MiB between page-locked memory and the device, as the engine makes them; `copied`: bytes so far.

    direction: "to host" or "to device", ValueError for another.
    """

    def __init__(self, direction: str, device: torch.device) -> None:
        if direction not in ("to host", "to device") or device.type != "cuda":
            raise ValueError(f"copies are {direction!r} on {device.type}; allowed: 'to host' or 'to device' on a GPU")
        host = torch.zeros(TURN_BYTES, dtype=torch.uint8, pin_memory=True)
        there = torch.zeros(TURN_BYTES, dtype=torch.uint8, device=device)
        self._target, self._source = (host, there) if direction == "to host" else (there, host)
        self._streams = CopyStreams(device)
        self._running: deque[torch.cuda.Event] = deque()
        self._most = int(QUEUED_SECONDS * FASTEST / TURN_BYTES)
        self.copied = 0

    def top_up(self) -> None:
        """Queue as many copies as have ended since the last call; called once a step."""
        self._count()
        while len(self._running) < self._most:
            self._streams.take_turns()
            with torch.cuda.stream(self._streams.stream):
                self._target.copy_(self._source, non_blocking=True)
                self._running.append(torch.cuda.Event())
                self._running[-1].record(self._streams.stream)

    def totals(self) -> dict[str, float]:
        """Bytes copied until now."""
        self._count()
        return {"copied_bytes": float(self.copied)}

    def _count(self) -> None:
        while self._running and self._running[0].query():
            self._running.popleft()
            self.copied += TURN_BYTES
