"""Stochastic rounding: the draws are Philox's, the bits are the reference's, and the mean is the value."""

from __future__ import annotations

import math

import pytest
import torch
from zenflow_kernels import stochastic_rounding as rounding
from zenflow_kernels.stochastic_rounding import (
    LANES,
    SPAN,
    draws_reference,
    philox_reference,
    round_stochastically,
    round_stochastically_reference,
)

from tests.kernels.building import Padded, bits, values

TILE = SPAN * LANES
KEY = {"seed": 2**63 + 12345, "step": 2**32 - 1, "stream": 2**31 + 7}  # each of them beyond its signed type
LARGEST = torch.finfo(torch.bfloat16).max
NAN, INF = float("nan"), float("inf")

# The test vectors that Random123 ships for philox4x32 with 10 rounds: counter, key, result.
VECTORS = [
    ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    (
        [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
        [0xA4093822, 0x299F31D0],
        [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), VECTORS, ids=["zeros", "ones", "pi"])
def test_the_generator_is_philox(counter, key, words):
    got = philox_reference(tuple(torch.tensor([word]) for word in counter), tuple(key))
    assert [word.item() for word in got] == words


def test_an_elements_draw_is_the_documented_word():
    tile, i = 3, 3 * TILE + 5 * SPAN + 77
    draws = draws_reference(tile, 1, seed=KEY["seed"], step=9, stream=4, device=torch.device("cpu"))
    counter = tuple(torch.tensor([word]) for word in (tile * SPAN + i % SPAN, 0, 9, 4))
    words = philox_reference(counter, (KEY["seed"] & 0xFFFFFFFF, KEY["seed"] >> 32))
    assert draws[i - tile * TILE].item() == words[2].item() >> 16


def patterns(n: int) -> torch.Tensor:
    """Every kind of fp32 number: random bits, then the ends of every range."""
    gen = torch.Generator().manual_seed(n)
    x = torch.randint(-(2**31), 2**31, (n,), generator=gen).to(torch.int32).view(torch.float32)
    payload = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)
    ends = torch.tensor([0.0, -0.0, INF, -INF, NAN, 3.4028235e38, -3.4028235e38, LARGEST, 1e-45, -1e-45, 1e-39])
    ends = torch.cat([ends, payload])
    x[: ends.numel()] = ends[:n]
    return x


@pytest.mark.parametrize("n", [1, 7, 1023, 1025, TILE - 1, TILE, TILE + 1, 20_011])
@pytest.mark.parametrize("key", [KEY, {"seed": 0, "step": 0}, {"seed": 1, "step": 1, "stream": 16}], ids=str)
def test_the_kernel_gives_the_references_bits(n, key, device, poisoned):
    pad, x = Padded(device), patterns(n)
    out = pad.hold(torch.full((n,), NAN, dtype=torch.bfloat16), shift=n % 2)
    held = pad.hold(x, shift=n % 3)
    assert round_stochastically(held, **key, out=out) is out
    expected = round_stochastically_reference(x, **key)
    assert torch.equal(out.cpu().view(torch.int16), expected.view(torch.int16))
    assert torch.equal(bits(round_stochastically(held, **key)), bits(expected))
    assert torch.equal(bits(held), bits(x))
    pad.check()


def test_the_result_is_one_of_the_two_neighbours():
    """Against float64: below or above, never further, and what bf16 holds exactly stays."""
    x = patterns(70_001)
    x = x[torch.isfinite(x) & (x.abs() <= LARGEST)]
    out = round_stochastically_reference(x, **KEY).double()
    below = (x.view(torch.int32) & -0x10000).view(torch.float32)  # toward zero
    above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32)
    exact = below == x
    assert bool((out[exact] == x[exact].double()).all()) and int(exact.sum()) > 3
    assert bool(((out == below.double()) | (out == above.double())).all())
    far = (out - x.double()).abs() / torch.finfo(torch.bfloat16).eps
    assert bool((far <= x.double().abs().clamp(min=torch.finfo(torch.float32).tiny)).all())


