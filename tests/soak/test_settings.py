"""The soak draws every field of the engine's configuration, and every value that takes a path of its own."""

from __future__ import annotations

import random
from dataclasses import fields
from itertools import chain
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

from tests.soak.scenario import Scenario
from tests.soak.settings import NOT_DRAWN, draw_places
from zenflow.config import ZenFlowConfig

SEEDS = range(10_000, 10_300)
HINTS = get_type_hints(ZenFlowConfig)


def words_of(hint: Any) -> set[Any]:
    """The values that an annotation names one by one: its words, both switches, and None."""
    if hint is bool:
        return {True, False}
    if hint is type(None):
        return {None}
    if get_origin(hint) is Literal:
        return set(get_args(hint))
    return set(chain.from_iterable(words_of(part) for part in get_args(hint)))


def has_numbers(hint: Any) -> bool:
    return hint in (int, float) or any(has_numbers(part) for part in get_args(hint) if get_origin(hint) is not Literal)


@pytest.fixture(scope="module")
def drawn() -> dict[str, set[Any]]:
    """By field, the values of some hundred seeds."""
    found: dict[str, set[Any]] = {field.name: set() for field in fields(ZenFlowConfig)}
    for seed in SEEDS:
        for name, value in Scenario(seed).settings.items():
            found[name].add(value)
    return found


@pytest.mark.parametrize("name", [field.name for field in fields(ZenFlowConfig)])
def test_every_value_of_every_field_is_drawn_or_has_a_reason(name: str, drawn: dict[str, set[Any]]) -> None:
    if name in NOT_DRAWN:
        assert drawn[name] <= {getattr(ZenFlowConfig(), name)}, "it is drawn, and needs no reason any more"
        return
    words = words_of(HINTS[name])
    excused = {word for word in words if (name, word) in NOT_DRAWN}
    assert words - drawn[name] == excused, "draw these, or say in NOT_DRAWN why not"
    numbers = drawn[name] - words
    assert len(numbers) >= 2 or not has_numbers(HINTS[name]), f"{numbers}: one number is no draw"


def test_reasons_are_of_fields_that_exist() -> None:
    names = {field.name for field in fields(ZenFlowConfig)}
    for place, reason in NOT_DRAWN.items():
        assert (place if isinstance(place, str) else place[0]) in names and reason


def test_delays_other_than_the_usual_are_drawn_with_and_without_stagger() -> None:
    found = {
        (settings["stagger"], settings["visible_after"] < ZenFlowConfig(**settings).resolved().update_interval)
        for settings in (Scenario(seed).settings for seed in SEEDS)
        if settings["visible_after"] != "auto"
    }
    assert found == {(stagger, early) for stagger in (False, True) for early in (False, True)}


def test_a_trainer_that_goes_on_changes_only_what_may_change() -> None:
    scenario = Scenario(SEEDS[0])
    lives = [scenario.settings_from(step) for step in range(20)]
    assert lives[0] == scenario.settings and lives[7] == Scenario(SEEDS[0]).settings_from(7)
    changed = {name for life in lives for name, value in life.items() if value != scenario.settings[name]}
    assert changed == draw_places(random.Random(0), 1).keys()


def test_every_case_of_parameters_and_groups_is_drawn() -> None:
    """Rates, missing gradients, frozen and thawed parameters, swapped weights, flushes, loss scales; B6, B11, X3."""
    moments = [moment for seed in SEEDS[:50] for moment in Scenario(seed).history]
    for name in ("rates", "absent", "thawed", "swap", "flush", "scale"):
        found = {getattr(moment, name) for moment in moments}
        assert len(found) >= 2, name
    assert all(0 not in moment.absent for moment in moments)


def test_a_trainer_that_goes_on_has_frozen_what_was() -> None:
    """And the first weights where the state has none, because nothing has moved them yet."""
    scenario = next(s for s in map(Scenario, SEEDS) if any(moment.thawed for moment in s.history))
    thaw, moment = next((step, moment) for step, moment in enumerate(scenario.history) if moment.thawed)
    index = min(moment.thawed)
    assert all(index in earlier.absent for earlier in scenario.history[:thaw])
    first, before, after = (scenario.parameters(step, known=[0]) for step in (0, thaw, thaw + 1))
    assert [parameters[index].requires_grad for parameters in (first, before, after)] == [False, False, True]
    assert not before[0].any() and before[index].equal(first[index]) and first[index].any()
