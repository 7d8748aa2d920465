"""Page-locked host memory, so that the device's copy engines read and write it by themselves."""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import torch
from torch import Tensor


class Pins:
    """The ranges that are locked for one device, each a number of whole pages; none where it is no GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._owner = os.getpid()
        self._addresses: list[int] = []

    def add(self, tensor: Tensor) -> None:
        """Lock the pages of a tensor; RuntimeError with the bytes asked for if the host does not allow it."""
        if self._device is None or tensor.numel() == 0:
            return
        first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-(tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        with torch.cuda.device(self._device):
            code = int(torch.cuda.cudart().cudaHostRegister(first, stop - first, 0))
        if code != 0:
            with suppress(RuntimeError):
                torch.zeros(1, device=self._device)  # CUDA keeps the error for whoever asks next: ask
            raise RuntimeError(
                f"cudaHostRegister could not pin {stop - first:,} bytes of host memory (CUDA error {code}); "
                "the limit on locked memory (`ulimit -l`) or the host's free memory is too low"
            )
        self._addresses.append(first)

    def release(self) -> None:
        """Unpin everything, once the device has finished its copies; nothing in a forked copy of the owner."""
        if self._addresses and os.getpid() == self._owner:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                for address in self._addresses:
                    torch.cuda.cudart().cudaHostUnregister(address)
        self._addresses = []
