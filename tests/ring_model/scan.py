"""How the worker finds the next slot: its own loop, over every moment at which a slot can become ready.

Slots become ready in the order in which they were sent, as soon as the window before the last in their place is done,
and behind the last of a segment's window comes the word `sent`; when that is between two looks of the worker is free.
`Setup` says which slots there are: segments, buckets, windows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np

from tests.ring_model.setup import Setup
from zenflow import worker as worker_module
from zenflow.pace import Pace
from zenflow.ring import SlotRecord, TornSlotError
from zenflow.window import WindowClock
from zenflow.worker import Place, Worker

SENT = -1  # in place of a bucket: the word behind the last slot of a segment's window


@dataclass(frozen=True)
class Slot:
    """frees: the slot that has to be done before this one can be ready: the last that its place has held, or 0."""

    seq: int
    segment: int
    bucket: int
    turn: int
    frees: int


@cache
def words_of(setup: Setup) -> tuple[Slot, ...]:
    """All slots of a run, in their order, and the `sent` of each segment's windows, with its last slot's number."""
    clock = WindowClock(
        update_interval=setup.interval, select_interval=1 << 30, full_warm_up_rounds=0, visible_after=setup.delay
    )
    clock.cohorts = tuple(setup.cohorts)
    found: list[Slot] = []
    seq = 0
    last = {(segment, turn): 0 for segment in range(setup.segments) for turn in (0, 1)}
    for step in range(1, setup.windows * setup.interval + 1):
        plan = clock.begin_step()
        ends = clock.cohorts if step in setup.selecting else plan.ends
        for segment in (number for number, cohort in enumerate(setup.cohorts) if cohort in ends):
            turn = sum((slot.segment, slot.bucket) == (segment, SENT) for slot in found) % 2
            for bucket in range(setup.buckets):
                seq += 1
                found.append(Slot(seq, segment, bucket, turn, last[segment, turn]))
            found.append(Slot(seq, segment, SENT, turn, last[segment, turn]))
            last[segment, turn] = seq
        clock.finish_step(ends)
    return tuple(found)


def slots_of(setup: Setup) -> tuple[Slot, ...]:
    """The slots alone."""
    return tuple(slot for slot in words_of(setup) if slot.bucket != SENT)


class Wrong(Exception):
    """The worker has done what it must not."""


class World:
    """What is ready, and one worker of the class `kind` that has processed `done` slots.

    words: by sequence number, what a slot's `ready` becomes instead, None if it never does; ready: how many of the
    words have been written, `order` is theirs. script: which way they go on before each look, as far as it goes; asked:
    how many other ways there were. Before the first look any number of words may have come; before another one, none,
    or those up to one that this look is at: what else could have come may just as well come later.
    """

    def __init__(
        self, setup: Setup, words: dict[int, int | None], kind: type[Worker], done: int, ready: int, script: list[int]
    ) -> None:
        self.order, self.slots, self.words = words_of(setup), slots_of(setup), words
        self.ready, self.script = ready, script
        self.asked: list[int] = []
        self.worker = self._make_worker(setup, kind)
        for slot in self.slots[:done]:
            place = self.worker.segments[slot.segment][slot.bucket]
            place.finish(slot.seq, 0)
            self.worker.due = self.worker._following(place)
        self.worker.done = done

    def _make_worker(self, setup: Setup, kind: type[Worker]) -> Worker:
        worker = kind.__new__(kind)
        worker.segments = [
            [Place(work, bucket) for bucket in range(setup.buckets)]
            for work in (self._work(segment) for segment in range(setup.segments))
        ]
        worker.due, worker.window, worker.pace = None, (0, False), Pace(1, adapt=False)
        worker.header = SimpleNamespace(beat=lambda: None, finish=lambda done, nanoseconds: None, threads=0)

        def stop(timeout: float) -> None:
            worker.running = False

        worker._receive = stop
        return worker

    def _work(self, segment: int) -> SimpleNamespace:
        memory = SimpleNamespace(
            segment=SimpleNamespace(index=segment),
            ready=lambda bucket, turn: self._look((segment, bucket, turn)),
            sent=lambda turn: self._look((segment, SENT, turn)),
            slot_record=lambda turn, bucket: SlotRecord(*np.zeros((4, 1), dtype=np.int64)),
            window=lambda turn: 0,
            is_urgent=lambda turn: False,
        )

        def process(bucket: int, seq: int, turn: int) -> None:
            slot = self.slots[self.worker.done] if self.worker.done < len(self.slots) else None
            expected = slot and (slot.seq, slot.segment, slot.bucket, slot.turn)
            if (seq, segment, bucket, turn) != expected or self.ready < self.place(slot.seq) or slot.seq in self.words:
                what = f"slot {seq} was taken from segment {segment}, bucket {bucket}, turn {turn}"
                # The record of a slot has its number, too: `SegmentMemory.read_slot`.
                raise TornSlotError(what) if self.shows(self.ready) and seq in self.words.values() else Wrong(what)

        return SimpleNamespace(memory=memory, process=process, set_threads=lambda threads: None)

    def place(self, seq: int) -> int:
        """How many words have been written with this slot's `ready`."""
        return next((n for n, slot in enumerate(self.order, start=1) if slot.seq == seq), len(self.order) + 1)

    def shows(self, ready: int) -> bool:
        """Whether a fault can be seen when so many words have been written: a lost slot by the word behind it."""
        return any(ready >= self.place(seq) + (word is None) for seq, word in self.words.items())

    def _look(self, place: tuple[int, int, int]) -> int:
        coming = 0
        for slot in self.order[self.ready :]:
            if slot.frees > self.worker.done:
                break
            coming += 1
        number, ways = len(self.asked), [0]
        for more, slot in enumerate(self.order[self.ready : self.ready + coming], start=1):
            if number == 0 or (slot.segment, slot.bucket, slot.turn) == place:
                ways.append(more)
        self.asked.append(len(ways) - 1)
        self.ready += ways[self.script[number] if number < len(self.script) else 0]
        found = 0
        for slot in self.order[: self.ready]:
            word = slot.seq if slot.bucket == SENT else self.words.get(slot.seq, slot.seq)
            if (slot.segment, slot.bucket, slot.turn) == place and word is not None:
                found = word
        return found


