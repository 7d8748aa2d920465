"""Importance and choice: what decides which channels are selected."""

from __future__ import annotations

import pytest
import torch
from zenflow_kernels import topk
from zenflow_kernels.importance import (
    IMPORTANCES,
    RunPlan,
    _kept_plan,
    channel_scores,
    channel_scores_reference,
    grouped_scores,
)
from zenflow_kernels.topk import grouped_choices, select_channels, select_channels_reference

from tests.kernels.building import Padded, bits, values

SHAPES = [(1, 1), (1, 3), (513, 7), (7, 1000), (2, 1025), (1025, 2)]
NAN, INF = float("nan"), float("inf")


def assert_scores(got: torch.Tensor, x: torch.Tensor, channel_dim: str, importance: str) -> None:
    """Against float64; terms are positive, so fp32 sums of n terms are within about log2(n) + 1 roundings."""
    exact = x.double().cpu()
    exact = exact.square() if importance == "square" else exact.abs()
    exact = exact.sum(0 if channel_dim == "column" else 1)
    error = (got.double().cpu() - exact) / exact.clamp(min=1e-30)
    assert got.dtype == torch.float32 and got.shape == exact.shape
    assert error.abs().max() < 4e-6
    assert error.square().mean().sqrt() < 1e-6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_scores_inside_poisoned_memory(shape, channel_dim, importance, device, dtype, poisoned):
    """D3, D7."""
    turn = SHAPES.index(shape) + (channel_dim == "row") + (dtype == torch.bfloat16)
    if device == "cpu" and importance != IMPORTANCES[turn % 2]:
        pytest.skip("the interpreter is slow: each shape, channel and dtype with one importance, on a GPU with both")
    pad = Padded(device)
    x = pad.hold(values(shape, torch.Generator().manual_seed(3), spread=1.0).to(dtype), shift=1)
    scores = channel_scores(x, channel_dim, importance)
    assert_scores(scores, x, channel_dim, importance)
    assert_scores(channel_scores_reference(x, channel_dim, importance), x, channel_dim, importance)
    assert torch.equal(bits(channel_scores(x, channel_dim, importance)), bits(scores))
    pad.check()


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_an_empty_matrix_scores_zero(shape, channel_dim, device):
    """D6."""
    scores = channel_scores(torch.empty(shape, device=device), channel_dim, "square")
    assert scores.tolist() == [0.0] * shape[1 if channel_dim == "column" else 0]


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_the_scores_of_a_matrix_do_not_depend_on_its_neighbours(channel_dim, device, poisoned):
    """Several dtypes, rows that are vectors and rows that are not, an empty matrix, and a NaN next door."""
    pad, gen = Padded(device), torch.Generator().manual_seed(5)
    shapes = [(7, 13), (1, 1), (0, 5), (515, 16), (3, 264), (5, 0), (16, 520), (7, 13)]
    dtypes = [torch.float32, torch.float16]
    held = [values(shape, gen, spread=1.0).to(dtypes[number % 3 == 0]) for number, shape in enumerate(shapes)]
    xs = [pad.hold(x, shift=number % 2) for number, x in enumerate(held)]
    xs[-1][2, 3] = NAN
    together = grouped_scores(xs, channel_dim, "square")
    assert len(together) == len(xs)
    for x, scores in zip(xs, together, strict=True):
        assert torch.equal(bits(scores), bits(channel_scores(x, channel_dim, "square")))
    for x, scores in zip(xs[:-1], together[:-1], strict=True):
        if x.numel():
            assert_scores(scores, x, channel_dim, "square")
    assert torch.isfinite(together[-1]).logical_not().nonzero().tolist() == [[3 if channel_dim == "column" else 2]]
    pad.check()


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_programs_are_counted_once_for_matrices_of_the_same_shapes(channel_dim, device, monkeypatch):
    """Their thousands of programs cost the host nothing the next time, and are counted anew for other blocks."""
    xs = [torch.ones(3, 4, device=device), torch.ones(2100, 8, device=device)]
    expected = [x.sum(0 if channel_dim == "column" else 1).tolist() for x in xs]

    def scores(given: list[torch.Tensor]) -> list[list[float]]:
        return [score.tolist() for score in grouped_scores(given, channel_dim, "square")]

    _kept_plan.cache_clear()
    assert scores(xs) == scores(xs) == expected
    assert (_kept_plan.cache_info().misses, _kept_plan.cache_info().hits) == (1, 1)
    for name in ("COLUMN_RUN", "ROW_RUN"):
        monkeypatch.setattr(f"zenflow_kernels.importance.{name}", 1024)
    assert scores(xs) == expected and scores(xs[::-1]) == expected[::-1]
    assert (_kept_plan.cache_info().misses, _kept_plan.cache_info().hits) == (3, 1)


