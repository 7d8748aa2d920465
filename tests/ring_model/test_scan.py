"""The worker finds every slot in its order, and notices one that is lost or foreign, whenever slots become ready."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pytest

from tests.ring_model.scan import explore, slots_of
from tests.ring_model.setup import Setup
from zenflow import worker as worker_module
from zenflow.worker import Place, Worker

SETUPS = {
    "one-bucket": Setup(buckets=1, windows=4),
    "buckets": Setup(buckets=2, windows=3),
    "cohorts": Setup(buckets=2, segments=2, interval=2, windows=2),
    "cohorts-together": Setup(buckets=2, segments=2, interval=2, windows=1, selecting=frozenset({1})),
    "three-cohorts": Setup(buckets=1, segments=3, interval=3, windows=1, selecting=frozenset({2})),
}


@pytest.mark.parametrize("name", SETUPS)
def test_no_slot_is_overlooked_or_taken_out_of_its_order(name: str) -> None:
    rounds, fault = explore(SETUPS[name])
    assert not fault and rounds > len(slots_of(SETUPS[name])), (rounds, fault)


@pytest.mark.parametrize("name", SETUPS)
def test_a_slot_that_is_lost_is_noticed_by_the_word_behind_it(name: str) -> None:
    for slot in slots_of(SETUPS[name]):
        assert not (fault := explore(SETUPS[name], {slot.seq: None})[1]), (slot, fault)


@pytest.mark.parametrize("name", sorted(SETUPS.keys() - {"cohorts"}))
def test_a_foreign_number_is_noticed(name: str) -> None:
    for slot in slots_of(SETUPS[name]):
        for number in {slot.seq - 1, slot.seq + 1, slot.seq + 99} - {0}:
            assert not (fault := explore(SETUPS[name], {slot.seq: number})[1]), (slot, number, fault)


# A rule of the worker, another in its place, and which faults it then misses or makes up.
MUTANTS = {
    "no-second-look": ("if ready > next_slot and (first := self._find(next_slot)) is not None", "if False", "raises"),
    "no-second-look-at-the-following": (
        "following.ready() == next_slot + 1 and self._arrived() is None",
        "following.ready() == next_slot + 1",
        "raises",
    ),
    "first-segment-only": ("for places in self.segments] if", "for places in self.segments[:1]] if", "overlooked"),
    "any-segment-at-any-time": ("if self.due is None else [self.due]", "", "overlooked"),
    "whatever-is-new": ("if ready == next_slot:", "if ready != place.last[place.turn]:", "was taken from"),
    "lost-before-the-following": ("if following is not None and", "if False and", "goes on without"),
    "no-second-look-at-what-is-sent": (
        "if last >= next_slot and self._arrived() is None",
        "if last >= next_slot",
        "raises",
    ),
    "foreign-is-lost-before-the-following": (
        "following.ready() == next_slot + 1 and self._arrived() is None",
        "following.ready() == next_slot + 1 and self._find(next_slot) is None",
        "named as a lost slot",
    ),
    "foreign-is-lost-where-all-is-sent": (
        "if last >= next_slot and self._arrived() is None",
        "if last >= next_slot and self._find(next_slot) is None",
        "named as a lost slot",
    ),
    "lost-as-the-last": ("if last >= next_slot and", "if last > next_slot and", "goes on without"),
    "strangers-let-through": ("strangers.append((place, ready))", "pass", "named as a lost slot"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_worker_with_another_rule_is_found_out(name: str) -> None:
    rule, other, shown = MUTANTS[name]
    source = inspect.getsource(Worker)
    assert source.count(rule) == 1, rule
    space = dict(vars(worker_module), SPIN_NS=-1)
    exec(source.replace(rule, other), space)
    assert any(shown in fault for fault in _faults(space["Worker"]))


def test_a_place_that_keeps_its_turn_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Place.finish

    def keeping(place: Place, seq: int, started: int) -> int:
        finished = finish(place, seq, started)
        place.turn ^= 1
        return finished

    monkeypatch.setattr(Place, "finish", keeping)
    assert any("is overlooked" in fault for fault in _faults(Worker))


def _faults(kind: type[Worker]) -> Iterator[str]:
    for setup in SETUPS.values():
        yield explore(setup, kind=kind)[1]
        for slot in slots_of(setup):
            for word in (None, slot.seq + 99):
                yield explore(setup, {slot.seq: word}, kind)[1]
