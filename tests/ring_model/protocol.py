"""The ring's protocol as programs of five actors: who waits for what, copied from the engine line by line.

One segment of some buckets, with stamps for contents. A `Stream` collects its operations as a CUDA stream does:
`wait_stream`, `wait_event` and `wait_word` hold back what is queued from then on. `Setup.without` leaves out orders,
which the checker must then miss. The worker's process is one actor: a slot is read and passed over, then `done` rises.

The selected part of a bucket's weights has a cell of its own. `fused_step` writes it in every step; where an upload may
be on its way meanwhile that write is worth nothing, and `write_masters` repeats it after the upload, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.ring_model.actors import Actors, items
from tests.ring_model.explore import COPIES, LOST, Op, Program
from tests.ring_model.setup import ORDERS, Setup

Sent = tuple[int, int, int]  # bucket, window, sequence number


def build(setup: Setup) -> Program:
    """The programs of all actors for one run: training, saves, selections, and a flush at the end."""
    return _Run(setup).build()


class _Run(Actors):
    """Goes through a run as the trainer's thread does, and notes what each actor has to do."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.window = 1
        self.running: list[int] = []  # the steps of the running window
        self.exchanges = 0
        self.sent = 0
        self.pending: list[Sent] = []
        self.queued: set[Sent] = set()
        self.poisoned: set[int] = set()  # buckets that are being tried
        self.passed: set[int] = set()
        self.uploaded: dict[int, tuple[int, int]] = {}
        self.copied: tuple[int, int] = (COPIES, 0)
        self.window_ends: list[int] = []
        self.leaving = False  # gradients are on their way
        self.visible = 0  # the window that the deferred weights show
        self.owned = 0  # the step whose selected masters the weights show

    def build(self) -> Program:
        setup = self.setup
        for self.step in range(1, setup.windows * setup.interval + 1):
            ends = len(self.running) + 1 == setup.interval
            self._backward(ends)
            if self.step in setup.dropping:
                self._drop_gradients(ends)
                self._backward(ends)
            self._step(ends)
            if self.step in setup.saving:
                self._save()
            if self.step in setup.flushing:
                self._flush()
        self._flush()
        streams = [self.compute.ops, self.copies.ops, self.uploads.ops]
        return Program([self.host, *streams, self.worker], self.cells, self.first, frozenset(self.counters), self.done)

    def _backward(self, ends: bool) -> None:
        """Phase 1, and phase 5 under it."""
        weights = self._each("weights", self.visible) | self._each("selected weights", self.owned)
        if self.setup.zeroed:
            if self.leaving and self._has("e: gradients are copied before they are zeroed"):
                self.compute.wait_stream(self.copies)
            self.leaving = False
            self.compute.push(("zero", self.step), "zenflow.optimizer:ZenFlow.zero_grad", writes=self._gradients(0))
        self.compute.push(("forward", self.step), "", reads=weights)
        for bucket in self.buckets:
            used = {
                self._cell("weights", bucket): self.visible,
                self._cell("selected weights", bucket): self.owned,
            }
            self.compute.push(("backward", self.step, bucket), "", used, {self._gradient(bucket): self.step})
            if ends and self.setup.upload == "backward":
                for sent in self.pending:
                    if sent[0] == bucket:
                        self._take_over(sent)

    def _drop_gradients(self, ends: bool) -> None:
        """`Pipeline.drop_gradients`: weights that went into transit arrive first."""
        if ends and self.setup.upload == "backward":
            self._make_visible()

    def _take_over(self, sent: Sent) -> None:
        bucket = sent[0]
        if self.setup.checked and bucket not in self.passed:
            self.poisoned.add(bucket)
            places = [self._cell(name, bucket) for name in ("weights", "selected weights")]
            self.compute.push(
                ("poison", self.step, bucket), "zenflow.uploads:Uploads._take_over", writes=dict.fromkeys(places, LOST)
            )
            return
        if not self.setup.stream_words:
            return  # only where the worker happens to have finished: the upload in step() covers less time
        if self._has("a: the last gradient before the upload"):
            self.uploads.wait_event(self.compute.event())
        self._upload(sent)

    def _upload(self, sent: Sent) -> None:
        bucket, window, seq = sent
        if self._has("a: done before the upload"):
            if self.setup.stream_words:
                self.uploads.wait_word(self.done, seq)
            else:
                self._wait_done(seq)
        self.uploads.push(
            ("upload", bucket, window),
            "zenflow.uploads:Uploads._copy",
            reads={self._cell("shadow", bucket): window},
            writes={self._cell("weights", bucket): window, self._cell("selected weights", bucket): LOST},
        )
        self.uploaded[bucket] = self.uploads.event()
        self.queued.add(sent)

    def _step(self, ends: bool) -> None:
        """Phase 2, `Pipeline.step`."""
        self._host(("check",), "zenflow.client:WorkerClient.check", asks="check")
        position = len(self.running)
        self.running.append(self.step)
        if self._has("d: the copy before the next fold"):
            self.compute.wait_event(self.copied)
        grads = self._gradients(self.step)
        log = {self._cell("device log"): (self.window, position + 1)}
        self.compute.push(("close", self.step), "zenflow.pipeline:Pipeline._reduce", grads, log)
        if self.poisoned:
            self._synchronize(self.compute, "zenflow.uploads:Uploads.end_backward")
            self.passed |= self.poisoned
        if self.setup.on_host:
            self._send_gradients(position)
        due = ends and bool(self.pending)
        folded = {} if self.setup.on_host else self._each("accumulator", (self.window, position + 1))
        before = self._each("accumulator", (self.window, position)) if folded and position else {}
        shown = {} if due else self._each("selected weights", self.step)
        where = "zenflow_kernels.fused_step:fused_step"
        self.compute.push(("update", self.step), where, grads | before, folded | shown)
        self.owned = self.step
        if ends:
            self._end_window(due)

    def _send_gradients(self, position: int) -> None:
        if self._has("c: the fold before the copy"):
            self.copies.wait_stream(self.compute)
        self.leaving = True
        for bucket in reversed(self.buckets):
            self.copies.push(
                ("gradient", self.step, bucket),
                "zenflow.sending:Sender.send_gradients",
                {self._gradient(bucket): self.step},
                {self._lane(self.window, position, bucket): self.step},
            )

    def _end_window(self, due: bool) -> None:
        """`Pipeline._end_window`."""
        selects = self.step in self.setup.selecting
        if selects:
            self._synchronize(self.compute, "zenflow.pipeline:Pipeline._is_finite")
        self._queue_rest()
        sent = self._send_window()
        self._land()
        self.pending = sent
        if selects or not self.setup.staleness:
            self._queue_rest()
            self._land()
        if due or selects or not self.setup.staleness:
            self._write_masters()
        if selects:
            self._select()
        self.window, self.running = self.window + 1, []

    def _queue_rest(self) -> None:
        left = [sent for sent in self.pending if sent not in self.queued]
        if left and self._has("a: backward before the uploads in step()"):
            self.uploads.wait_stream(self.compute)
        for sent in left:
            self._upload(sent)

    def _land(self) -> None:
        if self.pending:
            if self._has("b: uploads before the selected masters"):
                self.compute.wait_stream(self.uploads)
            self.visible = self.pending[-1][1]
        self.pending, self.poisoned = [], set()

    def _write_masters(self) -> None:
        where = "zenflow.pipeline:Pipeline.write_selected"
        self.compute.push(("masters", self.step), where, writes=self._each("selected weights", self.owned))

    def _make_visible(self) -> None:
        if self.pending:
            self._queue_rest()
            self._land()
            self._write_masters()

    def _send_window(self) -> list[Sent]:
        """Phase 3, and the worker's part of it."""
        if self._has("e: a turn's last window is done before its records are written") and len(self.window_ends) > 1:
            self._wait_done(self.window_ends[-2])
        if self._has("c: the fold before the copy"):
            self.copies.wait_stream(self.compute)
        sent = []
        for bucket in self.buckets:
            seq = self.sent + bucket + 1
            sent.append((bucket, self.window, seq))
            if bucket == 0:
                self._write_records()
            if bucket in self.uploaded and self._has("c: the upload before ready"):
                self.copies.wait_event(self.uploaded[bucket])
            if self._has("f: the payload before ready"):
                self._send_sum(bucket)
                self._raise_ready(bucket, seq)
            else:
                self._raise_ready(bucket, seq)
                self._send_sum(bucket)
            self._process(bucket, seq)
        self.copied = self.copies.event()
        self.sent += len(sent)
        self.window_ends.append(self.sent)
        return sent

    def _write_records(self) -> None:
        turn, window = self.window % 2, self.window
        record, log = self._cell("host record", turn), self._cell("log record", turn)
        self._host(("records", window), "zenflow.ring:SegmentMemory._write_window", writes=((record, window),))
        read = {self._cell("device log"): (window, len(self.running))}
        self.copies.push(("log", window), "zenflow.sending:Sender._send_segment", read, {log: window})

    def _send_sum(self, bucket: int) -> None:
        if not self.setup.on_host:
            self.copies.push(
                ("copy", self.window, bucket),
                "zenflow.sending:Sender._send_sum",
                {self._cell("accumulator", bucket): (self.window, len(self.running))},
                {self._lane(self.window, 0, bucket): self.window},
            )

    def _raise_ready(self, bucket: int, seq: int) -> None:
        ready = self._cell("ready", self.window % 2, bucket, counter=True)
        self.copies.push(("ready", seq), "zenflow.sending:Sender._raise_ready", writes={ready: seq})

    def _process(self, bucket: int, seq: int) -> None:
        """Phase 4: what the worker does with a slot. It takes only one whose `ready` is the number that is due."""
        turn, window = self.window % 2, self.window
        ready = self._cell("ready", turn, bucket, counter=True)
        reads = {ready: seq, self._cell("host record", turn): window, self._cell("log record", turn): window}
        if self.setup.on_host:
            reads |= {self._lane(window, place, bucket): step for place, step in enumerate(self.running)}
        else:
            reads[self._lane(window, 0, bucket)] = window
        written = {self._cell("shadow", bucket): window, self._cell("master", bucket): window}
        where, until = "zenflow.planning:SegmentWork.process", ((ready, seq),)
        work = Op(("process", seq), where, until=until, reads=items(reads), writes=items(written))
        finish = Op(("finish", seq), "zenflow.header:Header.finish", writes=((self.done, seq),))
        if self._has("f: the shadow before done"):
            self.worker += [work, finish]
        else:
            self.worker += [Op(("arrived", seq), "zenflow.worker:Worker._arrived", until=until), finish, work]

    # Selection

    def _select(self) -> None:
        """`Pipeline._select`: parts go through two halves of the idle ring, see `selection._Exchange.run`."""
        window = self.window
        self._wait_done(self.sent)
        self._synchronize(self.compute, "zenflow.selection:_fetch")
        parts = [(part, self._half(window, part)) for part in range(1, self.setup.parts + 1)]
        self._leave(window, *parts[0])
        self._order(window, *parts[0])
        for number, (part, half) in enumerate(parts, start=1):
            following = parts[number : number + 1]
            if following:
                self._leave(window, *following[0])
            if self._has("selection: the worker has answered before what enters is copied"):
                self._host(
                    ("answer", self.step, part),
                    "zenflow.client:WorkerClient.end_exchange",
                    until=((self.answered, self.exchanges),),
                    asks="await",
                )
            if following:
                self._order(window, *following[0])
            reads = {half: (window, part, 1)}
            self.compute.push(("enter", self.step, part), "zenflow.selection:_Exchange._enter", reads)

    def _half(self, window: int, part: int) -> int:
        """`selection._idle_half`: the lane, or those of the window that has just been sent."""
        bucket = 0 if part % 2 else self.setup.buckets - 1
        return self._lane(window, 0, bucket)

    def _leave(self, window: int, part: int, half: int) -> None:
        where = "zenflow.selection:_Exchange._leave"
        self.compute.push(("leave", self.step, part), where, writes={half: (window, part, 0)})
        self.arrived = self.compute.event()

    def _order(self, window: int, part: int, half: int) -> None:
        where = "zenflow.selection:_Exchange._order"
        if self._has("selection: what leaves has arrived before the worker is told"):
            self._host(("arrived", self.step, part), where, after=(self.arrived,))
        self.exchanges += 1
        self._host(("order", self.step, part), where, writes=((self.told, self.exchanges),))
        self.worker += [
            Op(
                ("exchange", self.step, part),
                "zenflow.exchange:carry_out",
                until=((self.told, self.exchanges),),
                reads=((half, (window, part, 0)),),
                writes=((half, (window, part, 1)), *self._each("master", window).items()),
            ),
            Op(
                ("answer", self.step, part),
                "zenflow.worker:Worker._exchange",
                writes=((self.answered, self.exchanges),),
            ),
        ]

    # What reads results

    def _save(self) -> None:
        """`checkpoint.save`, after a step: the worker's state and shadow, the running window's gradients, weights."""
        self._wait_done(self.sent)
        if self._has("e: copies are finished before a state is read"):
            self._synchronize(self.copies, "zenflow.sending:Sender.finish_copies")
        reads = self._each("master", self.window - 1) | self._each("shadow", self.window - 1)
        if self.setup.on_host:
            for place, step in enumerate(self.running):
                reads |= {self._lane(self.window, place, bucket): step for bucket in self.buckets}
        self._host(("save", self.step), "zenflow.optimizer:ZenFlow.state_dict", reads=items(reads))
        self._look("zenflow.optimizer:ZenFlow.state_dict")

    def _flush(self) -> None:
        """`Pipeline.flush`, and a user who looks at the weights after it."""
        self._host(("check",), "zenflow.client:WorkerClient.check", asks="check")
        self._make_visible()
        if self.running:
            self.pending = self._send_window()
            self.window, self.running = self.window + 1, []
        self._wait_done(self.sent)
        self._make_visible()
        self._write_masters()
        assert (self.visible, self.owned) == (self.window - 1, self.step)
        self._look("zenflow.pipeline:Pipeline.flush")

    def _look(self, where: str) -> None:
        """All weights are what they should be now, for a host that has waited for the compute stream."""
        self._synchronize(self.compute, where)
        weights = self._each("weights", self.visible) | self._each("selected weights", self.owned)
        self._host(("look", self.step), where, reads=items(weights))


def places(program: Program) -> Iterator[str]:
    """Every function of the engine that some operation stands for."""
    return iter({op.where for ops in program.ops for op in ops if op.where} | set(ORDERS.values()))
