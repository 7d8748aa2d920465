"""Weights that somebody else writes: the master follows exactly where they changed, whenever that is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.driving import Builder, Pair, assert_same_bits, feed, make_gradients, make_parameters
from zenflow import ZenFlow

SHAPES = [(6, 10), (5, 7), (3,)]
SETTINGS = {"lr": 0.02, "topk_ratio": 0.3, "update_interval": 4, "select_interval": 100}


def run(pair: Pair, steps: int, seed: int = 1) -> None:
    for grads in make_gradients(SHAPES, pair.parameters[0].dtype, steps, seed=seed):
        pair.step(grads)


@pytest.mark.parametrize("overlap_step", [True, False], ids=["overlap", "no-overlap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_one_channel_pinned_after_every_step_disturbs_no_other(
    channel_dim: str, dtype: torch.dtype, overlap_step: bool, device: str, build: Builder
) -> None:
    """Clamping and the like: low bits and pending updates of everything that was not touched stay as they are."""
    settings = {**SETTINGS, "overlap_step": overlap_step, "channel_dim": channel_dim}
    pair = Pair(build, make_parameters(SHAPES, dtype, device), **settings)
    weight = pair.parameters[0]
    others = [index for index in range(6 if channel_dim == "row" else 10) if index != 4]
    dim = 0 if channel_dim == "row" else 1
    for grads in make_gradients(SHAPES, dtype, 14):
        feed(pair.parameters, grads)
        pair.model.step(grads)
        pair.engine.step()
        with torch.no_grad():
            weight.select(dim, 4).fill_(0.125)
        index = torch.tensor(others)
        untouched = weight.detach().cpu().index_select(dim, index)
        assert_same_bits(untouched, pair.model.visible(0).index_select(dim, index), "visible")
        assert_same_bits(pair.parameters[1], pair.model.visible(1))
    actual, expected = pair.engine.channel_state(weight), pair.model.states[0]
    for name in ("master", "exp_avg", "exp_avg_sq"):
        got, wanted = getattr(actual, name), getattr(expected, name)
        assert_same_bits(got.index_select(dim, index), wanted.index_select(dim, index), name)
    assert (actual.master.select(dim, 4) == 0.125).all()


ENDS: dict[str, Callable[[ZenFlow], object]] = {
    "close": lambda engine: engine.close(),
    "flush": lambda engine: engine.flush(),
    "state_dict": lambda engine: engine.state_dict(),
}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("steps", [4, 6, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_loaded_weights_are_not_undone_by_the_end(
    end: str, steps: int, dtype: torch.dtype, device: str, build: Builder
) -> None:
    """B16: the best weights are put back after the last step; what follows must not bring older ones back."""
    pair = Pair(build, make_parameters(SHAPES, dtype, device), **{**SETTINGS, "weight_decay": 0.0})
    run(pair, steps)
    best = make_parameters(SHAPES, dtype, device, seed=9)
    pair.engine.flush()
    with torch.no_grad():
        for parameter, good in zip(pair.parameters, best, strict=True):
            parameter.copy_(good)
    result = ENDS[end](pair.engine)
    for index, (parameter, good) in enumerate(zip(pair.parameters, best, strict=True)):
        assert_same_bits(parameter, good, f"weight {index}")
        if isinstance(result, dict):
            assert_same_bits(result["state"][index]["master"].to(dtype), good, f"master {index}")


@pytest.mark.parametrize("steps", [3, 4, 6, 8])
def test_replaced_memory_keeps_pending_results(steps: int, device: str, build: Builder) -> None:
    """X2: `p.data = p.data.clone()`, then a flush at once, then on."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    run(pair, steps)
    for parameter in pair.parameters:
        parameter.data = parameter.data.clone()
    pair.engine.flush()
    pair.model.flush()
    pair.check_weights()
    run(pair, 6, seed=4)
    pair.check_state()


def test_masters_win_over_replaced_memory_in_a_load(device: str, build: Builder) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    run(pair, 6)
    saved = copy.deepcopy(pair.engine.state_dict())
    for parameter in pair.parameters:
        parameter.data = torch.zeros_like(parameter.data)
    pair.engine.load_state_dict(saved)
    pair.check_weights()
    run(pair, 6, seed=4)
    pair.check_state()


