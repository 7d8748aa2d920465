"""The simulation that the engine is compared with, itself compared with torch and with arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from tests.engine.driving import assert_same_bits, make_gradients, make_parameters, snapshot
from tests.engine.simulated_state import Group
from tests.engine.simulation import Reference, Simulation

SHAPES = [(6, 5), (3, 4, 2), (7,), ()]
GROUP = Group(lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)


def run(model: Simulation | Reference, steps: int, exact: bool = False) -> None:
    for grads in make_gradients(SHAPES, steps=steps, exact=exact):
        model.step(grads)


def weights() -> list[torch.Tensor]:
    return snapshot(make_parameters(SHAPES))


@pytest.mark.parametrize("max_grad_norm", [None, 0.5], ids=["no-clip", "clip"])
def test_reference_follows_torch_in_float64(max_grad_norm: float | None) -> None:
    reference = Reference(weights(), [GROUP] * len(SHAPES), max_grad_norm)
    doubles = [torch.nn.Parameter(weight.double()) for weight in weights()]
    torch_adamw = torch.optim.AdamW(doubles, lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    for grads in make_gradients(SHAPES, steps=40):
        reference.step(grads)
        for parameter, grad in zip(doubles, grads, strict=True):
            parameter.grad = grad.double()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(doubles, max_grad_norm)
        torch_adamw.step()
    for index, parameter in enumerate(doubles):
        torch.testing.assert_close(reference.visible(index).double(), parameter.detach(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"topk_ratio": 1},
        {"topk_ratio": 0, "update_interval": 1, "overlap_step": False},
        {"topk_ratio": 0.4, "update_interval": 1, "overlap_step": False, "select_interval": 3},
        {"topk_ratio": 0.4, "update_interval": 4, "full_warm_up_rounds": 20},
        {"topk_ratio": 0.4, "update_interval": 4, "min_deferred_numel": 31},
    ],
    ids=["k=1", "k=0-U=1", "U=1", "warm-up", "all-whole"],
)
def test_where_nothing_is_late_the_simulation_is_the_reference(settings: dict[str, object]) -> None:
    simulation = Simulation(weights(), [GROUP] * len(SHAPES), max_grad_norm=0.7, **settings)
    reference = Reference(weights(), [GROUP] * len(SHAPES), 0.7)
    run(simulation, 20)
    run(reference, 20)
    for index, (state, expected) in enumerate(zip(simulation.states, reference.states, strict=True)):
        assert_same_bits(simulation.visible(index), reference.visible(index))
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert_same_bits(getattr(state, name), getattr(expected, name))
        assert set(state.step.tolist()) == {20}


def test_overlap_shows_a_window_one_window_later() -> None:
    late = Simulation(weights(), [GROUP] * 4, topk_ratio=0, update_interval=2)
    prompt = Simulation(weights(), [GROUP] * 4, topk_ratio=0, update_interval=2, overlap_step=False)
    shown = {}
    for step, grads in enumerate(make_gradients(SHAPES, steps=8), start=1):
        late.step(grads)
        prompt.step(grads)
        shown[step] = (late.visible(0).clone(), prompt.visible(0).clone())
    assert torch.equal(shown[2][0], weights()[0])
    for step in (4, 6, 8):
        assert torch.equal(shown[step][0], shown[step - 2][1])
        assert not torch.equal(shown[step][0], shown[step][1])


def test_owners_steps_and_windows_by_hand() -> None:
    """One matrix of four columns, k 0.25, U 2, selection due at step 4: t counts the updates a channel received."""
    simulation = Simulation([torch.zeros(1, 4)], [GROUP], topk_ratio=0.25, update_interval=2, select_interval=4)
    stream = [[1.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 2.0, 0, 0], [0, 0, 3.0, 3.0], [0, 1.0, 0, 0], [0, 1.0, 0, 0]]
    owners, steps = [], []
    for row in stream:
        simulation.step([torch.tensor([row])])
        owners.append(simulation.states[0].selected.nonzero().flatten().tolist())
        steps.append(simulation.states[0].step.tolist())
    assert owners == [[0], [0], [0], [2], [2], [2]]
    assert steps == [[1, 0, 0, 0], [2, 1, 1, 1], [3, 1, 1, 1], [4, 2, 2, 2], [4, 2, 3, 2], [5, 3, 4, 3]]


@pytest.mark.parametrize("scale", ["linear", "none", 0.5])
def test_a_deferred_window_moves_by_the_documented_learning_rate(scale: str | float) -> None:
    """Constant gradient 1 and no decay: every AdamW update moves by its learning rate, whatever t is."""
    group = Group(lr=0.125, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    simulation = Simulation(
        [torch.zeros(2, 2)], [group], topk_ratio=0, update_interval=4, overlap_step=False, deferred_lr_scale=scale
    )
    for _ in range(8):
        simulation.step([torch.ones(2, 2)])
    factor = {"linear": 4, "none": 1, 0.5: 0.5}[scale]
    torch.testing.assert_close(simulation.visible(0), torch.full((2, 2), -2 * 0.125 * factor))


@pytest.mark.parametrize("after", [1, 2])
def test_a_late_result_is_shown_with_its_own_change_added_and_a_flush_shows_masters(after: int) -> None:
    """Every update moves by 2 steps times 0.125, and a prediction by half of that more; a step later, or two."""
    group = Group(lr=0.125, betas=(0.9, 0.99), eps=0.0, weight_decay=0.0)
    simulation = Simulation(
        [torch.zeros(2, 2)], [group], topk_ratio=0, update_interval=2, visible_after=after, weight_prediction=0.5
    )
    shown = []
    for _ in range(7):
        simulation.step([torch.ones(2, 2)])
        shown.append(simulation.visible(0)[0, 0].item())
    late = [0, 0, *([] if after == 1 else [0]), -0.375, -0.375, -0.625, -0.625, -0.875]
    assert shown == pytest.approx(late[:7], abs=1e-6)
    simulation.flush()
    assert simulation.visible(0)[0, 0].item() == pytest.approx(-0.875)


def test_a_skipped_step_changes_nothing_but_the_clock() -> None:
    simulation = Simulation(weights(), [GROUP] * 4, topk_ratio=0.4, update_interval=3)
    stream = make_gradients(SHAPES, steps=3)
    simulation.step(stream[0])
    before = [(s.master.clone(), s.step.clone(), s.accumulator.clone(), len(s.counted)) for s in simulation.states]
    stream[1][0][0, 0] = float("inf")
    simulation.step(stream[1])
    after = [(s.master, s.step, s.accumulator, len(s.counted)) for s in simulation.states]
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old[:3], new[:3], strict=True))
        assert old[3] == new[3]
    assert (simulation.skipped, simulation.position) == (1, 2)
