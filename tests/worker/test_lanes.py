"""Rings that keep every step's raw gradient, both deferred rules, and slots written while the worker reads others."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest

from tests.worker.feeding import make_segment
from zenflow.client import WorkerError
from zenflow.worker_settings import WorkerSettings

DTYPES = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]


def segments(channel_dim="column", bucket_bytes=700, **kinds):
    return [
        make_segment(
            index, weight_dtype=weight, ring_dtype=ring, channel_dim=channel_dim, bucket_bytes=bucket_bytes,
            keeps_steps=True, **kinds,
        )
        for index, (weight, ring) in enumerate(DTYPES)
    ]  # fmt: skip


def rule_settings(rule, **kinds):
    return WorkerSettings(deferred_rule=rule, **kinds)


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_windows_match_the_simulation(trainer, channel_dim, rule):
    """Five windows use each turn's lanes more than once; uncounted lanes hold NaN (`Trainer.fill_slot`)."""
    t = trainer(*segments(channel_dim), settings=rule_settings(rule))
    for number, n_steps in enumerate((4, 1, 3, 4, 2)):
        window = t.make_window(n_steps)
        window.finite[n_steps // 2 :: 2] = n_steps == 1
        for present in window.present:
            present[:, 0] = t.random.random(n_steps) < 0.5
            present[:, 1] = number != 3
        t.run(window)
        t.check()


@pytest.mark.parametrize(("rule", "native"), [("accumulate", "1"), ("replay", "1"), ("replay", "0")])
def test_predictions_go_to_two_shadows_in_turn(trainer, monkeypatch, rule, native):
    """The fourth window's results are shown at once, and a matrix has no counted step: both show plain masters."""
    monkeypatch.setenv("ZENFLOW_NATIVE", native)
    t = trainer(*segments(predicted=True), settings=rule_settings(rule, weight_prediction=0.7))
    t.run_predicted()


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
def test_t_counts_the_updates(trainer, rule):
    t = trainer(make_segment(keeps_steps=True), settings=rule_settings(rule))
    window = t.make_window()
    window.finite[1] = False
    window.present[0][:, 0] = False, True, True, False
    window.present[0][:, 1] = False
    t.run(window)
    t.check()
    found = [t.memories[0].channel_step[m.step_offset] for m in t.memories[0].segment.matrices]
    assert found == ([1, 0, 3] if rule == "replay" else [1, 0, 1])


@pytest.mark.parametrize("scale", ["none", 2.5], ids=str)
def test_the_learning_rate_scale_is_of_accumulate_alone(trainer, scale):
    for rule in ("accumulate", "replay"):
        t = trainer(make_segment(keeps_steps=True), settings=rule_settings(rule, deferred_lr_scale=scale))
        t.run(t.make_window())
        t.check()


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
def test_bits_do_not_depend_on_buckets_threads_or_the_compiled_pass(trainer, monkeypatch, rule):
    runs = []
    for bucket_bytes, threads, native in ((1 << 20, 1, "1"), (40_000, 2, "1"), (700, 3, "1"), (40_000, 1, "0")):
        monkeypatch.setenv("ZENFLOW_NATIVE", native)
        segment = make_segment(shapes=((301, 160, 0), (5, 301, 1)), bucket_bytes=bucket_bytes, keeps_steps=True)
        runs.append(trainer(segment, threads=threads, settings=rule_settings(rule)).history())
    for bits in runs[1:]:
        for found, expected in zip(bits, runs[0], strict=True):
            np.testing.assert_array_equal(found, expected)


def test_replay_without_the_steps_gradients_is_refused(trainer):
    with pytest.raises(WorkerError, match="AssertionError: replay needs the gradient of every step"):
        trainer(make_segment(), settings=rule_settings("replay"))


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
def test_the_next_window_is_written_while_the_worker_has_yet_to_read_this_one(trainer, rule):
    """A stopped worker: windows w and w + 1 lie in both turns, lanes and records, before it takes the first slot."""
    t = trainer(make_segment(bucket_bytes=700, keeps_steps=True), settings=rule_settings(rule))
    for _ in range(3):
        windows = t.make_window(), t.make_window(2)
        os.kill(t.client.worker_pid, signal.SIGSTOP)
        done = t.client.header.done
        for window in windows:
            t.fill(window)
            t.publish()
        assert t.client.header.done == done
        with pytest.raises(AssertionError, match="still in use"):
            t.memories[0].write_slot(0, t.seq + 1, 99, 1, windows[0].hyper, windows[0].present[0])
        os.kill(t.client.worker_pid, signal.SIGCONT)
        t.client.wait_done(t.seq)
        for window in windows:
            t.simulate(window)
        t.check()


def test_a_header_written_while_the_worker_is_inside_the_window_before(trainer):
    """One lane: payloads follow one another, as on a copy stream, but all of window w + 1's headers are there early."""
    t = trainer(make_segment(bucket_bytes=700))
    memory, buckets = t.memories[0], len(t.memories[0].segment.buckets)
    first, second = t.make_window(), t.make_window(2, lr=3e-3)
    t.fill(first)
    memory.publish(0, 0, 1)
    t.client.wait_done(1)
    for bucket in range(buckets):
        memory.write_slot(bucket, buckets + bucket + 1, 2, 2, second.hyper, second.present[0])
    for bucket in range(1, buckets):
        memory.publish(bucket, 0, bucket + 1)
    t.client.wait_done(buckets)
    t.simulate(first)
    t.check()


def test_the_worker_notes_when_it_processed_each_slot(trainer):
    t = trainer(make_segment(bucket_bytes=700), make_segment(1))
    last = time.monotonic_ns()
    for turn in (0, 1, 0):
        t.run(t.make_window())
        for memory, bucket in t.slots():
            record = memory.slot_record(turn, bucket)
            started, finished = int(record.started_ns[0]), int(record.finished_ns[0])
            assert last <= started <= finished <= time.monotonic_ns()
            last = finished
