"""X1: weights that are used again after their gradient exists. The check finds what counting gradients cannot."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.engine.driving import Builder, assert_same_bits
from tests.engine.uploading import (
    SETTINGS,
    hooks_of,
)
from zenflow import ZenFlow
from zenflow.upload_check import TRIES
from zenflow.uploading import Sent


class Reentrant(nn.Module):
    """A block used twice, under reentrant checkpointing: its weights get a gradient, and are then used again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block, self.last = (nn.Linear(12, 12) for _ in range(3))

    def loss(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.block(y)), x, use_reentrant=True)
        return self.last(x).square().sum()

    def run(self, x: Tensor) -> None:
        self.loss(x).backward()


class Detached(nn.Module):
    """A detached use early in the forward: its backward comes last, long after the weight's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(12, 12), nn.Linear(12, 12)

    def run(self, x: Tensor) -> None:
        early = torch.tanh(self.first(x)) @ self.block.weight.detach().T
        torch.tanh(self.block(early)).square().sum().backward()


class Twice(nn.Module):
    """Two passes through one retained graph; `again`: the second is for the first layer alone."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again = again
        self.first, self.block = nn.Linear(12, 12), nn.Linear(12, 12)

    def run(self, x: Tensor) -> None:
        loss = torch.tanh(self.block(torch.tanh(self.first(x)))).square().sum()
        loss.backward(retain_graph=True)
        loss.backward(inputs=list(self.first.parameters()) if self.again else None)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "reentrant": Reentrant,
    "detached": Detached,
    "retained": lambda: Twice(False),
    "retained-in-part": lambda: Twice(True),
}
FALLS_BACK = {"detached", "retained-in-part"}  # what counting gradients cannot see, and the check has to find


def run_beside_a_copy(model: nn.Module, engine: ZenFlow, batches: Sequence[Tensor]) -> list[bool]:
    """Train; each counted step's gradients must be those of a copy at the weights before backward. Which counted."""
    counted = []
    for x in batches:
        engine.zero_grad()
        twin = copy.deepcopy(model)
        twin.run(x.clone())
        engine._pipeline.wait_for_worker()
        before = engine.stats().skipped_steps
        model.run(x)
        engine.step()
        counted.append(engine.stats().skipped_steps == before)
        for (name, parameter), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert bool(parameter.isfinite().all()), f"{name} after step()"
            if counted[-1] and parameter.requires_grad:
                assert_same_bits(parameter.grad, other.grad, name)
    return counted


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", MODELS)
def test_x1_no_wrong_gradient_ever_counts(
    name: str, device: str, build: Builder, caplog: pytest.LogCaptureFixture, taken: list[tuple[Sent, bool]]
) -> None:
    """X1: where the check finds a late use, three steps are skipped and counted, one warning is given, and uploads stay
    in step(); where counting gradients is enough, the check passes at once and uploads go on in backward."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    engine = build(model.parameters(), **SETTINGS)
    batches = [torch.randn(3, 12, device=device) for _ in range(20)]
    with caplog.at_level(logging.WARNING, logger="zenflow"):
        counted = run_beside_a_copy(model, engine, batches)
    skipped = [number for number, good in enumerate(counted, start=1) if not good]
    assert skipped == ([4, 6, 8] if name in FALLS_BACK else [])
    assert engine.stats().skipped_steps == len(skipped)
    warned = [record.message for record in caplog.records if record.name == "zenflow"]
    assert len(warned) == (name in FALLS_BACK)
    assert all("upload_check" in message and f"{TRIES} skipped" in message for message in warned)
    assert any(in_backward for _, in_backward in taken) == (name not in FALLS_BACK)
    engine.flush()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


@pytest.mark.parametrize("name", ["reentrant", "retained"])
@pytest.mark.parametrize("checked", [True, False], ids=["checked", "unchecked"])
def test_x1_a_number_of_passes_that_is_too_small_is_an_error(
    checked: bool, name: str, device: str, build: Builder
) -> None:
    """X1: counted as one backward pass, the second gradient comes after the upload, or under the check after NaN.

    In the second pass through a retained graph autograd finds the upload before the gradient comes.
    """
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    settings = {**SETTINGS, "backward_passes_per_step": 1, "upload_check": checked}
    engine = build(model.parameters(), **settings)
    batches = [torch.randn(3, 12, device=device) for _ in range(4)]
    found_first = name == "retained" and not checked
    message = "modified by an inplace operation" if found_first else "backward_passes_per_step.*upload='step'"
    with pytest.raises(RuntimeError, match=message):
        run_beside_a_copy(model, engine, batches)
    engine.close()
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_x1_upload_in_step_is_right_for_all_of_them(device: str, build: Builder) -> None:
    for make in MODELS.values():
        torch.manual_seed(0)
        model = make().to(device)
        engine = build(model.parameters(), **SETTINGS, upload="step")
        assert all(run_beside_a_copy(model, engine, [torch.randn(3, 12, device=device) for _ in range(8)]))
        assert hooks_of(list(model.parameters())) == 0


def test_a_healthy_model_passes_the_check_at_its_first_try(
    device: str, build: Builder, caplog: pytest.LogCaptureFixture, taken: list[tuple[Sent, bool]]
) -> None:
    """No skipped step, no warning, no NaN after any step; the window after the check uploads in backward."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.LayerNorm(30), nn.Linear(30, 12)).to(device)
    engine = build(model.parameters(), **SETTINGS)
    poisoned = []
    with caplog.at_level(logging.WARNING, logger="zenflow"):
        for number in range(1, 9):
            engine.zero_grad()
            engine._pipeline.wait_for_worker()
            taken.clear()
            model(torch.randn(3, 12, device=device)).square().sum().backward()
            if any(bool(parameter.isnan().any()) for parameter in model.parameters()):
                poisoned.append(number)
            engine.step()
            assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
            if number in (6, 8):
                assert taken and all(in_backward for _, in_backward in taken)
    assert poisoned == [4]
    assert engine.stats().skipped_steps == 0
    assert not caplog.records


