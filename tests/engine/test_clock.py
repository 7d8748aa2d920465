"""Windows, selections, schedulers and counters: what happens at which step."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.engine.driving import (
    DEFAULT,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from zenflow import ZenFlow, ZenFlowConfig


def test_a1_a_plain_loop_counts_its_calls_and_stays_finite(device: str, build: Builder) -> None:
    """A1: bf16 MLP 64-128-64, U 4, k 0.1, 13 steps of plain `loss.backward()`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).to(torch.bfloat16).to(device)
    engine = build(model.parameters(), lr=1e-3, topk_ratio=0.1, update_interval=4)
    batch = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    losses = []
    for _ in range(13):
        engine.zero_grad()
        loss = nn.functional.mse_loss(model(batch).float(), batch.float())
        loss.backward()
        engine.step()
        losses.append(float(loss))
    stats = engine.stats()
    assert all(torch.tensor(losses).isfinite())
    assert losses[-1] < 0.9 * losses[0]
    assert (stats.steps, stats.windows, stats.skipped_steps, stats.selections) == (13, 3, 0, 1)


def count_selections(build: Builder, device: str, steps: int, skipped: set[int], **settings: Any) -> list[int]:
    """The selections made after each step."""
    parameters = make_parameters(SHAPES[:2], torch.bfloat16, device)
    engine = build(parameters, **{"topk_ratio": 0.3, **settings})
    counts = []
    for step, grads in enumerate(make_gradients(SHAPES[:2], torch.bfloat16, steps), start=1):
        if step in skipped:
            grads[0][0, 0] = float("nan")
        feed(parameters, grads)
        engine.step()
        counts.append(engine.stats().selections)
    return counts


