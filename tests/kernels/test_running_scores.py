"""Scores over several steps: sums, averages, what is left out, and the kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from zenflow_kernels.channels import channel_axis
from zenflow_kernels.control import FOLD_ADD, FOLD_NONE, FOLD_OVERWRITE
from zenflow_kernels.importance import channel_scores
from zenflow_kernels.running_scores import RunningScores

from tests.kernels.building import Spec, World, bits, make_world

# Rows of whole vectors and others, more than one run, more than one block of channels, and what keeps no scores.
SPECS = [
    Spec("column", 517, 9, 2),
    Spec("row", 9, 517, 3),
    Spec("column", 3, 264, 5),
    Spec("whole", 1, 33),
    Spec("row", 300, 8, 7, shift=1),
    Spec("column", 5, 6, 0),
    Spec("column", 1, 1, 1),
    Spec("row", 0, 8, 0),
]
KEPT = [0, 1, 2, 4, 6]
FOLDS = [FOLD_OVERWRITE, FOLD_ADD, FOLD_NONE, FOLD_ADD]  # of the steps


def exact_gradients(world: World, seed: int) -> list[torch.Tensor | None]:
    """Small whole numbers, whose sums no order changes; in every other step the second entry has none, and a row is off
    its alignment."""
    generator = torch.Generator().manual_seed(seed)
    table = world.table
    drawn = [torch.randint(-3, 4, entry.shape, generator=generator).to(table.weight_dtype) for entry in table.entries]
    grads = [world.pad.hold(grad, spec.shift * (seed % 2)) for grad, spec in zip(drawn, SPECS, strict=True)]
    return [None if number == 1 and seed % 2 else grad for number, grad in enumerate(grads)]


def decide(world: World, step: int) -> None:
    """By hand: every parameter's fold one step behind that of the one before it, none where the gradient is absent."""
    control, grads = world.control, world.table.grads
    for number, grad in enumerate(grads):
        fold = FOLD_NONE if grad is None else FOLDS[(step + number) % len(FOLDS)]
        control.fold[world.table.first + number] = fold
    control.inv_scale.fill_(0.25)
    control.clip.fill_(0.3 + step / 7)


def by_hand(kept: torch.Tensor, grad: torch.Tensor, kind: str, fold: int, world: World, importance: str, rate):
    """fp32, one operation at a time."""
    x = grad.cpu().double()
    s = (x * x if importance == "square" else x.abs()).sum(1 - channel_axis(kind)).float()
    factor = (world.control.inv_scale * world.control.clip).cpu()
    s = s * factor * factor if importance == "square" else s * factor
    if fold == FOLD_NONE:
        return kept
    if rate is not None:
        return kept + (s - kept) * torch.tensor(rate, dtype=torch.float32)
    return s if fold == FOLD_OVERWRITE else kept + s


@pytest.mark.parametrize(
    ("importance", "rate"),
    [("square", None), ("magnitude", 0.1), ("square", 1.0)],
    ids=["square-sum", "magnitude-average", "square-latest"],
)
def test_scores_follow_the_written_order(importance, rate, device, dtype, poisoned):
    """Bit for bit by hand and with the reference; skipped, absent and first steps of windows, each by its fold."""
    world = make_world(SPECS, device, dtype)
    twin = world.twin()
    running, reference = (RunningScores(each.table, importance, rate) for each in (world, twin))
    assert [number for number, scores in enumerate(running.scores) if scores is not None] == KEPT
    expected = {number: torch.zeros(world.table.entries[number].channels) for number in KEPT}
    for step in range(len(FOLDS)):
        grads = exact_gradients(world, step)
        world.table.bind(grads)
        twin.table.bind([None if grad is None else grad.cpu() for grad in grads])
        for each in (world, twin):
            decide(each, step)
        running.add(world.control)
        reference.add_reference(twin.control)
        for number in KEPT:
            entry, grad = world.table.entries[number], grads[number]
            if grad is not None:
                fold = int(world.control.fold[world.table.first + number])
                expected[number] = by_hand(expected[number], grad, entry.kind, fold, world, importance, rate)
            for each in (running, reference):
                assert torch.equal(bits(each.scores[number]), bits(expected[number])), (step, number)
    world.pad.check()
    running.clear()
    assert not any(bool(running.scores[number].any()) for number in KEPT)


@pytest.mark.parametrize("kind", ["column", "row"])
def test_a_single_step_is_its_channel_scores(kind, device, dtype):
    """The same bits as `channel_scores`, by which a selection by one step goes: numbers that no sum holds exactly."""
    world = make_world([Spec(kind, 515, 24, 3), Spec(kind, 33, 7, 3)], device, dtype)
    world.control.fold.fill_(FOLD_OVERWRITE)
    world.control.inv_scale.fill_(1)
    world.control.clip.fill_(1)
    grads = list(world.table.grads)
    running = RunningScores(world.table, "square")
    running.add(world.control)
    for scores, grad in zip(running.scores, grads, strict=True):
        alone = channel_scores(grad, kind, "square")
        assert torch.equal(bits(scores), bits(torch.where(alone.isfinite(), alone, 0.0)))


@pytest.mark.parametrize("rate", [None, 0.5], ids=["sum", "average"])
def test_scores_that_are_not_finite_count_for_nothing(rate, device):
    """A square beyond fp32 in a finite gradient, and what a skipped step holds."""
    world = make_world([Spec("column", 2, 3, 1)], device, torch.float32, first=0)
    running, control = RunningScores(world.table, "square", rate), world.control
    control.inv_scale.fill_(1)
    control.clip.fill_(1)
    steps = [
        (FOLD_OVERWRITE, [[1.0, 2.0, 1e30], [1.0, 0.0, 0.0]]),
        (FOLD_NONE, [[float("nan"), float("inf"), 1.0], [1.0, 1.0, 1.0]]),
        (FOLD_ADD, [[1.0, 3e38, 1.0], [1.0, 0.0, 1.0]]),
    ]
    for fold, grad in steps:
        control.fold.fill_(fold)
        world.table.bind([torch.tensor(grad, device=device)])
        running.add(control)
    assert running.scores[0].tolist() == ([4.0, 4.0, 2.0] if rate is None else [1.5, 2.0, 1.0])


@pytest.mark.parametrize(
    ("importance", "rate", "words"),
    [("cube", None, "'cube'"), ("square", 0.0, "got 0.0"), ("square", 1.01, "1.01"), ("square", float("nan"), "nan")],
)
def test_wrong_settings_are_refused_by_value(importance, rate, words):
    world = make_world([Spec("column", 2, 3, 1)], "cpu", torch.float32)
    with pytest.raises(ValueError, match=words):
        RunningScores(world.table, importance, rate)
