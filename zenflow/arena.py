"""Anonymous shared memory: one memfd and one mapping, with NumPy views that may outlive it.

Python's own `mmap` refuses to close while views exist and keeps a second descriptor; here the mapping goes with its
last view, and memory and descriptor go at once. The memory is made of huge pages where the kernel can (Linux 6.1): one
pass over it then needs a five-hundredth of the translations, in the CPU and for the device, and it is there sooner.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import numpy as np

from zenflow.cores import available_memory

POPULATE_CHUNK = 64 << 20
PAGE = resource.getpagesize()
HUGE_PAGE_FILE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
HUGE_PAGE_SECONDS = 2.0  # to make huge pages in: it is slow where free memory lies in pieces, and the rest stays small
_PROT_NONE, _PROT_READ_WRITE = 0, 3
_MAP_SHARED, _MAP_FIXED, _MAP_RESERVED = 1, 0x10, 0x4022  # the last: private, anonymous, without reserve
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25
_PUNCH_HOLE_KEEP_SIZE = 3

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def require_memory(needed: int) -> None:
    """MemoryError, before anything is taken, if the host or its cgroup cannot give `needed` bytes."""
    available = available_memory()
    if needed > available:
        raise MemoryError(
            f"the CPU optimizer needs {needed:,} bytes of host memory, {available:,} bytes are available: "
            "train fewer parameters, or give the host or container more memory"
        )


def _refused(code: int, nbytes: int) -> Exception:
    """The error for memory that the kernel does not give: MemoryError where it lacks it, else OSError."""
    reason = os.strerror(code)
    if code in (errno.ENOMEM, errno.ENOSPC, errno.EFBIG):
        option = "-f" if code == errno.EFBIG else "-v"  # shared memory is a file without a name
        return MemoryError(
            f"the CPU optimizer needs {nbytes:,} more bytes of shared memory and the system refuses them ({reason}), "
            f"{available_memory():,} bytes are available: raise the process's limit (ulimit {option}), or free memory"
        )
    return OSError(code, f"cannot take {nbytes:,} bytes of shared memory: {reason}")


@contextmanager
def descriptors_needed() -> Iterator[None]:
    """Where the process has no descriptor left for what is made inside: OSError with the limit and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise OSError(
            errno.EMFILE,
            f"the CPU optimizer needs more descriptors than this process has left of the {limit:,} that it may have "
            "open at once: raise the limit (ulimit -n), or close files",
        ) from error


def _bind_thread(cores: Sequence[int]) -> None:
    if cores:
        with suppress(OSError):
            os.sched_setaffinity(0, cores)


@cache
def huge_page_bytes() -> int:
    """Bytes of a huge page; 0 where the kernel has none."""
    try:
        return int(HUGE_PAGE_FILE.read_text())
    except (OSError, ValueError):
        return 0


