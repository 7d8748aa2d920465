"""Shared memory between the trainer and the CPU optimizer's process, and the contract of its slots.

All memory is anonymous (memfd), handed over by descriptor: nothing in /dev/shm, nothing to leak. A `Header` carries the
counters of one worker. A `SegmentMemory` is three arenas of one segment: ring and slots, shadow, the worker's state.

Order: the trainer sends, every window, all buckets of all attached segments, segment by segment. The n-th slot sent has
sequence number n, and its `ready` word becomes n last of all. The worker takes slots in that order and then raises
`done` to n. A bucket's slot, its part of the ring and its part of the shadow are free for the trainer while `done` has
reached the slot's last sequence number.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from zenflow import native
from zenflow.arena import Arena, require_memory
from zenflow.geometry import ITEM_BYTES, Segment

MAGIC, VERSION = 0x5A454E464C4F5721, 1
TEXT_BYTES = 8192
STAGGER = 77 * 64
HYPER_FIELDS = ("lr", "beta1", "beta2", "eps", "weight_decay")
LOG_STEP, LOG_END = 4, 2  # int32 words of the device's log: of one step, and of the window's number at either end
EMPTY = np.empty(0, dtype=np.uint8)
EMPTY.setflags(write=False)


def log_words(steps: int) -> int:
    """Length of the device's log of a window, int32 words; its content is told at `StepControl.window_log`."""
    return LOG_STEP * steps + 2 * LOG_END


class TornSlotError(RuntimeError):
    """A slot whose parts do not belong together: torn, reordered or overwritten."""


@dataclass(frozen=True)
class WorkerSettings:
    """What the worker needs to know beside the slots."""

    deferred_lr_scale: str | float = "linear"  # "linear" | "none" | factor


class Header:
    """Counters and the error text of one worker, in an arena of its own."""

    # done and the worker's own counters lie on separate cache lines: the trainer polls the first.
    DTYPE = np.dtype(
        {
            "names": ["magic", "version", "done", "heartbeat", "busy_ns", "failed", "text_bytes", "text"],
            "formats": ["u8"] * 7 + [f"V{TEXT_BYTES}"],
            "offsets": [0, 8, 64, 128, 136, 192, 200, 256],
            "itemsize": 256 + TEXT_BYTES,
        }
    )

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._words = {name: self._view(arena, name) for name in self.DTYPE.names if name != "text"}
        self._text = arena.array(np.uint8, self.DTYPE.fields["text"][1], TEXT_BYTES)
        self._last: tuple[int, float, str | None] = (0, 0.0, None)

    @classmethod
    def _view(cls, arena: Arena, name: str) -> np.ndarray:
        return arena.array(np.uint64, cls.DTYPE.fields[name][1], 1)

    @classmethod
    def create(cls) -> Header:
        """A new header, all counters 0."""
        header = cls(Arena.create("zenflow-header", cls.DTYPE.itemsize))
        header._words["magic"][0], header._words["version"][0] = MAGIC, VERSION
        return header

    @classmethod
    def attach(cls, fd: int) -> Header:
        """The header behind a received descriptor, which it takes over; RuntimeError if it is another version's."""
        header = cls(Arena.attach(fd, cls.DTYPE.itemsize))
        found = int(header._words["magic"][0]), int(header._words["version"][0])
        if found != (MAGIC, VERSION):
            raise RuntimeError(f"not a header of this version: magic and version {found}, expected {(MAGIC, VERSION)}")
        return header

    @property
    def done(self) -> int:
        """Slots fully processed since the worker started (acquire)."""
        return native.load_acquire(self._words["done"].ctypes.data) if self._words else self._last[0]

    @property
    def busy_seconds(self) -> float:
        """Time that the worker has spent in processing slots."""
        return int(self._words["busy_ns"][0]) / 1e9 if self._words else self._last[1]

    @property
    def heartbeat(self) -> float:
        """`time.monotonic()` of the worker's last sign of life; 0 before the first."""
        return int(self._words["heartbeat"][0]) / 1e9 if self._words else 0.0

    @property
    def error(self) -> str | None:
        """The worker's traceback, if it has failed."""
        if not self._words:
            return self._last[2]
        if not native.load_acquire(self._words["failed"].ctypes.data):
            return None
        return bytes(self._text[: int(self._words["text_bytes"][0])]).decode(errors="replace")

    def beat(self) -> None:
        """A sign of life."""
        self._words["heartbeat"][0] = time.monotonic_ns()

    def finish(self, seq: int, busy_ns: int) -> None:
        """The slot `seq` is processed (release)."""
        self._words["busy_ns"][0] += np.uint64(busy_ns)
        native.store_release(self._words["done"].ctypes.data, seq)

    def fail(self, text: str) -> None:
        """Leave a traceback (its end, if it is too long) for the trainer."""
        data = np.frombuffer(text.encode()[-TEXT_BYTES:], dtype=np.uint8)
        self._text[: data.size] = data
        self._words["text_bytes"][0] = data.size
        native.store_release(self._words["failed"].ctypes.data, 1)

    def close(self) -> None:
        """Release the memory; `done`, `busy_seconds` and `error` keep their last values."""
        if self._words:
            self._last = self.done, self.busy_seconds, self.error
        self._words, self._text = {}, EMPTY
        self.arena.close()