@pytest.mark.parametrize("step", range(3))
def test_infinities_nans_and_the_largest(step, device):
    payload = torch.tensor([0x7F800001, -0x7FFFFF], dtype=torch.int32).view(torch.float32)  # NaN below bf16
    x = torch.cat([torch.tensor([INF, -INF, NAN, 3.4028235e38, -3.4028235e38, -0.0, 0.0, LARGEST]), payload])
    out = round_stochastically(x.repeat(100).to(device), seed=1, step=step).cpu().float().view(100, -1)
    expected = torch.tensor([INF, -INF, NAN, LARGEST, -LARGEST, -0.0, 0.0, LARGEST, NAN, NAN])
    assert torch.equal(bits(out), bits(expected.expand(100, -1)))


FRACTIONS = {"a quarter": 0x4000, "one in 65536": 1, "a half": 0x8000, "almost one": 0xFFFF, "odd": 0x1235}


@pytest.mark.parametrize("low", FRACTIONS.values(), ids=FRACTIONS.keys())
@pytest.mark.parametrize("high", [0x3F80, -0x4080, 0x0001, 0x7F7E], ids=["1", "-1", "denormal", "huge"])
def test_rounding_up_is_as_probable_as_the_value_says(low, high):
    """The count of roundings up is binomial: within five standard deviations of its mean, for a fixed seed."""
    n = 1 << 17
    x = torch.full((n,), (high << 16) + low, dtype=torch.int32).view(torch.float32)
    out = round_stochastically_reference(x, seed=7, step=high & 0xFFFF, stream=low).view(torch.int16)
    ups, p = int((out == high + 1).sum()), low / 65536
    assert ups + int((out == high).sum()) == n
    assert abs(ups - n * p) <= 5 * math.sqrt(n * p * (1 - p))


def test_the_mean_over_steps_is_the_value():
    x = values((257,), torch.Generator().manual_seed(1), spread=1.0)
    steps = 200
    total = sum(round_stochastically_reference(x, seed=3, step=step).double() for step in range(steps))
    below = (x.view(torch.int32) & -0x10000).view(torch.float32).double()
    above = ((x.view(torch.int32) & -0x10000) + 0x10000).view(torch.float32).double()
    deviation = ((x.double() - below).abs() * (above - x.double()).abs()).sqrt() / math.sqrt(steps)
    z = ((total / steps - x.double()) / deviation.clamp(min=1e-300))[deviation > 0]
    # The mean square of some 250 standard normal numbers is 1, give or take 0.09.
    assert z.abs().max() < 5 and abs(z.square().mean().item() - 1) < 0.45


def test_draws_are_uniform_and_lanes_independent():
    """Chi-square over the upper byte: 255 degrees of freedom, standard deviation 22.6; and no lane follows another."""
    draws = draws_reference(5, 16, seed=11, step=2, stream=3, device=torch.device("cpu"))
    counts = torch.bincount(draws >> 8, minlength=256).double()
    expected = draws.numel() / 256
    assert abs(((counts - expected).square() / expected).sum().item() - 255) < 5 * 22.6
    lanes = draws.view(16, LANES, SPAN).transpose(0, 1).reshape(LANES, -1).double()
    correlation = torch.corrcoef(lanes) - torch.eye(LANES)
    assert correlation.abs().max() < 5 / math.sqrt(lanes.shape[1])


@pytest.mark.parametrize("change", [{"seed": 2**32 + 5}, {"step": 3}, {"stream": 1}], ids=str)
def test_every_part_of_the_key_counts(change):
    x = torch.full((4096,), 1.0 + 2**-8)  # a half: the two draws agree for half of the elements
    first = round_stochastically(x, **{"seed": 5, "step": 2, "stream": 0})
    other = round_stochastically(x, **{"seed": 5, "step": 2, "stream": 0, **change})
    assert abs(int((first == other).sum()) - 2048) < 5 * 32
    assert torch.equal(first, round_stochastically(x, seed=5, step=2))


