"""The worker process against the simulation: every bit of master, moments, t and shadow (I6, B1, E8)."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch

from tests.processes import within
from tests.worker.feeding import make_segment
from zenflow.client import WorkerError
from zenflow.worker_settings import WorkerSettings

DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32")]


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_windows_of_several_segments_match_the_simulation(trainer, channel_dim):
    segments = [
        make_segment(index, weight_dtype=weight, ring_dtype=ring, channel_dim=channel_dim, bucket_bytes=700)
        for index, (weight, ring) in enumerate(DTYPES)
    ]
    t = trainer(*segments)
    for n_steps in (4, 1, 3):
        t.run(t.make_window(n_steps))
        t.check()


def test_absent_and_skipped_steps_are_not_counted(trainer):
    t = trainer(make_segment())
    t.run(t.make_window())
    window = t.make_window()
    window.finite[1] = False
    window.present[0][:, 0] = False, True, True, False
    window.present[0][:, 1] = False
    t.run(window)
    t.check()
    assert [t.memories[0].channel_step[m.step_offset] for m in t.memories[0].segment.matrices] == [2, 1, 2]


def test_a_window_without_a_counted_step_only_refreshes_the_shadow(trainer):
    t = trainer(make_segment())
    t.run(t.make_window())
    t.memories[0].shadow[:] = 0
    window = t.make_window()
    window.finite[:] = False
    t.run(window)
    t.check()


@pytest.mark.parametrize("scale", ["linear", "none", 2.5], ids=str)
def test_learning_rate_scale_and_decay(trainer, scale):
    t = trainer(make_segment(), settings=WorkerSettings(deferred_lr_scale=scale))
    for n_steps in (4, 3):
        t.run(t.make_window(n_steps))
    t.check()


def test_learning_rate_zero_and_zero_gradients_change_nothing(trainer):
    t = trainer(make_segment())
    before = t.bits()
    window = t.make_window(lr=0.0)
    window.grads = [[np.zeros_like(total) for total in sums] for sums in window.grads]
    t.run(window)
    for old, new in zip(before[:-1], t.bits()[:-1], strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_bits_do_not_depend_on_buckets_or_threads(trainer, channel_dim):
    shapes = ((301, 160, 0), (5, 301, 1))
    runs = []
    for bucket_bytes, threads in ((1 << 20, 1), (40_000, 2), (700, 1)):
        segment = make_segment(shapes=shapes, channel_dim=channel_dim, bucket_bytes=bucket_bytes)
        runs.append((len(segment.buckets), trainer(segment, threads=threads).history()))
    assert [runs[0][0], runs[1][0] > 2, runs[2][0] > 100] == [1, True, True]
    for _, bits in runs[1:]:
        for found, expected in zip(bits, runs[0][1], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_without_the_compiled_pass_the_bits_are_the_same(trainer, monkeypatch):
    monkeypatch.setenv("ZENFLOW_NATIVE", "0")
    t = trainer(make_segment(bucket_bytes=700), make_segment(1, weight_dtype="float16", ring_dtype="float32"))
    t.history()


def test_a_segment_attached_between_two_windows(trainer):
    t = trainer(make_segment(bucket_bytes=700))
    for _ in range(3):
        t.run(t.make_window())
    t.add(make_segment(1, shapes=((9, 40, 1),)))
    for _ in range(2):
        t.run(t.make_window())
    t.check()


def test_a_segment_attached_inside_a_window_is_an_error(trainer):
    t = trainer(make_segment(bucket_bytes=700))
    t.fill(t.make_window())
    t.memories[0].publish(0, 0, 1)
    t.client.wait_done(1)
    with pytest.raises(WorkerError, match="between two windows"):
        t.add(make_segment(1))


@pytest.mark.parametrize("keeps_steps", [False, True], ids=["sums", "steps"])
def test_segments_come_in_any_order_and_windows_begin_at_any_place(trainer, keeps_steps):
    """As windows of cohorts end: one segment, two or all; lengths and places of the first step of each differ."""
    t = trainer(*[make_segment(index, bucket_bytes=700, keeps_steps=keeps_steps) for index in range(3)])
    for number, steps, first in ((2, 4, 3), (0, 1, 1), (2, 3, 2), (1, 2, 3), (0, 4, 0), (2, 1, 1), (1, 3, 2)):
        t.client.wait_done(t.send_one(number, t.make_window(steps), first))
        t.check()
    t.run(t.make_window())
    t.check()


def test_two_segments_queued_while_the_worker_stands_still(trainer):
    """It finds both ready, the later one perhaps first, and takes them in the order of their numbers."""
    t = trainer(*[make_segment(index, bucket_bytes=700, keeps_steps=True) for index in range(3)])
    os.kill(t.client.worker_pid, signal.SIGSTOP)
    try:
        for number in (2, 0, 1, 0, 2):
            t.send_one(number, t.make_window())
    finally:
        os.kill(t.client.worker_pid, signal.SIGCONT)
    t.client.wait_done(t.seq)
    t.check()
    finished = {}
    for number, memory in enumerate(t.memories):
        for turn in (0, 1):
            finished[number, turn] = int(memory.slot_record(turn, 0).finished_ns[0])
    assert finished[2, 0] < finished[0, 0] < finished[1, 0] < finished[0, 1] < finished[2, 1]


def test_a_segment_that_overtakes_another_stops_the_worker(trainer):
    t = trainer(*[make_segment(index) for index in range(2)])
    window = t.make_window()
    t.window_number = 1
    turns = [t.fill_slot(memory, 0, 1 + number, window) for number, memory in enumerate(t.memories)]
    t.memories[1].publish(0, turns[1], 2)
    with pytest.raises(WorkerError, match="TornSlotError: segment 1, bucket 0: ready is 2 while slot 1 is due"):
        within(5, t.client.wait_done, 1)


def test_slots_in_flight_are_neither_torn_nor_overwritten(trainer):
    """E15: two slots, 500 windows of stamped gradients; a slot is refilled once it is free, the other in flight."""
    t = trainer(make_segment(shapes=((31, 160, 0), (31, 160, 1)), bucket_bytes=31 * 160 * 2))
    memory = t.memories[0]
    assert len(memory.segment.buckets) == 2
    window = t.make_window(1, lr=1e-3)
    for t.window_number in range(1, 501):
        stamp = np.float32((-1) ** t.window_number * (t.window_number % 128))
        window.grads = [[np.full((31, 160), stamp + bucket, dtype=np.float32) for bucket in (0, 1)]]
        for bucket in (0, 1):
            seq = 2 * (t.window_number - 1) + bucket + 1
            t.client.wait_done(seq - 2)
            memory.publish(bucket, t.fill_slot(memory, bucket, seq, window), seq)
        t.simulate(window)
    t.client.wait_done(1000)
    t.check()


def test_writes_of_the_worker_show_in_the_trainers_views(trainer):
    """E8: torch views taken before the first window, also of the shadow as weights."""
    t = trainer(make_segment())
    memory = t.memories[0]
    shadow, master = torch.from_numpy(memory.shadow).view(torch.bfloat16), torch.from_numpy(memory.master)
    before = master.clone()
    t.run(t.make_window())
    assert not torch.equal(master, before)
    assert torch.equal(shadow, master.bfloat16())


def test_counters(trainer):
    t = trainer(make_segment(bucket_bytes=700))
    assert (t.client.header.done, t.client.busy_seconds) == (0, 0.0)
    t.run(t.make_window())
    assert t.client.header.done == t.seq == len(t.memories[0].segment.buckets)
    assert 0 < t.client.busy_seconds < 60
    assert t.client.wait_done(t.seq) == 0.0
    t.close()
    assert (t.client.header.done, t.client.busy_seconds > 0) == (t.seq, True)


def corrupt_sequence(window):
    window["seq"] += 7


def corrupt_window(window):
    window["device_log"][-2] += 1


def corrupt_hyper(window):
    window["hyper"][0, 0, 0] = 1.0


def corrupt_segment(window):
    window["segment"] = 2


@pytest.mark.parametrize(
    "corrupt, named",
    [(corrupt_sequence, "seq is 9"), (corrupt_window, "last window word"), (corrupt_hyper, "checksum"),
     (corrupt_segment, "segment is 2")],
)  # fmt: skip
def test_a_torn_slot_stops_the_worker_and_names_it(trainer, corrupt, named):
    t = trainer(make_segment(bucket_bytes=700))
    t.fill(t.make_window())
    before = t.bits()
    t.memories[0].publish(0, 0, 1)
    t.client.wait_done(1)
    corrupt(t.memories[0].windows[0])
    t.memories[0].publish(1, 0, 2)
    with pytest.raises(WorkerError, match=f"exit code 1(.|\n)*TornSlotError: slot 2 .*{named}"):
        within(5, t.client.wait_done, 2)
    assert not t.memories[0].slot_record(0, 1).finished_ns[0]
    rest = slice(t.memories[0].segment.buckets[0].stop, t.memories[0].segment.matrices[0].numel)
    np.testing.assert_array_equal(t.memories[0].master.view(np.uint32)[rest], before[0][rest])


@pytest.mark.parametrize(
    "bucket, turn, seq, whole",
    [(0, 0, 2, False), (0, 0, 99, False), (1, 0, 2, False), (0, 1, 1, True)],
    ids=["late", "foreign", "overtaken", "in-the-other-turn"],
)
def test_a_reordered_slot_stops_the_worker(trainer, bucket, turn, seq, whole):
    t = trainer(make_segment(bucket_bytes=700))
    t.fill(t.make_window())
    t.memories[0].publish(bucket, turn, seq)
    if whole:
        t.memories[0].end_window(0, 2)
    with pytest.raises(WorkerError, match="TornSlotError: .*slot 1"):
        within(5, t.client.wait_done, 1)
    with pytest.raises(WorkerError, match="TornSlotError"):
        t.client.check()


@pytest.mark.parametrize("windows", [0, 1, 2], ids=["first", "second", "third"])
@pytest.mark.parametrize("lost", [0, 1, 2], ids=["first-slot", "middle-slot", "last-slot"])
def test_a_slot_that_is_lost_with_nothing_behind_it_is_named(trainer, lost, windows):
    """The window's end, which comes behind its last slot, shows it: nobody waits for a slot that will never come."""
    segment = make_segment(bucket_bytes=350)
    t = trainer(segment)
    for _ in range(windows):
        t.run(t.make_window())
    memory, turn, last = t.memories[0], windows % 2, (windows + 1) * len(segment.buckets)
    t.fill(t.make_window())
    number = {0: 0, 1: 1, 2: len(segment.buckets) - 1}[lost]
    for bucket in segment.buckets:
        if bucket.index != number:
            memory.publish(bucket.index, turn, t.seq + bucket.index + 1)
    memory.end_window(turn, last)
    with pytest.raises(WorkerError, match=f"exit code 1(.|\n)*TornSlotError: .*slot {t.seq + number + 1}"):
        within(5, t.client.wait_done, last)
