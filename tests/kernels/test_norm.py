from __future__ import annotations

import pytest
import torch
from zenflow_kernels.close_step import close_step, close_step_reference
from zenflow_kernels.control import StepControl, log_words
from zenflow_kernels.norm import partial_norms, partial_norms_reference
from zenflow_kernels.table import Entry, Table

from tests.kernels.building import Spec, bits, make_world

SPECS = [
    Spec("column", 7, 13, 3),
    Spec("whole", 1, 1),
    Spec("row", 3, 64, 1),
    Spec("whole", 1, 129),
    Spec("row", 0, 5, 0),
]


def partials_of(world) -> torch.Tensor:
    partials = world.partials
    partial_norms(world.table, partials)
    return partials


def test_partial_sums_against_float64(device, dtype):
    world = make_world(SPECS, device, dtype)
    got, position = partials_of(world).cpu(), 0
    assert world.table.n_partials == 2 + 1 + 3 + 3
    for grad in world.table.grads:
        for piece in grad.cpu().double().view(-1).split(64) if grad.numel() else ():
            assert got[position].item() == pytest.approx(piece.square().sum().item(), rel=1e-14)
            position += 1
    assert position == got.numel()
    world.pad.check()


def test_absent_gradients_contribute_nothing(device, dtype):
    world = make_world(SPECS, device, dtype)
    grads = list(world.table.grads)
    grads[2] = None
    world.table.bind(grads)
    got = partials_of(world).cpu()
    assert got[3:6].tolist() == [0, 0, 0] and bool((got[:3] > 0).all())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 63, 64, 128])
def test_non_finite_exactly_where_the_gradient_is(value, place, device, dtype):
    world = make_world([Spec("whole", 1, 129), Spec("whole", 1, 64)], device, dtype)
    world.table.grads[0].view(-1)[place] = value
    finite = torch.isfinite(partials_of(world)).cpu()
    assert finite.tolist() == [tile != place // 64 for tile in range(3)] + [True]


def test_the_largest_finite_gradient_is_finite(device, dtype):
    world = make_world([Spec("whole", 1, 200)], device, dtype)
    world.table.grads[0].fill_(torch.finfo(dtype).max)
    assert bool(torch.isfinite(partials_of(world)).all())


def test_sums_do_not_depend_on_neighbours(device):
    alone = make_world([SPECS[0]], device, torch.float32)
    world = make_world(SPECS[1:], device, torch.float32)
    table = Table([*world.table.entries, *alone.table.entries], 0, norm_tile=64)
    table.bind([*world.table.grads, *alone.table.grads])
    partials = torch.empty(table.n_partials, dtype=torch.float64, device=device)
    partial_norms(table, partials)
    assert torch.equal(bits(partials[-2:]), bits(partials_of(alone)))


def test_the_reference_does_not_depend_on_threads():
    world = make_world([Spec("whole", 1, 300_001), Spec("whole", 2, 40_000)], "cpu", torch.float32, norm_tile=32768)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        partials = world.partials
        partial_norms_reference(world.table, partials)
        results.append(bits(partials))
    torch.set_num_threads(threads)
    assert torch.equal(*results)


CASES = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.1},
    "not clipped": {"max_grad_norm": 1e6},
    "scaled": {"max_grad_norm": 0.5, "scale": 2.0**16},
    "odd scale": {"max_grad_norm": 0.3, "scale": 3.0},
    "found inf": {"max_grad_norm": 0.5, "scale": 8.0, "found": 1.0},
    "found none": {"scale": 8.0, "found": 0.0},
    "non-finite": {"max_grad_norm": 1.0, "bad": float("nan")},
    "infinite": {"bad": float("inf")},
    "zero": {"max_grad_norm": 1.0, "factor": 0.0},
    "scale below 1": {"max_grad_norm": 1.0, "scale": 2.0**-8, "factor": 2.0**200},
    "unscaled beyond fp32": {"max_grad_norm": 1.0, "scale": 2.0**-30, "factor": 2.0**200},
    "norm beyond fp32": {"max_grad_norm": 1.0, "scale": 2.0**8, "factor": 2.0**260},
}


WINDOW = 2**32 * 7 + 2**31 + 5


