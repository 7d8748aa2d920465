"""Which channels are selected, and that a selection moves state and changes none of it (I5, I8, D9)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.driving import DTYPES, assert_same_bits, backward, make_gradients, make_parameters, snapshot
from zenflow import ZenFlow
from zenflow.owners import candidates, select
from zenflow.selection import choose_channels

# Their squares and magnitudes add up exactly in fp32, whatever the order; few of them, so that scores tie.
NUMBERS = [0.0, -0.0, 0.25, -0.25, 0.5, 1.0, -2.0]
STRANGE = [math.nan, -math.nan, math.inf, -math.inf]
SHAPES = [(9, 16), (5, 7), (3, 4, 2), (1, 9), (17, 3)]


@st.composite
def gradients(draw: st.DrawFn, rows: int, cols: int) -> Tensor:
    strange = draw(st.lists(st.sampled_from(STRANGE), max_size=3))
    seed, few = draw(st.integers(0, 2**16)), draw(st.sampled_from([2, 4, len(NUMBERS)]))
    generator = torch.Generator().manual_seed(seed)
    grad = torch.tensor(NUMBERS)[torch.randint(0, few, (rows, cols), generator=generator)]
    for value in strange:
        grad.view(-1)[draw(st.integers(0, rows * cols - 1))] = value
    return grad


def importance(channel: list[float], kind: str) -> float:
    """Its score, as far as comparisons go: what is not finite comes behind everything."""
    if not all(math.isfinite(x) for x in channel):
        return -1.0
    return math.fsum(x * x if kind == "square" else abs(x) for x in channel)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(1, 9), cols=st.integers(1, 9), data=st.data(), by=st.sampled_from(["column", "row"]),
    kind=st.sampled_from(["square", "magnitude"]), dtype=st.sampled_from(sorted(DTYPES)),
)  # fmt: skip
def test_the_best_channels_win_and_ties_go_to_the_lower_index(
    rows: int, cols: int, data: st.DataObject, by: str, kind: str, dtype: str
) -> None:
    grad = data.draw(gradients(rows, cols))
    channels = (grad.T if by == "column" else grad).tolist()
    wanted = data.draw(st.integers(0, len(channels)))
    record = SimpleNamespace(kind=by, weight=grad, n_selected=wanted)
    (chosen,) = choose_channels([record], [grad.to(DTYPES[dtype])], kind)
    ranked = sorted(range(len(channels)), key=lambda index: (-importance(channels[index], kind), index))
    assert chosen.dtype == torch.int64
    assert chosen.tolist() == sorted(ranked[:wanted])


@pytest.fixture(scope="module", params=[("column", "bf16"), ("row", "fp32")], ids="-".join)
def engine(request: pytest.FixtureRequest) -> Iterator[tuple[ZenFlow, list[torch.nn.Parameter]]]:
    """One that has trained for some steps, and is not torn down between two examples: selection after selection."""
    channel_dim, dtype = request.param
    parameters = make_parameters(SHAPES, DTYPES[dtype])
    with ZenFlow(
        parameters, lr=0.02, topk_ratio=0.3, update_interval=2, select_interval=1, channel_dim=channel_dim,
        min_deferred_numel=0, worker_threads=1, bucket_bytes=128,
    ) as made:  # fmt: skip
        train(made, parameters, steps=5)
        yield made, parameters


def train(engine: ZenFlow, parameters: list[torch.nn.Parameter], steps: int, seed: int = 1) -> None:
    for grads in make_gradients(SHAPES, parameters[0].dtype, steps, seed=seed):
        backward(parameters, grads)
        engine.step()


def states(engine: ZenFlow, parameters: list[torch.nn.Parameter]) -> list[tuple[Tensor, ...]]:
    found = [engine.channel_state(parameter) for parameter in parameters]
    weights = snapshot(parameters)
    return [
        (x.master, x.exp_avg, x.exp_avg_sq, x.step.to(torch.int32), weight)
        for x, weight in zip(found, weights, strict=True)
    ]


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), steps=st.integers(0, 3))
def test_a_selection_moves_owners_and_no_bit_of_any_state(
    engine: tuple[ZenFlow, list[torch.nn.Parameter]], data: st.DataObject, steps: int
) -> None:
    """I5, I8: masters, moments, t and weights keep their bits; every channel has one owner before and after."""
    optimizer, parameters = engine
    train(optimizer, parameters, steps, seed=data.draw(st.integers(0, 99)))
    optimizer.flush()
    pipeline, before = optimizer._pipeline, states(optimizer, parameters)
    pipeline.grads = [
        data.draw(gradients(*record.weight.shape)).to(record.dtype).view(record.param.shape)
        for record in pipeline.records
    ]
    movable = candidates(pipeline)
    assert len(movable) >= 4
    with torch.no_grad():
        select(pipeline, movable, step=1)
    wanted = choose_channels(movable, [pipeline.grads[record.index] for record in movable], "square")
    pipeline.grads = []
    for old, new, name in zip(before, states(optimizer, parameters), range(len(parameters)), strict=True):
        for one, other in zip(old, new, strict=True):
            assert_same_bits(other, one, f"parameter {name}")
    for record, chosen in zip(movable, wanted, strict=True):
        assert record.selected.tolist() == chosen.tolist()
        owners = torch.full((record.slot.numel(),), -1, dtype=torch.int32)
        owners[chosen] = torch.arange(len(chosen), dtype=torch.int32)
        assert record.slot.tolist() == owners.tolist(), "the GPU's own list of what it owns"


def test_training_goes_on_after_many_selections(engine: tuple[ZenFlow, list[torch.nn.Parameter]]) -> None:
    optimizer, parameters = engine
    train(optimizer, parameters, steps=4)
    optimizer.flush()
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)
