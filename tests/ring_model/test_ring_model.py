"""The orders (a) to (f) of the pipeline, checked over every interleaving, and each of them shown to be needed.

Larger: `python -m tests.ring_model --buckets 3 --windows 5`.
"""

from __future__ import annotations

import importlib
import re
from functools import reduce

import pytest

from tests.ring_model.explore import HOST, Explorer, Program
from tests.ring_model.protocol import build, places
from tests.ring_model.setup import ORDERS, Setup

STEPS = frozenset(range(1, 7))
EVEN = frozenset({2, 4, 6})
SETUPS = {
    "overlap": {},
    "four-windows": {"windows": 4},
    "three-buckets": {"buckets": 3, "windows": 2},
    "two-steps": {"interval": 2, "saving": STEPS},
    "no-overlap": {"visible_after": 0, "saving": STEPS},
    "upload-in-step": {"upload": "step", "flushing": {1}},
    "host-waits": {"stream_words": False, "saving": {2}},
    "selection": {"interval": 2, "selecting": {2, 6}},
    "selection-always": {"selecting": STEPS, "saving": {2}},
    "upload-check": {"checked": True, "dropping": {2}},
    "flush-mid-window": {"interval": 2, "flushing": {1, 4}},
    "dropped-gradients": {"interval": 2, "dropping": {3, 4}},
    "host": {"on_host": True, "interval": 2},
    "host-zeroed": {"on_host": True, "zeroed": True, "saving": {2}},
    "host-all": {"on_host": True, "interval": 2, "selecting": {4}, "saving": STEPS, "dropping": {4}},
    "sooner": {"interval": 2, "visible_after": 1, "saving": {3}, "flushing": {2}},
    "two-cohorts": {"buckets": 1, "segments": 2, "interval": 2},
    "cohorts": {"segments": 2, "interval": 2, "windows": 2, "visible_after": 1},
    "cohorts-selection": {"segments": 2, "interval": 2, "windows": 2, "selecting": {3}},
    "cohorts-flush": {"buckets": 1, "segments": 2, "interval": 3, "windows": 2, "flushing": {5}},
    "cohorts-check": {"buckets": 1, "segments": 2, "interval": 2, "visible_after": 1, "checked": True, "dropping": {3}},
    "cohorts-host": {"segments": 2, "interval": 2, "on_host": True, "saving": STEPS, "selecting": {3}},
    "three-cohorts": {"buckets": 1, "segments": 3, "interval": 3, "windows": 2, "visible_after": 2, "upload": "step"},
    "predicted": {"predicted": True, "saving": STEPS},
    "predicted-overlap": {"predicted": True, "windows": 4},
    "predicted-sooner": {"predicted": True, "interval": 2, "visible_after": 1, "saving": {2, 3}, "flushing": {2, 5}},
    "predicted-cohorts": {
        **{"predicted": True, "segments": 2, "interval": 2, "windows": 2, "visible_after": 1},
        **{"selecting": {3}, "saving": STEPS, "flushing": {2}},
    },
    "apart": {"apart": True, "saving": {2}},
    "apart-selection": {"apart": True, "interval": 2, "selecting": {2, 6}},
    "apart-cohorts": {"apart": True, "segments": 2, "interval": 2, "windows": 2, "selecting": {3}},
    "apart-predicted": {"apart": True, "predicted": True, "saving": STEPS, "selecting": {2}},
    "apart-predicted-overlap": {"apart": True, "predicted": True, "windows": 4},
    "host-predicted-overlap": {"on_host": True, "predicted": True, "windows": 4},
    "predicted-selection": {"predicted": True, "interval": 2, "visible_after": 1, "selecting": {2, 4}, "saving": STEPS},
    "host-no-overlap": {"on_host": True, "visible_after": 0, "selecting": EVEN, "flushing": {3}},
}


def make(name: str, **more: object) -> Program:
    settings = {key: frozenset(x) if isinstance(x, set) else x for key, x in SETUPS[name].items()}
    return build(Setup(**settings, **more))


@pytest.mark.parametrize("name", SETUPS)
def test_no_interleaving_breaks_the_protocol_though_the_worker_may_die_at_any_moment(name: str) -> None:
    """Nothing torn or overwritten, no shadow read while written, no fold into a sum being copied, no wrong window, no
    deadlock; and with a dead worker: everything that waits goes on, no weight becomes a gradient, and no save or flush
    returns with what was lost."""
    assert not (result := Explorer(make(name), deaths=True).run()).fault, str(result)


