from __future__ import annotations

import pytest
import torch
from zenflow_kernels import gather, scatter
from zenflow_kernels.channels import row_multiple
from zenflow_kernels.gather import gather_channels, gather_channels_reference
from zenflow_kernels.scatter import scatter_channels_, scatter_channels_reference_

from tests.kernels.building import Padded, bits, values

SHAPES = [(1, 1), (5, 3), (3, 700), (29, 257)]
CHANNEL_DIMS = ("column", "row")


def channels(shape: tuple[int, int], channel_dim: str) -> int:
    return shape[1 if channel_dim == "column" else 0]


def matrix(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values whose bits matter: NaN with a payload, infinities, negative zero and denormals among them."""
    x = values(shape, torch.Generator().manual_seed(seed)).to(dtype)
    special = torch.tensor([float("nan"), float("inf"), -0.0, torch.finfo(dtype).smallest_normal / 4]).to(dtype)
    x.view(-1)[: special.numel()] = special[: x.numel()]
    return x


def picks(shape: tuple[int, int], channel_dim: str, share: float) -> torch.Tensor:
    count = channels(shape, channel_dim)
    gen = torch.Generator().manual_seed(count)
    return torch.randperm(count, generator=gen)[: round(share * count)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_gather_copies_bits(shape, channel_dim, share, device, dtype, poisoned):
    pad = Padded(device)
    x, index = matrix(shape, dtype), picks(shape, channel_dim, share)
    got = gather_channels(pad.hold(x, shift=1), pad.hold(index), channel_dim)
    assert got.is_contiguous() and torch.equal(bits(got), bits(gather_channels_reference(x, index, channel_dim)))
    pad.check()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
@pytest.mark.parametrize("share", [0.4, 1.0])
def test_scatter_copies_bits_and_touches_nothing_else(shape, channel_dim, share, device, dtype):
    pad = Padded(device)
    x, index = matrix(shape, dtype), picks(shape, channel_dim, share)
    compact = (shape[0], index.numel()) if channel_dim == "column" else (index.numel(), shape[1])
    new = matrix(compact, dtype, seed=1)
    held = pad.hold(x)
    assert scatter_channels_(held, pad.hold(index), pad.hold(new, shift=1), channel_dim) is held
    assert torch.equal(bits(held), bits(scatter_channels_reference_(x.clone(), index, new, channel_dim)))
    pad.check()


@pytest.mark.parametrize("shape", [(9, 520), (12, 8)], ids=str)
@pytest.mark.parametrize("shift", [0, 1])
def test_rows_of_whole_vectors(shape, shift, device, dtype, poisoned):
    """Rows that begin with a vector, and the same ones where the matrix does not."""
    pad, x, index = Padded(device), matrix(shape, dtype), picks(shape, "row", 0.5)
    held, held_index = pad.hold(x, shift), pad.hold(index)
    part = gather_channels(held, held_index, "row")
    assert row_multiple(held, part) == (1 if shift else 16 // dtype.itemsize)
    assert torch.equal(bits(part), bits(gather_channels_reference(x, index, "row")))
    new = matrix((index.numel(), shape[1]), dtype, seed=2)
    scatter_channels_(held, held_index, pad.hold(new), "row")
    assert torch.equal(bits(held), bits(scatter_channels_reference_(x.clone(), index, new, "row")))
    pad.check()


@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
def test_scatter_undoes_gather(channel_dim, device, dtype):
    x, index = matrix((17, 19), dtype).to(device), picks((17, 19), channel_dim, 0.5).to(device)
    changed = x.clone()
    part = gather_channels(x, index, channel_dim)
    scatter_channels_(changed, index, torch.zeros_like(part), channel_dim)
    assert not torch.equal(bits(changed), bits(x))
    assert torch.equal(bits(scatter_channels_(changed, index, part, channel_dim)), bits(x))


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (7, 5)], ids=str)
@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
def test_nothing_to_copy_launches_nothing(shape, channel_dim, device, dtype, monkeypatch):
    """D6."""
    monkeypatch.setattr(gather, "_gather_kernel", None)
    monkeypatch.setattr(scatter, "_scatter_kernel", None)
    x, index = torch.zeros(shape, dtype=dtype, device=device), torch.empty(0, dtype=torch.int64, device=device)
    compact = (shape[0], 0) if channel_dim == "column" else (0, shape[1])
    part = gather_channels(x, index, channel_dim)
    assert part.shape == compact and part.dtype == dtype
    assert scatter_channels_(x, index, part, channel_dim) is x


@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
@pytest.mark.parametrize("bad", [[-1, 2], [0, 6], [2**40]], ids=str)
def test_an_index_out_of_range_is_refused(channel_dim, bad, device):
    x, index = torch.zeros(6, 6, device=device), torch.tensor(bad, device=device)
    part = torch.zeros((6, len(bad)) if channel_dim == "column" else (len(bad), 6), device=device)
    with pytest.raises(ValueError, match=str(max(bad) if max(bad) > 5 else min(bad))):
        gather_channels(x, index, channel_dim)
    with pytest.raises(ValueError, match=r"\[0, 6\)"):
        scatter_channels_(x, index, part, channel_dim)


@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
def test_a_repeated_index_is_read_but_not_written(channel_dim, device):
    """D14."""
    x, index = torch.randn(6, 6, device=device), torch.tensor([2, 4, 2], device=device)
    part = gather_channels(x, index, channel_dim)
    assert torch.equal(part.cpu(), x.cpu().index_select(1 if channel_dim == "column" else 0, index.cpu()))
    with pytest.raises(ValueError, match="2 more than once"):
        scatter_channels_(x, index, part, channel_dim)


def test_wrong_arguments_are_refused_by_value():
    x, index = torch.zeros(4, 6), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="'rows'"):
        gather_channels(x, index, "rows")
    with pytest.raises(ValueError, match="float32"):
        gather_channels(x, torch.zeros(0), "row")
    with pytest.raises(ValueError, match="contiguous"):
        gather_channels(x.T, index, "row")
    with pytest.raises(ValueError, match=r"\(4, 3\)"):
        scatter_channels_(x, index, torch.zeros(4, 3), "column")
    with pytest.raises(ValueError, match="bfloat16"):
        scatter_channels_(x, index, torch.zeros(4, 2).bfloat16(), "column")


@pytest.mark.gpu
@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
def test_the_last_rows_of_a_large_matrix(channel_dim):
    """D4: 2**31 + 2048 elements; the last rows, and every row in the last columns; no other element changes."""
    rows, cols = 2**20 + 1, 2048
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    index = torch.tensor([cols - 1, 0, 77] if channel_dim == "column" else [rows - 1, 3, rows - 2], device="cuda")
    before, part = x.clone(), gather_channels(x, index, channel_dim)
    assert torch.equal(part, x[:, index] if channel_dim == "column" else x[index])
    scatter_channels_(x, index, torch.zeros_like(part), channel_dim)
    assert gather_channels(x, index, channel_dim).count_nonzero().item() == 0
    assert torch.equal(scatter_channels_(x, index, part, channel_dim), before)


@pytest.mark.gpu
@pytest.mark.parametrize("channel_dim", CHANNEL_DIMS)
def test_compact_matrices_beyond_int32(channel_dim):
    """C8: gather and scatter of every channel of 2**31 + 8 elements."""
    shape = (2**28 + 1, 8)
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()
    index = torch.arange(channels(shape, channel_dim), device="cuda")
    copy = gather_channels(x, index, channel_dim)
    assert torch.equal(copy, x)
    assert torch.equal(scatter_channels_(torch.zeros_like(x), index, copy, channel_dim), x)