def test_neither_chunks_nor_the_end_of_the_tensor_change_a_draw(monkeypatch):
    x = values((3 * TILE + 11,), torch.Generator().manual_seed(2))
    whole = round_stochastically_reference(x, **KEY)
    monkeypatch.setattr(rounding, "CHUNK_TILES", 1)
    assert torch.equal(bits(round_stochastically_reference(x, **KEY)), bits(whole))
    assert torch.equal(bits(round_stochastically(x[: TILE + 3], **KEY)), bits(whole[: TILE + 3]))


def test_small_updates_of_a_weight_without_master_arrive():
    """C9 without a master: 128 updates of 2**-10 on bf16 1.0, whose neighbour is 2**-7 away, move it by 0.125."""
    weight, nearest = torch.ones(1024).bfloat16(), torch.ones(1024).bfloat16()
    for step in range(128):
        weight = round_stochastically_reference(weight.float() + 2**-10, seed=0, step=step)
        nearest = (nearest.float() + 2**-10).bfloat16()
    assert bool((nearest == 1).all())
    # The variance of a step is at most 2**-10 * 2**-7, of the sum of 128 of them 2**-10, of the mean over 1024 2**-20.
    assert abs(weight.double().mean().item() - 1.125) < 5 * 2**-10


@pytest.mark.parametrize("shape", [(0,), (0, 128), (128, 0)], ids=str)
def test_an_empty_tensor_launches_nothing(shape, device, monkeypatch):
    """D6."""
    monkeypatch.setattr(rounding, "_round_kernel", None)
    out = round_stochastically(torch.empty(shape, device=device), seed=0, step=0)
    assert out.shape == shape and out.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(4).double()}, "float64"),
        ({"x": torch.zeros(4, 6).T}, r"x must be contiguous.*strides \(1, 6\)"),
        ({"x": torch.zeros(8)[::2]}, r"x must be contiguous.*strides \(2,\)"),
        ({"out": torch.zeros(4)}, "out must be contiguous torch.bfloat16.*float32"),
        ({"out": torch.zeros(5).bfloat16()}, r"got \(5,\)"),
        ({"out": torch.zeros(8).bfloat16()[::2]}, r"out must be.*strides \(2,\)"),
        ({"seed": -1}, r"seed must be in \[0, 2\*\*64\), got -1"),
        ({"seed": 2**64}, "got 18446744073709551616"),
        ({"step": 2**32}, r"step must be in \[0, 2\*\*32\), got 4294967296"),
        ({"stream": -3}, "stream .* got -3"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_by_value(changes, message):
    arguments = {"x": torch.zeros(4), "seed": 0, "step": 0} | changes
    with pytest.raises(ValueError, match=message):
        round_stochastically(arguments.pop("x"), **arguments)


@pytest.mark.gpu
def test_beyond_int32():
    """C8: 2**31 + 8 elements: the first, the last, and those around the 2**31st, against the reference."""
    n = 2**31 + 8
    x = torch.full((n,), 1.0 + 2**-8, device="cuda")  # half way to its neighbour
    out = torch.full((n,), NAN, dtype=torch.bfloat16, device="cuda")
    round_stochastically(x, **KEY, out=out)
    assert not bool(torch.isnan(out).any())
    for tile in (0, 2**31 // TILE - 1, 2**31 // TILE):
        part = slice(tile * TILE, min(n, (tile + 1) * TILE))
        r = draws_reference(tile, 1, **KEY, device=torch.device("cpu"))[: part.stop - part.start]
        assert torch.equal(out[part].cpu() > 1, r >= 0x8000)


@pytest.mark.gpu
def test_other_devices_and_sizes_draw_the_same():
    x = values((1_000_003,), torch.Generator().manual_seed(4))
    assert torch.equal(bits(round_stochastically(x.cuda(), **KEY)), bits(round_stochastically(x, **KEY)))
