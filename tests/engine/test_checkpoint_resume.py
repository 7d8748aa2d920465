"""I7: saved at any step, through a folder, into a fresh optimizer on fresh weights, a run goes on bit for bit."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from torch import nn
from zenflow_kernels.close_step import close_step

from tests.engine.driving import USUAL, Builder, assert_same_bits, feed, make_gradients, make_parameters, snapshot
from tests.engine.resuming import Run, assert_same_run, assert_same_state, check_resumed, draw_script, make_script
from zenflow.checkpoint_folder import load, save

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "usual-bf16": (torch.bfloat16, USUAL),
    "usual-fp32": (torch.float32, USUAL),
    "usual-host-bf16": (torch.bfloat16, {"accumulate_on": "host", **USUAL}),
    "gpu-bf16": (torch.bfloat16, {}),
    "host-fp32": (torch.float32, {"accumulate_on": "host", "full_warm_up_rounds": 2}),
    "replay-bf16": (torch.bfloat16, {"accumulate_on": "host", "deferred_rule": "replay"}),
    "staleness-0-fp32": (torch.float32, {"overlap_step": False, "bucket_bytes": 64}),
    "half-delay-bf16": (torch.bfloat16, {"visible_after": 1}),
    "stochastic-bf16": (torch.bfloat16, {"selected_masters": "stochastic", "rounding_seed": 7}),
    "staggered-bf16": (torch.bfloat16, {"stagger": True}),
    "predicted-bf16": (torch.bfloat16, {"weight_prediction": 1.0, "visible_after": 1}),
    "predicted-fp32": (torch.float32, {"weight_prediction": 0.7, "stagger": True, "visible_after": 1}),
    "predicted-replay": (
        torch.bfloat16,
        {"accumulate_on": "host", "deferred_rule": "replay", "weight_prediction": 1.5},
    ),
    "window-scores-fp32": (torch.float32, {"importance_over": "window", "stagger": True, "update_interval": 4}),
    "window-scores-host": (torch.bfloat16, {"importance_over": "window", "accumulate_on": "host"}),
    "average-scores-bf16": (torch.bfloat16, {"importance_over": "average", "full_warm_up_rounds": 2}),
    "staggered-host-fp32": (torch.float32, {"stagger": True, "accumulate_on": "host", "visible_after": 3}),
}


@pytest.mark.parametrize("mode", MODES)
def test_i7_saved_at_any_step_a_run_goes_on(mode: str, device: str, build: Builder, tmp_path: Path) -> None:
    """I7, B12, B14, B17, G6: after every step of more than two windows, with the worker busy, a partial sum, a result
    on its way, a skipped step, a selection and a changed learning rate; weights at every later step, and in the end all
    masters, moments, t, owners and counters. Half of them go back in one optimizer that has gone on already."""
    dtype, given = MODES[mode]
    rewinds = mode in ("usual-fp32", "host-fp32", "staleness-0-fp32", "window-scores-fp32", "average-scores-bf16")
    check_resumed(make_script(dtype, given, 9), range(1, 9), device, build, tmp_path, rewinds=rewinds)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(source=draw.randoms(use_true_random=False), save_at=draw.integers(1, 10))
def test_i7_any_history_goes_on(source: random.Random, save_at: int, device: str, build: Builder) -> None:
    """Settings, shapes, dtypes, groups, frozen and added parameters, skips, loss scales, flushes, swapped weights."""
    with tempfile.TemporaryDirectory() as folder:
        check_resumed(draw_script(source, 11), [save_at], device, build, Path(folder))


def test_i7_saved_twice_in_one_run(device: str, build: Builder, tmp_path: Path) -> None:
    """A resumed run is saved and resumed like any other."""
    script = make_script(torch.bfloat16, {}, 9)
    run, broken = Run.start(script, device, build), Run.start(script, device, build)
    for number in range(9):
        expected, actual = run.play(number), broken.play(number)
        for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
            assert_same_bits(one, other, f"weight {index} after step {number + 1}")
        if number in (1, 2, 4):
            broken.save(tmp_path / str(number))
            broken.engine.close(flush=False)
            broken = Run.resume(script, tmp_path / str(number), device, build)
    assert_same_run(broken, run)


def test_b14_settings_of_groups_reach_both_halves(device: str, build: Builder) -> None:
    """B14: saved with lr .125 and decay .5, loaded by an optimizer that was built with lr .75 and none."""
    shapes, given = [(6, 10), (5,)], {"topk_ratio": 0.3, "update_interval": 1, "overlap_step": False}
    first, second = (make_parameters(shapes, device=device) for _ in range(2))
    engine = build(first, lr=0.125, weight_decay=0.5, **given)
    resumed = build(second, lr=0.75, weight_decay=0.0, **given)
    stream = make_gradients(shapes, steps=2)
    feed(first, stream[0])
    engine.step()
    resumed.load_state_dict(engine.state_dict())
    assert (resumed.param_groups[0]["lr"], resumed.param_groups[0]["weight_decay"]) == (0.125, 0.5)
    for parameters, optimizer in ((first, engine), (second, resumed)):
        feed(parameters, stream[1])
        optimizer.step()
    for index, (one, other) in enumerate(zip(second, first, strict=True)):
        assert_same_bits(one, other, f"weight {index}")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.embedding(tokens))))


def test_b18_tied_weights_are_one_state_and_still_tied(device: str, build: Builder, tmp_path: Path) -> None:
    """B18: embedding and head, with the model's own state in the same folder."""
    torch.manual_seed(0)
    model, again = Tied().to(device), Tied().to(device)
    tokens = torch.arange(11, device=device)
    given = {"lr": 0.05, "topk_ratio": 0.3, "update_interval": 2}
    engine, resumed = (build(one.parameters(), **given) for one in (model, again))

    def train(one: Tied, optimizer: Any, steps: int) -> None:
        for _ in range(steps):
            torch.nn.functional.cross_entropy(one(tokens), tokens.roll(1)).backward()
            optimizer.step()
            optimizer.zero_grad()

    train(model, engine, 3)
    save(tmp_path / "saved", {"optimizer": engine.state_dict(), "model": model.state_dict()})
    state = load(tmp_path / "saved")
    assert len(state["optimizer"]["state"]) == 3
    assert state["model"]["embedding.weight"] is state["model"]["head.weight"]
    again.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    assert again.head.weight is again.embedding.weight
    for one, optimizer in ((model, engine), (again, resumed)):
        train(one, optimizer, 4)
    for (name, weight), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert_same_bits(other, weight, name)
    assert_same_state(resumed.state_dict(), engine.state_dict())


