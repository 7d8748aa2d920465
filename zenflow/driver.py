"""What a CUDA stream can do that torch does not offer, or not cheaply: wait for a word in host memory, write one, copy.

Through the driver's `cuStreamWaitValue64` and `cuStreamWriteValue64`. A stream that waits holds no host thread, so the
thread that launches kernels goes on; whoever makes a stream wait must see to it that the word comes, whatever happens.
"""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor

_GEQ = 0  # CU_STREAM_WAIT_VALUE_GEQ: goes on once int64(word - value) >= 0
_NOTHING = nullcontext()
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # private, so never relied on
_NAMES = ("cuStreamWaitValue64", "cuStreamWriteValue64")


class StreamWords:
    """64-bit words of page-locked host memory, seen from the streams of one device.

    RuntimeError from every method if the driver refuses a call.
    """

    def __init__(self, library: ctypes.CDLL, device: torch.device) -> None:
        self._library = library
        self._device = device  # the driver takes words and streams of the current one alone
        # The versions that need no module parameter; before CUDA 12 the plain names are the only ones.
        self._wait, self._write = (_function(library, name) for name in _NAMES)
        self._copy = library.cuMemcpyHtoDAsync_v2
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]

    def device_address(self, host_address: int) -> int:
        """Where the device sees a word that `cudaHostRegister` has locked."""
        pointer = ctypes.c_uint64()
        with torch.cuda.device(self._device):
            code = self._library.cuMemHostGetDevicePointer_v2(ctypes.byref(pointer), ctypes.c_void_p(host_address), 0)
        _check("cuMemHostGetDevicePointer", code)
        return pointer.value

    def wait(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """What is queued on `stream` from now on waits until the word at device `address` is at least `value`."""
        with self._current():
            _check(_NAMES[0], self._wait(stream.cuda_stream, address, value, _GEQ))

    def write(self, stream: torch.cuda.Stream, address: int, value: int) -> None:
        """`stream` writes the word after all that is queued on it now has become visible to the host."""
        with self._current():
            _check(_NAMES[1], self._write(stream.cuda_stream, address, value, 0))

    def copy_to_device(self, stream: torch.cuda.Stream, target: Tensor, source: Tensor) -> None:
        """Queue a copy from contiguous, page-locked `source`; torch's own costs the host several times as much."""
        nbytes = source.nbytes
        assert target.nbytes == nbytes, (target.shape, source.shape)
        with self._current():
            code = self._copy(target.data_ptr(), source.data_ptr(), nbytes, stream.cuda_stream)
        _check("cuMemcpyHtoDAsync", code)

    def _current(self) -> AbstractContextManager[object]:
        """The device as the current one; to ask costs less than to change it."""
        return _NOTHING if torch.cuda.current_device() == self._device.index else torch.cuda.device(self._device)


@cache
def stream_words(device: torch.device) -> StreamWords | None:
    """For a CUDA device whose driver offers both operations, else None."""
    if device.type != "cuda":
        return None
    try:
        words = StreamWords(ctypes.CDLL("libcuda.so.1"), device)
    except (OSError, AttributeError):
        return None
    # A driver that has the functions may still refuse them: try both on a word of its own.
    word = torch.zeros(1, dtype=torch.int64, pin_memory=True)
    stream = torch.cuda.Stream(device)
    try:
        address = words.device_address(word.data_ptr())
        words.write(stream, address, 1)
        words.wait(stream, address, 1)
    except RuntimeError:
        return None
    stream.synchronize()
    return words if word.item() == 1 else None


def ask(stream: torch.cuda.Stream | None) -> None:
    """Raise the error of a device that has failed: it will never send the slot that the worker is waiting for."""
    if stream is not None:
        stream.query()


def current_stream_number(device: torch.device) -> int:
    """Which stream is current, for comparison; 0 for a CPU. Asked at every gradient, so without making an object."""
    if device.type != "cuda":
        return 0
    if _raw_stream is None:
        return torch.cuda.current_stream(device).cuda_stream
    return _raw_stream(device.index)


def _function(library: ctypes.CDLL, name: str) -> ctypes._CFuncPtr:
    function = getattr(library, f"{name}_v2", None) or getattr(library, name)
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


def _check(name: str, code: int) -> None:
    if code:
        raise RuntimeError(f"{name} failed with CUDA driver error {code}")