@dataclass(frozen=True)
class Layout:
    """The byte layout of one slot of a segment."""

    dtype: np.dtype
    host_bytes: int  # bytes covered by the checksum

    @classmethod
    def of(cls, segment: Segment) -> Layout:
        """The layout for a segment's longest window, its groups and its matrices."""
        steps, groups, matrices = segment.max_steps, segment.n_groups, len(segment.matrices)
        present = 24 + 40 * steps * groups
        crc = _up(present + steps * matrices, 8)
        device = _up(crc + 8, 64)
        ready = _up(device + 4 * log_words(steps), 64)
        fields = {
            "seq": ("u8", 0),
            "window": ("u8", 8),
            "bucket": ("u4", 16),
            "n_steps": ("u4", 20),
            "hyper": (("f8", (steps, groups, len(HYPER_FIELDS))), 24),
            "present": (("u1", (steps, matrices)), present),
            "crc": ("u8", crc),
            "device_log": (("i4", (log_words(steps),)), device),
            "ready": (("i8", (1,)), ready),
        }
        formats, offsets = [f for f, _ in fields.values()], [o for _, o in fields.values()]
        dtype = {"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": ready + 64}
        return cls(np.dtype(dtype), crc)


@dataclass(frozen=True)
class Slot:
    """The verified content of a slot; arrays cut to the window's steps."""

    hyper: np.ndarray  # float64 [n_steps, n_groups, 5]: HYPER_FIELDS
    counted: np.ndarray  # bool [n_steps, n_matrices]: the parameter was present and the step's gradient finite