def explore(setup: Setup, words: dict[int, int | None] | None = None, kind: type[Worker] = Worker) -> tuple[int, str]:
    """Rounds of the worker's loop that were gone through, and what is wrong, empty if nothing.

    A slot that is ready is processed in the next round, in its order. Where `words` has another number for a slot (not
    the last that its place has held), or none, the round that needs the slot raises TornSlotError once that number, or
    the slot behind it, can be seen; before that, none does. Where there is a number, the error is not of a lost slot.
    """
    words = words or {}
    rounds, states, waiting = 0, {(0, 0)}, deque([(0, 0)])
    while waiting:
        done, ready = waiting.popleft()
        for world, error in _rounds(setup, words, kind, done, ready):
            rounds += 1
            if fault := _judge(world, error, done, ready):
                return rounds, f"{done} done, {ready} ready at first, then {world.script} more: {fault}"
            state = world.worker.done, world.ready
            if error is None and state not in states:
                states.add(state)
                waiting.append(state)
    reached = max(done for done, _ in states)
    assert reached == min(words, default=len(slots_of(setup)) + 1) - 1, reached
    return rounds, ""


def _rounds(
    setup: Setup, words: dict[int, int | None], kind: type[Worker], done: int, ready: int
) -> Iterator[tuple[World, Exception | None]]:
    """One round of the loop, in all ways in which slots can become ready meanwhile."""
    script: list[int] | None = []
    while script is not None:
        world = World(setup, words, kind, done, ready, script)
        world.worker.running, error = True, None
        try:
            with patch.object(worker_module, "SPIN_NS", -1):  # it looks for lost slots whenever it finds nothing
                world.worker.run()
        except (TornSlotError, Wrong) as raised:
            error = raised
        chosen = [*script, *[0] * (len(world.asked) - len(script))]
        world.script = chosen
        yield world, error
        script = _next(chosen, world.asked)


def _next(chosen: list[int], most: list[int]) -> list[int] | None:
    for place in reversed(range(len(chosen))):
        if chosen[place] < most[place]:
            return [*chosen[:place], chosen[place] + 1]
    return None


def _judge(world: World, error: Exception | None, done: int, ready: int) -> str:
    """What is wrong with one round, which began with so many slots done and ready."""
    if isinstance(error, Wrong):
        return str(error)
    if error is not None and not world.shows(world.ready):
        return f"it raises {error}"
    if error is not None:
        lost = "has not come" in str(error) or "is ready before slot" in str(error)
        return f"a foreign number is named as a lost slot: {error}" if lost and None not in world.words.values() else ""
    if done + 1 in world.words:
        return f"it goes on without slot {done + 1}" if world.shows(ready) else ""
    return f"slot {done + 1} is overlooked" if ready >= world.place(done + 1) and done == world.worker.done else ""