def _map(fd: int, nbytes: int) -> int:
    """Address of a new shared mapping; at a huge page's boundary if it can hold one and there are addresses enough."""
    huge = huge_page_bytes()
    try:
        reserved = _mmap(None, nbytes + huge, _PROT_NONE, _MAP_RESERVED, -1) if 0 < huge <= nbytes else None
    except MemoryError:
        reserved = None  # the process's limit (ulimit -v) may still leave room for the memory itself
    if reserved is None:
        return _mmap(None, nbytes, _PROT_READ_WRITE, _MAP_SHARED, fd)
    place, end = -(-reserved // huge) * huge, reserved + nbytes + huge
    _unmap(reserved, place)
    try:
        _mmap(place, nbytes, _PROT_READ_WRITE, _MAP_SHARED | _MAP_FIXED, fd)
    except (OSError, MemoryError):
        _unmap(place, end)
        raise
    _unmap(-(-(place + nbytes) // PAGE) * PAGE, end)
    return place


def _mmap(place: int | None, nbytes: int, protection: int, flags: int, fd: int) -> int:
    address = _libc.mmap(place, nbytes, protection, flags, fd, 0)
    if address == ctypes.c_void_p(-1).value:
        raise _refused(ctypes.get_errno(), nbytes)
    return address


def _unmap(start: int, end: int) -> None:
    if end > start:
        _libc.munmap(start, end - start)


class _Mapping:
    """A shared mapping of a descriptor; unmapped when the last array made from it is gone."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.address: int = _map(fd, nbytes)
        self.__array_interface__ = {"data": (self.address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if hasattr(self, "address"):
            _libc.munmap(self.address, self.nbytes)


class Arena:
    """`nbytes` of shared memory behind the descriptor `fd`."""

    def __init__(self, fd: int, nbytes: int, made_here: bool) -> None:
        self.fd, self.nbytes = fd, nbytes
        self._maker = os.getpid() if made_here else None
        try:
            self._mapping: _Mapping | None = _Mapping(fd, nbytes)
        except (OSError, MemoryError):
            os.close(fd)
            raise

    @classmethod
    def create(cls, name: str, nbytes: int) -> Arena:
        """New zeroed memory; `name` shows in /proc only. MemoryError, with the bytes, if the kernel lacks it."""
        if nbytes < 1:
            raise ValueError(f"nbytes must be at least 1, got {nbytes}")
        with descriptors_needed():
            fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, nbytes)
        except OSError as error:
            os.close(fd)
            raise _refused(error.errno, nbytes) from error
        return cls(fd, nbytes, made_here=True)

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Arena:
        """The memory behind a received descriptor, which it takes over; ValueError if it is smaller than `nbytes`."""
        size = os.fstat(fd).st_size
        if size < nbytes:
            raise ValueError(f"the arena has {size} bytes, expected {nbytes}")
        return cls(fd, nbytes, made_here=False)

    @property
    def address(self) -> int:
        """Start of the mapping in this process, page-aligned."""
        assert self._mapping is not None, "the arena is closed"
        return self._mapping.address

    def array(self, dtype: np.dtype | type, offset: int, count: int) -> np.ndarray:
        """`count` elements from byte `offset` on, writable; keeps the mapping, not the memory, alive."""
        assert self._mapping is not None, "the arena is closed"
        nbytes = np.dtype(dtype).itemsize * count
        assert 0 <= offset <= self.nbytes - nbytes, (offset, nbytes, self.nbytes)
        return np.asarray(self._mapping)[offset : offset + nbytes].view(dtype)

    def populate(self, threads: int = 1, cores: Sequence[int] = ()) -> None:
        """Touch every page now, in parallel, so that training never faults; changes no byte.

        cores: the CPUs that the threads run on; new pages come from these CPUs' NUMA node.
        """
        _libc.madvise(self.address, self.nbytes, _MADV_HUGEPAGE)
        deadline = time.monotonic() + HUGE_PAGE_SECONDS
        with ThreadPoolExecutor(max(1, threads), initializer=_bind_thread, initargs=(cores,)) as pool:
            for _ in pool.map(partial(self._populate, deadline), range(0, self.nbytes, POPULATE_CHUNK)):
                pass

    def _populate(self, deadline: float, start: int) -> None:
        """One chunk; in huge pages where that can be had before the deadline, on the monotonic clock."""
        length, huge = min(POPULATE_CHUNK, self.nbytes - start), huge_page_bytes()
        if 0 < huge <= length and time.monotonic() < deadline:
            # A huge page is made from one that holds something: a read gives each a first small page.
            self.array(np.uint8, start, length)[::huge].max()
            _libc.madvise(self.address + start, length // huge * huge, _MADV_COLLAPSE)
        # Kernels before 5.14 cannot: then new memory, which is zero, is cleared once more, and received memory is left.
        if _libc.madvise(self.address + start, length, _MADV_POPULATE_WRITE) and self._maker:
            _libc.memset(self.address + start, 0, length)

    def close(self) -> None:
        """Give memory and descriptor back, once. Live views read zeros from now on, if this process made it."""
        if self._mapping is None:
            return
        if self._maker == os.getpid():
            # The pages go now, whoever still maps them; without this they would stay until the last view is gone.
            _libc.fallocate(self.fd, _PUNCH_HOLE_KEEP_SIZE, 0, self.nbytes)
        self._mapping = None
        os.close(self.fd)
        self.fd = -1

    def __del__(self) -> None:
        if getattr(self, "_mapping", None) is not None:
            with suppress(OSError):
                os.close(self.fd)
