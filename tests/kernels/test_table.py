from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from zenflow_kernels.control import StepControl
from zenflow_kernels.fused_step import fused_step, write_masters
from zenflow_kernels.norm import partial_norms
from zenflow_kernels.table import Table

from tests.kernels.building import Spec, World, bits, make_world
from zenflow import ZenFlow


@pytest.fixture
def world() -> World:
    return make_world([Spec("column", 4, 6, 2), Spec("whole", 1, 5)], "cpu", torch.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "diagonal"}, "diagonal"),
        ({"weight": torch.zeros(4, 6).double()}, "float64"),
        ({"weight": torch.zeros(24)}, r"\(24,\)"),
        ({"weight": torch.zeros(6, 4).T}, "strides"),
        ({"master": torch.zeros(4, 3)}, r"master must be contiguous \(4, 2\)"),
        ({"exp_avg": torch.zeros(4, 2).half()}, "float16"),
        ({"exp_avg_sq": torch.zeros(2, 4).T}, "exp_avg_sq"),
        ({"slot": torch.zeros(6)}, "slot"),
        ({"slot": None}, "slot belongs"),
        ({"accumulator": torch.zeros(4, 6).half()}, "accumulator"),
        ({"start": torch.zeros(2)}, "start"),
    ],
    ids=str,
)
def test_an_entry_of_another_kind_is_refused_by_name(world, changes, message):
    entry = replace(world.table.entries[0], **changes)
    with pytest.raises(ValueError, match=message):
        Table([world.table.entries[1], entry], 0)


def test_entries_share_their_dtypes(world):
    column = world.table.entries[0]
    with pytest.raises(ValueError, match="bfloat16"):
        Table([column, replace(column, weight=column.weight.bfloat16())], 0)
    with pytest.raises(ValueError, match="accumulator dtype"):
        Table([column, replace(column, accumulator=column.accumulator.bfloat16())], 0)


@pytest.mark.parametrize(
    ("grad", "message"),
    [
        (torch.zeros(4, 6).bfloat16(), "bfloat16"),
        (torch.zeros(4, 5), r"\(4, 5\)"),
        (torch.zeros(6, 4).T, "contiguous"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_a_gradient_of_another_kind_is_refused(world, grad, message):
    with pytest.raises(ValueError, match=message):
        world.table.bind([grad, None])
    with pytest.raises(ValueError, match="2, got 1"):
        world.table.bind([None])


def test_an_empty_table_does_nothing(device):
    table, control = Table([], 0), StepControl.create(1, 1, "cpu")
    table.bind([])
    assert table.n_partials == 0
    partial_norms(table, torch.zeros(0, dtype=torch.float64))
    fused_step(table, control, torch.zeros(1, 8), torch.ones(1, 2, 2))
    write_masters(table, control)


@pytest.mark.parametrize("wrong", [(-1, 1), (1, 0)], ids=str)
def test_a_control_of_no_steps_is_refused(wrong):
    with pytest.raises(ValueError, match=str(wrong[0])):
        StepControl.create(*wrong, "cpu")


@pytest.mark.gpu
def test_a_gradient_address_is_kept_until_it_is_copied():
    """Pinned memory of an earlier bind must not be reused while the stream still has to read it."""
    world = make_world([Spec("whole", 1, 64)], "cuda", torch.float32, norm_tile=64)
    grads = [torch.full((1, 64), float(value), device="cuda") for value in range(200)]
    partials = torch.zeros(200, dtype=torch.float64, device="cuda")
    ballast = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(30):
        ballast = ballast @ ballast.clamp(-1e-3, 1e-3)
    for number, grad in enumerate(grads):
        world.table.bind([grad])
        partial_norms(world.table, partials[number : number + 1])
    assert partials.tolist() == [64.0 * value * value for value in range(200)]


@pytest.mark.gpu
def test_parameters_on_another_gpu_leave_the_current_device_alone():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    world = make_world([Spec("column", 7, 40, 4), Spec("whole", 1, 5)], "cuda:1", torch.bfloat16)
    world.control.fold.fill_(1)
    fused_step(world.table, world.control, world.hyper, world.bias)
    partials = world.partials
    partial_norms(world.table, partials)
    assert torch.cuda.current_device() == 0 and partials.device.index == 1
    assert bool(torch.isfinite(partials).all())


def test_a_loaded_state_from_before_the_first_selection_leaves_no_channel_behind(device):
    """A skipped step writes the weights of the channels that are selected: none are, though they have been."""
    param = torch.nn.Parameter(torch.linspace(-1, 1, 8 * 16, device=device).view(8, 16))
    before = param.detach().clone()
    with ZenFlow([param], lr=0.1, topk_ratio=0.25, update_interval=2, min_deferred_numel=0) as optimizer:

        def step(value: float) -> None:
            param.grad = torch.full_like(param, value)
            optimizer.step()

        step(float("nan"))
        state = optimizer.state_dict()
        step(1.0)
        optimizer.load_state_dict(state)
        step(float("nan"))
        assert torch.equal(bits(param), bits(before))