# Which setup misses an order, and how that shows.
MISSED = {
    "a: the last gradient before the upload": (
        "overlap",
        r"same time: .*forward .*upload .*both touch selected weights",
    ),
    "a: done before the upload": ("overlap", r"upload .*ring \d holds \d, expected"),
    "a: backward before the uploads in step()": (
        "upload-in-step",
        r"same time: .*forward .*upload .*both touch selected weights",
    ),
    "b: uploads before the selected masters": ("overlap", r"forward .*: weights 0 holds 0, expected 1"),
    "c: the fold before the copy": ("overlap", r"device log holds 0"),
    "c: the upload before ready": ("overlap", r"same time: .*copy 2 .*process 1 .*both touch ring"),
    "d: the copy before the next fold": ("overlap", r"same time: .*close .*log .*both touch device log"),
    "e: a turn's last window is done before its records are written": ("overlap", r"records .*both touch host record"),
    "e: that of every segment whose windows end": ("cohorts-flush", r"records .*both touch host record"),
    "e: gradients are copied before they are zeroed": ("host-zeroed", r"same time: .*zero .*both touch gradient"),
    "e: copies are finished before a state is read": ("host-all", r"save .*lane"),
    "f: the payload before ready": ("overlap", r"same time: .*copy .*process .*both touch ring"),
    "f: the shadow before done": ("overlap", r"same time: .*upload .*process .*both touch ring"),
    "predictions: the last upload before masters take its shadow": (
        "predicted",
        r"same time: .*rewrite .*upload .*both touch ring",
    ),
    "cohorts: a result arrives before the next one takes its place": (
        "cohorts-selection",
        r"same time: .*copy 3 .*process 3 .*both touch ring",
    ),
    "selection: what leaves has arrived before the worker is told": (
        "selection",
        r"leave .*exchange .*both touch ring",
    ),
    "selection: the worker has answered before what enters is copied": ("selection", r"exchange .*both touch ring"),
}


@pytest.mark.parametrize("order", ORDERS)
def test_each_order_is_needed(order: str) -> None:
    name, shown = MISSED[order]
    result = Explorer(make(name, without=frozenset({order}))).run()
    assert result.fault, f"{name} holds without it"
    assert result.steps and re.search(shown, result.fault), str(result)


@pytest.mark.parametrize("order", [order for order in ORDERS if MISSED[order][0] == "overlap"])
def test_cohorts_need_it_too(order: str) -> None:
    assert Explorer(make("two-cohorts", without=frozenset({order}))).run().fault


@pytest.mark.parametrize(
    "name, order, shown",
    [
        ("apart", "a: done before the upload", r"upload .*shadow \d holds \d, expected"),
        ("apart", "f: the shadow before done", r"same time: .*upload .*process .*both touch shadow"),
        (
            "apart-predicted",
            "predictions: the last upload before masters take its shadow",
            r"rewrite .*both touch shadow",
        ),
    ],
)
def test_shadows_of_their_own_need_it_too(name: str, order: str, shown: str) -> None:
    result = Explorer(make(name, without=frozenset({order}))).run()
    assert re.search(shown, result.fault), str(result)


@pytest.mark.parametrize(
    "name, order, cells, shown",
    [
        ("overlap", "d: the copy before the next fold", ["device log"], r"update .*copy .*both touch accumulator"),
        ("overlap", "c: the fold before the copy", ["device log"], r"copy 1 0 .*accumulator 0 holds"),
        ("apart", "c: the upload before ready", ["ring"], r"same time: .*upload .*process .*both touch shadow"),
        ("overlap", "a: the last gradient before the upload", ["selected weights"], r"forward .*both touch weights"),
        (
            "apart-cohorts",
            "cohorts: a result arrives before the next one takes its place",
            ["ring"],
            r"upload 2 2 .*shadow 2 holds 3, expected 2",
        ),
    ],
)
def test_what_else_an_order_protects(name: str, order: str, cells: list[str], shown: str) -> None:
    """With the cells out of sight in which its absence shows first."""
    program = make(name, without=frozenset({order}))
    hidden = {index for name, index in program.cells.items() if name[0] in cells}
    for ops in program.ops:
        ops[:] = [
            op._replace(
                reads=tuple(item for item in op.reads if item[0] not in hidden),
                writes=tuple(item for item in op.writes if item[0] not in hidden),
            )
            for op in ops
        ]
    assert re.search(shown, Explorer(program).run().fault)


