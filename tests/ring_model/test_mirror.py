"""The model's programs are the engine's: what it queues on its streams, in which order and behind what.

The engine runs on the CPU with streams and events that take notes, as it would on a GPU; data move at once, so that the
run itself is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ring_model.actors import Stream
from tests.ring_model.explore import ACTORS, COMPUTE, COPIES, HOST, UPLOADS, Op
from tests.ring_model.protocol import build
from tests.ring_model.setup import Setup
from zenflow import ZenFlow, owners, visible
from zenflow import step as step_module
from zenflow.client import WorkerClient
from zenflow.migration import Migration
from zenflow.param_record import ParamRecord
from zenflow.ring import SegmentMemory
from zenflow.sending import Sender
from zenflow.storage import SegmentStorage
from zenflow.upload_check import UploadCheck
from zenflow.uploading import Sent, Uploader

DONE = -1
SENT = -2  # where the words behind windows would be


class NotingStream(Stream):
    """A CUDA stream as the engine sees it."""

    def wait_event(self, event: Any) -> None:
        super().wait_event(event.point if isinstance(event, NotingEvent) else event)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.host.append(Op(("synchronize", self.actor), ""))


class NotingEvent:
    """A CUDA event: the point of a stream at which it was recorded last."""

    def __init__(self, engine: NotingEngine) -> None:
        self.engine, self.point, self.part = engine, (COMPUTE, 0), 0

    def record(self, stream: NotingStream | None = None) -> None:
        self.point, self.part = (stream or self.engine.current).event(), self.engine.part

    def synchronize(self) -> None:
        self.engine.note("arrived", self.engine.step, self.part)


class NotingWords:
    """`driver.StreamWords`, with the CPU doing at once what the streams would do later."""

    def __init__(self, engine: NotingEngine, client: WorkerClient) -> None:
        self.engine, self.client = engine, client

    def wait(self, stream: NotingStream, address: int, value: int) -> None:
        stream.wait_word(DONE, value)
        with self.engine.muted():
            self.client.wait_done(value)

    def write(self, stream: NotingStream, address: int, value: int) -> None:
        item = self.engine.raised
        assert item.seq == value
        if address == SENT:  # no order hangs on it but the worker's search, which is `scan.py`'s matter
            item.storage.memory.end_window(item.turn, value)
            return
        stream.push(("ready", value), "")
        item.storage.memory.publish(item.bucket.index, item.turn, value)

    def copy_to_device(self, stream: NotingStream, target: Tensor, source: Tensor) -> None:
        target.copy_(source)


class NotingEngine:
    """A ZenFlow optimizer on the CPU whose pipeline believes that it has streams."""

    def __init__(self, setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
        self.setup, self.host, self.quiet = setup, [], False
        count = setup.segments * setup.buckets
        self.model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(count))).bfloat16()
        delay = {"overlap_step": False} if setup.visible_after == 0 else {"visible_after": setup.delay}
        self.engine = ZenFlow(
            self.model.parameters(), topk_ratio=0.5 if setup.selecting else 0.0,
            full_warm_up_rounds=0, min_deferred_numel=0, worker_threads=1, bucket_bytes=128,
            ring_dtype="float32" if setup.apart else "auto",
            update_interval=setup.interval, stagger=setup.segments > 1, **delay, upload=setup.upload,
            upload_check=setup.checked, accumulate_on="host" if setup.on_host else "gpu", backward_passes_per_step=1,
            select_interval=min(setup.selecting, default=10**6), weight_prediction=float(setup.predicted),
        )  # fmt: skip
        self.pipeline = self.engine._pipeline
        assert [storage.cohort for storage in self.pipeline.storages] == setup.cohorts
        segments = (storage.segment for storage in self.pipeline.storages)
        assert {(len(one.buckets), one.in_place) for one in segments} == {(setup.buckets, setup.in_place)}
        self.compute, self.copies, self.uploads = (NotingStream(a, self.host) for a in (COMPUTE, COPIES, UPLOADS))
        self.current = self.compute
        self.step = self.part = 0
        self.half = 0  # of all channels, the selected one
        self.raised: Sent | None = None  # the latest slot whose `ready` was
        self._give_streams(monkeypatch)
        self._take_notes(monkeypatch)
        for record in self.pipeline.records:
            bucket = self.number(record.storage, record.storage.indices.index(record.index))
            record.param.register_hook(lambda grad, bucket=bucket: self._gradient(bucket))

    def _give_streams(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sender, uploader, client = self.pipeline.sender, self.pipeline.uploader, self.pipeline.client
        # The other copy stream adds nothing to the order: what the one whose turn it is does comes after it.
        sender._copies.stream, uploader.stream, sender._copied = self.copies, self.uploads, NotingEvent(self)
        words = NotingWords(self, client) if self.setup.stream_words else None
        sender._words = NotingWords(self, client)
        uploader._words = words
        for storage in self.pipeline.storages:
            for word in storage.ends:
                word.address = SENT
            for events in (storage.gradients_exist, storage.uploaded):
                events += [NotingEvent(self) for _ in range(self.setup.buckets)]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self._as_current)
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
        if words is None:  # what the worker's pace decides: it is never found to have finished
            uploader._client = Unfinished(client)

    @contextmanager
    def _as_current(self, stream: NotingStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def muted(self) -> Iterator[None]:
        before, self.quiet = self.quiet, True
        yield
        self.quiet = before

    def number(self, storage: SegmentStorage, bucket: int) -> int:
        """The model's, of a segment's bucket."""
        return storage.segment.index * self.setup.buckets + bucket

    def note(self, *key: object) -> None:
        if not self.quiet:
            self.host.append(Op(key, ""))

    def _take_notes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def before(owner: Any, name: str, notes: Any) -> None:
            original = getattr(owner, name)

            def noting(*args: Any, **kwargs: Any) -> Any:
                notes(*args)
                with self.muted():
                    return original(*args, **kwargs)

            monkeypatch.setattr(owner, name, noting)

        for owner, name, key in (
            (step_module, "close_step", "close"),
            (step_module, "fused_step", "update"),
            (visible, "write_masters", "masters"),
        ):
            before(owner, name, lambda *_, key=key: self.compute.push((key, self.step), ""))
        before(WorkerClient, "check", lambda client: self.note("check"))
        before(WorkerClient, "wait_done", lambda client, seq, *_: self.note("wait for", seq))
        before(SegmentMemory, "_write_window", self._records)
        before(Sender, "_send_sum", lambda _, item: self.copies.push(("copy", item.window, self._bucket(item)), ""))
        before(Sender, "_raise_ready", lambda _, item, word: setattr(self, "raised", item))
        before(Sender, "_copy", self._log)
        before(ParamRecord, "lane", self._lane)
        before(Uploader, "copy", self._upload)
        before(Migration, "_leave", self._leave)
        before(Migration, "_enter", self._enter)
        monkeypatch.setattr(owners, "choose_channels", self._choose)
        before(WorkerClient, "begin_exchange", lambda *_: self.note("order", self.step))
        before(WorkerClient, "end_exchange", lambda *_: self.note("answer", self.step))
        made = Migration.__init__

        def with_events(migration: Migration, *args: Any) -> None:
            made(migration, *args)
            migration.arrived = [NotingEvent(self), NotingEvent(self)]

        monkeypatch.setattr(Migration, "__init__", with_events)
        poison = UploadCheck.poison

        def noting(check: UploadCheck, sent: Sent) -> bool:
            poisoned = poison(check, sent)
            if poisoned:
                self.compute.push(("poison", self.step, self._bucket(sent)), "")
            return poisoned

        monkeypatch.setattr(UploadCheck, "poison", noting)

    def _bucket(self, sent: Sent) -> int:
        return self.number(sent.storage, sent.bucket.index)

    def _records(self, memory: SegmentMemory, turn: int, seq: int, window: int, *_: Any) -> None:
        self.note("records", window, memory.segment.index)

    def _log(self, sender: Sender, target: Tensor, source: Tensor) -> None:
        for storage in self.pipeline.storages:
            if target.data_ptr() in [log.data_ptr() for log in storage.logs]:
                self.copies.push(("log", self.pipeline.logged, storage.segment.index), "")

    def _lane(self, record: ParamRecord, turn: int, position: int) -> None:
        if self.current is self.copies:
            bucket = self.number(record.storage, record.storage.indices.index(record.index))
            self.copies.push(("gradient", self.step, bucket), "")

    def _upload(self, uploader: Uploader, sent: Sent) -> None:
        self.uploads.push(("upload", self._bucket(sent), sent.window), "")

    def _leave(self, migration: Migration, number: int) -> None:
        self.part = number + 1
        self.compute.push(("leave", self.step, self.part, migration.segment), "")

    def _choose(self, records: Sequence[ParamRecord], *_: Any) -> list[Tensor]:
        """Always the other half: a selection moves all it has, in as many parts as state tensors."""
        self.half ^= 1
        return [torch.arange(self.half, 8, 2) for _ in records]

    def _enter(self, migration: Migration, number: int) -> None:
        self.compute.push(("enter", self.step, number + 1, migration.segment), "")

    def _gradient(self, bucket: int) -> None:
        self.compute.push(("backward", self.step, bucket), "")

    # A training loop, as the model has it

    def run(self) -> None:
        setup = self.setup
        for self.step in range(1, setup.windows * setup.interval + 1):
            self.backward()
            if self.step in setup.dropping:
                self.backward()
            self.engine.step()
            if self.step in setup.saving:
                self.engine.state_dict()
            if self.step in setup.flushing:
                self.engine.flush()
            if not setup.zeroed:
                self.engine.zero_grad()
        self.engine.flush()

    def backward(self) -> None:
        self.engine.zero_grad(set_to_none=not self.setup.zeroed)
        if self.setup.zeroed:
            self.compute.push(("zero", self.step), "")
        self.compute.push(("forward", self.step), "")
        self.model(torch.eye(8).bfloat16()).square().sum().backward()


class Unfinished:
    """A client whose worker has finished nothing until it is waited for."""

    def __init__(self, client: WorkerClient) -> None:
        self.client = client

    def finished(self, seq: int) -> bool:
        return False

    def wait_done(self, seq: int, check: Any) -> float:
        return self.client.wait_done(seq, check)


def comparable(host: list[Op]) -> list[tuple]:
    """What the host did, less what a CPU cannot show: what it reads and writes, and waiting for the compute stream."""
    unseen = (("synchronize", COMPUTE),)
    keys = [op.key for op in host if op.key[0] not in ("look", "save", "rewrite") and op.key not in unseen]
    return [key[:2] if key[0] in ("order", "answer") else key for key in keys]


def guards(ops: list[Op]) -> list[tuple]:
    """Each operation with the points of other streams and the `done` that it waits for."""
    others = [tuple(place for place in op.after if place[0] != HOST) for op in ops]
    return [(op.key, after, tuple(least for _, least in op.until)) for op, after in zip(ops, others, strict=True)]


SETUPS = {
    "overlap": {"windows": 4},
    "three-buckets": {"buckets": 3, "apart": True},
    "two-steps": {"interval": 2, "saving": {1, 4}},
    "no-overlap": {"visible_after": 0},
    "upload-in-step": {"upload": "step"},
    "host-waits": {"stream_words": False},
    "upload-check": {"windows": 4, "checked": True, "dropping": {2}},
    "selection": {"buckets": 1, "windows": 4, "selecting": {2, 4}},
    "selection-host": {"buckets": 1, "windows": 4, "selecting": {2, 4}, "on_host": True, "visible_after": 0},
    "flush-mid-window": {"interval": 2, "flushing": {1, 4}, "dropping": {3, 4}},
    "sooner": {"interval": 3, "visible_after": 1, "dropping": {4}},
    "cohorts": {"segments": 2, "interval": 2, "saving": {2}},
    "cohorts-sooner": {"buckets": 1, "segments": 3, "interval": 3, "visible_after": 2, "flushing": {5}},
    "cohorts-check": {"segments": 2, "interval": 2, "visible_after": 1, "checked": True, "dropping": {4}},
    "cohorts-selection": {"buckets": 1, "segments": 2, "interval": 2, "selecting": {2, 4, 6}},
    "cohorts-host": {"buckets": 1, "segments": 2, "interval": 3, "on_host": True, "flushing": {5}},
    "cohorts-no-overlap": {"segments": 2, "interval": 2, "visible_after": 0},
    "predicted": {"predicted": True, "interval": 2, "flushing": {2, 3}, "saving": {4}},
    "predicted-cohorts": {"predicted": True, "segments": 2, "interval": 2, "visible_after": 1, "flushing": {4}},
    "host": {"on_host": True, "interval": 2, "saving": {3}},
    "host-zeroed": {"on_host": True, "zeroed": True, "dropping": {2}},
}


def difference(setup: Setup, like: Setup, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the engine under `setup` and the model of `like` differ; empty if nowhere."""
    real, program = NotingEngine(setup, monkeypatch), build(like)
    try:
        real.run()
    finally:
        monkeypatch.undo()
        real.engine.close(flush=False)
    pairs = {"host": (comparable(real.host), comparable(program.ops[HOST]))}
    for stream in (real.compute, real.copies, real.uploads):
        pairs[ACTORS[stream.actor]] = guards(stream.ops), guards(program.ops[stream.actor])
    found = [f"{who}: {one} and {two}" for who, both in pairs.items() for one, two in zip_longest(*both) if one != two]
    return "\n".join(found)


def make(name: str, **more: object) -> Setup:
    return Setup(**{key: frozenset(x) if isinstance(x, set) else x for key, x in SETUPS[name].items()}, **more)


@pytest.mark.parametrize("name", SETUPS)
def test_the_engine_queues_what_the_model_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not difference(make(name), make(name), monkeypatch)


@pytest.mark.parametrize(
    "method, order",
    [
        ("wait_for_copies", "d: the copy before the next fold"),
        ("_free_records", "e: a turn's last window is done before its records are written"),
    ],
)
def test_an_engine_without_an_order_is_the_model_without_it(
    method: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sender, method, lambda self, *_: None)
    assert not difference(make("overlap"), make("overlap", without=frozenset({order})), monkeypatch)
    monkeypatch.setattr(Sender, method, lambda self, *_: None)
    assert difference(make("overlap"), make("overlap"), monkeypatch)