def test_each_weight_has_a_storage_of_its_own(device: str, build: Builder, tmp_path: Path) -> None:
    """X2: tools that take one storage for one tensor save every weight, and only its own bytes."""
    safetensors = pytest.importorskip("safetensors.torch")
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]).to(device)
    engine = build(model.parameters(), **SETTINGS)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    safetensors.save_model(model, str(tmp_path / "model.safetensors"))
    saved = safetensors.load_file(str(tmp_path / "model.safetensors"))
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        assert_same_bits(value, expected[name], name)
    torch.save(model[0].weight.detach(), tmp_path / "weight.pt")
    assert (tmp_path / "weight.pt").stat().st_size < 2 * 16 * 16 * 4 + 2000
    engine.close()


def test_accelerate_saves_and_loads_everything(tmp_path: Path, build: Builder) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    engine = build(model.parameters(), **SETTINGS)
    model, wrapped = accelerator.prepare(model, engine)
    for _ in range(6):
        accelerator.backward(model(torch.ones(2, 16)).square().sum())
        wrapped.step()
        wrapped.zero_grad()
    accelerator.save_state(str(tmp_path))
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(str(tmp_path))
    for parameter, value in zip(model.parameters(), expected, strict=True):
        assert_same_bits(parameter, value)


def test_a_parameter_in_another_group_is_refused_by_name(device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.0}], **SETTINGS)
    feed(parameters, make_gradients(SHAPES, torch.bfloat16, 1)[0])
    engine.param_groups[1]["params"].append(engine.param_groups[0]["params"].pop())
    with pytest.raises(ValueError, match="parameter 1 of group 0.*group 0.*1"):
        engine.step()
    del engine.param_groups[1]
    with pytest.raises(ValueError, match="none"):
        engine.step()


@pytest.mark.parametrize("line", ["step._reduce", "window_end._send", "step.end_windows"])
def test_a_step_broken_off_in_the_middle_is_named_ever_after(
    line: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in a notebook, caught: no later call goes on with half a step."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    run(pair, 3)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    feed(pair.parameters, make_gradients(SHAPES, torch.bfloat16, 1)[0])
    with monkeypatch.context() as patch:
        patch.setattr(f"zenflow.{line}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.engine.step()
    for call in (pair.engine.step, pair.engine.flush, pair.engine.state_dict):
        with pytest.raises(RuntimeError, match="broken off"):
            call()
    pair.engine.close()


def test_a_flush_broken_off_in_the_middle_is_named_ever_after(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has sent some buckets of the window and not the others."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    run(pair, 3)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair.engine._pipeline.sender, "_raise_ready", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.engine.flush()
    for call in (pair.engine.step, pair.engine.flush, pair.engine.state_dict):
        with pytest.raises(RuntimeError, match="broken off"):
            call()
    pair.engine.close()


@pytest.mark.parametrize(
    "line", ["checkpoint._load_record", "checkpoint._saved_scores", "pipeline.Uploads.load_state_dict"]
)
def test_a_load_broken_off_in_the_middle_is_named_ever_after(
    line: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it is the state's, and the rest what was trained here; a new optimizer loads it whole."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    run(pair, 6)
    saved = copy.deepcopy(pair.engine.state_dict())
    parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=2)
    broken = build(parameters, **SETTINGS)
    for grads in make_gradients(SHAPES, torch.bfloat16, 3):
        feed(parameters, grads)
        broken.step()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"zenflow.{line}", interrupted)
        with pytest.raises(KeyboardInterrupt):
            broken.load_state_dict(saved)
    for call in (broken.step, broken.flush, broken.state_dict, lambda: broken.load_state_dict(saved)):
        with pytest.raises(RuntimeError, match="broken off"):
            call()
    broken.close()
    pair.engine = build(pair.parameters, **SETTINGS)
    pair.engine.load_state_dict(saved)
    run(pair, 6, seed=4)
    pair.check_state()