class SegmentMemory:
    """The arenas of one segment and the views of them that both processes use.

    ring: uint8 `[numel * itemsize of the ring]`; shadow: uint16 `[numel]` (bits of the weights), None for fp32 weights,
    whose shadow is the master; master, exp_avg, exp_avg_sq: float32 `[numel]`; channel_step: int32 `[n_channels]`, the
    AdamW updates a channel has received. slots: record array `[n_buckets]`, see `Layout`; of a slot the device writes
    `device_log`, int32 `[log_words(max_steps)]`, and then `ready`, int64 `[1]`. After `close()` all are empty.
    """

    def __init__(self, segment: Segment, arenas: Sequence[Arena]) -> None:
        self.segment = segment
        self.header: Header | None = None
        self.arenas = tuple(arenas)
        self.layout = Layout.of(segment)
        _, ring_offset, state_offsets = _sizes(segment)
        front, state, numel = self.arenas[0], self.arenas[1], segment.numel
        self.slots = front.array(self.layout.dtype, 0, len(segment.buckets)).view(np.recarray)
        self._slot_bytes = front.array(np.uint8, 0, self.slots.nbytes).reshape(len(segment.buckets), -1)
        self.ring = front.array(np.uint8, ring_offset, numel * ITEM_BYTES[segment.ring_dtype])
        self.master, self.exp_avg, self.exp_avg_sq = (
            state.array(np.float32, offset, numel) for offset in state_offsets[:3]
        )
        self.channel_step = state.array(np.int32, state_offsets[3], segment.n_channels)
        self.shadow: np.ndarray | None = None
        if segment.weight_dtype != "float32":
            self.shadow = self.arenas[2].array(np.uint16, 0, numel)

    @classmethod
    def create(cls, segment: Segment, threads: int | None = None) -> SegmentMemory:
        """New, zeroed and populated memory; MemoryError with the bytes needed and available if the host lacks it.

        threads: how many touch the pages, by default one on each CPU that this process may use.
        """
        threads = len(os.sched_getaffinity(0)) if threads is None else threads
        sizes = _sizes(segment)[0]
        require_memory(sum(sizes))
        arenas: list[Arena] = []
        try:
            for name, size in zip(("ring", "state", "shadow"), sizes, strict=False):
                arenas.append(Arena.create(f"zenflow-{name}", size))
                arenas[-1].populate(threads)
        except BaseException:
            for arena in arenas:
                arena.close()
            raise
        return cls(segment, arenas)

    @classmethod
    def attach(cls, segment: Segment, fds: Sequence[int]) -> SegmentMemory:
        """The same memory in another process; takes over the descriptors."""
        return cls(segment, [Arena.attach(fd, size) for fd, size in zip(fds, _sizes(segment)[0], strict=True)])

    def fds(self) -> list[int]:
        """The arenas' descriptors, in the order that `attach` takes."""
        return [arena.fd for arena in self.arenas]

    def ready(self, bucket: int) -> int:
        """The slot's `ready` word, read with acquire."""
        return native.load_acquire(self.slots[bucket].ready.ctypes.data)

    def publish(self, bucket: int, seq: int) -> None:
        """Set `ready` with release: for a trainer whose payload is written by the CPU."""
        native.store_release(self.slots[bucket].ready.ctypes.data, seq)

    def write_slot(
        self, bucket: int, seq: int, window: int, n_steps: int, hyper: ArrayLike, present: ArrayLike
    ) -> None:
        """Write the host part of a slot: hyper `[n_steps, n_groups or more, 5]`, present `[n_steps, n_matrices]`.

        AssertionError if the worker has not finished with the slot's last use.
        """
        slot = self.slots[bucket]
        assert self.header is not None, "attach the memory to a worker first"
        assert self.header.done >= slot.seq, f"bucket {bucket}: slot {slot.seq} is still in use"
        assert 1 <= n_steps <= self.segment.max_steps, f"{n_steps} steps in a window of {self.segment.max_steps}"
        slot.seq, slot.window, slot.bucket, slot.n_steps = seq, window, bucket, n_steps
        slot.hyper[:n_steps] = np.asarray(hyper, dtype=np.float64)[:n_steps, : self.segment.n_groups]
        slot.present[:n_steps] = np.asarray(present)[:n_steps]
        slot.crc = self._checksum(bucket)

    def read_slot(self, bucket: int, seq: int) -> Slot:
        """The content of a slot whose `ready` is `seq`; TornSlotError, naming the slot, if its parts disagree."""
        slot = self.slots[bucket]
        window, steps = int(slot.window), int(slot.n_steps)
        log = slot.device_log
        first, last = (int(end.view(np.uint64)[0]) for end in (log[:LOG_END], log[-LOG_END:]))
        found = {
            "seq": int(slot.seq),
            "bucket": int(slot.bucket),
            "checksum": int(slot.crc),
            "ready": self.ready(bucket),
        }
        expected = {"seq": seq, "bucket": bucket, "checksum": self._checksum(bucket), "ready": seq}
        found |= {"first window word": first, "last window word": last, "steps": steps}
        expected |= {"first window word": window, "last window word": window}
        expected["steps"] = min(max(steps, 1), self.segment.max_steps)
        wrong = [name for name in found if found[name] != expected[name]]
        if wrong:
            parts = ", ".join(f"{name} is {found[name]}, expected {expected[name]}" for name in wrong)
            place = f"segment {self.segment.index}, bucket {bucket}, window {window}"
            raise TornSlotError(f"slot {seq} ({place}) is torn or out of order: {parts}")
        finite = log[LOG_END:-LOG_END:LOG_STEP][:steps] != 0
        return Slot(slot.hyper[:steps].copy(), (slot.present[:steps] != 0) & finite[:, None])

    def _checksum(self, bucket: int) -> int:
        return zlib.crc32(self._slot_bytes[bucket, : self.layout.host_bytes])

    def close(self) -> None:
        """Release memory and descriptors, once. Live views read zeros from now on, if this process made the memory."""
        self.ring = self._slot_bytes = EMPTY
        self.shadow = None if self.shadow is None else EMPTY.view(np.uint16)
        self.master = self.exp_avg = self.exp_avg_sq = EMPTY.view(np.float32)
        self.channel_step, self.slots = EMPTY.view(np.int32), np.recarray(0, dtype=self.layout.dtype)
        for arena in self.arenas:
            arena.close()


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _sizes(segment: Segment) -> tuple[list[int], int, list[int]]:
    """Bytes of the arenas (ring with slots, state, shadow if there is one), the ring's and the state's offsets."""
    ring = _up(Layout.of(segment).dtype.itemsize * len(segment.buckets), 4096)
    ring_bytes = ring + segment.numel * ITEM_BYTES[segment.ring_dtype]
    # Master and moments a power of two apart would fight for the same cache sets, which slows the pass.
    part = _up(4 * segment.numel, 4096) + STAGGER
    state_offsets = [0, part, 2 * part, 3 * part]
    sizes = [ring_bytes, 3 * part + 4 * segment.n_channels]
    if segment.weight_dtype != "float32":
        sizes.append(2 * segment.numel)
    return [_up(size, 4096) for size in sizes], ring, state_offsets
