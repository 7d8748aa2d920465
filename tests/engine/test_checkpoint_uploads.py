"""I7 for what uploads learn of the model: how often gradients come, which buckets were tried, and the retreat."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.driving import Builder, assert_same_bits, make_gradients
from tests.engine.resuming import Script, Step, assert_same_state, check_resumed
from tests.engine.test_upload_check import Detached
from tests.engine.uploading import SETTINGS
from zenflow import ZenFlow


def train(model: Any, engine: ZenFlow, batches: list[torch.Tensor]) -> None:
    for x in batches:
        engine.zero_grad()
        engine._pipeline.wait_for_worker()  # so that backward takes a bucket on the CPU as surely as on a GPU
        model.run(x)
        engine.step()


@pytest.mark.parametrize("stagger", [False, True], ids=["together", "staggered"])
@pytest.mark.parametrize("steps", [1, 3, 5, 7, 9])
def test_i7_a_model_whose_weights_are_used_late(
    steps: int, stagger: bool, device: str, build: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    """The check skips steps 4, 6 and 8, then uploads stay in step(): a resumed run skips the same steps, no others."""
    torch.manual_seed(0)
    model = Detached().to(device)
    batches = [torch.randn(3, 12, device=device) for _ in range(14)]
    engine = build(model.parameters(), **SETTINGS, stagger=stagger)
    train(model, engine, batches[:steps])
    saved = copy.deepcopy(engine.state_dict())
    fresh = Detached().to(device)
    resumed = build(fresh.parameters(), **SETTINGS, stagger=stagger)
    resumed.load_state_dict(saved)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="zenflow"):
        train(model, engine, batches[steps:])
        warned = len(caplog.records)
        train(fresh, resumed, batches[steps:])
    assert len(caplog.records) == 2 * warned == 2 * (steps < 8)
    assert engine.stats().skipped_steps == resumed.stats().skipped_steps == 3
    for (name, weight), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert_same_bits(other, weight, name)
    assert_same_state(resumed.state_dict(), engine.state_dict())


@pytest.mark.parametrize("event", ["late", "frozen"])
@pytest.mark.parametrize("stagger", [False, True], ids=["together", "staggered"])
def test_i7_buckets_are_tried_as_they_were_laid_out(
    event: str, stagger: bool, device: str, build: Builder, tmp_path: Path
) -> None:
    """A parameter that came later has a bucket of its own, and one that is frozen by now has not: buckets pass the
    check when all of their parameters have gradients, which here is in different steps."""
    shapes = [(6, 8), (8, 6), (6, 8)]
    steps = [Step([*grads]) for grads in make_gradients(shapes, torch.bfloat16, 14)]
    for number in (*range(4, 14, 3), *range(5, 14, 3)):
        steps[number].grads[0] = None
    groups = [([0, 1, 2], {"lr": 0.02})]
    if event == "late":
        steps[2].added = [2]
        groups = [([0, 1], {"lr": 0.02})]
    else:
        steps[3].frozen = {1: True}
    settings = {"topk_ratio": 0.2, "update_interval": 2, "select_interval": 50, "stagger": stagger}
    script = Script(shapes, [torch.bfloat16] * 3, settings, groups, [], steps)
    check_resumed(script, [4, 5, 7], device, build, tmp_path)


class Healthy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(12, 12), nn.Linear(12, 12)

    def run(self, x: torch.Tensor) -> None:
        self.block(torch.tanh(self.first(x))).square().sum().backward()


@pytest.mark.parametrize("bucket_bytes", [256, 1 << 20], ids=["same-buckets", "other-buckets"])
def test_what_has_passed_the_check_is_not_tried_again(bucket_bytes: int, device: str, build: Builder) -> None:
    torch.manual_seed(0)
    model, fresh = Healthy().to(device), Healthy().to(device)
    engine = build(model.parameters(), **SETTINGS)
    batches = [torch.randn(3, 12, device=device) for _ in range(7)]
    train(model, engine, batches[:5])
    resumed = build(fresh.parameters(), **{**SETTINGS, "bucket_bytes": bucket_bytes})
    resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
    resumed._pipeline.wait_for_worker()
    fresh.run(batches[5])
    assert resumed._pipeline.uploads.in_transit
    assert all(bool(weight.isfinite().all()) for weight in fresh.parameters())
    resumed.step()


def test_a_retreat_is_the_models_and_a_choice_is_not(device: str, build: Builder) -> None:
    """Saved under `upload: step`, or without the check, a run takes up uploads in backward and their check."""
    torch.manual_seed(0)
    for given in ({"upload": "step"}, {"upload_check": False}):
        model, fresh = Healthy().to(device), Healthy().to(device)
        engine = build(model.parameters(), **SETTINGS, **given)
        batches = [torch.randn(3, 12, device=device) for _ in range(9)]
        train(model, engine, batches[:2])
        resumed = build(fresh.parameters(), **SETTINGS)
        resumed.load_state_dict(copy.deepcopy(engine.state_dict()))
        train(fresh, resumed, batches[2:8])
        assert resumed._pipeline.uploads.check.passed


@pytest.mark.parametrize(
    "uploads",
    [{}, {"fell_back": False, "tries": 1, "passed": [], "failed": [], "arrivals": {"seen": 3, "usual": {}}}],
    ids=str,
)
def test_what_uploads_never_save_is_refused(uploads: dict[str, Any], device: str, build: Builder) -> None:
    model = Healthy().to(device)
    engine = build(model.parameters(), **SETTINGS)
    train(model, engine, [torch.ones(3, 12, device=device)])
    state = engine.state_dict()
    state["zenflow"]["uploads"] = uploads
    with pytest.raises(ValueError, match="uploads are"):
        engine.load_state_dict(state)


@pytest.mark.parametrize("layout", [3, [0, 1], [[0], [0]], [["0"]], [[0, 99]]], ids=str)
def test_what_no_layout_is_is_refused(layout: Any, device: str, build: Builder) -> None:
    model = Healthy().to(device)
    engine = build(model.parameters(), **SETTINGS)
    train(model, engine, [torch.ones(3, 12, device=device)])
    state = engine.state_dict()
    assert state["zenflow"]["layout"] == [[0, 1, 2, 3]]
    state["zenflow"]["layout"] = layout
    with pytest.raises(ValueError, match=r"layout is .* in the state; allowed is an order of its entries"):
        engine.load_state_dict(state)
