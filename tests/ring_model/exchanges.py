"""Selection in the ring's model: what host, compute stream and worker do while state changes its owner."""

from __future__ import annotations

from tests.ring_model.explore import LOST, Op
from tests.ring_model.sending import Sending
from tests.ring_model.setup import Setup


class Exchanges(Sending):
    """`migration.Migration`; exchanges: how many parts have been ordered."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.exchanges = 0

    def _select(self) -> None:
        """`owners.select`: segment by segment."""
        self._wait_done(self.sent)
        self._synchronize(self.compute, "zenflow.selection:_fetch")
        for segment in range(self.setup.segments):
            self._exchange(segment)
        if self.setup.predicts:  # the other shadows, whose lanes the exchange may have used
            self.shown |= {(self._turn(bucket), bucket): LOST for bucket in self.buckets}

    def _exchange(self, segment: int) -> None:
        """Parts go through two halves of the idle ring, see `migration.Migration.run`."""
        window = self.latest[segment]
        parts = [(segment, part, self._half(segment, part)) for part in range(1, self.setup.parts + 1)]
        self._leave(window, *parts[0])
        self._order(window, *parts[0])
        for number, (_, part, half) in enumerate(parts, start=1):
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
            self.compute.push(("enter", self.step, part, segment), "zenflow.migration:Migration._enter", reads)

    def _half(self, segment: int, part: int) -> int:
        """`migration._idle_half`: the next window's lane, or those of the one that has just been sent."""
        members = self._members(segment)
        turn = (self.uses[segment] - self.setup.on_host) % 2
        return self._lane(turn, 0, members[0] if part % 2 else members[-1])

    def _leave(self, window: int, segment: int, part: int, half: int) -> None:
        where = "zenflow.migration:Migration._leave"
        self.compute.push(("leave", self.step, part, segment), where, writes={half: (window, part, 0)})
        self.arrived = self.compute.event()

    def _order(self, window: int, segment: int, part: int, half: int) -> None:
        where = "zenflow.migration:Migration._order"
        if self._has("selection: what leaves has arrived before the worker is told"):
            self._host(("arrived", self.step, part), where, after=(self.arrived,))
        self.exchanges += 1
        self._host(("order", self.step, part), where, writes=((self.told, self.exchanges),))
        written = [(self._cell("master", bucket), window) for bucket in self._members(segment)]
        if self.setup.predicts:
            visible = [(self._turn(bucket) ^ 1, bucket) for bucket in self._members(segment)]
            written += [(self._shadow(turn, bucket), self.shown[turn, bucket]) for turn, bucket in visible]
        self.worker += [
            Op(
                ("exchange", self.step, part, segment),
                "zenflow.exchange:carry_out",
                until=((self.told, self.exchanges),),
                reads=((half, (window, part, 0)),),
                writes=((half, (window, part, 1)), *written),
            ),
            Op(
                ("answer", self.step, part),
                "zenflow.worker:Worker._exchange",
                writes=((self.answered, self.exchanges),),
            ),
        ]
