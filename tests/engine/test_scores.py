"""Scores over a window and over all steps (`importance_over`): by hand, and what must not change them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zenflow_kernels.running_scores import RunningScores

from tests.engine.driving import (
    DTYPES,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
)
from zenflow import ZenFlow

OVER = ["window", "average"]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 4, "select_interval": 6}


def scores_of(engine: ZenFlow) -> list[Tensor | None]:
    """By parameter, in the order in which they were laid out."""
    pipeline = engine._pipeline
    return [pipeline.scores.of(record) for record in pipeline.records]


def run(engine: ZenFlow, parameters: list[nn.Parameter], stream: list[Any]) -> None:
    for grads in stream:
        feed(parameters, grads)
        engine.step()


def run_rows(engine: ZenFlow, parameter: nn.Parameter, rows: list[list[float]]) -> None:
    """Of one parameter `[1, n]`, a gradient a step."""
    run(engine, [parameter], [[torch.tensor([row], dtype=torch.float32)] for row in rows])


def owners(engine: ZenFlow, parameters: list[nn.Parameter]) -> list[list[bool]]:
    return [engine.channel_state(parameter).selected.tolist() for parameter in parameters]


@pytest.mark.parametrize(
    ("over", "importance", "expected"),
    [
        ("step", "square", 0),  # 1 beside 0, 0.25 and 0
        ("window", "square", 1),  # 1 beside 9, 8.09 and 0
        ("window", "magnitude", 2),  # 1 beside 3, 3.3 and 0
        ("average", "square", 3),  # what is left of 10 ** 2 in the first window
    ],
)
def test_by_hand(over: str, importance: str, expected: int, device: str, build: Builder) -> None:
    """Two windows, in the second of which a step is skipped; at its end one channel of four is selected."""
    (parameter,) = make_parameters([(1, 4)], torch.float32, device)
    engine = build(
        [parameter], topk_ratio=0.25, update_interval=3, select_interval=6, importance=importance, importance_over=over
    )
    nan = float("nan")
    rows = [[0, 0, 0, 1], [0, 0, 0, 10], [0, 0, 0, 10], [0, 3, 2.8, 0], [99, 99, nan, 99], [1, 0, 0.5, 0]]
    run_rows(engine, parameter, rows)
    assert (engine.stats().selections, engine.stats().skipped_steps) == (2, 1)
    assert owners(engine, [parameter])[0] == [channel == expected for channel in range(4)]
    if over != "step":
        (scores,) = scores_of(engine)
        assert bool(scores.isfinite().all()) and int(scores.argmax()) == expected


def test_under_step_nothing_is_computed_kept_or_saved(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunningScores, "__init__", None)
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    run(engine, parameters, make_gradients(SHAPES, torch.bfloat16, 9))
    assert engine.stats().selections == 2 and not any(scores_of(engine))
    assert not any("scores" in entry for entry in engine.state_dict()["state"].values())


def test_scores_are_kept_of_matrices_that_have_both_kinds_of_channels(device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS, importance_over="average", min_deferred_numel=10)
    kept = [None if scores is None else (scores.dtype, len(scores)) for scores in scores_of(engine)]
    sizes = [12, 13, None, 24, None, 3, None]
    assert kept == [size and (torch.float32, size) for size in sizes]
    for ratio in (0, 1):
        parameters = make_parameters(SHAPES, torch.bfloat16, device)
        assert not any(scores_of(build(parameters, **SETTINGS | {"topk_ratio": ratio}, importance_over="average")))


@pytest.mark.parametrize(("over", "expected"), [("window", range(7, 13)), ("average", range(1, 15))])
def test_a_window_is_scored_if_a_selection_can_come_at_its_end(
    over: str, expected: range, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U 4: a selection falls due in step 10 and runs in 12; from step 7 on it could have been this window's."""
    scored: list[int] = []
    add = RunningScores.add
    parameters = make_parameters([(6, 8)], torch.float32, device)
    engine = build(parameters, **SETTINGS | {"select_interval": 10}, importance_over=over)
    clock = engine._pipeline.clock
    monkeypatch.setattr(
        RunningScores, "add", lambda self, control: scored.append(clock.state.step) or add(self, control)
    )
    run(engine, parameters, make_gradients([(6, 8)], steps=14))
    assert scored == [*expected]
    assert engine.stats().selections == 2


