"""Results that take the place of gradients, and a worker that dies before it has written them: no weight ever becomes a
gradient, whoever waits for `done` and however far the worker had come."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.engine.driving import DTYPES, Builder, assert_same_bits, backward, make_gradients, make_parameters, snapshot
from tests.engine.simulation import TOGETHER
from tests.processes import ends_within, within
from zenflow import WorkerError, ZenFlow
from zenflow.uploading import Sent

SHAPES = [(16, 12), (7, 13), (31, 3), (8, 4, 3, 2)]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.0, "update_interval": 2, "bucket_bytes": 256}
LIMIT = 5.0
MODES: dict[str, dict[str, Any]] = {"plain": {}, "predicted": {"weight_prediction": 1.0}}
pytestmark = [pytest.mark.parametrize("mode", MODES)]


class Stopped:
    """An engine after some steps, whose last window is in a worker that stands still; one before it is visible."""

    def __init__(self, build: Builder, mode: str, dtype: str = "bf16", steps: int = 4, **given: Any) -> None:
        self.parameters = make_parameters(SHAPES, DTYPES[dtype])
        self.engine: ZenFlow = build(self.parameters, **{**SETTINGS, **MODES[mode], **given})
        self.pipeline = self.engine._pipeline
        (self.storage,) = self.pipeline.storages
        self.stream = make_gradients(SHAPES, DTYPES[dtype], 8)
        for grads in self.stream[: steps - 1]:
            self.step(grads)
        self.pipeline.wait_for_worker()
        self.pid = self.pipeline.client.worker_pid
        os.kill(self.pid, signal.SIGSTOP)
        self.step(self.stream[steps - 1])
        self.sent = list(self.pipeline.uploads.pending)
        assert [sent.seq > self.pipeline.client.done for sent in self.sent] == [True] * len(self.sent)
        self.visible = snapshot(self.parameters)

    def step(self, grads: list[Tensor]) -> None:
        backward(self.parameters, grads)
        self.engine.step()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert ends_within(self.pid, LIMIT)

    def noticed(self) -> None:
        self.pipeline.client._watch.join(LIMIT)
        assert not self.pipeline.client._watch.is_alive()

    def check(self, flat: Tensor) -> None:
        """All that is visible, and nothing else, lies in a shadow."""
        for record, visible in zip(self.pipeline.records, self.visible, strict=True):
            assert_same_bits(record._own(flat), visible.view(record.weight.shape), record.name)

    def following(self) -> list[Sent]:
        """The slots of the next window, whose payload has not come: it follows the uploads of the one before."""
        memory, last = self.storage.memory, self.sent[-1].seq
        present = np.ones((2, len(SHAPES)), dtype=bool)
        found = []
        for seq, bucket in enumerate(self.storage.segment.buckets, start=last + 1):
            turn = memory.write_slot(bucket.index, seq, 9, 2, np.zeros((2, 1, 5)), present)
            found.append(Sent(self.storage, bucket, seq, turn, 9, 99))
            self.pipeline.client.stand_in.add(found[-1])
        return found


def wait_for(client: Any, seq: int) -> None:
    """As a stream does, which looks at nothing else."""
    deadline = time.monotonic() + LIMIT
    while client.header.done < seq:
        assert time.monotonic() < deadline, f"done stays {client.header.done}"
        time.sleep(1e-4)


@pytest.mark.parametrize("accumulate_on", ["gpu", "host"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_visible_lies_in_the_shadow_before_anybody_is_let_go(
    mode: str, dtype: str, accumulate_on: str, build: Builder
) -> None:
    """Also where results have shadows of their own (fp16, or gradients that are kept by step), of which, with
    predictions, one is of two windows ago; and for fp32 weights, which are the masters."""
    here = Stopped(build, mode, dtype, accumulate_on=accumulate_on)
    memory, turn = here.storage.memory, here.sent[0].turn
    if here.storage.segment.in_place:
        before = here.storage.shadow(turn).clone()
        assert not torch.equal(before, here.storage.weights), "the window's gradient"
        assert memory.shadow_of(turn).ctypes.data == here.storage.lane(turn, 0).data_ptr()
    here.kill()
    here.noticed()
    here.check(here.storage.shadow(turn))


def take(here: Stopped, later: list[Sent], taken: list[Tensor]) -> None:
    """The device's part: uploads in their order, and behind each the payload that comes into the same place."""
    for number, sent in enumerate([*here.sent, *later]):
        wait_for(here.pipeline.client, sent.seq)
        part = slice(sent.bucket.start, sent.bucket.stop)
        taken[number // len(here.sent)][part] = here.storage.shadow(sent.turn)[part]
        if number < len(later):
            following = later[number]
            here.storage.lane(following.turn, 0)[part] = float("nan")
            here.storage.memory.publish(following.bucket.index, following.turn, following.seq)


def test_streams_that_wait_take_what_is_visible_also_of_the_window_after(mode: str, build: Builder) -> None:
    """A trainer may be so far ahead that the next window's uploads wait, too, when the worker dies."""
    here = Stopped(build, mode)
    taken = [torch.zeros_like(here.storage.weights) for _ in range(2)]
    device = threading.Thread(target=take, args=(here, here.following(), taken))
    device.start()
    here.kill()
    device.join(2 * LIMIT)
    here.noticed()
    for flat in taken:
        here.check(flat)


def test_a_result_that_was_half_written_is_none(mode: str, build: Builder) -> None:
    """Masters have moved on in a part of the first bucket: they are what is shown there, or the old prediction is."""
    here = Stopped(build, mode)
    bucket, turn = here.storage.segment.buckets[0], here.sent[0].turn
    half = slice(bucket.start, (bucket.start + bucket.stop) // 2)
    here.storage.state[0][half] = 0.375
    here.storage.shadow(turn)[half] = 0.375
    if mode == "plain":
        flat = here.storage.weights.clone()
        flat[half] = 0.375
        here.visible = [record._own(flat).clone() for record in here.pipeline.records]
    here.kill()
    here.noticed()
    here.check(here.storage.shadow(turn))


def test_who_asks_is_told_though_done_rises(mode: str, build: Builder) -> None:
    """What the stand-in passes over is no result: neither a wait nor an upload returns as if it were."""
    here = Stopped(build, mode)
    later = here.following()
    here.kill()
    wait_for(here.pipeline.client, here.sent[-1].seq)
    assert here.pipeline.client.done == here.sent[-1].seq, "the next payload has not come"
    with pytest.raises(WorkerError, match="SIGKILL"):
        here.pipeline.client.wait_done(here.sent[0].seq)
    for sent in (here.sent[0], later[0]):
        with pytest.raises(WorkerError, match="SIGKILL"):
            here.pipeline.uploader.upload(sent)
    for call in (here.engine.flush, here.engine.state_dict):
        with pytest.raises(WorkerError, match="SIGKILL"):
            within(LIMIT, call)
    within(LIMIT, here.engine.close, False)
    for parameter, visible in zip(here.parameters, here.visible, strict=True):
        assert_same_bits(parameter, visible)


def test_a_lost_ready_is_made_up_for_by_what_comes_after_it(mode: str, build: Builder) -> None:
    """A worker dies of it; whatever waits goes on at once, and takes what is visible."""
    here = Stopped(build, mode)
    for sent in here.sent:
        here.storage.memory.publish(sent.bucket.index, sent.turn, 0)
    here.kill()
    here.noticed()
    here.check(here.storage.shadow(here.sent[0].turn))


def test_a_payload_that_never_comes_holds_nobody_for_long(
    mode: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zenflow.stand_in.PATIENCE_SECONDS", 0.05)
    here = Stopped(build, mode)
    here.following()
    here.kill()
    here.noticed()
    wait_for(here.pipeline.client, 1 << 62)


@pytest.mark.parametrize("noticed", [False, True], ids=["at-once", "later"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_poisoned_weights_are_what_was_visible_though_no_result_came(
    mode: str, dtype: str, noticed: bool, build: Builder
) -> None:
    """`upload_check` has made them NaN, and their slots still hold gradients."""
    here = Stopped(build, mode, dtype, steps=2, backward_passes_per_step=1)
    here.step(here.stream[2])
    backward(here.parameters, here.stream[3])
    assert here.pipeline.uploads.in_transit
    assert any(bool(parameter.isnan().any()) for parameter in here.parameters)
    here.kill()
    if noticed:
        here.noticed()
    within(LIMIT, here.engine.close, False)
    for parameter, visible in zip(here.parameters, here.visible, strict=True):
        assert_same_bits(parameter, visible)


def test_slots_that_are_done_are_not_kept(mode: str) -> None:
    """And an engine that nobody closes lets go of its memory, though the watch knows of it."""
    parameters = make_parameters(SHAPES, torch.bfloat16)
    engine = ZenFlow(parameters, min_deferred_numel=0, worker_threads=1, **{**TOGETHER, **SETTINGS, **MODES[mode]})
    for grads in make_gradients(SHAPES, torch.bfloat16, 8):
        backward(parameters, grads)
        engine.step()
    (storage,) = engine._pipeline.storages
    assert 0 < len(engine._pipeline.client.stand_in._slots) <= 2 * len(storage.segment.buckets)
    pid, kept = engine._pipeline.client.worker_pid, weakref.ref(storage)
    del engine, storage
    gc.collect()
    assert kept() is None and ends_within(pid, LIMIT)
