"""Selections in the engine: first owners without the host, exchanges in parts of any size, and a worker that dies."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from zenflow_kernels.numerics import adamw_, pack_hyper

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
from tests.engine.test_checkpoint_moves import moved
from tests.processes import ends_within, within
from zenflow import WorkerError, ZenFlow, exchange, migration
from zenflow.bias import bias_table
from zenflow.client import WorkerClient
from zenflow.predictions import visible_shadow

LIMIT = 5.0  # seconds in which a dead worker must be noticed
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 2, "select_interval": 2}


def refuse(*_: Any) -> None:
    raise AssertionError("the worker was asked for something")


@pytest.mark.parametrize("ring_dtype", ["auto", "float32"])
@pytest.mark.parametrize("predicted", [0.0, 1.0], ids=["plain", "predicted"])
def test_first_owners_after_a_load_come_while_a_result_is_on_its_way(
    predicted: float, ring_dtype: str, device: str, build: Builder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their state travels through the ring, where the others' result may lie, or what is visible meanwhile."""
    monkeypatch.setattr(migration, "PART_BYTES", 512)
    settings = SETTINGS | {"select_interval": 100, "update_interval": 3, "weight_prediction": predicted}
    settings |= {"ring_dtype": ring_dtype}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings)
    for number, grads in enumerate(make_gradients(SHAPES, torch.bfloat16, 12)):
        if number < 4:
            grads[1] = grads[3] = None
        if number == 3:
            moved(pair, build, tmp_path / "state", **settings)
        moves = pair.engine.stats().bytes_to_device
        pending = bool(pair.engine._pipeline.uploads.pending)
        pair.step(grads)
        if number == 4:
            assert pending and pair.engine.stats().bytes_to_device > moves and pair.engine.stats().selections == 2
        with torch.no_grad():
            for parameter in pair.parameters:  # compared with what is visible, and found to be the same
                parameter.mul_(1.0)
    pair.check_state()


