"""States that move: to other settings and other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import (
    DTYPES,
    SHAPES,
    Builder,
    Pair,
    assert_same_bits,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from tests.engine.resuming import Run, assert_same_state, make_script
from zenflow.checkpoint_folder import load, save

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 3, "select_interval": 4}
HOST = {"accumulate_on": "host"}


def moved(pair: Pair, build: Builder, folder: Path, **given: Any) -> None:
    """Go on in a fresh engine with other settings, and so does the model."""
    save(folder, pair.engine.state_dict())
    weights = snapshot(pair.parameters)
    device = str(pair.parameters[0].device)
    pair.parameters = [make_parameters([w.shape], w.dtype, device, seed=number)[0] for number, w in enumerate(weights)]
    pair.engine = build(pair.parameters, **{**SETTINGS, **given})
    pair.engine.load_state_dict(load(folder))
    pair.model.settings |= {name: value for name, value in given.items() if name in pair.model.settings}
    pair.check_weights()


@pytest.mark.parametrize(
    "given",
    [{"bucket_bytes": 64, "worker_threads": 2}, {"upload": "step", "upload_check": False}],
    ids=["buckets-threads", "upload"],
)
def test_what_changes_no_bit_may_change_at_a_load(
    given: dict[str, Any], device: str, build: Builder, tmp_path: Path
) -> None:
    """There while a result is pending, and back in the middle of the next window."""
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    for number, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 9)):
        if number in (3, 4):
            moved(pair, build, tmp_path / str(number), **(given if number == 3 else {}))
        pair.step(grads)
    pair.check_state()


WINDOW_ENDS = {
    "gpu-to-host": ({}, HOST),
    "host-to-gpu": (HOST, {"accumulate_on": "gpu"}),
    "to-replay": ({}, {**HOST, "deferred_rule": "replay"}),
    "ring-dtype": ({"ring_dtype": "bfloat16"}, {"ring_dtype": "float32"}),
    "longer-window": ({}, {"update_interval": 5}),
    "shorter-window": ({}, {"update_interval": 1}),
    "no-overlap": ({}, {"overlap_step": False}),
}


@pytest.mark.parametrize("name", WINDOW_ENDS)
def test_at_a_windows_end_windows_may_change(name: str, device: str, build: Builder, tmp_path: Path) -> None:
    """With a result on its way; the simulation changes its settings at the same step."""
    before, after = WINDOW_ENDS[name]
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, **before)
    stream = make_gradients(SHAPES, torch.bfloat16, 13)
    for grads in stream[:3]:
        pair.step(grads)
    assert pair.engine._pipeline.uploads.pending
    moved(pair, build, tmp_path / "saved", **after)
    for grads in stream[3:]:
        pair.step(grads)
    pair.check_state()


IN_THE_MIDDLE = {
    "accumulate_on": ({}, HOST),
    "ring_dtype": ({"ring_dtype": "bfloat16"}, {"ring_dtype": "float32"}),
    "update_interval": ({}, {"update_interval": 5}),
}


@pytest.mark.parametrize("name", IN_THE_MIDDLE)
def test_in_the_middle_of_a_window_they_are_refused(name: str, device: str, build: Builder) -> None:
    before, after = IN_THE_MIDDLE[name]
    first, second = (make_parameters(SHAPES, torch.bfloat16, device, seed=seed) for seed in (0, 3))
    engine, other = build(first, **SETTINGS, **before), build(second, **{**SETTINGS, **after, "lr": 0.5})
    kept = snapshot(second)
    for grads in make_gradients(SHAPES, torch.bfloat16, 2):
        feed(first, grads)
        engine.step()
    with pytest.raises(ValueError, match=rf"middle of a window with {name}=.*flush"):
        other.load_state_dict(engine.state_dict())
    assert other.param_groups[0]["lr"] == 0.5
    for index, (weight, expected) in enumerate(zip(second, kept, strict=True)):
        assert_same_bits(weight, expected, f"weight {index}")


def test_flush_is_the_way(device: str, build: Builder, tmp_path: Path) -> None:
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS)
    stream = make_gradients(SHAPES, torch.bfloat16, 9)
    for grads in stream[:5]:
        pair.step(grads)
    pair.engine.flush()
    pair.model.flush()
    moved(pair, build, tmp_path / "saved", **HOST, update_interval=5)
    for grads in stream[5:]:
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize(("dtype", "ring_dtype"), [("bf16", "bfloat16"), ("bf16", "float32"), ("fp16", "bfloat16")])
def test_gradients_on_the_host_become_the_sum_that_the_device_would_hold(
    dtype: str, ring_dtype: str, device: str, build: Builder
) -> None:
    """In the middle of a window, from `accumulate_on: host` to `gpu`, with clipping, an absent gradient and a skip."""
    settings = {**SETTINGS, "max_grad_norm": 0.5, "update_interval": 5, "select_interval": 50}
    there, here = {**settings, **HOST}, {**settings, "ring_dtype": ring_dtype}
    stream = make_gradients(SHAPES, DTYPES[dtype], 9)
    stream[6][0].view(-1)[3], stream[5][1] = float("nan"), None
    runs = []
    for switch in (5, 8):  # at the window's end, and in the middle of the next
        parameters = make_parameters(SHAPES, DTYPES[dtype], device)
        engine = build(parameters, **there)
        for number, grads in enumerate(stream):
            if number == switch:
                state = engine.state_dict()
                parameters = make_parameters(SHAPES, DTYPES[dtype], device, seed=4)
                engine = build(parameters, **here)
                engine.load_state_dict(state)
            feed(parameters, grads)
            engine.step()
        runs.append(engine.state_dict())
    assert runs[0]["state"][0]["count"] == 3
    assert_same_state(runs[1], runs[0])


@pytest.mark.parametrize("name", ["topk_ratio", "channel_dim", "min_deferred_numel"])
def test_what_decides_on_channels_never_changes(name: str, device: str, build: Builder) -> None:
    other = {"topk_ratio": 0.5, "channel_dim": "row", "min_deferred_numel": 20}[name]
    first, second = (make_parameters(SHAPES, device=device) for _ in range(2))
    engine, changed = build(first, **SETTINGS), build(second, **{**SETTINGS, name: other})
    feed(first, make_gradients(SHAPES, steps=1)[0])
    engine.step()
    engine.flush()
    with pytest.raises(ValueError, match=rf"saved with {name}=.*this optimizer has {other!r}"):
        changed.load_state_dict(engine.state_dict())


def test_groups_of_other_sizes_are_refused_before_anything_changes(device: str, build: Builder) -> None:
    first, second = (make_parameters(SHAPES, device=device) for _ in range(2))
    engine = build(first, **SETTINGS)
    other = build([{"params": second[:2]}, {"params": second[2:]}], **{**SETTINGS, "lr": 0.5})
    feed(first, make_gradients(SHAPES, steps=1)[0])
    engine.step()
    with pytest.raises(ValueError, match=r"groups of \[7\] parameters, this optimizer of \[2, 5\]"):
        other.load_state_dict(engine.state_dict())
    assert [group["lr"] for group in other.param_groups] == [0.5, 0.5]


@pytest.mark.gpu
@pytest.mark.parametrize("steps", [3, 4, 5])
@pytest.mark.parametrize("way", [("cpu", "cuda"), ("cuda", "cpu")], ids="-to-".join)
def test_a_state_moves_between_devices(way: tuple[str, str], steps: int, build: Builder, tmp_path: Path) -> None:
    """What is loaded on the other device is what was saved, and the run goes on there as it would have here."""
    script = make_script(torch.bfloat16, {}, 9)
    script.settings["max_grad_norm"] = None  # the norm's sums are ordered otherwise
    run = Run.start(script, way[0], build)
    for number in range(steps):
        run.play(number)
    run.save(tmp_path / "saved")
    moved = Run.resume(script, tmp_path / "saved", way[1], build)
    assert_same_state(moved.engine.state_dict(), run.engine.state_dict())
    for number in range(steps, 9):
        for index, (one, other) in enumerate(zip(moved.play(number), run.play(number), strict=True)):
            assert_same_bits(one, other, f"weight {index} after step {number + 1}")
