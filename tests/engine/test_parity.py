"""The engine against the simulation, bit for bit: every weight after every step, every channel's state at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.engine.driving import DEFAULT, DTYPES, SHAPES, Builder, Pair, make_gradients, make_parameters

STEPS = 30


@dataclass(frozen=True)
class Scenario:
    settings: dict[str, Any]
    dtype: str = "bf16"
    eventful: bool = False  # absent gradients, non-finite gradients, learning rate, betas and decay that change
    shapes: list[tuple[int, ...]] = field(default_factory=lambda: SHAPES)


def scenario(dtype: str = "bf16", eventful: bool = False, **settings: Any) -> Scenario:
    return Scenario({"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, **settings}, dtype, eventful)


REPLAY = {"accumulate_on": "host", "deferred_rule": "replay"}
SCENARIOS = {
    "defaults": Scenario(DEFAULT),
    "together": Scenario({}),
    "overlap": scenario(select_interval=8),
    "no-overlap": scenario(select_interval=8, overlap_step=False),
    "fp32": scenario("fp32", select_interval=8),
    "fp16": scenario("fp16", select_interval=8),
    "fp32-bf16-ring": scenario("fp32", ring_dtype="bfloat16", select_interval=5),
    "bf16-fp32-ring": scenario(ring_dtype="float32", select_interval=5),
    "k=0": scenario(topk_ratio=0),
    "k=0-fp32-no-overlap": scenario("fp32", topk_ratio=0, overlap_step=False),
    "k=1": scenario(topk_ratio=1, select_interval=6),
    "k=0.01": scenario(topk_ratio=0.01, select_interval=6),
    "k=0.95": scenario(topk_ratio=0.95, select_interval=6),
    "U=1-overlap": scenario(update_interval=1, select_interval=7),
    "U=3-interval-5": scenario(update_interval=3, select_interval=5),
    "U=7-interval-2": scenario(update_interval=7, select_interval=2),
    "U=31": scenario(update_interval=31),
    "interval-1": scenario(update_interval=2, select_interval=1, overlap_step=False),
    "warm-up": scenario(full_warm_up_rounds=5, select_interval=8),
    "warm-up-then-late-selection": scenario(full_warm_up_rounds=3, update_interval=5, select_interval=4),
    "scale-none": scenario(deferred_lr_scale="none", select_interval=8),
    "scale-number": scenario(deferred_lr_scale=1.7, select_interval=8),
    "reset": scenario(on_reselect="reset", select_interval=8),
    "rows": scenario(channel_dim="row", select_interval=8),
    "magnitude": scenario(importance="magnitude", select_interval=8),
    "rows-magnitude-fp32": scenario("fp32", channel_dim="row", importance="magnitude", select_interval=4),
    "window": scenario(importance_over="window", select_interval=8),
    "window-magnitude-rows-fp32": scenario(
        "fp32",
        channel_dim="row",
        importance="magnitude",
        importance_over="window",
        update_interval=3,
        select_interval=5,
    ),
    "window-clip": scenario(importance_over="window", max_grad_norm=0.5, select_interval=6),
    "window-eventful": scenario(eventful=True, importance_over="window", select_interval=8, max_grad_norm=1.0),
    "window-eventful-warm-up": scenario(
        "fp16", True, importance_over="window", full_warm_up_rounds=5, update_interval=3, select_interval=9
    ),
    "window-staggered-host": scenario(
        accumulate_on="host", importance_over="window", stagger=True, update_interval=5, select_interval=7
    ),
    "average": scenario(importance_over="average", select_interval=8),
    "average-clip-fp32-rows": scenario(
        "fp32",
        channel_dim="row",
        importance_over="average",
        importance_decay=0.5,
        max_grad_norm=0.25,
        select_interval=5,
    ),
    "average-eventful": scenario(
        eventful=True, importance_over="average", importance="magnitude", select_interval=8, max_grad_norm=1.0
    ),
    "average-staggered-eventful": scenario(
        "fp16", True, importance_over="average", importance_decay=0.99, stagger=True, select_interval=8
    ),
    "average-k=0": scenario(importance_over="average", topk_ratio=0),
    "average-k=1": scenario(importance_over="average", topk_ratio=1),
    "clip": scenario(max_grad_norm=0.5, select_interval=8),
    "clip-fp32-rows": scenario("fp32", channel_dim="row", max_grad_norm=0.25, select_interval=8),
    "small-matrices-whole": scenario(min_deferred_numel=40, select_interval=8),
    "small-buckets": scenario(bucket_bytes=64, select_interval=8),
    "eventful": scenario(eventful=True, select_interval=8, max_grad_norm=1.0),
    "eventful-fp16": scenario("fp16", eventful=True, update_interval=3, select_interval=5, max_grad_norm=1.0),
    "eventful-fp32-no-overlap": scenario("fp32", eventful=True, overlap_step=False, select_interval=8),
    "eventful-warm-up": scenario(eventful=True, full_warm_up_rounds=5, update_interval=3, select_interval=9),
    "eventful-none": scenario(eventful=True, deferred_lr_scale="none", update_interval=2, select_interval=9),
    "eventful-rows-small-buckets": scenario(eventful=True, channel_dim="row", bucket_bytes=128, select_interval=6),
    "host": scenario(accumulate_on="host", select_interval=8, max_grad_norm=0.5),
    "host-U=1-fp32": scenario("fp32", accumulate_on="host", update_interval=1, select_interval=7),
    "host-small-buckets-no-overlap": scenario(accumulate_on="host", bucket_bytes=64, overlap_step=False),
    "host-warm-up": scenario("fp16", accumulate_on="host", full_warm_up_rounds=5, select_interval=8),
    "host-eventful": scenario(eventful=True, accumulate_on="host", select_interval=8, max_grad_norm=1.0),
    "host-eventful-fp16": scenario("fp16", True, accumulate_on="host", update_interval=3, select_interval=5),
    "host-rows-none": scenario(accumulate_on="host", channel_dim="row", deferred_lr_scale="none", select_interval=8),
    "replay": scenario(**REPLAY, select_interval=8, max_grad_norm=0.5),
    "replay-k=0": scenario(**REPLAY, topk_ratio=0, update_interval=3),
    "replay-U=7-fp32": scenario("fp32", **REPLAY, update_interval=7, select_interval=2),
    "replay-no-overlap-rows": scenario(**REPLAY, overlap_step=False, channel_dim="row", bucket_bytes=128),
    "replay-eventful": scenario(eventful=True, **REPLAY, select_interval=8, max_grad_norm=1.0),
    "replay-eventful-fp16": scenario("fp16", True, **REPLAY, update_interval=3, select_interval=5, max_grad_norm=1.0),
    "upload-in-step": scenario(upload="step", select_interval=8),
    "unchecked-uploads": scenario(upload_check=False, backward_passes_per_step=1, bucket_bytes=64),
}
STOCHASTIC = {"selected_masters": "stochastic", "rounding_seed": 2**63 + 11}
SCENARIOS |= {
    "stochastic": scenario(**STOCHASTIC, select_interval=8),
    "stochastic-k=1": scenario(**STOCHASTIC, topk_ratio=1),
    "stochastic-rows-clip": scenario(**STOCHASTIC, channel_dim="row", max_grad_norm=0.5, select_interval=6),
    "stochastic-reset": scenario(**STOCHASTIC, on_reselect="reset", select_interval=4, overlap_step=False),
    "stochastic-staggered": scenario(**STOCHASTIC, stagger=True, select_interval=7, bucket_bytes=64),
    "stochastic-eventful": scenario(eventful=True, **STOCHASTIC, select_interval=8, max_grad_norm=1.0),
    "stochastic-eventful-warm-up": scenario(
        eventful=True, **STOCHASTIC, full_warm_up_rounds=5, update_interval=3, select_interval=9
    ),
    "stochastic-host": scenario(accumulate_on="host", **STOCHASTIC, select_interval=8, max_grad_norm=0.5),
    "stochastic-replay-eventful": scenario(eventful=True, **REPLAY, **STOCHASTIC, select_interval=8, max_grad_norm=1.0),
    "stochastic-more-than-a-tile": Scenario(
        {"lr": 0.02, "topk_ratio": 0.1, "select_interval": 8, **STOCHASTIC}, shapes=[(150, 120), (9000,), (3, 5000)]
    ),
}
EVERYONE = {*range(len(SHAPES))}
ABSENT = {2: {1, 2}, 3: {0, 1}, 5: {1}, 7: EVERYONE, **dict.fromkeys((17, 18, 19, 20), {0, 4}), 23: {3, 5}, 24: {3}}
NON_FINITE = {1: (0, "inf"), 4: (2, "nan"), 6: (1, "-inf"), 8: (3, "nan"), 16: (0, "inf"), 26: (4, "inf")}


def disturbed(pair: Pair, step: int, grads: list[Tensor]) -> list[Tensor | None]:
    """The gradients of one eventful step."""
    for group in pair.engine.param_groups:
        group["lr"] = 0.02 * (1 - step / 40)
        group["betas"] = (0.8, 0.95) if step >= 14 else (0.9, 0.999)
        group["weight_decay"] = 0.2 if step in (9, 10, 15, 22) else 0.1
    given = [None if index in ABSENT.get(step, ()) else grad for index, grad in enumerate(grads)]
    if step in NON_FINITE:
        index, value = NON_FINITE[step]
        if given[index] is not None:
            given[index].view(-1)[given[index].numel() // 2] = float(value)
    return given


@pytest.mark.parametrize("name", SCENARIOS)
def test_engine_equals_the_simulation(name: str, device: str, build: Builder) -> None:
    chosen = SCENARIOS[name]
    dtype = DTYPES[chosen.dtype]
    exact = "max_grad_norm" in chosen.settings
    pair = Pair(build, make_parameters(chosen.shapes, dtype, device), **chosen.settings)
    for step, grads in enumerate(make_gradients(chosen.shapes, dtype, STEPS, exact=exact), start=1):
        pair.step(disturbed(pair, step, grads) if chosen.eventful else grads)
    stats = pair.engine.stats()
    pair.check_state()
    assert (stats.steps, stats.skipped_steps) == (STEPS, pair.model.skipped)
    assert stats.windows == pair.model.windows
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()
    pair.check_state()


@pytest.mark.parametrize("steps_to_flush", [{1}, {4}, {3, 5, 6}, {2, 9, 10}], ids=str)
def test_flush_ends_the_running_window(steps_to_flush: set[int], device: str, build: Builder) -> None:
    """Its partial sum is applied, everything becomes visible, and the next step begins a window."""
    dtype = torch.bfloat16
    pair = Pair(build, make_parameters(dtype=dtype, device=device), lr=0.02, topk_ratio=0.3, update_interval=4)
    for step, grads in enumerate(make_gradients(dtype=dtype, steps=14), start=1):
        pair.step(grads)
        if step in steps_to_flush:
            pair.engine.flush()
            pair.model.flush()
            pair.check_weights()
    pair.check_state()


def test_channel_state_makes_nothing_visible(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), lr=0.02, topk_ratio=0.3, select_interval=6)
    for grads in make_gradients(dtype=torch.bfloat16, steps=13):
        pair.step(grads)
        pair.check_state()
        pair.check_weights()


class Net(nn.Module):
    """A convolution, a tied embedding, biases, a 0-dim scale and an odd width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 12)
        self.conv = nn.Conv1d(12, 14, 3, padding=1)
        self.up, self.down = nn.Linear(14, 31), nn.Linear(31, 12)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.down(torch.tanh(self.up(x))) * self.scale
        return x @ self.embed.weight.T


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_engine_equals_the_simulation_through_backward(dtype: str, overlap: bool, device: str, build: Builder) -> None:
    """Gradients that PyTorch makes, in its own layouts; two micro-batches a step, weights tied."""
    torch.manual_seed(3)
    net = Net().to(DTYPES[dtype]).to(device)
    pair = Pair(build, list(net.parameters()), lr=0.01, topk_ratio=0.2, select_interval=8, overlap_step=overlap)
    generator = torch.Generator().manual_seed(0)
    for _ in range(18):
        pair.engine.zero_grad()
        for _ in range(2):
            tokens = torch.randint(0, 23, (3, 9), generator=generator).to(device)
            logits = net(tokens[:, :-1]).float()
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        pair.step_on_grad()
    pair.check_state()
