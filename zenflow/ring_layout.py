"""Where everything lies in a segment's shared memory, to the byte; what it means is told in `ring.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from zenflow.geometry import ITEM_BYTES, Segment

PART_SHIFT = 77 * 64  # bytes, an odd number of cache lines
HYPER_FIELDS = ("lr", "beta1", "beta2", "eps", "weight_decay")
LOG_STEP, LOG_END = 4, 2  # int32 words of the device's log: of one step, and of the window's number at either end


def log_words(steps: int) -> int:
    """Length of the device's log of a window, int32 words; its content is told at `StepControl.window_log`."""
    return LOG_STEP * steps + 2 * LOG_END


@dataclass(frozen=True)
class Layout:
    """The byte layout of a segment's window and slot records; host_bytes: of a window, covered by the checksum."""

    window: np.dtype
    slot: np.dtype
    host_bytes: int

    @classmethod
    def of(cls, segment: Segment) -> Layout:
        """The layout for a segment's longest window, its groups and its matrices."""
        steps, groups, matrices = segment.max_steps, segment.n_groups, len(segment.matrices)
        present = 32 + 40 * steps * groups
        crc = _up(present + steps * matrices, 8)
        device = _up(crc + 8, 64)
        sent = _up(device + 4 * log_words(steps), 64)
        window = {
            "seq": ("u8", 0),
            "window": ("u8", 8),
            "segment": ("u4", 16),
            "n_steps": ("u4", 20),
            "urgent": ("u2", 24),
            "predict": ("u2", 26),
            "first": ("u4", 28),
            "hyper": (("f8", (steps, groups, len(HYPER_FIELDS))), 32),
            "present": (("u1", (steps, matrices)), present),
            "crc": ("u8", crc),
            "device_log": (("i4", (log_words(steps),)), device),
            "sent": ("i8", sent),
        }
        # The device writes the first word and the worker the others: a cache line for each.
        slot = {"ready": ("i8", 0), "started_ns": ("u8", 64), "finished_ns": ("u8", 72)}
        return cls(_record(window, sent + 64), _record(slot, 128), crc)


def _record(fields: dict[str, tuple], itemsize: int) -> np.dtype:
    formats, offsets = zip(*fields.values(), strict=True)
    return np.dtype({"names": list(fields), "formats": formats, "offsets": offsets, "itemsize": itemsize})


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def bytes_of(segment: Segment) -> int:
    """Host memory of one segment, all arenas together."""
    return sum(sizes_of(segment)[0])


def sizes_of(segment: Segment) -> tuple[list[int], dict[str, int]]:
    """Bytes of the arenas (ring with records, state, shadow if it has one of its own), and offsets in the first two."""
    layout = Layout.of(segment)
    slots = 2 * layout.window.itemsize
    ring = _up(slots + 2 * layout.slot.itemsize * len(segment.buckets), 4096)
    ring_bytes = ring + segment.lanes * segment.numel * ITEM_BYTES[segment.ring_dtype]
    # Master and moments a power of two apart would fight for the same cache sets, which slows the pass.
    part = _up(4 * segment.numel, 4096) + PART_SHIFT
    state = {"master": 0, "exp_avg": part, "exp_avg_sq": 2 * part, "channel_step": 3 * part}
    sizes = [ring_bytes, 3 * part + 4 * segment.n_channels]
    if segment.shadows and not segment.in_place:
        sizes.append(segment.shadows * segment.numel * ITEM_BYTES[segment.weight_dtype])
    return [_up(size, 4096) for size in sizes], {"slots": slots, "ring": ring, **state}
