"""Launch constants of measured cards: they reach the launches of their card alone, and no entry changes a bit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from zenflow_kernels import cards, fused_step
from zenflow_kernels.cards import ALL, CARDS, TUNABLE, constants, launch_class
from zenflow_kernels.table import STEP_TILE, Table

from tests.kernels.building import bits
from zenflow.bench.kernel_ops import OPS
from zenflow.bench.kernel_problem import Problem
from zenflow.bench.kernel_tune import KNOBS, SHIPPED, class_of, launch_constants, outputs_of, todays

CPU = torch.device("cpu")
OWN = {"FOLD_BLOCK": 4096, "UPDATE_BLOCK": 1024, "WARPS": 4}
CLASS = "column float32"
Use = Callable[[Any], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Makes something the entry of the card on which the test runs."""
    monkeypatch.setattr(cards, "card", lambda device: "this card")

    def use(entry: Any, name: str = "this card") -> None:
        monkeypatch.setattr(cards, "CARDS", {name: entry})
        cards._of_card.cache_clear()

    yield use
    cards._of_card.cache_clear()


def problem(layout: str = "columns", device: str = "cpu") -> Problem:
    return Problem(70, 136, torch.float32, layout, 0.1, torch.device(device))


def result(op: str, layout: str, device: str) -> list[torch.Tensor]:
    return [bits(tensor) for tensor in outputs_of(OPS[op].build(problem(layout, device)))]


def test_an_entry_serves_its_card_op_and_class_alone(use: Use):
    use({"fused_step": {CLASS: {"UPDATE_BLOCK": 256, "WARPS": 8}}})
    assert constants("fused_step", CLASS, CPU, **OWN) == OWN | {"UPDATE_BLOCK": 256, "WARPS": 8}
    assert constants("fused_step", "row float32", CPU, **OWN) == OWN
    assert constants("gather_channels", CLASS, CPU, WARPS=4) == {"WARPS": 4}
    with cards.ignored():
        assert constants("fused_step", CLASS, CPU, **OWN) == OWN
    use({"fused_step": {CLASS: {"WARPS": 8}}}, name="another card")
    assert constants("fused_step", CLASS, CPU, **OWN) == OWN


def test_classes_have_the_names_of_kinds_and_dtypes():
    assert launch_class("column", torch.float32) == CLASS
    assert launch_class("whole", torch.bfloat16, stochastic=True) == "whole bfloat16 stochastic"
    assert launch_class("row", torch.bfloat16, stochastic=True, alone=True) == "row bfloat16 stochastic alone"
    expected = {
        "fused_step": CLASS, "fused_step_alone": f"{CLASS} alone", "gather_channels": CLASS, "scatter_channels": CLASS,
        "fused_step_stochastic": "column bfloat16 stochastic", "select_channels": ALL, "stochastic_rounding": ALL,
    }  # fmt: skip
    assert {op: class_of(op, problem()) for op in expected} == expected
    assert set(SHIPPED) - set(expected) == {"fused_step_whole"}


def edge(op: str, end: int) -> dict[str, int]:
    """The lowest (0) or the highest (1) of every constant."""
    return {name: bounds[end] for name, bounds in TUNABLE[SHIPPED[op]].items()}


@pytest.mark.parametrize("end", [0, 1], ids=["lowest", "highest"])
@pytest.mark.parametrize(("op", "layout"), [(op, layout) for op in SHIPPED for layout in OPS[op].layouts])
def test_what_may_be_tuned_changes_no_bit(op, layout, end, device, use, poisoned):
    if device == "cuda" and end == 1:
        pytest.skip(
            "all at once they need more registers than there are; the search compares those that can be launched"
        )
    use({})
    expected = result(op, layout, device)
    use({SHIPPED[op]: {class_of(op, problem(layout)): edge(op, end)}})
    taken = {knob.name: value for knob, value in todays(op, problem(layout, device)).items()}
    assert taken and taken.items() <= edge(op, end).items()
    assert all(torch.equal(one, other) for one, other in zip(result(op, layout, device), expected, strict=True))


def test_a_launch_takes_its_cards_constants(device, use, monkeypatch):
    launched: list[dict[str, Any]] = []

    class Kernel:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                launched.append(options)
                self.kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(fused_step, "_step_kernel", Kernel(fused_step._step_kernel))
    entry = {"STEP_TILE": 8192, "FOLD_BLOCK": 1024, "UPDATE_BLOCK": 256, "PARTS": 8, "WARPS": 8}
    use({"fused_step": {CLASS: entry, f"{CLASS} alone": entry | {"WARPS": 2}}})
    outputs_of(OPS["fused_step"].build(problem(device=device)))
    outputs_of(OPS["fused_step_alone"].build(problem(device=device)))
    outputs_of(OPS["fused_step"].build(problem("rows", device)))
    (knob,) = (knob for knob in KNOBS["fused_step"] if knob.name == "UPDATE_BLOCK")
    with launch_constants({knob: 1024}):
        outputs_of(OPS["fused_step"].build(problem(device=device)))
    seen = [
        (one["TILE"], one["BLOCK_R"] * one["BLOCK_C"], one["BLOCK"], one["PARTS"], one["num_warps"]) for one in launched
    ]
    fold, update, parts, warps = fused_step.FOLD_BLOCK, fused_step.UPDATE_BLOCK, fused_step.PARTS, fused_step.WARPS
    assert seen == [
        (8192, 1024, 256, 1, 8), (8192, 1024, 256, 8, 2), (STEP_TILE, fold, update, parts, warps),
        (STEP_TILE, fold, 1024, 1, warps),
    ]  # fmt: skip


