"""Phase 5 in the ring's model: results go from the shadows into the weights, in backward or in `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tests.ring_model.actors import Actors
from tests.ring_model.explore import LOST, Stamp
from tests.ring_model.setup import Setup


class Sent(NamedTuple):
    """`uploading.Sent`; stamp: of what its shadow holds, a prediction being another thing than the window's masters."""

    bucket: int
    window: int
    seq: int
    due: int
    turn: int
    stamp: Stamp


class Landing(Actors):
    """`uploads.Uploads`, `uploading.Uploader` and `visible`. owned: the step whose selected masters the weights show.

    visible: what the deferred weights show, by segment: a window's result. poisoned: buckets that are being tried.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.pending: list[Sent] = []
        self.queued: set[Sent] = set()
        self.poisoned: set[int] = set()
        self.passed: set[int] = set()
        self.uploaded: dict[int, tuple[int, int]] = {}
        self.visible: list[Stamp] = [0] * setup.segments
        self.owned = 0

    def _due(self) -> list[Sent]:
        """`Uploads.due`."""
        return [sent for sent in self.pending if sent.due <= self.step]

    def _drop_gradients(self) -> None:
        """`visible.drop_gradients`: weights that went into transit arrive first."""
        if self.setup.upload == "backward":
            self._show(self._due())

    def _take_over(self, sent: Sent) -> None:
        bucket = sent.bucket
        if self.setup.checked and bucket not in self.passed:
            self.poisoned.add(bucket)
            where = "zenflow.upload_check:UploadCheck.poison"
            places = [self._cell(name, bucket) for name in ("weights", "selected weights")]
            self.compute.push(("poison", self.step, bucket), where, writes=dict.fromkeys(places, LOST))
            return
        if not self.setup.stream_words:
            return  # only where the worker happens to have finished: the upload in step() covers less time
        if self._has("a: the last gradient before the upload"):
            self.uploads.wait_event(self.compute.event())
        self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        bucket, window, seq, _, turn, stamp = sent
        if self._has("a: done before the upload"):
            if self.setup.stream_words:
                self.uploads.wait_word(self.done, seq)
            else:
                self._wait_done(seq)
        self.uploads.push(
            ("upload", bucket, window),
            "zenflow.uploading:Uploader.copy",
            reads={self._shadow(turn, bucket): stamp},
            writes={self._cell("weights", bucket): stamp, self._cell("selected weights", bucket): LOST},
            asks="noticed",
        )
        self.uploaded[bucket] = self.uploads.event()
        self.queued.add(sent)

    def _queue_rest(self, wanted: Sequence[Sent]) -> None:
        left = [sent for sent in wanted if sent not in self.queued]
        if left and self._has("a: backward before the uploads in step()"):
            self.uploads.wait_stream(self.compute)
        for sent in left:
            self._upload(sent)

    def _land(self, queued: Sequence[Sent]) -> None:
        if not queued:
            return
        if self._has("b: uploads before the selected masters"):
            self.compute.wait_stream(self.uploads)
        for sent in queued:
            self.visible[self._segment(sent.bucket)] = sent.stamp
        self.pending = [sent for sent in self.pending if sent not in queued]
        self.queued, self.poisoned = set(), set()

    def _write_masters(self) -> None:
        where = "zenflow.visible:write_selected"
        self.compute.push(("masters", self.step), where, writes=self._each("selected weights", self.owned))

    def _show(self, wanted: Sequence[Sent]) -> None:
        if wanted:
            self._queue_rest(wanted)
            self._land(wanted)
            self._write_masters()
