from __future__ import annotations

import pytest
import torch
from zenflow_kernels.fingerprint import FACTORS, row_fingerprints, row_fingerprints_reference

from tests.kernels.building import Padded, bits, values

SHAPES = [(1, 1), (5, 3), (7, 1000), (9, 1025), (3, 2048)]


def by_hand(weight: torch.Tensor, slot: torch.Tensor | None) -> list[int]:
    """The formula in Python's integers, wrapped to 64 bits at the end."""

    def signed(value: int) -> int:
        return (value + 2**63) % 2**64 - 2**63

    def multiplier(col: int) -> int:
        mixed = signed((col + 1) * FACTORS[0])
        mixed = signed((mixed ^ (mixed >> 31)) * FACTORS[1])
        return (mixed ^ (mixed >> 29)) | 1

    counted = [col for col in range(weight.shape[1]) if slot is None or slot[col] < 0]
    return [signed(sum(row[col] * multiplier(col) for col in counted)) for row in bits(weight).tolist()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("selected", [None, 0.0, 0.3, 1.0])
def test_fingerprints_equal_the_formula(shape, selected, device, dtype, poisoned):
    pad, gen = Padded(device), torch.Generator().manual_seed(0)
    weight, slot = values(shape, gen).to(dtype), None
    if selected is not None:
        slot = torch.where(torch.rand(shape[1], generator=gen) < selected, 3, -1).to(torch.int32)
    got = row_fingerprints(pad.hold(weight), None if slot is None else pad.hold(slot))
    assert got.tolist() == by_hand(weight, slot) == row_fingerprints_reference(weight, slot).tolist()
    pad.check()


def test_one_flipped_bit_changes_its_row_alone(device):
    weight = torch.randn(6, 130, generator=torch.Generator().manual_seed(2)).to(device)
    before = row_fingerprints(weight, None)
    changed = weight.clone()
    changed.view(torch.int32)[4, 129] ^= 1
    assert (row_fingerprints(changed, None) != before).tolist() == [row == 4 for row in range(6)]


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)], ids=str)
def test_an_empty_matrix(shape, device):
    assert row_fingerprints(torch.empty(shape, device=device), None).tolist() == [0] * shape[0]


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="strides"):
        row_fingerprints(torch.zeros(3, 4).T, None)
    with pytest.raises(ValueError, match=r"\[4\]"):
        row_fingerprints(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int32))


@pytest.mark.gpu
def test_the_last_row_beyond_int32():
    weight = torch.zeros(2**20 + 1, 2049, dtype=torch.bfloat16, device="cuda")
    weight[-1, -1] = 1.0
    got = row_fingerprints(weight, None)
    assert got.count_nonzero().item() == 1 and got[-1].item() == by_hand(weight[-1:].cpu(), None)[0]