def test_a_death_that_nobody_watches_for_is_a_deadlock() -> None:
    result = Explorer(make("overlap"), deaths=True, watched=False).run()
    assert "the worker dies" in str(result) and "deadlock" in result.fault and "upload" in result.fault, str(result)


@pytest.mark.parametrize(
    "stand_in, shown",
    [
        ("none", r"upload .*(: ring .* holds \(\d, 2\), expected|both touch ring)"),
        ("hasty", r"same time: stand-in: slot \d .*copy .*both touch ring"),
    ],
)
@pytest.mark.parametrize("name", ["overlap", "predicted-overlap"])
def test_without_a_patient_stand_in_a_death_makes_gradients_of_weights(name: str, stand_in: str, shown: str) -> None:
    result = Explorer(make(name), deaths=True, stand_in=stand_in).run()
    assert "the worker dies" in str(result) and re.search(shown, result.fault), str(result)


@pytest.mark.parametrize(
    "stand_in, shown",
    [
        ("none", r"upload .*: shadow .* holds -1, expected \(\d, 1\)"),
        ("hasty", r"same time: stand-in: slot \d .*upload .*both touch shadow"),
    ],
)
@pytest.mark.parametrize("name", ["apart-predicted-overlap", "host-predicted-overlap"])
def test_of_two_shadows_the_other_is_no_result_until_a_patient_stand_in_has_made_one_of_it(
    name: str, stand_in: str, shown: str
) -> None:
    """Torn, or a prediction of two windows ago, which its last upload may still be reading."""
    result = Explorer(make(name), deaths=True, stand_in=stand_in).run()
    assert "the worker dies" in str(result) and re.search(shown, result.fault), str(result)


def test_uploads_ask_because_the_stand_in_knows_no_later_slots() -> None:
    program = make("overlap")
    program.ops[HOST] = [op._replace(asks="") if op.asks == "noticed" else op for op in program.ops[HOST]]
    result = Explorer(program, deaths=True).run()
    assert re.search(r"copy .*upload .*both touch ring", result.fault), str(result)


def blind(program: Program, *keys: str) -> Program:
    """The host asks no questions at these operations."""
    program.ops[HOST] = [op._replace(asks="blind") if op.key[0] in keys else op for op in program.ops[HOST]]
    return program


@pytest.mark.parametrize("name, key, watched", [("host-waits", "wait for", False), ("selection", "answer", True)])
def test_a_host_that_waits_and_does_not_ask_is_a_deadlock(name: str, key: str, watched: bool) -> None:
    """As `WorkerClient.wait_done` and `_await` without their look at the process."""
    result = Explorer(blind(make(name), key), deaths=True, watched=watched).run()
    assert "the worker dies" in str(result) and re.search(f"deadlock: .*{key}", result.fault), str(result)


def test_a_host_that_does_not_ask_takes_what_was_lost_for_a_result() -> None:
    """Streams go on when `done` is released: only the host's questions keep their results from being believed."""
    program = blind(make("overlap", saving=frozenset({2})), "check", "wait for")
    result = Explorer(program, deaths=True).run()
    assert re.search(r"host: (save|look) .* holds -?\d, expected", result.fault), str(result)


@pytest.mark.parametrize("without", [None, *(order for order in ORDERS if MISSED[order][0] == "overlap")])
def test_carrying_out_invisible_operations_at_once_hides_nothing(without: str | None) -> None:
    """The verdict is that of all interleavings, of which there are many times as many."""
    program = make("overlap", without=frozenset({without} if without else ()))
    reduced, full = Explorer(program).run(), Explorer(program, eager=False).run()
    assert bool(reduced.fault) == bool(full.fault) == (without is not None)
    assert without or full.states > 4 * reduced.states


@pytest.mark.parametrize("place", sorted(set().union(*(places(make(name)) for name in SETUPS))))
def test_every_operation_stands_for_a_function_that_exists(place: str) -> None:
    module, _, name = place.partition(":")
    assert callable(reduce(getattr, name.split("."), importlib.import_module(module)))
