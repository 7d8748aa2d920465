"""Arenas, the header and the slot contract, inside one process."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from zenflow_kernels.control import StepControl

from tests.shortages import files_up_to
from tests.worker.feeding import GROUPS, MAX_STEPS, make_segment
from zenflow import arena as arena_module
from zenflow.arena import Arena
from zenflow.header import Header
from zenflow.ring import SegmentMemory, TornSlotError
from zenflow.ring_layout import log_words

REPOSITORY = Path(arena_module.__file__).parents[1]
HYPER = np.arange(MAX_STEPS * GROUPS * 5, dtype=np.float64).reshape(MAX_STEPS, GROUPS, 5)


@pytest.fixture
def memory():
    made = SegmentMemory.create(make_segment(bucket_bytes=700))
    made.header = Header.create()
    yield made
    made.header.close()
    made.close()


def log_window(memory, turn, window, finite=(1, 1, 1, 1), clip=1.0, inv_scale=1.0):
    log = memory.slot_record(turn, 0).device_log
    log[:2].view(np.uint64)[0] = log[-2:].view(np.uint64)[0] = window
    words = log[2:-2].reshape(-1, 4)
    words[:, 0], words[:, 3] = finite, 0
    words[:, 1:3].view(np.float32)[:] = np.broadcast_to(np.transpose([clip, inv_scale]), (MAX_STEPS, 2))


def send(memory, window, seq=1, n_steps=MAX_STEPS):
    """The host part and the log of one window, and all its ready words; its turn."""
    buckets = range(len(memory.segment.buckets))
    turns = {
        memory.write_slot(bucket, seq + bucket, window, n_steps, HYPER, np.ones((MAX_STEPS, 3))) for bucket in buckets
    }
    (turn,) = turns
    log_window(memory, turn, window)
    for bucket in buckets:
        memory.publish(bucket, turn, seq + bucket)
    return turn


def test_two_mappings_share_the_bytes():
    mine = Arena.create("test", 10_000)
    theirs = Arena.attach(os.dup(mine.fd), 10_000)
    mine.array(np.float32, 8, 3)[:] = 1, 2, 3
    assert theirs.array(np.float32, 8, 3).tolist() == [1, 2, 3]
    assert theirs.address % 4096 == 0 and theirs.address != mine.address
    theirs.close()
    assert mine.array(np.float32, 8, 3).tolist() == [1, 2, 3], "only the maker's close frees"
    mine.close()


def test_attach_refuses_a_smaller_arena():
    made = Arena.create("test", 4096)
    copy = os.dup(made.fd)
    with pytest.raises(ValueError, match="has 4096 bytes, expected 4097"):
        Arena.attach(copy, 4097)
    os.close(copy)
    made.close()


@pytest.mark.parametrize("nbytes", [0, -1])
def test_size_must_be_positive(nbytes):
    with pytest.raises(ValueError, match=f"at least 1, got {nbytes}"):
        Arena.create("test", nbytes)


def test_populate_takes_the_memory_and_changes_nothing():
    made = Arena.create("test", 3 << 20)
    made.array(np.uint8, 77, 2)[:] = 5
    assert os.fstat(made.fd).st_blocks * 512 < 3 << 20
    made.populate(threads=2)
    assert os.fstat(made.fd).st_blocks * 512 >= 3 << 20
    content = made.array(np.uint8, 0, 3 << 20)
    assert content[77:79].tolist() == [5, 5] and content.sum() == 10
    made.close()


def test_close_frees_memory_and_descriptor_while_views_are_alive():
    made = Arena.create("test", 1 << 20)
    made.populate()
    view = made.array(np.uint8, 0, 1 << 20)
    view[:] = 1
    watch, descriptor = os.dup(made.fd), made.fd
    made.close()
    made.close()
    assert os.fstat(watch).st_blocks == 0
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert not view.any(), "readable, and empty"
    os.close(watch)


def test_a_dropped_arena_closes_its_descriptor_and_a_view_keeps_its_bytes():
    made = Arena.create("test", 4096)
    view, descriptor = made.array(np.uint8, 0, 4096), made.fd
    view[:] = 3
    del made
    with pytest.raises(OSError):
        os.fstat(descriptor)
    assert view.sum() == 3 * 4096


def test_too_little_memory_is_told_before_any_is_taken(monkeypatch):
    monkeypatch.setattr(arena_module, "available_memory", lambda: 1000)
    monkeypatch.setattr(Arena, "create", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(MemoryError, match=r"needs [\d,]+ bytes .* 1,000 bytes are available"):
        SegmentMemory.create(make_segment())


REFUSED = r"needs 1,099,511,627,776 more bytes .*{}.* [\d,]+ bytes are available"


def test_a_refused_mapping_is_told_with_the_bytes():
    script = (
        "import resource; from zenflow.arena import Arena\n"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 36, 1 << 36))\n"
        "try: Arena.create('test', 1 << 40)\n"
        "except MemoryError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert re.search(REFUSED.format("Cannot allocate memory"), done.stdout), done.stderr


def test_a_limit_on_files_is_one_on_shared_memory_and_is_named():
    refused = r"needs 2,097,152 more bytes .*File too large.*ulimit -f"
    with files_up_to(1 << 20), pytest.raises(MemoryError, match=refused):
        Arena.create("test", 1 << 21)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.ENOSPC])
def test_a_refused_size_is_told_with_the_bytes_and_keeps_no_descriptor(monkeypatch, code):
    taken = []

    def refuse(fd, nbytes):
        taken.append(fd)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(MemoryError, match=REFUSED.format(os.strerror(code))):
        Arena.create("test", 1 << 40)
    with pytest.raises(OSError):
        os.fstat(taken[0])


def test_nothing_lies_in_dev_shm(memory):
    """E1: no file system limit applies, so none can be exceeded."""
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "zenflow-" in line]
    assert len(lines) >= 3 and all("/memfd:" in line and "/dev/shm" not in line for line in lines)


def test_views_cover_the_geometry(memory):
    segment = memory.segment
    assert memory.ring.nbytes == memory.shadow.nbytes == 2 * segment.numel
    assert memory.ring.ctypes.data == memory.shadow.ctypes.data, "results take the place of gradients"
    assert {x.size for x in (memory.master, memory.exp_avg, memory.exp_avg_sq)} == {segment.numel}
    assert (memory.channel_step.size, memory.slots.shape) == (segment.n_channels, (2, len(segment.buckets)))
    lines = set()
    for turn, bucket in np.ndindex(memory.slots.shape):
        slot = memory.slot_record(turn, bucket)
        log, ready, times = slot.device_log, slot.ready, (slot.started_ns, slot.finished_ns)
        assert (log.shape, log.dtype, log.ctypes.data % 64) == ((log_words(MAX_STEPS),), np.int32, 0)
        assert (ready.shape, ready.dtype, ready.ctypes.data % 64) == ((1,), np.int64, 0)
        assert [(x.shape, x.dtype) for x in times] == [((1,), np.uint64)] * 2
        assert len({x.ctypes.data // 64 for x in times}) == 1, "the worker's words share a line"
        lines |= {x.ctypes.data // 64 for x in (ready, times[0])}
    assert len(lines) == 2 * memory.slots.size, "the device's word and the worker's words never do"


@pytest.mark.parametrize("ring_dtype", ["float32", "bfloat16", "float16"])
def test_a_ring_that_keeps_steps_has_room_for_two_windows(ring_dtype):
    made = SegmentMemory.create(make_segment(ring_dtype=ring_dtype, keeps_steps=True))
    item = 4 if ring_dtype == "float32" else 2
    assert made.ring.nbytes == 2 * MAX_STEPS * made.segment.numel * item
    assert made.ring.ctypes.data % 64 == made.segment.numel * item % 64 == 0, "each lane starts a cache line"
    made.close()


@pytest.mark.parametrize("steps", [1, 4, 1000])
def test_the_slot_has_room_for_the_devices_log(steps):
    assert log_words(steps) == len(StepControl.create(0, steps, "cpu").window_log)


@pytest.mark.parametrize("kinds", [{}, {"predicted": True}, {"keeps_steps": True}], ids=str)
def test_views_do_not_overlap(kinds):
    memory = SegmentMemory.create(make_segment(ring_dtype="float32", **kinds))
    views = (memory.master, memory.exp_avg, memory.exp_avg_sq, memory.channel_step, memory.shadow, memory.ring)
    for number, view in enumerate(views):
        view[:] = number + 1
    memory.windows.view(np.uint8)[:] = memory.slots.view(np.uint8)[:] = 99
    assert [set(np.unique(view)) for view in views] == [{number + 1} for number in range(len(views))]
    memory.close()


def test_fp32_weights_have_no_shadow():
    made = SegmentMemory.create(make_segment(weight_dtype="float32", ring_dtype="float32"))
    assert made.shadow is None and len(made.fds()) == 2
    made.close()


def test_close_is_idempotent_and_leaves_empty_views():
    made = SegmentMemory.create(make_segment())
    master = made.master
    watch = [os.dup(fd) for fd in made.fds()]
    made.close()
    made.close()
    assert [x.size for x in (made.master, made.ring, made.windows, made.slots, made.shadow)] == [0] * 5
    assert [os.fstat(fd).st_blocks for fd in watch] == [0, 0] and not master.any()
    for fd in watch:
        os.close(fd)
    with pytest.raises(IndexError):
        made.ready(0, 0)
    with pytest.raises(IndexError):
        made.publish(0, 0, 1)


def test_what_is_written_is_read(memory):
    present = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]], dtype=bool)
    for bucket in (0, 1):
        assert memory.write_slot(bucket, 6 + bucket, 7, 3, HYPER[:3].tolist(), present.tolist()) == 0
    log_window(memory, 0, 7, (1, 0, 1, 1), clip=[0.5, 1, 0.25, 9], inv_scale=[1, 2, 3, 9])
    memory.publish(1, 0, 7)
    slot = memory.read_slot(1, 7, 0)
    np.testing.assert_array_equal(slot.hyper, HYPER[:3])
    assert slot.counted.tolist() == [[True, False, True], [False] * 3, [False, False, True]]
    assert slot.clip.dtype == slot.inv_scale.dtype == np.float32
    assert (slot.clip.tolist(), slot.inv_scale.tolist()) == ([0.5, 1, 0.25], [1, 2, 3])


def test_windows_take_turns(memory):
    """Window 2 is written while window 1 is read; window 3 only after it."""
    buckets = len(memory.segment.buckets)
    assert [memory.turn(bucket) for bucket in range(buckets)] == [0] * buckets
    assert send(memory, window=1) == 0
    assert send(memory, window=2, seq=1 + buckets) == 1
    for turn, window in ((0, 1), (1, 2)):
        for bucket in range(buckets):
            memory.read_slot(bucket, (window - 1) * buckets + bucket + 1, turn)
    third = (2 * buckets + 1, 3, MAX_STEPS, HYPER, np.ones((MAX_STEPS, 3)))
    with pytest.raises(AssertionError, match=f"slot {buckets} is still in use"):
        memory.write_slot(0, *third)
    memory.header.finish(buckets - 1, 10)
    with pytest.raises(AssertionError, match=f"slot {buckets} is still in use"):
        memory.write_slot(0, *third)
    memory.header.finish(buckets, 10)
    assert memory.write_slot(0, *third) == 0
    assert [memory.turn(bucket) for bucket in range(3)] == [1, 0, 0]
    with pytest.raises(TornSlotError, match="ready is 1, expected"):
        memory.read_slot(0, third[0], 0)
    memory.read_slot(0, buckets + 1, 1)


def test_a_slot_of_another_window_is_not_taken_for_this_one(memory):
    buckets = len(memory.segment.buckets)
    send(memory, window=1)
    send(memory, window=2, seq=1 + buckets)
    with pytest.raises(TornSlotError, match=f"seq is {buckets + 2}, expected 2, ready is {buckets + 2}"):
        memory.read_slot(1, 2, 1)
    with pytest.raises(TornSlotError, match="seq is 3, expected 2"):
        memory.read_slot(2, 2, 0)


def test_buckets_are_written_in_order(memory):
    rest = (1, MAX_STEPS, HYPER, np.ones((MAX_STEPS, 3)))
    with pytest.raises(AssertionError, match="bucket 1 before bucket 0"):
        memory.write_slot(1, 2, *rest)
    memory.write_slot(0, 1, *rest)
    with pytest.raises(AssertionError, match="bucket 2 before bucket 1"):
        memory.write_slot(2, 3, *rest)
    with pytest.raises(AssertionError, match="bucket 1: slot 3 is out of order, expected 2"):
        memory.write_slot(1, 3, *rest)
    memory.write_slot(1, 2, *rest)


def test_groups_added_later_are_left_out(memory):
    wider = np.concatenate([HYPER, HYPER], axis=1)
    memory.write_slot(0, 1, 1, MAX_STEPS, wider, np.ones((MAX_STEPS, 3)))
    np.testing.assert_array_equal(memory.windows["hyper"][0], HYPER)


def test_groups_that_came_after_the_steps_have_nothing_in_them(memory):
    memory.write_slot(0, 1, 1, MAX_STEPS, HYPER[:, :1], np.ones((MAX_STEPS, 3)))
    np.testing.assert_array_equal(memory.windows["hyper"][0][:, :1], HYPER[:, :1])
    assert not memory.windows["hyper"][0][:, 1:].any() and HYPER.shape[1] > 1


@pytest.mark.parametrize("n_steps", [0, MAX_STEPS + 1])
def test_a_window_has_its_length(memory, n_steps):
    with pytest.raises(AssertionError, match=f"{n_steps} steps in a window of {MAX_STEPS}"):
        memory.write_slot(0, 1, 1, n_steps, HYPER, np.ones((MAX_STEPS, 3)))


def test_every_torn_byte_of_the_host_part_is_seen(memory):
    send(memory, window=1)
    memory.read_slot(1, 2, 0)
    host = memory.arenas[0].array(np.uint8, 0, memory.layout.host_bytes)
    for place in range(host.size):
        host[place] ^= 0x10
        with pytest.raises(TornSlotError, match="slot 2 .*bucket 1"):
            memory.read_slot(1, 2, 0)
        host[place] ^= 0x10
    memory.read_slot(1, 2, 0)


@pytest.mark.parametrize("word, named", [(0, "first window"), (1, "first window"), (-2, "last window"), (-1, "last")])
def test_a_log_of_another_window_is_seen(memory, word, named):
    send(memory, window=1)
    memory.windows["device_log"][0, word] += 1
    with pytest.raises(TornSlotError, match=named):
        memory.read_slot(0, 1, 0)


def test_header():
    header = Header.create()
    other = Header.attach(os.dup(header.arena.fd))
    assert (other.done, other.busy_seconds, other.error) == (0, 0.0, None)
    header.beat()
    header.finish(3, 2_000_000_000)
    header.fail("ä" * 10_000 + "the end")
    assert (other.done, other.busy_seconds) == (3, 2.0)
    assert other.heartbeat > 0 and other.error.endswith("äthe end")
    header.close()
    assert header.heartbeat == 0
    assert (header.done, header.busy_seconds) == (3, 2.0) and header.error.endswith("the end")
    other.close()


def test_a_foreign_header_is_refused():
    blank = Arena.create("test", Header.DTYPE.itemsize)
    with pytest.raises(RuntimeError, match="magic and version"):
        Header.attach(os.dup(blank.fd))
    blank.close()
