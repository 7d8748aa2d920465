"""Shares and survival on gradients whose right figures can be told beforehand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from zenflow_kernels.importance import channel_scores_reference
from zenflow_kernels.topk import select_channels_reference

from zenflow.locality.config import LocalitySettings
from zenflow.locality.figures import kind_rows, matrix_rows, share_rows, survival_rows
from zenflow.locality.study import CURVE, DIMS, Study, Subject, Track
from zenflow.training.errors import InputError

SETTINGS = LocalitySettings(shares=[0.01, 0.1, 0.5], lags=[1, 3, 5], topk_ratio=0.1, min_numel=1)


def gradient(scores: list[float], dim: str, length: int = 7) -> torch.Tensor:
    """A matrix whose channels have these squared norms, each spread evenly over `length` elements."""
    parts = (torch.tensor(scores, dtype=torch.float64) / length).sqrt().float()
    return parts.expand(length, -1).contiguous() if dim == "column" else parts[:, None].expand(-1, length).contiguous()


def watch(steps: list[dict[str, torch.Tensor | None]], settings: LocalitySettings = SETTINGS) -> Study:
    """A study of parameters that get these gradients, by name, one dictionary a step."""
    shapes = {name: grad.shape for grads in steps for name, grad in grads.items() if grad is not None}
    weights = {name: Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    study = Study(weights.items(), settings)
    for grads in steps:
        for name, weight in weights.items():
            grad = grads.get(name)
            weight.data = weight.data.to(weight.dtype if grad is None else grad.dtype)
            weight.grad = grad
        study.observe()
    return study


def track(study: Study, dim: str, name: str = "w") -> Track:
    (found,) = (one for one in study.tracks if (one.subject.dim, one.subject.name) == (dim, name))
    return found


@pytest.mark.parametrize("dim", DIMS)
def test_the_top_channels_share_is_that_of_their_squares(dim):
    """100 channels with the squared norms 1 to 100, in a mixed order: 5050 in all."""
    scores = torch.randperm(100, generator=torch.Generator().manual_seed(0)) + 1.0
    found = track(watch([{"w": gradient(scores.tolist(), dim)}]), dim)
    wanted = [100, sum(range(91, 101)), sum(range(51, 101))]
    assert found.shares == pytest.approx([value / 5050 for value in wanted], rel=1e-6)
    other = track(watch([{"w": gradient(scores.tolist(), dim)}]), DIMS[1 - DIMS.index(dim)])
    assert other.shares == pytest.approx([1 / 7, 1 / 7, 4 / 7], rel=1e-6)  # 7 equal channels, at least one of them


@pytest.mark.parametrize(("channels", "tops"), [(1, [1, 1, 1]), (3, [1, 1, 2]), (149, [1, 15, 74]), (151, [2, 15, 76])])
def test_a_share_of_the_channels_is_rounded_and_at_least_one(channels, tops):
    assert Track(Subject("w", 5, channels, "column"), SETTINGS).tops == tops


def test_the_curve_runs_through_the_exact_shares_and_ends_at_one():
    scores = [float(value) for value in range(1, 1001)]
    found = track(watch([{"w": gradient(scores, "column")}]), "column")
    assert found.curve[-1] == pytest.approx(1) and (np.diff(found.curve) > 0).all()
    (place,) = np.flatnonzero(np.isclose(CURVE, 0.1))
    assert found.curve[place] == pytest.approx(sum(range(901, 1001)) / sum(range(1, 1001)), rel=1e-5)


def test_shares_are_means_over_the_steps_whatever_their_scale():
    first, second = [9.0] + [1 / 11] * 11, [1.0] * 12
    study = watch([{"w": gradient(first, "column")}, {"w": 1e-3 * gradient(second, "column")}])
    row = next(row for row in matrix_rows(study) if row["dim"] == "column")
    assert row["top_0.01"] == pytest.approx((0.9 + 1 / 12) / 2, rel=1e-5)
    assert row["steps"] == 2


def test_a_quadratic_s_gradient_through_autograd():
    """loss = 1/2 sum a_c w_rc^2 has the gradient a_c w_rc: of weights that are one, column c holds a_c^2 / sum a^2."""
    scale = torch.arange(1.0, 21.0)
    weight = Parameter(torch.ones(5, 20))
    study = Study([("w", weight)], SETTINGS)
    (0.5 * scale * weight.square()).sum().backward()
    study.observe()
    assert track(study, "column").shares[0] == pytest.approx(400 / (scale.square().sum().item()), rel=1e-6)


@pytest.mark.parametrize("dim", DIMS)
def test_a_moving_selection_loses_what_it_moves_by(dim):
    """Ten of 100 channels carry a score of 9, the rest 1 / 9: one channel further with each step."""
    steps = []
    for step in range(8):
        scores = [1 / 9] * 100
        scores[step : step + 10] = [9.0] * 10
        steps.append({"w": gradient(scores, dim)})
    found = track(watch(steps), dim)
    assert found.pairs.tolist() == [7, 5, 3]
    assert found.overlap / found.pairs == pytest.approx([0.9, 0.7, 0.5])
    held = [(9 * (10 - lag) + lag / 9) / 100 for lag in SETTINGS.lags]
    assert found.held / found.pairs == pytest.approx(held, rel=1e-5)


def test_lags_are_counted_over_steps_without_a_gradient():
    """Steps 1 and 4 have one: only they are compared, and they are 3 apart."""
    some, none = {"w": gradient([4.0, 1.0, 1.0], "column")}, {"w": None}
    found = track(watch([some, none, none, some]), "column")
    assert found.steps == 2
    assert found.pairs.tolist() == [0, 1, 0] and found.overlap.tolist() == [0, 1, 0]


@pytest.mark.parametrize("scores", [[4.0, math.nan, 1.0], [4.0, math.inf, 1.0], [0.0] * 3], ids=["nan", "inf", "zero"])
def test_a_step_without_a_finite_norm_above_zero_is_left_out(scores):
    good = {"w": gradient([4.0, 1.0, 1.0], "column")}
    study = watch([good, {"w": gradient(scores, "column")}, good])
    found = track(study, "column")
    assert (found.steps, study.steps, study.empty) == (2, 3, 1)
    assert found.shares[0] / found.steps == pytest.approx(4 / 6, rel=1e-6)
    assert found.pairs.tolist() == [0, 0, 0]  # the two that are left are 2 steps apart


def test_the_selection_is_the_engine_s_ties_included():
    torch.manual_seed(0)
    grads = [torch.randint(-1, 2, (3, 1009)).float() for _ in range(2)]  # four scores for all channels
    found = track(watch([{"w": grad} for grad in grads]), "column")
    chosen = [select_channels_reference(channel_scores_reference(grad, "column", "square"), 101) for grad in grads]
    assert sorted(found._late[0].tolist()) == chosen[1].tolist()
    assert found.overlap[0] == len(set(chosen[0].tolist()) & set(chosen[1].tolist())) / 101


def test_overall_is_weighted_by_the_squared_norm():
    """One matrix holds 99 of 100 parts of the norm, all in one channel; the other spreads its part over ten."""
    steps = [{"big": gradient([99.0] + [0.0] * 9, "column"), "small": gradient([0.1] * 10, "column")}]
    study = watch(steps)
    rows = matrix_rows(study)
    assert [row["weight"] for row in rows if row["dim"] == "column"] == pytest.approx([0.99, 0.01], rel=1e-5)
    first = share_rows(study, rows)[0]
    assert (first["dim"], first["share"]) == ("column", 0.01)
    assert first["overall"] == pytest.approx((99 + 0.1) / 100, rel=1e-5)
    assert first["median"] == pytest.approx((1 + 0.1) / 2, rel=1e-5)


def test_matrices_are_seen_as_the_engine_sees_them():
    """A13: a convolution is [out, rest]; vectors, small and frozen matrices are left out; bf16 is summed in fp32."""
    torch.manual_seed(0)
    conv, vector = Parameter(torch.zeros(8, 4, 5, 3)), Parameter(torch.zeros(600))
    small, frozen = Parameter(torch.zeros(3, 5)), Parameter(torch.zeros(30, 30), requires_grad=False)
    half = Parameter(torch.zeros(16, 32, dtype=torch.bfloat16))
    named = {"conv": conv, "vector": vector, "small": small, "frozen": frozen, "half": half}
    study = Study(named.items(), LocalitySettings(shares=[0.1], min_numel=16))
    assert (study.matrices, study.numel) == (2, 480 + 512)
    for weight in (conv, vector, small, half):
        weight.grad = torch.randn_like(weight)
    study.observe()
    for name, grad in (("conv", conv.grad.view(8, 60)), ("half", half.grad)):
        for dim, axis in zip(DIMS, (0, 1), strict=True):
            scores = grad.double().square().sum(axis).sort(descending=True).values
            count = max(1, round(0.1 * len(scores)))
            wanted = (scores[:count].sum() / scores.sum()).item()
            assert track(study, dim, name).shares[0] == pytest.approx(wanted, rel=1e-5)


def test_no_gradient_is_kept_and_no_more_selections_than_the_longest_lag():
    study = watch([{"w": torch.randn(7, 100)} for _ in range(20)])
    kept = [one for found in study.tracks for one in found._late]
    assert len(kept) == 2 * max(SETTINGS.lags)
    assert {(one.dtype.name, len(one)) for one in kept} == {("int32", 10), ("int32", 1)}


def test_kinds_take_layers_together():
    names = ["layer.0.mlp.weight", "layer.1.mlp.weight", "layer.0.attention.weight", "embedding.weight"]
    study = watch([{name: torch.randn(20, 30) for name in names}])
    found = kind_rows(study, matrix_rows(study))
    columns = [(row["kind"], row["matrices"]) for row in found if row["dim"] == "column"]
    assert columns == [("embedding", 1), ("layer.*.attention", 1), ("layer.*.mlp", 2)]
    assert sum(row["weight"] for row in found) == pytest.approx(2)  # one for each direction


def test_a_run_too_short_for_a_lag_has_no_figure_for_it():
    study = watch([{"w": torch.randn(7, 100)} for _ in range(4)])
    rows = matrix_rows(study)
    assert [rows[0][f"overlap_{lag}"] is None for lag in SETTINGS.lags] == [False, False, True]
    assert {row["lag"] for row in survival_rows(study, rows)} == {1, 3}


def test_a_model_without_such_a_matrix_is_refused():
    with pytest.raises(InputError, match="locality.min_numel is 4096"):
        Study([("w", Parameter(torch.zeros(8, 8)))], LocalitySettings())