OTHER_PROCESS = """
import sys
from pathlib import Path
from tests.engine.resuming import Run, make_script
from zenflow import ZenFlow
from zenflow.checkpoint_folder import save
import torch

def build(params, **settings):
    return ZenFlow(params, min_deferred_numel=0, worker_threads=1, **settings)

run = Run.resume(make_script(torch.bfloat16, {}, 9), Path(sys.argv[1]), sys.argv[3], build)
for number in range(4, 9):
    run.play(number)
save(sys.argv[2], {"optimizer": run.engine.state_dict(), "weights": [p.detach() for p in run.parameters]})
run.engine.close(flush=False)
"""


def test_c6_a_fresh_process_goes_on_with_equal_bits(device: str, build: Builder, tmp_path: Path) -> None:
    """C6, B12: saved in the middle of a window with a result on its way, loaded where nothing of the run is left; the
    folder holds no handle of the worker or its memory, and no pickle."""
    script = make_script(torch.bfloat16, {}, 9)
    run = Run.start(script, device, build)
    for number in range(4):
        run.play(number)
    assert run.engine._pipeline.uploads.pending
    run.save(tmp_path / "saved")
    text = json.dumps(json.loads((tmp_path / "saved" / "manifest.json").read_text())["tree"])
    assert "/proc/" not in text
    assert str(run.engine.stats().worker_pid) not in text.split('"')
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    command = [sys.executable, "-c", OTHER_PROCESS, str(tmp_path / "saved"), str(tmp_path / "later"), device]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for number in range(4, 9):
        run.play(number)
    later = load(tmp_path / "later")
    for index, (one, other) in enumerate(zip(later["weights"], snapshot(run.parameters), strict=True)):
        assert_same_bits(one, other, f"weight {index}")
    assert_same_state(later["optimizer"], run.engine.state_dict())


def test_x3_swapped_weights_after_a_load_keep_the_masters_low_bits(device: str, build: Builder, tmp_path: Path) -> None:
    """X3: an evaluation with averaged weights, just after a load and while a result is on its way."""
    script = make_script(torch.bfloat16, {}, 9)
    script.steps[5].swap = script.steps[7].swap = True
    check_resumed(script, [4, 5, 7], device, build, tmp_path)


