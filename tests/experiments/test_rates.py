"""G5: the learning rates in metrics.jsonl are those that moved the weights, on the device and by the CPU process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.commands import BRIEF
from tests.engine.simulation import TOGETHER
from zenflow.config import ZenFlowConfig
from zenflow.training.engines import AdamW, ZenFlowRun
from zenflow.training.metrics import Recorder, StepTimer
from zenflow.training.rates import DeferredRates

STEPS, SELECTED = 14, 2  # of 16 columns: equal scores go to the lower index
RATES = [2.0**-10 * (3 + 5 * step % 7) for step in range(STEPS)]


def fields_of(config: ZenFlowConfig) -> dict[str, Any]:
    """As a run records them."""
    return vars(config) | {"visible_after": config.visible_after_steps}


def moved(
    folder: Path,
    skipped: tuple[int, ...] = (),
    log_every: int = 1,
    device: str = "cpu",
    matrices: int = 1,
    **settings: Any,
) -> tuple[list[dict], list[Tensor]]:
    """The lines of a run whose gradient is always 1, and how far each step moved the weights `[matrices, 16]`, by
    column; on the schedule of the paper, where `settings` name no other.

    AdamW moves by the rate itself then, whatever its t: both moments' means are 1.
    """
    weights = [nn.Parameter(torch.zeros(8, 16, device=device)) for _ in range(matrices)]
    own = {"topk_ratio": SELECTED / 16, "min_deferred_numel": 1, "worker_threads": 1}
    config = ZenFlowConfig(**own | TOGETHER | settings)
    engine = ZenFlowRun(weights, config, lr=1.0, weight_decay=0.0)
    timer, distances = StepTimer(weights[0].device), []
    with engine, Recorder(folder, timer, engine, log_every, None, DeferredRates(fields_of(config))) as recorder:
        for number, lr in enumerate(RATES, 1):
            engine.param_groups[0]["lr"] = lr
            timer.start()
            (torch.stack(weights) * (float("inf") if number in skipped else 1.0)).sum().backward()
            before = torch.stack(weights).detach()
            engine.step()
            engine.zero_grad()
            timer.stop()
            recorder.step(number, torch.tensor(1.0), lr, 1, last=number == STEPS)
            distances.append((before - torch.stack(weights).detach())[:, 0].cpu())
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()], distances


SETTINGS = {
    "linear": {},
    "none": {"deferred_lr_scale": "none"},
    "number": {"deferred_lr_scale": 2.5},
    "undelayed": {"overlap_step": False},
    "window-of-one": {"update_interval": 1},
    "undelayed-window-of-one": {"update_interval": 1, "overlap_step": False, "stagger": True},
    "half-delay": {"visible_after": 2},
    "one-cohort": {"stagger": True},
    "warm-up": {"full_warm_up_rounds": 3, "update_interval": 3},
    "selections": {"select_interval": 6},
    "host": {"accumulate_on": "host", "update_interval": 3},
    "replay": {"accumulate_on": "host", "deferred_rule": "replay"},
    "replay-selections": {"accumulate_on": "host", "deferred_rule": "replay", "select_interval": 5},
}


@pytest.mark.parametrize("skipped", [(), (4, 9, 10)], ids=["counted", "skipped"])
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_logged_rates_are_those_applied(device, name, skipped, tmp_path):
    lines, distances = moved(tmp_path, skipped, device=device, upload="step", **SETTINGS[name])
    for line, (distance,) in zip(lines, distances, strict=True):
        # One update differs from its rate by the roundings of some ten operations in fp32.
        applied = 0.0 if line["step"] in skipped else line["lr"]
        assert distance[:SELECTED].tolist() == pytest.approx([applied] * SELECTED, rel=1e-4, abs=1e-7)
        assert distance[SELECTED:].tolist() == pytest.approx([line.get("deferred_lr", 0.0)] * 14, rel=1e-4, abs=1e-7)
    shown = [line for line in lines if "deferred_lr" in line]
    assert len(shown) >= 2 and all(line.keys() >= {"staleness", "deferred_step"} for line in shown)


@pytest.mark.parametrize("prediction", [0.0, 1.0])
def test_the_logged_rates_are_those_of_the_cohort_that_became_visible(prediction, tmp_path):
    """The default's schedule, with three cohorts: one of them moves in a step, by the rate in the step's line, and by
    what a prediction adds: as much again, less what it had added the time before."""
    lines, distances = moved(tmp_path, matrices=3, upload="step", stagger=True, weight_prediction=prediction)
    applied: list[list[float]] = [[0.0], [0.0], [0.0]]
    for line, distance in zip(lines, distances, strict=True):
        assert distance[:, :SELECTED].flatten().tolist() == pytest.approx([line["lr"]] * 3 * SELECTED, rel=1e-4)
        movers = distance[:, SELECTED:].any(dim=1).nonzero().flatten().tolist()
        assert len(movers) == ("deferred_lr" in line)
        for cohort in movers:
            applied[cohort].append(line["deferred_lr"])
            before, rate = applied[cohort][-2:]
            expected = rate + prediction * (rate - before)
            assert distance[cohort, SELECTED:].tolist() == pytest.approx([expected] * 14, rel=1e-4, abs=1e-7)
    assert all(line["staleness"] == 1 for line in lines if "deferred_lr" in line)
    assert min(len(rates) for rates in applied) > 2


@pytest.mark.parametrize("engine", ["zenflow", "adamw"])
def test_a_run_s_file_has_the_rate_that_each_step_was_made_with(command, monkeypatch, engine):
    """Warm-up to 2e-3 in 3 steps, then down to nothing: another one in every step."""
    applied, kind = [], {"zenflow": ZenFlowRun, "adamw": AdamW}[engine]
    step = kind.step

    def noted(run):
        applied.append([group["lr"] for group in run.param_groups])
        step(run)

    monkeypatch.setattr(kind, "step", noted)
    outcome = command(*BRIEF, "steps=6", f"engine={engine}", "optimizer.warmup_steps=3", "optimizer.schedule=linear")
    assert outcome.code == 0, outcome.err
    logged = [line["lr"] for line in outcome.metrics() if "loss" in line]
    assert [[lr] for lr in logged] == applied
    assert logged == pytest.approx([2e-3 * share for share in (1 / 3, 2 / 3, 1, 2 / 3, 1 / 3, 0)], abs=1e-12)


def test_a_line_names_the_window_that_became_visible_and_its_delay(tmp_path):
    lines, _ = moved(tmp_path, update_interval=3, select_interval=9)
    told = {line["step"]: (line["staleness"], line["deferred_step"]) for line in lines if "staleness" in line}
    # The selection at step 9 shows the window that ends there, too.
    assert told == {6: (1, 3), 9: (0, 9)}
    assert lines[8]["deferred_lr"] == pytest.approx(3 * (RATES[5] + RATES[8]))


@pytest.mark.parametrize("log_every", [5, 100])
def test_a_rate_that_the_host_cannot_know_is_left_out(tmp_path, log_every):
    """Which of several steps was skipped is not asked for: the windows that it may have been in have no rate."""
    lines, _ = moved(tmp_path, skipped=(7,), log_every=log_every, update_interval=2)
    rates = {line["step"]: line.get("deferred_lr") for line in lines if "deferred_step" in line}
    assert list(rates) == [4, 6, 8, 10, 12, 14]
    unknown = {5: [8, 10, 12], 100: [4, 6, 8, 10, 12, 14]}[log_every]
    assert [step for step, rate in rates.items() if rate is None] == unknown
    assert all(rates[step] == pytest.approx(2 * RATES[step - 3]) for step in rates if step not in unknown)


def test_a_staggered_line_has_the_rate_of_the_cohort_that_became_visible():
    """U 3, visible two steps later, warm-up to step 2, a selection at step 7 at which three windows end."""
    rates = DeferredRates(fields_of(ZenFlowConfig(update_interval=3, full_warm_up_rounds=2)))
    lines = [{"step": step, "lr": float(step)} for step in range(1, 13)]
    rates.read(lines, 0)
    staleness = {1: 0, 2: 0, **dict.fromkeys((5, 6), 1), 7: 0, **dict.fromkeys((10, 11, 12), 1)}
    told = [
        rates.complete(line | {"staleness": staleness[line["step"]]}) for line in lines if line["step"] in staleness
    ]
    assert [(line["deferred_step"], line.get("deferred_lr")) for line in told] == [
        (1, 1.0), (2, 2.0), (3, 3.0), (4, 2 * 4.0), (7, None), (8, 8.0), (9, 2 * 9.0), (10, 3 * 10.0),
    ]  # fmt: skip


def test_steps_of_which_all_were_skipped_are_known():
    rates = DeferredRates(fields_of(ZenFlowConfig(update_interval=2, **TOGETHER)))
    lines = [{"step": step, "lr": 0.5} for step in range(1, 7)]
    rates.read(lines[:2], 0)
    rates.read(lines[2:4], 2)
    rates.read(lines[4:], None)
    assert rates.complete(lines[0]) == {}
    assert rates.complete(lines[3] | {"staleness": 1}) == {"deferred_step": 2, "deferred_lr": 1.0}
    assert rates.complete(lines[5] | {"staleness": 1}) == {"deferred_step": 4, "deferred_lr": 0}