def test_a_plan_leads_every_program_to_its_matrix():
    """Programs, runs and scores of the matrices lie one behind the other."""
    plan = RunPlan.of([(1025, 300), (3, 8), (512, 257)], [4, 0, 7], "column", pinned=False)
    told = plan.on(torch.device("cpu"))
    assert told.fields.view(3, -1).tolist() == [
        [4, 1025, 300, 300, 2, 0, 3, 0, 0, 0],
        [0, 3, 8, 8, 1, 900, 1, 300, 6, 2],
        [7, 512, 257, 257, 2, 908, 1, 308, 7, 3],
    ]
    assert told.run_matrix.tolist() == [0] * 6 + [1] + [2] * 2
    assert told.sum_matrix.tolist() == [0] * 2 + [1] + [2] * 2
    assert (plan.n_runs, plan.n_scores) == (1165, 565)


def test_no_matrices_have_no_scores():
    assert grouped_scores([], "column", "square") == [] and grouped_choices([], []) == []


@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("importance", IMPORTANCES)
def test_non_finite_channels_are_never_important(channel_dim, importance, device, dtype):
    """D9."""
    x = torch.full((9, 9), 0.5, dtype=dtype)
    for channel, value in [(0, NAN), (3, -NAN), (4, INF), (8, -INF)]:
        x[(5, channel) if channel_dim == "column" else (channel, 5)] = value
    scores = channel_scores(x.to(device), channel_dim, importance)
    assert torch.isfinite(scores).tolist() == [channel not in (0, 3, 4, 8) for channel in range(9)]
    assert select_channels(scores, 5).tolist() == [1, 2, 5, 6, 7]


def test_a_convolution_picks_what_its_matrix_picks(device):
    weight = torch.randn(8, 4, 5, 3, generator=torch.Generator().manual_seed(0)).to(device)
    for channel_dim, n in (("column", 6), ("row", 1)):
        from_conv = select_channels(channel_scores(weight.flatten(1), channel_dim, "square"), n)
        from_matrix = select_channels(channel_scores(weight.clone().view(8, 60), channel_dim, "square"), n)
        sums = weight.double().square().view(8, 60).sum(0 if channel_dim == "column" else 1)
        assert torch.equal(from_conv, from_matrix)
        assert torch.equal(from_conv, sums.topk(n).indices.sort().values)


def test_scores_do_not_depend_on_threads():
    x = torch.randn(1700, 601)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        results.append(torch.cat([bits(channel_scores(x, channel_dim, "square")) for channel_dim in ("column", "row")]))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


SCORES = {
    "distinct": [3.0, 1.0, 4.0, 1.5, 9.0, 2.0, 6.0],
    "ties": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 2.0],
    "all equal": [0.0] * 7,
    "signs": [-1.0, -2.0, 0.0, -0.0, 1e-45, -1e-45, 2.0],
    "extremes": [3.4e38, -3.4e38, 1e-38, INF, -INF, NAN, -NAN],
    "few finite": [NAN, 1.0, INF, -NAN, -INF, -5.0, NAN],
    "none finite": [NAN, INF, -NAN, -INF, INF, NAN, NAN],
}