@pytest.mark.parametrize("older", [False, True], ids=["", "state-without-layout"])
def test_the_norm_is_summed_in_the_order_of_the_saved_run(
    older: bool, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that woke up late comes last there, and first where the optimizer is built anew: the order of a sum
    decides on its last bit, and so on clip factors. Later layers follow in all runs; a second load keeps the order.
    States of older versions say nothing of the layout, and have an order all the same."""
    summed: list[torch.Tensor] = []

    def watched(control: Any, partials: torch.Tensor, *arguments: Any, **options: Any) -> None:
        summed.append(partials.cpu().clone())
        close_step(control, partials, *arguments, **options)

    monkeypatch.setattr("zenflow.step.close_step", watched)
    shapes = [(6, 5), (4,), (300, 300), (2, 2)]  # the third has several partial sums
    stream = make_gradients(shapes, steps=4)
    for late in (stream[0], stream[1], stream[2]):
        late[3] = None
    stream[0][0] = None
    parameters = make_parameters(shapes, device=device)
    parameters[0].requires_grad_(False)
    engine = build([*parameters[:3]], max_grad_norm=0.5)
    feed(parameters, stream[0])
    engine.step()
    parameters[0].requires_grad_(True)
    feed(parameters, stream[1])
    engine.step()
    resumed = [parameters]
    engines = [engine]
    for seed in (5, 6):
        fresh = make_parameters(shapes, device=device, seed=seed)
        engines.append(build([*fresh[:3]], max_grad_norm=0.5))
        state = engines[-2].state_dict()
        if older:
            del state["zenflow"]["layout"]
        engines[-1].load_state_dict(state)
        resumed.append(fresh)
    for one, others in zip(engines, resumed, strict=True):
        one.add_param_group({"params": others[3:]})
        for grads in stream[2:]:
            feed(others, grads)
            one.step()
    runs = [summed[2:4], summed[4:6], summed[6:8]]
    sizes = [grad.float().double().square().sum().item() for grad in (stream[2][1], stream[2][0])]
    assert runs[0][0][0].item() == pytest.approx(sizes[0])
    assert runs[0][0][-1].item() == pytest.approx(sizes[1])
    for run in runs[1:]:
        for step, (one, other) in enumerate(zip(run, runs[0], strict=True)):
            assert_same_bits(one, other, f"partial sums of step {step}")


class Loop:
    """A training loop as anybody writes it: dropout, shuffled data, a schedule, clipping, two passes a step."""

    def __init__(self, device: str, build: Builder, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Linear(12, 24), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(24), nn.Linear(24, 5)
        self.device, self.model = device, nn.Sequential(*layers).to(device)
        self.optimizer = build(self.model.parameters(), lr=0.02, max_grad_norm=0.5, topk_ratio=0.3, update_interval=3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=20)
        self.shuffling = torch.Generator().manual_seed(seed)
        self.losses: list[float] = []

    def step(self) -> None:
        for _ in range(2):
            picked = torch.randint(0, 64, (8,), generator=self.shuffling)
            x, y = (torch.sin(picked[:, None] * torch.arange(1, 13))).to(self.device), (picked % 5).to(self.device)
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "shuffling": self.shuffling.get_state(),
            "dropout": torch.get_rng_state(),
            "dropout_on_gpu": torch.cuda.get_rng_state() if self.device == "cuda" else None,
            "losses": self.losses,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.shuffling.set_state(state["shuffling"])
        torch.set_rng_state(state["dropout"])
        if self.device == "cuda":
            torch.cuda.set_rng_state(state["dropout_on_gpu"])
        self.losses = state["losses"]


def test_i7_with_dropout_shuffled_data_and_a_schedule(device: str, build: Builder, tmp_path: Path) -> None:
    """A whole loop in one folder; with torch's own schedulers, whose momentum cycles through `betas` too."""
    loop = Loop(device, build, seed=0)
    for step in range(1, 12):
        loop.step()
        if step in (4, 8):
            save(tmp_path / str(step), loop.state_dict())
    for step in (4, 8):
        resumed = Loop(device, build, seed=9)
        resumed.load_state_dict(load(tmp_path / str(step)))
        while len(resumed.losses) < 11:
            resumed.step()
        assert resumed.losses == loop.losses
        assert_same_state(resumed.optimizer.state_dict(), loop.optimizer.state_dict())
        for (name, weight), other in zip(loop.model.named_parameters(), resumed.model.parameters(), strict=True):
            assert_same_bits(other, weight, name)
