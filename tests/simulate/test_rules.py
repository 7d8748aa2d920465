"""What the engine does not have, against arithmetic done by hand in float64, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from tests.engine.driving import assert_same_bits, feed, make_gradients, make_parameters
from tests.engine.simulation import TOGETHER
from zenflow import ZenFlowConfig
from zenflow.simulate.rule import Rule
from zenflow.simulate.simulation import Simulation

LR, BETA1, BETA2, DECAY = 0.01, 0.9, 0.99, 0.1
GRADS = [0.5, -1.0, 2.0, 0.25, 1.5, -0.75, 1.0, 3.0]
SHAPES = [(7, 13), (16, 12), (31, 3), (5,)]


def rule(own: dict[str, Any], **settings: Any) -> Rule:
    """On the schedule of the paper, where `settings` name no other."""
    return Rule(ZenFlowConfig(**{"topk_ratio": 0.0, "min_deferred_numel": 0} | TOGETHER | settings), **own)


def simulated(parameters: list[Parameter], chosen: Rule) -> Simulation:
    return Simulation(parameters, chosen, lr=LR, betas=(BETA1, BETA2), eps=1e-8, weight_decay=DECAY)


def one_weight(chosen: Rule, grads: list[float] = GRADS) -> list[float]:
    """What is visible of one deferred weight, 1 at first, after each step with these gradients."""
    weight = Parameter(torch.ones(2, 1))
    simulation, shown = simulated([weight], chosen), []
    for grad in grads:
        weight.grad = torch.full((2, 1), grad)
        simulation.step()
        shown.append(weight[0, 0].item())
    return shown


def windows_by_hand(update: Callable[[list[float]], tuple[float, float, int, int]]) -> list[float]:
    """The master after each window of four of GRADS; `update` gives from its gradients the first and second moment's
    new part and the powers of their betas."""
    p, m, v, t1, t2, found = 1.0, 0.0, 0.0, 0, 0, []
    for start in range(0, len(GRADS), 4):
        grad, square, n1, n2 = update(GRADS[start : start + 4])
        t1, t2 = t1 + n1, t2 + n2
        m = BETA1**n1 * m + (1 - BETA1**n1) * grad
        v = BETA2**n2 * v + (1 - BETA2**n2) * square
        p *= (1 - LR * DECAY) ** 4
        p -= 4 * LR * (m / (1 - BETA1**t1)) / ((v / (1 - BETA2**t2)) ** 0.5 + 1e-8)
        found.append(p)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("own", "update"),
    [
        ({"betas_per_window": "first"}, lambda g: (mean(g), mean(g) ** 2, 4, 1)),
        ({"betas_per_window": "both"}, lambda g: (mean(g), mean(g) ** 2, 4, 4)),
        ({"second_moment": "steps"}, lambda g: (mean(g), mean([x * x for x in g]), 1, 1)),
        (
            {"second_moment": "steps", "betas_per_window": "both"},
            lambda g: (mean(g), mean([x * x for x in g]), 4, 4),
        ),
    ],
    ids=["beta1^n", "both^n", "squares", "squares-both^n"],
)
def test_moments_of_a_window_are_those_of_the_formula(own, update):
    first, second = windows_by_hand(update)
    shown = one_weight(rule(own, overlap_step=False))
    assert shown == pytest.approx([1, 1, 1, first, first, first, first, second], rel=1e-6)
    assert shown[3::4] != pytest.approx(one_weight(rule({}, overlap_step=False))[3::4], rel=1e-4)


def test_a_window_of_one_step_is_an_ordinary_one_under_every_rule():
    plain = one_weight(rule({}, update_interval=1, overlap_step=False))
    for own in ({"betas_per_window": "both"}, {"second_moment": "steps"}, {"delay_compensation": 10.0}):
        assert one_weight(rule(own, update_interval=1, overlap_step=False)) == plain


@pytest.mark.parametrize("deferred_rule", ["accumulate", "replay"])
def test_compensated_gradients_are_those_at_the_master(deferred_rule):
    """Of half the square of the weight the gradient is the weight; with lambda = 1 / w^2 it is exact at the master.

    The second window's gradients are taken at 1, while the master has moved to what the first made of it: by hand, the
    same rule without delay, fed with the gradient at that master.
    """
    host = {"accumulate_on": "host", "deferred_rule": deferred_rule, "update_interval": 1}
    late = one_weight(rule({"delay_compensation": 1.0}, **host), [1.0, 1.0, 1.0])
    first = one_weight(rule({}, overlap_step=False, **host), [1.0])[0]
    prompt = one_weight(rule({}, overlap_step=False, **host), [1.0, first])
    assert late[:2] == [1.0, first]
    assert late[2] == pytest.approx(prompt[1], rel=1e-6)
    assert late[2] != one_weight(rule({}, **host), [1.0, 1.0, 1.0])[2]


def test_windows_grow():
    """Over 8 steps to U = 4: windows of 1, 1, 2, 3 steps begin with steps 1, 2, 3, 5, and one of 4 with step 8."""
    shown = one_weight(rule({"growing_rounds": 8}, overlap_step=False), GRADS + GRADS[:4])
    moved = [number for number, (old, new) in enumerate(zip([1.0, *shown], shown, strict=False), 1) if old != new]
    assert moved == [1, 2, 4, 7, 11]


def test_windows_that_have_grown_up_are_the_engine_s():
    parameters, others = make_parameters(SHAPES), make_parameters(SHAPES)
    growing = simulated(parameters, rule({"growing_rounds": 1}, stagger=True, topk_ratio=0.3, update_interval=3))
    plain = simulated(others, rule({}, stagger=True, topk_ratio=0.3, update_interval=3))
    for grads in make_gradients(SHAPES, steps=9):
        for simulation, weights in ((growing, parameters), (plain, others)):
            feed(weights, grads)
            simulation.step()
    growing.flush()
    plain.flush()
    assert growing.windows == plain.windows
    for one, other in zip(parameters, others, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("cut", [5, 8], ids=["mid-window", "window-end"])
def test_a_resumed_simulation_gives_the_same_bits(cut):  # I7
    own = {"delay_compensation": 5.0, "second_moment": "steps", "betas_per_window": "first", "growing_rounds": 6}
    chosen = rule(own, stagger=True, topk_ratio=0.3, select_interval=4, weight_prediction=0.5, max_grad_norm=0.5)
    stream = make_gradients(SHAPES, steps=14)
    whole = make_parameters(SHAPES)
    uninterrupted = simulated(whole, chosen)
    for number, grads in enumerate(stream):
        if number == cut:
            state, weights = uninterrupted.state_dict(), [weight.detach().clone() for weight in whole]
        feed(whole, grads)
        uninterrupted.step()
    parts = [Parameter(weight) for weight in weights]
    resumed = simulated(parts, chosen)
    resumed.load_state_dict(state)
    for grads in stream[cut:]:
        feed(parts, grads)
        resumed.step()
    for one, other in zip(whole, parts, strict=True):
        assert_same_bits(one, other)
    assert (resumed.windows, resumed.selections) == (uninterrupted.windows, uninterrupted.selections)


def test_a_state_of_other_parameters_changes_nothing():
    simulation = simulated(make_parameters(SHAPES), rule({}))
    other = simulated(make_parameters(SHAPES[:2]), rule({})).state_dict()
    with pytest.raises(ValueError, match=r"state is of matrices \[\(7, 13\), \(16, 12\)\]; allowed here"):
        simulation.load_state_dict(other)
    assert simulation.steps == 0


@pytest.mark.parametrize(
    ("own", "settings", "message"),
    [
        ({"betas_per_window": "third"}, {}, "betas_per_window is 'third'; allowed: 'none' or 'first' or 'both'"),
        ({"second_moment": "sum"}, {}, "second_moment is 'sum'; allowed: 'mean' or 'steps'"),
        ({"delay_compensation": -1.0}, {}, "delay_compensation is -1.0; allowed: a finite number >= 0"),
        ({"delay_compensation": float("nan")}, {}, "delay_compensation is nan"),
        ({"growing_rounds": -1}, {}, "growing_rounds is -1; allowed: an integer >= 0"),
        ({}, {"on_reselect": "reset"}, "on_reselect is 'reset'; allowed: 'migrate'"),
        ({}, {"selected_masters": "stochastic"}, "selected_masters is 'stochastic'; allowed: 'float32'"),
        ({}, {"importance_over": "window"}, "importance_over is 'window'; allowed: 'step'"),
        (
            {"second_moment": "steps"},
            {"deferred_rule": "replay", "accumulate_on": "host"},
            "second_moment is 'steps'; allowed: 'mean' under deferred_rule='replay'",
        ),
    ],
)
def test_a_rule_that_cannot_be_is_refused_by_name(own, settings, message):
    with pytest.raises(ValueError) as caught:
        rule(own, **settings)
    assert message in str(caught.value)


def test_parameters_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"not contiguous"):
        simulated([Parameter(torch.zeros(3, 4).T)], rule({}))
    with pytest.raises(ValueError, match=r"torch\.float64; allowed"):
        simulated([Parameter(torch.zeros(3, 4, dtype=torch.float64))], rule({}))
    frozen = Parameter(torch.zeros(3, 4, dtype=torch.float64), requires_grad=False)
    assert simulated([frozen], rule({})).master(frozen) is None