@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES.keys())
@pytest.mark.parametrize("n", [0, 1, 3, 5, 7])
def test_choice_equals_the_documented_order(scores, n, device):
    """Finite before non-finite, then higher before lower, then lower index before higher."""
    keys = [(torch.isfinite(torch.tensor(s)).item(), s if abs(s) < INF else 0.0) for s in scores]
    ranked = sorted(range(7), key=lambda i: (not keys[i][0], -keys[i][1], i))
    pad = Padded(device)
    held = pad.hold(torch.tensor(scores))
    chosen = select_channels(held, n)
    assert chosen.dtype == torch.int64 and chosen.tolist() == sorted(ranked[:n])
    assert torch.equal(chosen.cpu(), select_channels_reference(held.cpu(), n))
    pad.check()


def test_choices_together_are_the_choices_alone(device):
    pad, gen = Padded(device), torch.Generator().manual_seed(2)
    counts = {1: 1, 7: 0, 1000: 333, topk.BLOCK + 1: topk.BLOCK, 12: 12, 31: 5}
    scores = [pad.hold(torch.randint(0, 9, (channels,), generator=gen).float(), shift=1) for channels in counts]
    scores[2][::3] = NAN
    together = grouped_choices(scores, list(counts.values()))
    for score, n, chosen in zip(scores, counts.values(), together, strict=True):
        assert torch.equal(chosen.cpu(), select_channels_reference(score.cpu(), n))
    pad.check()


@pytest.mark.parametrize("channels", [1, topk.BLOCK - 1, topk.BLOCK, topk.BLOCK + 1, 20_011])
def test_choice_over_several_blocks(channels, device, poisoned):
    scores = torch.randint(0, 50, (channels,), generator=torch.Generator().manual_seed(channels)).float()
    scores[::17] = NAN
    for n in sorted({0, 1, channels // 3, channels - 1, channels}):
        assert torch.equal(select_channels(scores.to(device), n).cpu(), select_channels_reference(scores, n))


def test_two_hundred_thousand_channels(device):
    """D15."""
    scores = torch.rand(200_000, generator=torch.Generator().manual_seed(1)).round(decimals=3)
    assert torch.equal(select_channels(scores.to(device), 20_000).cpu(), select_channels_reference(scores, 20_000))


def test_an_empty_choice_launches_nothing(device, monkeypatch):
    monkeypatch.setattr(topk, "_select_kernel", None)
    for scores in (torch.rand(4, device=device), torch.empty(0, device=device)):
        chosen = select_channels(scores, 0)
        assert chosen.dtype == torch.int64 and chosen.shape == (0,)


@pytest.mark.parametrize("n", [-1, 5])
def test_more_channels_than_there_are_is_refused(n):
    with pytest.raises(ValueError, match=f"got {n}"):
        select_channels(torch.rand(4), n)


def test_wrong_arguments_are_refused_by_value():
    x = torch.zeros(4, 4)
    with pytest.raises(ValueError, match="'diagonal'"):
        channel_scores(x, "diagonal", "square")
    with pytest.raises(ValueError, match="'cube'"):
        channel_scores(x, "row", "cube")
    with pytest.raises(ValueError, match="int64"):
        channel_scores(x.long(), "row", "square")
    with pytest.raises(ValueError, match="contiguous"):
        channel_scores(torch.zeros(4, 5).T, "row", "square")
    with pytest.raises(ValueError, match="float64"):
        select_channels(torch.zeros(4).double(), 1)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1536, 8960), (8960, 1536), (151_936, 1536), (5, 200_003)], ids=str)
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_large_scores_on_the_gpu(shape, channel_dim, dtype, poisoned):
    x = torch.randn(shape, device="cuda").to(dtype)
    for importance in IMPORTANCES:
        scores = channel_scores(x, channel_dim, importance)
        assert_scores(scores, x, channel_dim, importance)
        assert torch.equal(bits(channel_scores(x, channel_dim, importance)), bits(scores))


@pytest.mark.gpu
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_scores_beyond_int32(channel_dim):
    """C8: 2**31 + 2049 elements; the last row and column count."""
    x = torch.zeros(2**20 + 1, 2049, dtype=torch.bfloat16, device="cuda")
    x[-1, -1] = 3.0
    scores = channel_scores(x, channel_dim, "square")
    assert scores[-1].item() == 9.0 and scores.count_nonzero().item() == 1