@pytest.mark.parametrize("on_reselect", ["migrate", "reset"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_first_owners_come_without_the_host(
    dtype: str, channel_dim: str, on_reselect: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WorkerClient, "begin_exchange", refuse)
    pair = Pair(
        build, make_parameters(SHAPES, DTYPES[dtype], device), **SETTINGS | {"select_interval": 100},
        channel_dim=channel_dim, on_reselect=on_reselect,
    )  # fmt: skip
    before = pair.engine.stats()
    for number, grads in enumerate(make_gradients(SHAPES, DTYPES[dtype], 5)):
        if number < 2:  # these come in mid-window
            grads[1] = grads[3] = None
        pair.step(grads)
        if number == 0:
            stats = pair.engine.stats()
            assert (stats.bytes_to_host, stats.bytes_to_device) == (before.bytes_to_host, before.bytes_to_device)
    pair.check_state()


@pytest.mark.parametrize("part_bytes", [4, 20, 400])
@pytest.mark.parametrize("on_reselect", ["migrate", "reset"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_any_size_carry_the_same_bits(
    dtype: str,
    channel_dim: str,
    on_reselect: str,
    part_bytes: int,
    device: str,
    build: Builder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Down to one element a part, less than a row or a channel of any matrix."""
    monkeypatch.setattr(migration, "PART_BYTES", part_bytes)
    pair = Pair(
        build, make_parameters(SHAPES, DTYPES[dtype], device), **SETTINGS,
        channel_dim=channel_dim, on_reselect=on_reselect,
    )  # fmt: skip
    for grads in make_gradients(SHAPES, DTYPES[dtype], 5):
        pair.step(grads)
    pair.check_state()
    assert pair.engine.stats().selections == 3


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_without_the_compiled_pass(
    channel_dim: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZENFLOW_NATIVE", "0")  # the worker's
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS, channel_dim=channel_dim)
    for grads in make_gradients(SHAPES, torch.bfloat16, 5):
        pair.step(grads)
    pair.check_state()


@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_slots_invert_the_owners_and_the_worker_keeps_no_moments_of_theirs(
    channel_dim: str, device: str, build: Builder
) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS, channel_dim=channel_dim)
    for grads in make_gradients(SHAPES, torch.bfloat16, 6):
        feed(parameters, grads)
        engine.step()
        for record in engine._pipeline.records:
            if record.slot is not None:
                slot, owners = record.slot.cpu(), record.selected
                assert owners.numel() == record.n_selected and bool((owners[1:] > owners[:-1]).all())
                assert slot[owners].tolist() == list(range(len(owners)))
                assert int((slot >= 0).sum()) == len(owners)
                engine._pipeline.wait_for_worker()
                for moment in record.host[1:]:
                    assert not moment.index_select(1 if channel_dim == "column" else 0, owners).any()


@pytest.mark.parametrize("given", [{}, {"ring_dtype": "float32"}, {"accumulate_on": "host"}], ids=str)
@pytest.mark.parametrize("stagger", [False, True], ids=["together", "staggered"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_shadow_of_what_is_visible_follows_selections_and_nobody_reads_the_other(
    dtype: str, stagger: bool, given: dict[str, Any], device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step the one holds each deferred weight; NaN in the other, while nothing is on its way in it, is
    gone before anything comes of it, also where states are saved and weights compared."""
    monkeypatch.setattr(migration, "PART_BYTES", 64)
    settings = SETTINGS | {"update_interval": 3, "visible_after": 1, "weight_prediction": 1.0, "stagger": stagger}
    pair = Pair(build, make_parameters(SHAPES, DTYPES[dtype], device), **settings | given)
    pipeline, spoilt = pair.engine._pipeline, 0
    for grads in make_gradients(SHAPES, DTYPES[dtype], 14):
        pair.step(grads)
        pipeline.wait_for_worker()
        pending = pipeline.uploads.pending_storages()
        for record in (record for record in pipeline.records if record.storage is not None):
            weight = record.weight.cpu()
            shown = visible_shadow(record, pending=record.storage in pending).clone()
            axis = 1 if record.kind == "column" else 0
            shown.index_copy_(axis, record.selected, weight.index_select(axis, record.selected))
            assert_same_bits(shown, weight, record.name)
        for storage in set(pipeline.storages) - pending:
            storage.shadow(storage.memory.turn(0)).fill_(float("nan"))
            spoilt += 1
        pair.engine.state_dict()
        with torch.no_grad():
            for parameter in pair.parameters:  # compared with what is visible, and found to be the same
                parameter.mul_(1.0)
    pair.check_state()
    assert spoilt > 14 / 3 and pair.engine.stats().selections > 3


def state_with_a_stranger(build: Builder, device: str, stream: list[Any], **settings: Any) -> dict[str, Any]:
    """Saved after two steps of a window of four, in which parameter 0 had no gradient; its state is not its weight."""
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS | {"update_interval": 4}, **settings)
    for grads in stream[:2]:
        feed(parameters, [None, *grads[1:]])
        engine.step()
    saved = engine.state_dict()
    generator = torch.Generator().manual_seed(7)
    entry = saved["state"][0]
    assert entry["owned"] is False
    entry["master"] = torch.randn(SHAPES[0], generator=generator)
    entry["exp_avg"] = torch.randn(SHAPES[0], generator=generator)
    entry["exp_avg_sq"] = torch.rand(SHAPES[0], generator=generator)
    entry["step"] = torch.arange(3, 3 + entry["step"].numel())
    return saved


def updated_by_hand(entry: dict[str, Tensor], grad: Tensor, step: Tensor, chosen: Tensor, axis: int) -> list[Tensor]:
    """Master and moments after one update of the channels `chosen`, with the t `step`, by SETTINGS."""
    before = [entry[name] for name in ("master", "exp_avg", "exp_avg_sq")]
    compact = [tensor.index_select(axis, chosen).contiguous() for tensor in before]
    factors = torch.from_numpy(bias_table(0.9, 0.999, int(step.max())).copy())[step[chosen]]
    row = pack_hyper(0.02, 0.9, 0.999, 1e-8, 0.1)
    names = ("beta1", "one_minus_beta1", "beta2", "one_minus_beta2", "eps", "decay")
    shape = (1, -1) if axis else (-1, 1)
    adamw_(
        *compact, grad.float().index_select(axis, chosen).contiguous(),
        step_size=(torch.tensor(row[0]) * factors[:, 0]).view(shape), denom_scale=factors[:, 1].view(shape),
        **dict(zip(names, row[1:7], strict=True)),
    )  # fmt: skip
    return [whole.index_copy(axis, chosen, part) for whole, part in zip(before, compact, strict=True)]


@pytest.mark.parametrize("accumulate_on", ["gpu", "host"])
@pytest.mark.parametrize("channel_dim", ["column", "row"])
def test_first_owners_of_a_loaded_state_take_it_over(
    channel_dim: str, accumulate_on: str, device: str, build: Builder
) -> None:
    """In mid-window: masters that are no weights, moments and t go to the GPU, and the window's gradients stay."""
    stream = make_gradients(SHAPES, torch.bfloat16, 4)
    settings = {"channel_dim": channel_dim, "accumulate_on": accumulate_on}
    saved = state_with_a_stranger(build, device, stream, **settings)
    entry = {name: value.clone() for name, value in saved["state"][0].items() if torch.is_tensor(value)}
    parameters = make_parameters(SHAPES, torch.bfloat16, device, seed=5)
    engine = build(parameters, **SETTINGS | {"update_interval": 4}, **settings)
    engine.load_state_dict(saved)
    feed(parameters, stream[2])
    engine.step()

    found = engine.channel_state(parameters[0])
    axis = 1 if channel_dim == "column" else 0
    chosen = found.selected.nonzero().view(-1)
    assert len(chosen) == round(0.3 * SHAPES[0][axis])
    step = entry["step"] + found.selected
    assert found.step.tolist() == step.tolist()
    expected = updated_by_hand(entry, stream[2][0], step, chosen, axis)
    for whole, actual in zip(expected, (found.master, found.exp_avg, found.exp_avg_sq), strict=True):
        assert_same_bits(actual, whole)

    other = make_parameters(SHAPES, torch.bfloat16, device)
    plain = build(other, **SETTINGS | {"update_interval": 4}, **settings)
    for number, grads in enumerate(stream[:3]):
        feed(other, grads if number == 2 else [None, *grads[1:]])
        plain.step()
    for each, params in ((engine, parameters), (plain, other)):
        feed(params, stream[3])
        each.step()
        each.flush()
    for index in range(1, len(SHAPES)):
        assert_same_bits(parameters[index], other[index], f"weight {index}")


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    assert ends_within(pid, LIMIT)


@pytest.mark.parametrize("moment", ["before", "during", "after the first part"])
def test_e7_a_worker_that_dies_in_an_exchange_is_an_error(
    moment: str, device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, end = WorkerClient.begin_exchange, WorkerClient.end_exchange
    monkeypatch.setattr(migration, "PART_BYTES", 64)

    def begin_exchange(client: WorkerClient, *args: Any) -> None:
        if moment == "before":
            kill(client.worker_pid)
        elif moment == "during":
            os.kill(client.worker_pid, signal.SIGSTOP)
        begin(client, *args)
        if moment == "during":
            os.kill(client.worker_pid, signal.SIGKILL)

    def end_exchange(client: WorkerClient, *args: Any) -> None:
        end(client, *args)
        kill(client.worker_pid)

    monkeypatch.setattr(WorkerClient, "begin_exchange", begin_exchange)
    if moment == "after the first part":
        monkeypatch.setattr(WorkerClient, "end_exchange", end_exchange)
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    stream = make_gradients(SHAPES, torch.bfloat16, 2)
    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        within(LIMIT, run, engine, parameters, stream)
    engine.close(flush=False)
    assert all(bool(weight.isfinite().all()) for weight in snapshot(parameters))


def run(engine: ZenFlow, parameters: list[torch.nn.Parameter], stream: list[Any]) -> None:
    for grads in stream:
        feed(parameters, grads)
        engine.step()


def test_a_refused_order_reaches_the_trainer_with_its_traceback(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = WorkerClient.begin_exchange

    def begin_exchange(client: WorkerClient, segment: int, orders: list[exchange.Order]) -> None:
        begin(client, segment, [order._replace(first=10**9) for order in orders])

    monkeypatch.setattr(WorkerClient, "begin_exchange", begin_exchange)
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    with pytest.raises(WorkerError, match="AssertionError"):
        within(LIMIT, run, engine, parameters, make_gradients(SHAPES, torch.bfloat16, 2))
    engine.close(flush=False)


def waits(call: Callable[[], None]) -> int:
    """How often `call` waits for the device, as far as torch knows."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.gpu
@pytest.mark.parametrize("interval", [100, 2], ids=["first", "later"])
def test_a_selection_waits_as_often_for_many_matrices_as_for_one(interval: int, build: Builder) -> None:
    counts = []
    for shapes in ([(64, 96)], [(64, 96)] * 9):
        parameters = make_parameters(shapes, torch.bfloat16, "cuda")
        engine = build(parameters, **SETTINGS | {"select_interval": interval})
        stream = make_gradients(shapes, torch.bfloat16, 2)
        if interval == 2:
            run(engine, parameters, stream[:1])
        feed(parameters, stream[-1])
        counts.append(waits(engine.step))
    assert counts[0] == counts[1] > 0
