"""Copies in one order, on two streams in turn.

A single stream with many copies queued keeps the device's copy engine until the last is done, and a small copy in the
same direction, such as the `.item()` in a training loop or inside a model, waits that long: measured on an H200, 28 ms
behind 1.5 GB to the host, against 0.13 ms where two streams take turns.
"""

from __future__ import annotations

import torch

TURN_BYTES = 64 * 2**20  # that one of the two streams may copy before the other takes over


class CopyStreams:
    """Two streams of a device; on a CPU there are none, and nothing to wait for.

    stream: the one whose turn it is; what is queued on it follows all that is queued on the other. None on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream, self._other = (torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2))

    @property
    def all(self) -> tuple[torch.cuda.Stream, ...]:
        """Both, or none."""
        return () if self.stream is None else (self.stream, self._other)

    def take_turns(self) -> None:
        """What is queued from now on goes to the other stream, behind all that is queued on this one."""
        if self._other is not None:
            self._other.wait_stream(self.stream)
            self.stream, self._other = self._other, self.stream

    def follow_compute(self) -> None:
        """What is queued from now on comes after all that the compute stream has to do now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
