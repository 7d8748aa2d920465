"""Views that are not contiguous: every op refuses them by name, as the kernels read and write runs of neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from zenflow_kernels.fused_step import fused_step
from zenflow_kernels.gather import gather_channels
from zenflow_kernels.importance import channel_scores, grouped_scores
from zenflow_kernels.norm import partial_norms
from zenflow_kernels.scatter import scatter_channels_
from zenflow_kernels.stochastic_rounding import round_stochastically
from zenflow_kernels.table import Table
from zenflow_kernels.topk import grouped_choices, select_channels

from tests.kernels.building import Spec, World, make_world

WIDE = torch.zeros(6, 12)
VIEWS = {"transposed": WIDE[:, :6].T, "every other": WIDE[:, ::2], "a part of each row": WIDE[:, 3:9]}
INDEX, STRIDED = torch.tensor([1, 2]), torch.zeros(8, dtype=torch.int64)[::4]
MATRIX_OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "channel_scores": lambda x: channel_scores(x, "column", "square"),
    "grouped_scores": lambda x: grouped_scores([torch.zeros(2, 2), x], "row", "magnitude"),
    "gather_channels": lambda x: gather_channels(x, INDEX, "row"),
    "scatter_channels_": lambda x: scatter_channels_(x, INDEX, torch.zeros(2, 6), "row"),
    "round_stochastically": lambda x: round_stochastically(x, seed=0, step=0),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("op", MATRIX_OPS.values(), ids=MATRIX_OPS.keys())
def test_a_matrix_that_is_a_view_is_refused(op, view):
    assert not view.is_contiguous() and view.shape == (6, 6)
    with pytest.raises(ValueError, match=rf"x must be contiguous.*\(6, 6\) with strides \({view.stride(0)}, "):
        op(view)
    op(view.contiguous())


@pytest.fixture
def world() -> World:
    return make_world([Spec("column", 6, 6, 2)], "cpu", torch.float32)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("name", ["weight", "accumulator"])
def test_a_parameter_that_is_a_view_is_refused(name, view, world):
    with pytest.raises(ValueError, match=rf"entry 0: {name} must be contiguous"):
        Table([replace(world.table.entries[0], **{name: view})], 0)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_gradient_that_is_a_view_is_refused(view, world):
    with pytest.raises(ValueError, match="gradient 0 must be contiguous"):
        world.table.bind([view])


STATE = ("master", "exp_avg", "exp_avg_sq", "start", "slot")


@pytest.mark.parametrize("name", STATE)
def test_a_state_that_is_a_view_is_refused(name, world):
    tensor = getattr(world.table.entries[0], name)
    strided = torch.stack([tensor, tensor], dim=-1)[..., 0]
    with pytest.raises(ValueError, match=rf"entry 0: {name} must be contiguous"):
        Table([replace(world.table.entries[0], **{name: strided})], 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_channels(torch.zeros(8)[::2], 1), "scores must be contiguous"),
        (lambda: grouped_choices([torch.zeros(4), torch.zeros(8)[::2]], [1, 1]), "scores must be contiguous"),
        (lambda: gather_channels(torch.zeros(6, 6), STRIDED, "row"), "index must be contiguous"),
        (lambda: scatter_channels_(torch.zeros(6, 6), STRIDED, torch.zeros(2, 6), "row"), "index must be contiguous"),
        (
            lambda: scatter_channels_(torch.zeros(6, 6), INDEX, torch.zeros(2, 12)[:, ::2], "row"),
            r"values must be contiguous.*strides \(12, 2\)",
        ),
    ],
    ids=["scores", "several scores", "index to gather", "index to scatter", "values"],
)
def test_a_vector_or_values_that_are_a_view_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_factors_and_sums_that_are_views_are_refused():
    world = make_world([Spec("column", 40, 6, 2)], "cpu", torch.float32)
    assert world.table.n_partials > 1
    wide = torch.zeros(world.hyper.shape[0], 2 * world.hyper.shape[1])[:, ::2]
    with pytest.raises(ValueError, match="hyper must be contiguous"):
        fused_step(world.table, world.control, wide, world.bias)
    with pytest.raises(ValueError, match="bias must be contiguous"):
        fused_step(world.table, world.control, world.hyper, world.bias.repeat(1, 2, 1)[:, ::2])
    with pytest.raises(ValueError, match="partials must be contiguous"):
        partial_norms(world.table, torch.zeros(2 * world.table.n_partials, dtype=torch.float64)[::2])