@pytest.mark.parametrize("over", OVER)
@pytest.mark.parametrize("importance", ["square", "magnitude"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_loss_scale_is_in_no_score(dtype: str, importance: str, over: str, device: str, build: Builder) -> None:
    """Another power of two in every step, as GradScaler multiplies the loss by: not one bit differs."""
    engines = []
    for scaled in (False, True):
        parameters = make_parameters(SHAPES, DTYPES[dtype], device)
        engine = build(parameters, **SETTINGS, importance=importance, importance_over=over)
        for step, grads in enumerate(make_gradients(SHAPES, DTYPES[dtype], 9, exact=True)):
            scale = 2.0 ** (step % 5 + 3) if scaled else 1.0
            feed(parameters, [grad * scale for grad in grads])
            engine.grad_scale = torch.tensor([scale], device=device)
            engine.step()
        engines.append((scores_of(engine), owners(engine, parameters)))
    assert engines[0][1] == engines[1][1]
    for one, other in zip(engines[0][0], engines[1][0], strict=True):
        if one is not None:
            assert bool(one.any())
            assert_same_bits(other, one)


def test_scores_are_of_the_clipped_gradient(device: str, build: Builder) -> None:
    """Before clipping the second step would weigh 100 times as much as the first; it is clipped to the same norm."""
    (parameter,) = make_parameters([(1, 4)], torch.float32, device)
    engine = build(
        [parameter], topk_ratio=0.25, update_interval=3, select_interval=3, importance_over="window", max_grad_norm=1.0
    )
    rows = [[3.0, 4, 0, 0], [0, 40, 30, 0], [3, 0, 4, 0]]
    run_rows(engine, parameter, rows)
    (scores,) = scores_of(engine)
    torch.testing.assert_close(scores.cpu(), torch.tensor([0.72, 1.28, 1.0, 0.0]))
    assert owners(engine, [parameter]) == [[False, True, False, False]]


def test_an_average_forgets_a_square_beyond_fp32(device: str, build: Builder) -> None:
    """A finite gradient of 1e30: its step counts for nothing there, and its channel is selected later."""
    (parameter,) = make_parameters([(1, 4)], torch.float32, device)
    engine = build(
        [parameter],
        topk_ratio=0.25,
        update_interval=2,
        select_interval=4,
        importance_over="average",
        importance_decay=0,
    )
    rows = [[1.0, 0, 0, 0], [0, 0, 1e30, 0], [0, 1, 0, 0], [0, 1, 2, 0]]
    run_rows(engine, parameter, rows)
    assert engine.stats().skipped_steps == 0
    assert owners(engine, [parameter]) == [[False, False, True, False]]


@pytest.mark.parametrize("over", OVER)
def test_a_late_parameter_begins_its_scores_with_its_first_gradient(over: str, device: str, build: Builder) -> None:
    pair = Pair(
        build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, importance_over=over, importance_decay=0.7
    )
    for step, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 14), start=1):
        if step < 7:
            grads[0] = grads[3] = None
        pair.step(grads)
    pair.check_state()


