"""An explicit-state checker: every interleaving of some sequential actors over shared memory, breadth first.

A *cell* of memory holds a stamp (what its content stands for); the checker moves stamps, never data. An actor carries
out its operations in order. An operation may begin once other actors have come so far (`after`) and counters in memory
have grown so far (`until`); it then finds the stamps that it `reads`, or memory was overwritten, torn or not yet
written, and leaves those that it `writes`. Two operations that could run at the same moment must not touch one cell if
one of them writes it. Operations take effect at once: two that overlap are both enabled in some reachable state, and
there it is seen.

Every operation moves an actor forward, so the states form no cycle: a run that ends in no proper final state is a
deadlock, and a wake-up that is lost is one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

HOST, COMPUTE, COPIES, UPLOADS, WORKER = range(5)
ACTORS = ("host", "compute stream", "copy stream", "upload stream", "worker")
ALIVE, DEAD, NOTICED, RELEASED = range(4)
LOST = -1  # a stamp that stands for nothing: the worker died while it wrote, or before
MASTERS = -2  # rounded as they were when the worker died: weights, but of no one window
PREDICTED, GRADIENT = 1, 2  # in stamps with a window's number: its result as a prediction, its gradient
INFINITY = 1 << 62

Stamp = int | tuple[int, ...]


class Op(NamedTuple):
    """One operation. where: the function that it stands for, `module:name`; key: what it is, for comparison.

    asks: of the host alone. "check" raises where the worker is dead; "noticed" where the watch knows it; "wait" waits
    for `until`, raises where the watch knows it or the worker is dead before that; "await" likewise, without asking the
    watch; "blind" waits and asks nobody.
    """

    key: tuple
    where: str
    after: tuple[tuple[int, int], ...] = ()
    until: tuple[tuple[int, int], ...] = ()
    reads: tuple[tuple[int, Stamp], ...] = ()
    writes: tuple[tuple[int, Stamp], ...] = ()
    asks: str = ""

    @property
    def invisible(self) -> bool:
        """Whether it does nothing but let others go on: carried out at once, it hides no interleaving."""
        return not (self.reads or self.writes or self.until or self.asks)


class Slot(NamedTuple):
    """What a stand-in knows of a slot. known: the host's operations before that.

    shadow: where the result would come, if what is visible is put there; kept: where that is, else the masters are.
    """

    seq: int
    known: int
    ready: int
    shadow: int | None
    kept: int | None


@dataclass
class Program:
    """The actors' operations, and the memory: names of cells, first stamps, which are counters (never raced for)."""

    ops: list[list[Op]]
    cells: dict[tuple, int]
    first: list[Stamp]
    counters: frozenset[int]
    done: int  # the cell that a dead worker's watch releases
    slots: list[Slot]

    def named(self, cell: int) -> str:
        """The name of a cell, for people."""
        return " ".join(str(part) for part in next(name for name, index in self.cells.items() if index == cell))


class State(NamedTuple):
    """How far each actor is, what each cell holds, whether the worker lives, whether the host has raised."""

    at: tuple[int, ...]
    memory: tuple[Stamp, ...]
    life: int = ALIVE
    raised: bool = False


@dataclass
class Result:
    """states: explored; fault: what is wrong, empty if nothing; steps: the shortest way to it."""

    states: int
    fault: str = ""
    steps: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.states} states", *self.steps, self.fault])


class Fault(Exception):
    """A property does not hold."""


