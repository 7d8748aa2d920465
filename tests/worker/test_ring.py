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

from tests.worker.feeding import GROUPS, MAX_STEPS, make_segment
from zenflow import arena as arena_module
from zenflow.arena import Arena
from zenflow.ring import Header, SegmentMemory, TornSlotError, log_words

REPOSITORY = Path(arena_module.__file__).parents[1]
HYPER = np.arange(MAX_STEPS * GROUPS * 5, dtype=np.float64).reshape(MAX_STEPS, GROUPS, 5)


@pytest.fixture
def memory():
    made = SegmentMemory.create(make_segment(bucket_bytes=700))
    made.header = Header.create()
    yield made
    made.header.close()
    made.close()


def log_window(memory, bucket, window, finite=(1, 1, 1, 1)):
    log = memory.slots[bucket].device_log
    log[:2].view(np.uint64)[0] = log[-2:].view(np.uint64)[0] = window
    log[2:-2:4] = finite


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
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert re.search(REFUSED.format("Cannot allocate memory"), done.stdout), done.stderr


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
    assert len(lines) >= 4 and all("/memfd:" in line and "/dev/shm" not in line for line in lines)


def test_views_cover_the_geometry(memory):
    segment = memory.segment
    assert memory.ring.nbytes == memory.shadow.nbytes == 2 * segment.numel
    assert {x.size for x in (memory.master, memory.exp_avg, memory.exp_avg_sq)} == {segment.numel}
    assert (memory.channel_step.size, len(memory.slots)) == (segment.n_channels, len(segment.buckets))
    for bucket in range(len(memory.slots)):
        slot = memory.slots[bucket]
        log, ready = slot.device_log, slot.ready
        assert (log.shape, log.dtype, log.ctypes.data % 64) == ((log_words(MAX_STEPS),), np.int32, 0)
        assert (ready.shape, ready.dtype, ready.ctypes.data % 64) == ((1,), np.int64, 0)


@pytest.mark.parametrize("steps", [1, 4, 1000])
def test_the_slot_has_room_for_the_devices_log(steps):
    assert log_words(steps) == len(StepControl.create(0, steps, "cpu").window_log)


def test_views_do_not_overlap(memory):
    views = (memory.master, memory.exp_avg, memory.exp_avg_sq, memory.channel_step, memory.shadow, memory.ring)
    for number, view in enumerate(views):
        view[:] = number + 1
    memory.slots.view(np.uint8)[:] = 99
    assert [set(np.unique(view)) for view in views] == [{number + 1} for number in range(len(views))]


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
    assert [made.master.size, made.ring.size, made.slots.size, made.shadow.size] == [0, 0, 0, 0]
    assert [os.fstat(fd).st_blocks for fd in watch] == [0, 0, 0] and not master.any()
    for fd in watch:
        os.close(fd)


def test_what_is_written_is_read(memory):
    present = np.array([[1, 0, 1], [1, 1, 1], [0, 0, 1]], dtype=bool)
    memory.write_slot(1, 2, 7, 3, HYPER[:3].tolist(), present.tolist())
    log_window(memory, 1, 7, (1, 0, 1, 1))
    memory.publish(1, 2)
    slot = memory.read_slot(1, 2)
    np.testing.assert_array_equal(slot.hyper, HYPER[:3])
    assert slot.counted.tolist() == [[True, False, True], [False] * 3, [False, False, True]]


def test_groups_added_later_are_left_out(memory):
    wider = np.concatenate([HYPER, HYPER], axis=1)
    memory.write_slot(0, 1, 1, MAX_STEPS, wider, np.ones((MAX_STEPS, 3)))
    np.testing.assert_array_equal(memory.slots[0].hyper, HYPER)


def test_a_slot_in_use_is_not_overwritten(memory):
    arguments = (MAX_STEPS, HYPER, np.ones((MAX_STEPS, 3)))
    memory.write_slot(0, 1, 1, *arguments)
    with pytest.raises(AssertionError, match="slot 1 is still in use"):
        memory.write_slot(0, 5, 2, *arguments)
    memory.header.finish(1, 10)
    memory.write_slot(0, 5, 2, *arguments)
    assert memory.slots[0].seq == 5


@pytest.mark.parametrize("n_steps", [0, MAX_STEPS + 1])
def test_a_window_has_its_length(memory, n_steps):
    with pytest.raises(AssertionError, match=f"{n_steps} steps in a window of {MAX_STEPS}"):
        memory.write_slot(0, 1, 1, n_steps, HYPER, np.ones((MAX_STEPS, 3)))


def test_every_torn_byte_of_the_host_part_is_seen(memory):
    memory.write_slot(0, 1, 1, MAX_STEPS, HYPER, np.ones((MAX_STEPS, 3)))
    log_window(memory, 0, 1)
    memory.publish(0, 1)
    memory.read_slot(0, 1)
    host = memory.arenas[0].array(np.uint8, 0, memory.layout.host_bytes)
    for place in range(host.size):
        host[place] ^= 0x10
        with pytest.raises(TornSlotError, match="slot 1 .*bucket 0"):
            memory.read_slot(0, 1)
        host[place] ^= 0x10
    memory.read_slot(0, 1)


@pytest.mark.parametrize("word, named", [(0, "first window"), (1, "first window"), (-2, "last window"), (-1, "last")])
def test_a_log_of_another_window_is_seen(memory, word, named):
    memory.write_slot(0, 1, 1, MAX_STEPS, HYPER, np.ones((MAX_STEPS, 3)))
    log_window(memory, 0, 1)
    memory.publish(0, 1)
    memory.slots[0].device_log[word] += 1
    with pytest.raises(TornSlotError, match=named):
        memory.read_slot(0, 1)


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
