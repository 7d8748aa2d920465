from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from zenflow_kernels import numerics
from zenflow_kernels.numerics import HYPER, HYPER_WIDTH, adamw_, chunks, pack_hyper

from tests.kernels.building import bits, values
from zenflow.bias import bias_table

LR, BETA1, BETA2, EPS, DECAY = 3e-3, 0.9, 0.999, 1e-8, 0.1
SHAPES = [(1, 1), (1, 7), (7, 1), (13, 17), (0, 5), (5, 0), (1, 1025)]


def constants() -> dict[str, float]:
    packed = dict(zip(HYPER, pack_hyper(LR, BETA1, BETA2, EPS, DECAY)[: len(HYPER)], strict=True))
    return {name: packed[name] for name in HYPER[1:]}


def by_numpy(state: list[Tensor], step_size: Tensor, denom_scale: Tensor) -> list[np.ndarray]:
    """The written order in NumPy, whose fp32 operations are single and correctly rounded."""
    p, m, v, g = (tensor.numpy().copy() for tensor in state)
    c = {name: np.float32(value) for name, value in constants().items()}
    m = c["beta1"] * m + c["one_minus_beta1"] * g
    v = c["beta2"] * v + c["one_minus_beta2"] * (g * g)
    p = p * c["decay"]
    p = p - step_size.numpy() * (m / (np.sqrt(v) * denom_scale.numpy() + c["eps"]))
    return [p, m, v]


def random_state(shape: tuple[int, ...], scale: float = 1.0) -> list[Tensor]:
    gen = torch.Generator().manual_seed(5)
    p, m, v, g = (values(shape, gen) * scale for _ in range(4))
    return [p, m, v.square(), g]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("factors", ["column", "row", "one"])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-38], ids=["normal", "tiny", "denormal"])
def test_adamw_follows_the_written_order_bit_for_bit(shape, factors, scale):
    state = random_state(shape, scale)
    kind = {"column": (1, shape[1]), "row": (shape[0], 1), "one": (1, 1)}[factors]
    step_size, denom_scale = torch.rand(kind) * 1e-3, 1 + torch.rand(kind)
    with np.errstate(all="ignore"):
        expected = by_numpy(state, step_size, denom_scale)
    adamw_(*state, step_size=step_size, denom_scale=denom_scale, **constants())
    for got, want in zip(state[:3], expected, strict=True):
        assert torch.equal(bits(got), bits(torch.from_numpy(want)))


def test_adamw_is_adamw():
    gen = torch.Generator().manual_seed(1)
    start = torch.randn(11, 13, generator=gen)
    exact = torch.nn.Parameter(start.double())
    optimizer = torch.optim.AdamW([exact], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY)
    state = [start.clone(), torch.zeros_like(start), torch.zeros_like(start)]
    bias = torch.from_numpy(bias_table(BETA1, BETA2, 100).copy())
    for t in range(1, 51):
        grad = torch.randn(11, 13, generator=gen)
        exact.grad = grad.double()
        optimizer.step()
        adamw_(*state, grad, step_size=bias[t, 0] * LR, denom_scale=bias[t, 1], **constants())
    error = (state[0] - exact.detach()).double()
    # 50 decay factors, each off by the same rounding of up to 3e-8, on weights of up to 3; then single roundings.
    assert error.abs().max() < 5e-6
    assert error.square().mean().sqrt() < 1e-6


@pytest.mark.parametrize("shape", [(257, 33), (1, 5000), (70000,)], ids=str)
def test_neither_chunks_nor_threads_change_a_bit(shape, monkeypatch):
    results = []
    threads = torch.get_num_threads()
    for count, chunk in [(1, 32768), (2, 32768), (1, 7), (2, 1000)]:
        monkeypatch.setattr(numerics, "CHUNK_PER_THREAD", chunk if shape != (70000,) else max(chunk, 1000))
        torch.set_num_threads(count)
        state = random_state(shape)
        adamw_(*state, step_size=torch.tensor(1e-3), denom_scale=torch.tensor(1.5), **constants())
        results.append(torch.cat([bits(tensor).reshape(-1) for tensor in state[:3]]))
    torch.set_num_threads(threads)
    assert all(torch.equal(result, results[0]) for result in results[1:])


def test_zero_gradient_and_zero_rate_change_nothing():
    p = torch.randn(5, 7)
    state = [p.clone(), torch.zeros(5, 7), torch.zeros(5, 7), torch.zeros(5, 7)]
    adamw_(*state, step_size=torch.zeros(1, 1), denom_scale=torch.ones(1, 1), **{**constants(), "decay": 1.0})
    assert torch.equal(bits(state[0]), bits(p))


def test_another_dtype_is_refused():
    state = [torch.zeros(2, 2) for _ in range(3)]
    with pytest.raises(ValueError, match="float64"):
        adamw_(*state, torch.zeros(2, 2).double(), step_size=torch.ones(1), denom_scale=torch.ones(1), **constants())


def test_hyperparameters_are_rounded_once_from_float64():
    packed = pack_hyper(0.1, 0.9, 0.999, 1e-8, 0.3)
    assert len(packed) == HYPER_WIDTH and not any(packed[len(HYPER) :])
    lr, beta1, left1, beta2, left2, eps, decay = packed[: len(HYPER)]
    assert [lr, beta1, beta2, eps] == [float(np.float32(x)) for x in (0.1, 0.9, 0.999, 1e-8)]
    assert left1 == float(np.float32(1 - 0.9)) and left2 == float(np.float32(1 - 0.999))
    assert decay == float(np.float32(1 - 0.1 * 0.3))


@pytest.mark.parametrize(
    ("rows", "cols", "limit"), [(5, 3, 7), (5, 3, 2), (1, 10, 4), (3, 1, 100), (0, 4, 2), (4, 0, 2)]
)
def test_chunks_cover_every_element_once(rows, cols, limit):
    seen = torch.zeros(rows, cols, dtype=torch.int32)
    for piece in chunks(rows, cols, limit):
        assert 0 < seen[piece].numel() <= limit
        seen[piece] += 1
    assert bool((seen == 1).all())
