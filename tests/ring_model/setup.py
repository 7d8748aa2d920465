"""What is modelled, and the orders that can be left out."""

from __future__ import annotations

from dataclasses import dataclass

# Each is one wait or one sequence in the engine; DESIGN's letters. `Setup.without` takes some away.
ORDERS = {
    "a: the last gradient before the upload": "zenflow.uploading:Uploader.follow_gradients",
    "a: done before the upload": "zenflow.uploading:Uploader.upload",
    "a: backward before the uploads in step()": "zenflow.uploads:Uploads.queue_rest",
    "b: uploads before the selected masters": "zenflow.uploading:Uploader.wait_for_uploads",
    "c: the fold before the copy": "zenflow.copy_streams:CopyStreams.follow_compute",
    "c: the upload before ready": "zenflow.sending:Sender._send_segment",
    "d: the copy before the next fold": "zenflow.sending:Sender.wait_for_copies",
    "e: a turn's last window is done before its records are written": "zenflow.sending:Sender._free_records",
    "e: that of every segment whose windows end": "zenflow.sending:Sender._free_records",
    "e: gradients are copied before they are zeroed": "zenflow.sending:Sender.release_gradients",
    "e: copies are finished before a state is read": "zenflow.sending:Sender.finish_copies",
    "f: the payload before ready": "zenflow.sending:Sender._raise_ready",
    "f: the shadow before done": "zenflow.header:Header.finish",
    "predictions: the last upload before masters take its shadow": "zenflow.predictions:replace_predictions",
    "cohorts: a result arrives before the next one takes its place": "zenflow.window_end:end_windows",
    "selection: what leaves has arrived before the worker is told": "zenflow.migration:Migration._order",
    "selection: the worker has answered before what enters is copied": "zenflow.client:WorkerClient.end_exchange",
}


@dataclass(frozen=True)
class Setup:
    """What is modelled: `windows` times `interval` steps, and at which of them something more happens.

    buckets: of each segment; segments: of as many cohorts, whose windows end in different steps; visible_after: steps
    from a window's last to the one at whose end its result is visible, None: `interval`.
    apart: results have shadows of their own, as where the ring's numbers are larger than the weights'; else, but under
    on_host, they take the place of their gradients. stream_words: streams wait for `done` themselves, else the host
    does. zeroed: gradients are zeroed in place between two steps, else given up. checked: a bucket's first upload is
    tried with NaN (`upload_check`). selecting: steps at which a selection is due, for the first end of a window; state
    moves in `parts`, through the rings of a segment's first and last bucket, which must be two. predicted: late results
    are predictions, which a flush replaces.
    saving, flushing: steps after which `state_dict()` or `flush()` is called.
    dropping: steps whose first gradients are thrown away.
    without: of ORDERS.
    """

    buckets: int = 2
    windows: int = 3
    interval: int = 1
    segments: int = 1
    visible_after: int | None = None
    upload: str = "backward"
    on_host: bool = False
    apart: bool = False
    stream_words: bool = True
    zeroed: bool = False
    checked: bool = False
    predicted: bool = False
    selecting: frozenset[int] = frozenset()
    saving: frozenset[int] = frozenset()
    flushing: frozenset[int] = frozenset()
    dropping: frozenset[int] = frozenset()
    parts: int = 3
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        assert self.without <= ORDERS.keys(), self.without - ORDERS.keys()
        assert self.segments <= self.interval, f"{self.segments} cohorts in windows of {self.interval} steps"

    @property
    def delay(self) -> int:
        """`visible_after`, in steps."""
        return self.interval if self.visible_after is None else self.visible_after

    @property
    def predicts(self) -> bool:
        """`ZenFlowConfig.predicts`."""
        return self.predicted and self.delay > 0

    @property
    def in_place(self) -> bool:
        """`geometry.Segment.in_place`."""
        return not self.on_host and not self.apart

    @property
    def cohorts(self) -> list[int]:
        """Of each segment: in which step of `interval` its windows end; see `window.divide`."""
        return [(number + 1) * self.interval // self.segments for number in range(self.segments)]