def close(function, control, partials, present, position, case) -> None:
    device = partials.device

    def scalar(name: str) -> torch.Tensor | None:
        return torch.tensor([case[name]], device=device) if name in case else None

    function(
        control, partials, present, window=WINDOW, position=position, max_grad_norm=case.get("max_grad_norm"),
        grad_scale=scalar("scale"), found_inf=scalar("found"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name, finite", [("scale below 1", 1), ("unscaled beyond fp32", 0), ("norm beyond fp32", 1)], ids=str
)
def test_a_gradient_that_its_scale_takes_out_of_fp32_is_skipped(name, finite, device):
    control = StepControl.create(1, 1, device)
    partials = torch.arange(1, 98, dtype=torch.float64, device=device) * CASES[name]["factor"]
    close(close_step, control, partials, torch.ones(1, dtype=torch.int32, device=device), 0, CASES[name])
    assert int(control.finite) == finite == int(control.count)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_decision_equals_the_reference(case, device):
    """Small squares of integers, so that the sum is exact in any order and every output must agree bit for bit."""
    partials = torch.arange(1, 98, dtype=torch.float64) * case.get("factor", 1.0)
    if "bad" in case:
        partials[50] = case["bad"]
    present = torch.tensor([1, 0, 1, 1, 0], dtype=torch.int32)
    twin = StepControl.create(5, 3, "cpu")
    twin.count.copy_(torch.tensor([0, 0, 1, 2, 1]))
    twin.advance.copy_(torch.tensor([0, 5, 1, 2, 1]))
    twin.cohort.copy_(torch.tensor([3, 1, 2, 3, 1]))
    twin.skipped.fill_(2**33)
    control = StepControl(**{name: tensor.clone().to(device) for name, tensor in vars(twin).items()})
    for position in (1, 0, 2, 3, 5):
        close(close_step, control, partials.to(device), present.to(device), position, case)
        close(close_step_reference, twin, partials, present, position, case)
        for name, tensor in vars(control).items():
            assert torch.equal(bits(tensor), bits(getattr(twin, name))), (name, position)


def test_decision_by_hand(device):
    control = StepControl.create(3, 2, device)
    present = torch.tensor([1, 0, 1], dtype=torch.int32, device=device)
    partials = torch.tensor([9.0, 16.0], dtype=torch.float64, device=device)
    case = {"max_grad_norm": 1.0, "scale": 4.0}
    close(close_step, control, partials, present, 0, case)
    assert control.norm.item() == 1.25 and control.inv_scale.item() == 0.25 and control.finite.item() == 1
    assert control.clip.item() == pytest.approx(1 / 1.250001, rel=1e-7)
    assert control.fold.tolist() == [1, 0, 1] and control.count.tolist() == [1, 0, 1] == control.advance.tolist()
    close(close_step, control, partials * float("nan"), present, 1, case)
    assert control.fold.tolist() == [0, 0, 0] and control.skipped.item() == 1 and control.clip.item() == 1
    log = control.window_log.cpu()
    assert log.numel() == log_words(2) == 2 + 2 * 4 + 2
    assert log[2:10].view(2, 4)[:, 0].tolist() == [1, 0]
    assert log[3:5].view(torch.float32).tolist() == [pytest.approx(1 / 1.250001, rel=1e-7), 0.25]
    assert log[[0, 1, -2, -1]].tolist() == [5 - 2**31, 7, 5 - 2**31, 7]
    close(close_step, control, partials, present, 1, case)
    assert control.fold.tolist() == [2, 0, 2] and control.advance.tolist() == [2, 0, 2]
    close(close_step, control, partials, present, 0, case)
    assert control.fold.tolist() == [1, 0, 1] and control.count.tolist() == [1, 0, 1]


def test_each_cohort_counts_its_own_window(device):
    """U 3: cohort 1 begins after steps 1, 4, 7, ..., cohort 3 after 3, 6, ...; positions stay below 2U."""
    control = StepControl.create(3, 3, device)
    control.cohort.copy_(torch.tensor([1, 2, 3]))
    present = torch.ones(3, dtype=torch.int32, device=device)
    partials = torch.ones(2, dtype=torch.float64, device=device)
    counts, folds = [], []
    for position in (0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 0, 1):
        close(close_step, control, partials, present, position, {})
        counts.append(control.count.tolist())
        folds.append(control.fold.tolist())
        log = control.window_log[2:-2].view(3, 4)[:, 0].tolist()
        assert log == [1] * min(3, len(counts)) + [0] * (3 - len(counts))
    assert counts[:6] == [[1, 1, 1], [1, 2, 2], [2, 1, 3], [3, 2, 1], [1, 3, 2], [2, 1, 3]]
    assert counts[6:] == [[3, 2, 1], [1, 3, 2], [2, 1, 3], [3, 2, 1], [1, 1, 1], [1, 2, 2]]
    assert folds == [[1 if count == 1 else 2 for count in row] for row in counts]


@pytest.mark.parametrize("n_params", [0, 1, 1025])
def test_many_parameters_and_partial_sums(n_params, device):
    control, twin = StepControl.create(n_params, 1, device), StepControl.create(n_params, 1, "cpu")
    gen = torch.Generator().manual_seed(0)
    partials = torch.rand(9001, generator=gen, dtype=torch.float64)
    present = torch.randint(0, 2, (n_params,), generator=gen, dtype=torch.int32)
    close(close_step, control, partials.to(device), present.to(device), 0, {})
    close(close_step_reference, twin, partials, present, 0, {})
    assert control.norm.item() == pytest.approx(twin.norm.item(), rel=1e-7)
    assert torch.equal(control.fold.cpu(), twin.fold) and torch.equal(control.count.cpu(), twin.count)


def test_same_bits_twice(device, dtype):
    world = make_world(SPECS, device, dtype)
    assert torch.equal(bits(partials_of(world)), bits(partials_of(world)))


@pytest.mark.parametrize("bad", [-1, 6])
def test_a_position_outside_the_window_is_refused(bad):
    control = StepControl.create(1, 3, "cpu")
    with pytest.raises(ValueError, match=str(bad)):
        close(close_step, control, torch.ones(1).double(), torch.ones(1, dtype=torch.int32), bad, {})


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 2**31 - 1, 2**31 + 7])
def test_beyond_int32(place):
    """C8: 2**31 + 8 bf16 elements: the sum counts every one of them, and an inf at either end is seen."""
    grad = torch.ones(1, 2**31 + 8, dtype=torch.bfloat16, device="cuda")
    slot = torch.zeros(1, dtype=torch.int32, device="cuda")
    compact = [torch.zeros(0, 2**31 + 8, device="cuda") for _ in range(3)]
    empty = torch.zeros(0, dtype=torch.int32, device="cuda")
    accumulator = torch.empty_like(grad)
    table = Table([Entry(grad, "row", 0, *compact, empty, slot, accumulator)], 0)
    table.bind([grad])
    partials = torch.full((table.n_partials,), float("nan"), dtype=torch.float64, device="cuda")
    partial_norms(table, partials)
    assert partials.sum().item() == 2**31 + 8
    grad[0, place] = float("inf")
    partial_norms(table, partials)
    assert (~torch.isfinite(partials)).nonzero().view(-1).tolist() == [place // table.norm_tile]