def test_a_layer_that_is_unfrozen_after_the_check_is_tried_too(
    device: str, build: Builder, caplog: pytest.LogCaptureFixture
) -> None:
    """Gradual unfreezing: the check has passed in the other layers' buckets, the late use is in this one."""
    torch.manual_seed(0)
    model = Detached().to(device)
    engine = build(model.parameters(), **SETTINGS)
    batches = [torch.randn(3, 12, device=device) for _ in range(20)]
    model.block.requires_grad_(False)
    counted = run_beside_a_copy(model, engine, batches[:8])
    assert all(counted) and engine._pipeline.uploads.check.passed
    model.block.requires_grad_(True)
    with caplog.at_level(logging.WARNING, logger="zenflow"):
        counted = run_beside_a_copy(model, engine, batches[8:])
    assert counted.count(False) == TRIES
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


def test_an_overflow_during_the_check_is_tried_again(
    device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    """GradScaler with fp16: the checking step overflows; it is skipped, and the next window tries again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)).half().to(device)
    engine = build(model.parameters(), **SETTINGS)
    scaler = torch.amp.GradScaler(device, init_scale=16.0, growth_interval=1000)
    for number in range(1, 11):
        engine.zero_grad()
        engine._pipeline.wait_for_worker()
        taken.clear()
        x = torch.randn(3, 12, dtype=torch.float16, device=device)
        if number == 4:
            x[0, 0] = 60000.0
        loss = model(x).float().square().mean() * (1e6 if number == 4 else 1)
        scaler.scale(loss).backward()
        tries = engine._pipeline.uploads.check.tries
        scaler.step(engine)
        scaler.update()
        assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
        assert engine._pipeline.uploads.check.tries - tries == {4: -1, 6: 1}.get(number, 0)
    assert taken and all(in_backward for _, in_backward in taken)
    assert engine.stats().skipped_steps == 1


@pytest.mark.parametrize("name", sorted(FALLS_BACK))
def test_a_late_use_that_nobody_has_tried_is_torchs_own_error(name: str, device: str, build: Builder) -> None:
    """Without the check, or after it: for autograd an upload is a change in place, so no wrong gradient comes out."""
    torch.manual_seed(0)
    model = MODELS[name]().to(device)
    engine = build(model.parameters(), **SETTINGS, upload_check=False)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_beside_a_copy(model, engine, [torch.randn(3, 12, device=device) for _ in range(8)])
    engine.zero_grad()
    assert not engine._pipeline.uploads.in_transit


@pytest.mark.parametrize("upload", ["backward", "step"])
def test_a_graph_that_is_kept_beyond_a_step_raises_as_with_adamw(upload: str, device: str, build: Builder) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)).to(device)
    engine = build(model.parameters(), **SETTINGS, upload=upload)
    loss = model(torch.randn(3, 12, device=device)).square().sum()
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