MOVES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "step-to-window": ({"importance_over": "step"}, {"importance_over": "window"}, False),
    "step-to-average": ({"importance_over": "step"}, {"importance_over": "average"}, False),
    "window-to-average": ({"importance_over": "window"}, {"importance_over": "average"}, False),
    "average-to-step": ({"importance_over": "average"}, {"importance_over": "step"}, False),
    "square-to-magnitude": (
        {"importance_over": "average"},
        {"importance_over": "average", "importance": "magnitude"},
        False,
    ),
    "other-decay": ({"importance_over": "average"}, {"importance_over": "average", "importance_decay": 0.5}, True),
    "other-interval": (
        {"importance_over": "window"},
        {"importance_over": "window", "select_interval": 50},
        True,
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_a_state_moves_between_settings(name: str, device: str, build: Builder) -> None:
    """In the middle of a window: where the kind of score differs, it begins anew; selections go on."""
    before, after, kept = MOVES[name]
    parameters, others = (make_parameters(SHAPES, torch.bfloat16, device, seed=seed) for seed in (0, 5))
    engine, moved = build(parameters, **SETTINGS, **before), build(others, **{**SETTINGS, **after})
    stream = make_gradients(SHAPES, torch.bfloat16, 14)
    run(moved, others, stream[:1])  # what it has of its own is forgotten
    run(engine, parameters, stream[:6])
    moved.load_state_dict(engine.state_dict())
    for one, other in zip(scores_of(engine), scores_of(moved), strict=True):
        if other is not None:
            assert_same_bits(other, one if kept else torch.zeros_like(other))
            assert kept == bool(other.any())
    run(moved, others, stream[6:])
    assert moved.stats().selections == (2 if "select_interval" in after else 3)


def test_a_window_that_was_not_scored_leaves_nothing_of_the_one_before(device: str, build: Builder) -> None:
    """Scored up to step 8, whose selection has run, not in 9 and 10; then other intervals ask for a selection in 12."""
    parameters = make_parameters([(1, 4), (1, 4)], torch.float32, device)
    settings = {"topk_ratio": 0.25, "update_interval": 4, "importance_over": "window"}
    engine, moved = (
        build([parameter], **settings, select_interval=interval)
        for parameter, interval in zip(parameters, (8, 3), strict=True)
    )
    run_rows(engine, parameters[0], [[100, 0, 0, 0]] * 8 + [[0, 0, 50, 0]] * 2)
    moved.load_state_dict(engine.state_dict())
    run_rows(moved, parameters[1], [[0, 3, 2, 0]] * 2)
    assert scores_of(moved)[0].tolist() == [0, 18, 8, 0]
    assert owners(moved, parameters[1:]) == [[False, True, False, False]]


def test_an_older_state_loads_and_scores_begin_anew(device: str, build: Builder) -> None:
    settings = {**SETTINGS, "importance_over": "average"}
    parameters, others = (make_parameters(SHAPES, torch.bfloat16, device, seed=seed) for seed in (0, 5))
    engine, older = build(parameters, **settings), build(others, **settings)
    stream = make_gradients(SHAPES, torch.bfloat16, 8)
    run(engine, parameters, stream[:5])
    saved = engine.state_dict()
    for entry in saved["state"].values():
        entry.pop("scores", None)
    for name in ("importance_over", "importance_decay"):
        del saved["zenflow"]["config"][name]
    older.load_state_dict(saved)
    assert not any(bool(scores.any()) for scores in scores_of(older) if scores is not None)
    for each, params in ((engine, parameters), (older, others)):
        run(each, params, stream[5:7])  # as far as no selection comes
    for one, other in zip(others, parameters, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.zeros(11), r"\(11,\)"),
        (torch.zeros(12, dtype=torch.float64), "float64"),
        (torch.full((12,), float("nan")), "NaN"),
        ([0.0] * 12, r"\[0.0"),
    ],
    ids=["length", "dtype", "nan", "list"],
)
def test_scores_that_do_not_fit_are_refused_by_name(value: Any, words: str, device: str, build: Builder) -> None:
    settings = {**SETTINGS, "importance_over": "average"}
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **settings)
    run(engine, parameters, make_gradients(SHAPES, torch.bfloat16, 2))
    saved = engine.state_dict()
    saved["state"][0]["scores"] = value
    with pytest.raises(ValueError, match=f"^scores of parameter 0 of group 0 .*{words}"):
        engine.load_state_dict(saved)