class Explorer:
    """deaths: the worker may die at any moment. watched: its death is noticed. eager: invisible operations at once.

    stand_in: what is done to the slots that it has left, see `zenflow/stand_in.py`; "hasty" waits for no payload.
    """

    def __init__(
        self,
        program: Program,
        *,
        deaths: bool = False,
        watched: bool = True,
        eager: bool = True,
        stand_in: Literal["patient", "hasty", "none"] = "patient",
    ) -> None:
        self.program, self.deaths, self.watched, self.eager = program, deaths, watched, eager
        self.stand_in, self._shadows = stand_in, {slot.shadow for slot in program.slots}
        counters = program.counters
        self._written = [[_mask(op.writes, counters) for op in ops] for ops in program.ops]
        self._touched = [[_mask(op.reads + op.writes, counters) for op in ops] for ops in program.ops]

    def run(self, limit: int = 20_000_000) -> Result:
        """Explore everything that can happen, until something is wrong. RuntimeError beyond `limit` states."""
        first = self._settled(State((0,) * len(self.program.ops), tuple(self.program.first)))
        came_from: dict[State, tuple[State, str] | None] = {first: None}
        waiting = deque([first])
        while waiting:
            state = waiting.popleft()
            try:
                following = self._following(state)
            except Fault as fault:
                return Result(len(came_from), str(fault), self._way(came_from, state))
            for label, next_state in following:
                reached = self._settled(next_state)
                if reached not in came_from:
                    came_from[reached] = state, label
                    waiting.append(reached)
            if len(came_from) > limit:
                raise RuntimeError(f"more than {limit} states")
        return Result(len(came_from))

    def _way(self, came_from: dict[State, tuple[State, str] | None], state: State) -> list[str]:
        steps = []
        while (link := came_from[state]) is not None:
            state, label = link
            steps.append(label)
        return steps[::-1]

    def _following(self, state: State) -> list[tuple[str, State]]:
        enabled = [actor for actor in range(len(ACTORS)) if self._enabled(state, actor)]
        self._check_races(state, enabled)
        following = [self._carry_out(state, actor) for actor in enabled]
        following += self._endings(state)
        if not following:
            self._check_end(state)
        return following

    def _settled(self, state: State) -> State:
        """Invisible operations are carried out at once, if that is wanted."""
        moved = self.eager
        while moved:
            moved = False
            for actor, ops in enumerate(self.program.ops):
                while self._enabled(state, actor) and self._invisible(ops[state.at[actor]]):
                    state, moved = _moved(state, actor), True
        return state

    def _invisible(self, op: Op) -> bool:
        return op.invisible or (op.asks == "noticed" and not self.deaths)

    def _label(self, actor: int, op: Op) -> str:
        return f"{ACTORS[actor]}: {' '.join(str(part) for part in op.key)}  [{op.where}]"

    def _enabled(self, state: State, actor: int) -> bool:
        ops, at = self.program.ops[actor], state.at[actor]
        if at >= len(ops) or (actor == WORKER and state.life != ALIVE) or (actor == HOST and state.raised):
            return False
        op = ops[at]
        for other, count in op.after:
            if state.at[other] < count:
                return False
        if op.asks in ("check", "noticed"):
            return True
        came = all(state.memory[cell] >= least for cell, least in op.until)
        return came or (state.life != ALIVE and op.asks in ("wait", "await"))

    def _carry_out(self, state: State, actor: int) -> tuple[str, State]:
        op = self.program.ops[actor][state.at[actor]]
        label = self._label(actor, op)
        if self._raises(state, op):
            return f"{label} raises", state._replace(raised=True)
        lost = False
        for cell, expected in op.reads:
            found = state.memory[cell]
            if found != expected:
                # Where nothing is put back, half an old result and half a new one are weights; a gradient is none.
                garbage = actor == UPLOADS and cell in self._shadows and not _is_weights(found)
                if state.life < NOTICED or actor in (HOST, WORKER) or garbage:
                    raise Fault(f"{label}: {self.program.named(cell)} holds {found}, expected {expected}")
                lost = True  # the streams go on with what there is; nobody may take it for a result
        memory = list(state.memory)
        for cell, stamp in op.writes:
            memory[cell] = LOST if lost and cell not in self.program.counters else stamp
        return label, _moved(state, actor)._replace(memory=tuple(memory))

    def _raises(self, state: State, op: Op) -> bool:
        if op.asks == "check":
            return state.life != ALIVE
        if op.asks in ("wait", "noticed") and state.life >= NOTICED:
            return True
        return op.asks in ("wait", "await") and any(state.memory[cell] < least for cell, least in op.until)

    def _check_races(self, state: State, enabled: list[int]) -> None:
        for number, one in enumerate(enabled):
            for other in enabled[number + 1 :]:
                at_one, at_other = state.at[one], state.at[other]
                both = self._written[one][at_one] & self._touched[other][at_other]
                both |= self._touched[one][at_one] & self._written[other][at_other]
                if both:
                    labels = [self._label(actor, self.program.ops[actor][state.at[actor]]) for actor in (one, other)]
                    cell = both.bit_length() - 1
                    raise Fault(f"at the same time: {' | '.join(labels)}: both touch {self.program.named(cell)}")

    def _endings(self, state: State) -> list[tuple[str, State]]:
        """The worker's death, also in the middle of an operation, and its being noticed by the watch."""
        if not self.deaths:
            return []
        if state.life == ALIVE:
            ends = [("the worker dies", state._replace(life=DEAD))]
            if self._enabled(state, WORKER):
                torn = list(state.memory)
                for cell, _ in self.program.ops[WORKER][state.at[WORKER]].writes:
                    if cell not in self.program.counters:
                        torn[cell] = LOST
                if tuple(torn) != state.memory:
                    ends.append(("the worker dies while it writes", ends[0][1]._replace(memory=tuple(torn))))
            return ends
        if state.life == DEAD and self.watched:
            return [("the watch notices", state._replace(life=NOTICED))]
        return self._stand_in(state) if state.life == NOTICED else []

    def _stand_in(self, state: State) -> list[tuple[str, State]]:
        """One slot that the dead worker has left is passed over, or none is known any more and `done` released."""
        done, memory = self.program.done, list(state.memory)
        left = (slot for slot in self.program.slots if memory[done] < slot.seq and slot.known <= state.at[HOST])
        slot = next(left, None) if self.stand_in != "none" else None
        if slot is None:
            memory[done] = INFINITY
            return [("the watch releases done", state._replace(life=RELEASED, memory=tuple(memory)))]
        label = f"stand-in: slot {slot.seq}"
        if slot.shadow is not None:
            if self.stand_in == "patient" and memory[slot.ready] != slot.seq:
                return []
            self._check_stand_in(state, slot, label)
            memory[slot.shadow] = MASTERS if slot.kept is None else memory[slot.kept]
        memory[done] = slot.seq
        return [(label, state._replace(memory=tuple(memory)))]

    def _check_stand_in(self, state: State, slot: Slot, label: str) -> None:
        """Nobody else touches the shadow meanwhile, or writes what is visible."""
        kept = 0 if slot.kept is None else 1 << slot.kept
        for actor in range(len(ACTORS)):
            if self._enabled(state, actor):
                at = state.at[actor]
                if self._touched[actor][at] & 1 << slot.shadow or self._written[actor][at] & kept:
                    other = self._label(actor, self.program.ops[actor][at])
                    raise Fault(f"at the same time: {label} | {other}: both touch {self.program.named(slot.shadow)}")
        if kept and not _is_weights(state.memory[slot.kept]):
            raise Fault(f"{label}: {self.program.named(slot.kept)} holds {state.memory[slot.kept]}, which is visible")

    def _check_end(self, state: State) -> None:
        """Nothing can happen any more: everybody must be through, or the host has raised and the streams are empty."""
        ops = self.program.ops
        left = [actor for actor in (COMPUTE, COPIES, UPLOADS) if self._queued(state, actor)]
        if not state.raised:
            left += [HOST] if state.at[HOST] < len(ops[HOST]) else []
            left += [WORKER] if state.at[WORKER] < len(ops[WORKER]) and state.life == ALIVE else []
        if left:
            what = [self._label(actor, ops[actor][state.at[actor]]) for actor in left]
            raise Fault(f"deadlock: {' | '.join(what)}")

    def _queued(self, state: State, actor: int) -> bool:
        """Whether the host has given the stream something that it has not done."""
        ops, at = self.program.ops[actor], state.at[actor]
        return at < len(ops) and all(state.at[HOST] >= count for other, count in ops[at].after if other == HOST)


def _is_weights(stamp: Stamp) -> bool:
    """Whether what a shadow holds can be shown: neither a gradient, nor torn, nor a selection's."""
    return stamp[1:] == (PREDICTED,) if isinstance(stamp, tuple) else stamp != LOST


def _mask(cells: tuple[tuple[int, Stamp], ...], counters: frozenset[int]) -> int:
    mask = 0
    for cell, _ in cells:
        if cell not in counters:
            mask |= 1 << cell
    return mask


def _moved(state: State, actor: int) -> State:
    at = state.at
    return state._replace(at=(*at[:actor], at[actor] + 1, *at[actor + 1 :]))
