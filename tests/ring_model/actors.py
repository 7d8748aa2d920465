"""The actors of the ring's model: streams that collect what is queued on them, the host, and the worker."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.ring_model.explore import COMPUTE, COPIES, HOST, UPLOADS, Op, Stamp
from tests.ring_model.memory import Memory
from tests.ring_model.setup import ORDERS, Setup


@dataclass
class Stream:
    """An actor's operations so far, and what holds back the next one."""

    actor: int
    host: list[Op]
    ops: list[Op] = field(default_factory=list)
    after: dict[int, int] = field(default_factory=dict)
    until: list[tuple[int, int]] = field(default_factory=list)

    def event(self) -> tuple[int, int]:
        """A point of the stream: all that is queued now."""
        if self.after or self.until:
            self.push(("wait",), "torch.cuda:Stream.wait_event")
        return self.actor, len(self.ops)

    def wait_event(self, event: tuple[int, int]) -> None:
        actor, count = event
        if count:
            self.after[actor] = max(count, self.after.get(actor, 0))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.event())

    def wait_word(self, cell: int, least: int) -> None:
        self.until.append((cell, least))

    def push(
        self,
        key: tuple,
        where: str,
        reads: dict[int, Stamp] | None = None,
        writes: dict[int, Stamp] | None = None,
        asks: str = "",
    ) -> None:
        """Queue an operation: the host launches it, with a question maybe, the stream carries it out."""
        self.host.append(Op(("launch", *key), where, asks=asks))
        after = {**self.after, HOST: len(self.host)}
        self.ops.append(Op(key, where, tuple(sorted(after.items())), tuple(self.until), items(reads), items(writes)))
        self.after, self.until = {}, []


def items(stamps: dict[int, Stamp] | None) -> tuple[tuple[int, Stamp], ...]:
    return tuple((stamps or {}).items())


class Actors(Memory):
    """Their operations so far, and the counters over which host and worker meet."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.host: list[Op] = []
        self.compute, self.copies, self.uploads = (Stream(actor, self.host) for actor in (COMPUTE, COPIES, UPLOADS))
        self.worker: list[Op] = []
        self.done = self._cell("done", counter=True)
        self.told = self._cell("exchange ordered", counter=True)
        self.answered = self._cell("exchange answered", counter=True)

    def _has(self, order: str) -> bool:
        assert order in ORDERS, order
        return order not in self.setup.without

    def _host(self, key: tuple, where: str, **parts: object) -> None:
        self.host.append(Op(key, where, **parts))

    def _wait_done(self, seq: int) -> None:
        if seq:
            self._host(
                ("wait for", seq), "zenflow.client:WorkerClient.wait_done", until=((self.done, seq),), asks="wait"
            )

    def _synchronize(self, stream: Stream, where: str) -> None:
        self._host(("synchronize", stream.actor), where, after=(stream.event(),))