def test_a4_interval_8_over_40_steps_is_6_logged_selections(
    device: str, build: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    """A4: the first, and those due at 8, 16, 24, 32 and 40; one line each, naming its step."""
    with caplog.at_level(logging.INFO, logger="zenflow"):
        counts = count_selections(build, device, 40, set(), update_interval=4, select_interval=8)
    assert counts == [1 + step // 8 for step in range(1, 41)]
    said = [re.match(r"selection at step (\d+)\b", record.getMessage()) for record in caplog.records]
    assert [int(found[1]) for found in said if found] == [1, 8, 16, 24, 32, 40]


@pytest.mark.parametrize(
    ("settings", "skipped", "selecting_steps"),
    [
        ({"update_interval": 4, "select_interval": 6}, set(), [1, 8, 12, 20, 24]),
        ({"update_interval": 5, "select_interval": 2}, set(), [1, 5, 10, 15, 20]),
        ({"update_interval": 4, "select_interval": 8}, {1, 2, 8, 16}, [3, 12, 20, 24]),
        ({"update_interval": 3, "full_warm_up_rounds": 4, "select_interval": 9}, set(), [1, 4, 10, 19]),
        ({"update_interval": 4, "select_interval": 3, "full_warm_up_rounds": 6}, set(), [1, 3, 6, 10, 14, 18, 22]),
        (
            {"update_interval": 2, "select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 5},
            set(),
            [1, 10, 20],
        ),
    ],
    ids=["between-ends", "several-dues", "skipped", "warm-up", "warm-up-many", "epochs"],
)
def test_a4_selections_run_at_the_first_window_end_after_they_are_due(
    settings: dict[str, Any], skipped: set[int], selecting_steps: list[int], device: str, build: Builder
) -> None:
    counts = count_selections(build, device, 24, skipped, **settings)
    assert counts == [sum(due <= step for due in selecting_steps) for step in range(1, 25)]


def test_a4_epochs_without_a_length_are_an_error(build: Builder) -> None:
    with pytest.raises(ValueError, match="steps_per_epoch"):
        build(make_parameters(), select_strategy="epoch")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("topk_ratio", -0.1),
        ("topk_ratio", 1.5),
        ("topk_ratio", float("nan")),
        ("update_interval", 0),
        ("update_interval", -1),
        ("update_interval", 2.5),
        ("lr", -1e-3),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("betas", (1.0, 0.999)),
        ("betas", (0.9, -0.1)),
    ],
    ids=str,
)
def test_a8_bad_settings_are_refused_by_name_and_value(name: str, value: Any, build: Builder) -> None:
    with pytest.raises(ValueError) as refusal:
        build(make_parameters(), **{name: value})
    shown = value if name != "betas" else next(beta for beta in value if not 0 <= beta < 1)
    assert str(shown) in str(refusal.value)
    assert name.rstrip("s") in str(refusal.value).replace("learning rate", "lr")


def test_an_unknown_setting_is_refused_by_name(build: Builder) -> None:
    with pytest.raises((TypeError, ValueError), match="topk_ration"):
        build(make_parameters(), topk_ration=0.1)


def test_a_config_and_keywords_mean_the_same(build: Builder) -> None:
    settings = {"topk_ratio": 1, "update_interval": 3, "min_deferred_numel": 0, "worker_threads": 1}
    with ZenFlow(make_parameters(), config=ZenFlowConfig(**settings)) as engine:
        assert engine.config == build(make_parameters(), **settings, **DEFAULT).config
        assert (engine.config.topk_ratio, engine.config.update_interval) == (1, 3)


SCHEDULERS = {
    "lambda": lambda engine: lr_scheduler.LambdaLR(engine, lambda step: 1 / (1 + step)),
    "cosine": lambda engine: lr_scheduler.CosineAnnealingLR(engine, T_max=12),
    "one-cycle": lambda engine: lr_scheduler.OneCycleLR(engine, max_lr=0.05, total_steps=15),
    "sequential": lambda engine: lr_scheduler.SequentialLR(
        engine, [lr_scheduler.ConstantLR(engine, 0.1, 3), lr_scheduler.ExponentialLR(engine, 0.9)], [3]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_c1_schedulers_drive_both_halves(
    name: str, device: str, build: Builder, recwarn: pytest.WarningsRecorder
) -> None:
    """C1: each deferred update uses the last counted step's rate; OneCycleLR changes the betas too."""
    pair = Pair(build, make_parameters(dtype=torch.bfloat16, device=device), lr=0.02, topk_ratio=0.3, select_interval=8)
    scheduler = SCHEDULERS[name](pair.engine)
    rates = []
    for grads in make_gradients(dtype=torch.bfloat16, steps=14):
        rates.append(pair.engine.param_groups[0]["lr"])
        pair.step(grads)
        scheduler.step()
    pair.check_state()
    assert len(set(rates)) > 1
    assert not [str(w.message) for w in recwarn if "optimizer.step" in str(w.message)]


@pytest.mark.parametrize("lr", [0.0, 1e-20, torch.tensor(0.0)], ids=["0", "1e-20", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_c7_no_learning_rate_changes_nothing(dtype: torch.dtype, lr: Any, device: str, build: Builder) -> None:
    parameters = make_parameters(dtype=dtype, device=device)
    before = snapshot(parameters)
    engine = build(parameters, lr=lr, weight_decay=0.1, topk_ratio=0.3, update_interval=2, select_interval=4)
    for grads in make_gradients(dtype=dtype, steps=9):
        feed(parameters, grads)
        engine.step()
    engine.flush()
    for index, (parameter, weight) in enumerate(zip(parameters, before, strict=True)):
        assert_same_bits(parameter, weight, f"weight {index}")
        assert bool(engine.channel_state(parameter).exp_avg_sq.isfinite().all())


def test_c7_zero_gradients_change_nothing_and_stay_finite(device: str, build: Builder) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    before = snapshot(parameters)
    engine = build(parameters, lr=0.1, weight_decay=0.0, topk_ratio=0.3, update_interval=2, max_grad_norm=1.0)
    for _ in range(7):
        feed(parameters, [torch.zeros(shape, dtype=torch.bfloat16) for shape in SHAPES])
        engine.step()
    engine.flush()
    for parameter, weight in zip(parameters, before, strict=True):
        assert_same_bits(parameter, weight)
    assert engine.stats().grad_norm == 0
    assert engine.stats().skipped_steps == 0


def test_stats_count_what_happened(device: str, build: Builder) -> None:
    parameters = make_parameters(dtype=torch.bfloat16, device=device)
    engine = build(parameters, topk_ratio=0.3, update_interval=4, select_interval=8)
    first = engine.stats()
    assert (first.steps, first.windows, first.selections, first.skipped_steps) == (0, 0, 0, 0)
    assert (first.bytes_to_host, first.bytes_to_device) == (0, 0)
    for grads in make_gradients(dtype=torch.bfloat16, steps=17):
        feed(parameters, grads)
        engine.step()
    stats = engine.stats()
    assert (stats.steps, stats.windows, stats.selections, stats.skipped_steps) == (17, 4, 3, 0)
    deferrable = sum(parameter.numel() for parameter in parameters if parameter.dim() >= 2)
    assert stats.bytes_to_host >= 4 * 2 * deferrable * 0.5
    assert stats.bytes_to_device >= 4 * 2 * deferrable * 0.5
    assert stats.worker_busy_seconds > 0
    assert stats.stall_seconds >= 0
    assert stats.host_wait_seconds >= 0
    assert isinstance(stats.worker_pid, int)


def test_k_1_and_all_whole_start_no_worker(device: str, build: Builder) -> None:
    assert build(make_parameters(device=device), topk_ratio=1).stats().worker_pid is None
    assert build(make_parameters([(5,), ()], device=device), topk_ratio=0).stats().worker_pid is None
    assert build(make_parameters(device=device), min_deferred_numel=10**6).stats().worker_pid is None


def test_the_default_leaves_small_matrices_whole() -> None:
    """`min_deferred_numel` is 4096 unless it is set."""
    small, large = nn.Parameter(torch.zeros(63, 65)), nn.Parameter(torch.zeros(64, 64))
    with ZenFlow([small, large], worker_threads=1) as engine:
        feed([small, large], [torch.ones(63, 65), torch.ones(64, 64)])
        engine.step()
        assert bool(engine.channel_state(small).selected.all())
        assert int(engine.channel_state(large).selected.sum()) == 6