def test_a_tables_tile_is_that_of_its_first_matrix(use: Use):
    use(
        {
            "fused_step": {
                CLASS: {"STEP_TILE": 1024},
                f"{CLASS} alone": {"STEP_TILE": 2048},
                "row float32": {"STEP_TILE": 4096},
            }
        }
    )
    whole, rows, columns = (problem(layout) for layout in ("whole", "rows", "columns"))
    made = [whole.entry(folds=False), columns.entry(folds=True), columns.entry(folds=False), rows.entry(folds=True)]
    assert [Table([made[0], one], 0).step_tile for one in made] == [STEP_TILE, 1024, 2048, 4096]
    assert Table([made[2], made[1]], 0).step_tile == 2048


BROKEN = [
    *(
        {"fused_step": {CLASS: {"UPDATE_BLOCK": value}}}
        for value in (0, -8, 3, 96, 32, 1 << 40, True, 256.0, "256", None)
    ),
    {"fused_step": {CLASS: {"BLOCK": 256}}},
    {"fused_step": {CLASS: [256]}},
    {"fused_step": 8},
    {"partial_norms": {CLASS: {"NORM_BLOCK": 2048, "WARPS": 4}}},
    {7: {CLASS: {"WARPS": 8}}},
    "NVIDIA",
]


@pytest.mark.parametrize("entry", BROKEN, ids=str)
def test_what_is_not_as_it_should_be_is_left_out_with_a_warning(entry, use, caplog):
    use(entry)
    with caplog.at_level(logging.WARNING, "zenflow"):
        for _ in range(2):
            assert constants("fused_step", CLASS, CPU, **OWN) == OWN
            assert constants("partial_norms", CLASS, CPU, NORM_BLOCK=4096, WARPS=8) == {"NORM_BLOCK": 4096, "WARPS": 8}
    assert caplog.messages and len(caplog.messages) == len(set(caplog.messages))  # said once
    assert all("this card" in message and "allowed" in message for message in caplog.messages)


def test_the_rest_of_a_broken_entry_is_used(use):
    use({"fused_step": {CLASS: {"UPDATE_BLOCK": 3, "WARPS": 8}, "row float32": None}, "gather_channels": 3})
    assert constants("fused_step", CLASS, CPU, **OWN) == OWN | {"WARPS": 8}


@pytest.mark.parametrize("card", CARDS)
def test_what_ships_is_sound(card, monkeypatch, caplog):
    monkeypatch.setattr(cards, "card", lambda device: card)
    cards._of_card.cache_clear()
    with caplog.at_level(logging.WARNING, "zenflow"):
        for op, classes in CARDS[card].items():
            for launch, values in classes.items():
                assert constants(op, launch, CPU, **dict.fromkeys(values, 0)) == values
    assert not caplog.messages


def test_only_what_the_search_tries_can_be_shipped_and_no_sum():
    """A sum's blocks are its order: `norm`, `importance` and `close_step` have nothing here."""
    for op, shipped in SHIPPED.items():
        tried = {knob.name: knob.values for knob in KNOBS[op]}
        assert set(tried) <= set(TUNABLE[shipped])
        for name, values in tried.items():
            low, high = TUNABLE[shipped][name]
            assert all(low <= value <= high for value in values)
    assert set(TUNABLE) == set(SHIPPED.values()) and not {"partial_norms", "channel_scores", "close_step"} & set(
        TUNABLE
    )


def test_a_table_may_still_be_given_its_tile(use):
    use({"fused_step": {"whole float32": {"STEP_TILE": 1024}}})
    entry = problem("whole").entry(folds=False)
    assert [Table([entry], 0).step_tile, Table([entry], 0, step_tile=48).step_tile] == [1024, 48]
    assert Table([], 0).step_tile == 1024


def test_nothing_is_tuned_in_production():
    """No kernel is autotuned or timed where it is used (D1)."""
    sources = list(Path(cards.__file__).parent.glob("*.py"))
    assert len(sources) > 12
    for path in sources:
        text = path.read_text(encoding="utf-8")
        assert not [word for word in ("autotune", "do_bench", "perf_counter", "Event(") if word in text], path.name


@pytest.mark.gpu
def test_a_card_is_known_by_its_name():
    device = torch.device("cuda", torch.cuda.current_device())
    assert cards.card(device) == torch.cuda.get_device_name() != ""
    assert cards.card(CPU) == ""
