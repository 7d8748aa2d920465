"""What `zenflow-bench kernels` times: all contestants do the same job, and no search for constants touches a state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from zenflow_kernels import fused_step, table

from tests.kernels.building import bits
from zenflow.bench import kernel_ops
from zenflow.bench.kernel_ops import CHANNELS, OPS, Work
from zenflow.bench.kernel_problem import Problem
from zenflow.bench.kernel_tune import KNOBS, Candidate, knobs_of, launch_constants, outputs_of, tune

SUMS = ("partial_norms", "channel_scores", "running_scores")  # what a block or a warp adds first is part of their bits
CASES = [(name, layout) for name, op in OPS.items() for layout in op.layouts]


def problem_of(layout: str, device: str, dtype: torch.dtype = torch.float32) -> Problem:
    """Neither side a power of two, and more than one of the smallest tiles."""
    return Problem(70, 136, dtype, layout, 0.1, torch.device(device))


def assert_close(got: torch.Tensor, want: torch.Tensor, name: str) -> None:
    """The same bits; of sums, which are of positive numbers, 1e-5 relative for 64 roundings of fp32."""
    if name in SUMS:
        torch.testing.assert_close(got.cpu(), want.cpu(), rtol=1e-5, atol=0)
    else:
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(("name", "layout"), CASES, ids=str)
def test_ours_and_the_reference_do_the_same_job(name, layout, device, poisoned):
    ours, other = (OPS[name].build(problem_of(layout, device)) for _ in range(2))
    made = other.reference.run()
    expected = [*other.outputs, *([made] if isinstance(made, torch.Tensor) else [])]
    for got, want in zip(outputs_of(ours), expected, strict=True):
        assert_close(got, want, name)


def test_the_known_kernels_do_it_too(device, monkeypatch):
    monkeypatch.setattr(kernel_ops, "SCALES", (1.0, 1.0))  # they neither unscale nor clip
    monkeypatch.setattr(kernel_ops, "LR", 0.1)  # large, so that a wrong update shows
    for name in ("write_masters", "fused_step_whole"):
        ours, other = (OPS[name].build(problem_of(OPS[name].layouts[0], device)) for _ in range(2))
        before = [tensor.clone() for tensor in ours.outputs]
        ours.ours.run()
        other.known.run()
        assert not torch.equal(ours.outputs[-1], before[-1])
        # torch's order of operations is another one; with fp32 weights it leaves the copy of the master to nobody.
        first = 0 if name == "write_masters" else 1
        for got, want, old in zip(ours.outputs[first:], other.outputs[first:], before[first:], strict=True):
            # A small result may be the difference of two large numbers: roundings are in proportion to those.
            assert bool(((got - want).abs() <= 1e-6 + 1e-5 * (old.abs() + want.abs())).all()), name
    norms = OPS["partial_norms"].build(problem_of("whole", device))
    norms.ours.run()
    assert norms.known.run().item() ** 2 == pytest.approx(norms.outputs[0].sum().item(), rel=1e-5)
    for layout in ("columns", "rows"):
        scores = OPS["channel_scores"].build(problem_of(layout, device))
        torch.testing.assert_close(scores.known.run().square(), scores.ours.run(), rtol=1e-5, atol=0)
    choice = OPS["select_channels"].build(problem_of("columns", device))
    assert torch.equal(choice.known.run().sort().values, choice.ours.run())


# Kernels that read the same constants in the same way are tried once.
SAME = {("write_masters", "rows"), ("gather_channels", "rows"), ("scatter_channels", "columns")}
SAME |= {(f"fused_step_{name}", layout) for name in ("first", "stochastic") for layout in (*CHANNELS, "whole")}
SETTINGS = [
    pytest.param(name, layout, knob, value, id=f"{name}-{layout}-{knob.label}={value}")
    for name in KNOBS
    for layout in OPS[name].layouts
    for knob in knobs_of(name, problem_of(layout, "cpu"))
    for value in knob.values
    if (name, layout) not in SAME
]


@pytest.mark.parametrize(("name", "layout", "knob", "value"), SETTINGS)
def test_every_launch_constant_alone(name, layout, knob, value, device, poisoned):
    """D2: outputs in memory that held NaN are today's, bit for bit where nothing is added."""
    if device == "cuda" and value != knob.values[-1]:
        pytest.skip("on a GPU every setting is compiled: one of each constant, the search itself compares the others")
    problem = problem_of(layout, device)
    expected = outputs_of(OPS[name].build(problem))
    with launch_constants({knob: value}):
        got = outputs_of(OPS[name].build(problem))
    for one, other in zip(got, expected, strict=True):
        assert not (one.is_floating_point() and bool(torch.isnan(one).any()))
        assert_close(one, other, name)


CHANGED_ALONE = [
    pytest.param(name, knob, value, id=f"{name}-{knob.label}={value}")
    for name in ("fused_step_first", "fused_step_alone")
    for knob in knobs_of(name, problem_of("columns", "cpu", torch.bfloat16))
    for value in knob.values
]


@pytest.mark.parametrize(("name", "knob", "value"), CHANGED_ALONE)
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=["bf16"], indirect=True)
def test_every_launch_constant_alone_where_only_weights_that_change_are_written(
    name, knob, value, dtype, device, monkeypatch
):
    """D2: accumulator and selected weights held NaN; what a window's first step leaves there is the reference's."""
    monkeypatch.setattr(kernel_ops, "LR", 0.1)  # large, so that a wrong update shows
    problem = replace(problem_of("columns", device, dtype), ratio=0.9)  # of some rows more than are updated at once
    ours, other = (OPS[name].build(problem) for _ in range(2))
    for work in (ours, other):
        work.outputs[0][:, problem.index().to(device)] = float("nan")
        for accumulator in work.outputs[4:]:
            accumulator[:] = float("nan")
    with launch_constants({knob: value}):
        ours.ours.run()
    other.reference.run()
    for got, want in zip(ours.outputs, other.outputs, strict=True):
        assert bool(torch.isfinite(got).all()) and torch.equal(bits(got), bits(want))


def searched(problem: Problem, favourite: int) -> tuple[list[Candidate], list[Work]]:
    """A search in which the candidate of that number is fastest."""
    seen: list[Work] = []

    def measure(work: Work) -> SimpleNamespace:
        seen.append(work)
        return SimpleNamespace(p50=0.5 if len(seen) - 1 == favourite else 1.0 + 0.01 * len(seen))

    return tune("fused_step", problem, measure), seen


def test_a_search_leaves_every_state_alone(device):
    """D1: in place, and tried many times; the state that was there before is as it was, and one step is one step."""
    problem = problem_of("columns", device)
    mine = OPS["fused_step"].build(problem)
    before = [bits(tensor).clone() for tensor in mine.outputs]
    constants = {knob: getattr(knob.module, knob.name) for knob in KNOBS["fused_step"]}
    found, works = searched(problem, favourite=3)
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(mine.outputs, before, strict=True))
    assert constants == {knob: getattr(knob.module, knob.name) for knob in KNOBS["fused_step"]}
    written = {tensor.data_ptr() for tensor in mine.outputs}
    assert not written & {tensor.data_ptr() for work in works for tensor in work.outputs}
    assert all(candidate.same_bits for candidate in found)
    mine.ours.run()
    expected = OPS["fused_step"].build(problem)
    expected.reference.run()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(mine.outputs, expected.outputs, strict=True))


def test_a_search_starts_from_today_and_keeps_the_best():
    problem = problem_of("columns", "cpu")
    found, _ = searched(problem, favourite=2)
    assert [candidate.today for candidate in found].index(True) == 0 == sum(c.today for c in found[1:])
    (best,) = (candidate for candidate in found if candidate.best)
    assert best is found[2]
    # Each value of each constant once, today's among them counted once in all.
    assert len(found) == 1 + sum(len(knob.values) - 1 for knob in knobs_of("fused_step", problem))
    chosen = best.label.split()[0]
    assert chosen.startswith("table.STEP_TILE=") and chosen != f"table.STEP_TILE={table.STEP_TILE}"
    after = found[1 + len(KNOBS["fused_step"][0].values) - 1 :]
    assert all(candidate.label.split()[0] == chosen for candidate in after)


def test_a_candidate_that_cannot_run_is_told_and_never_best():
    today = fused_step.UPDATE_BLOCK

    def measure(work: Work) -> SimpleNamespace:
        if today != fused_step.UPDATE_BLOCK:
            raise RuntimeError("out of resource: shared memory")
        return SimpleNamespace(p50=1.0)

    found = tune("fused_step_alone", problem_of("columns", "cpu"), measure)
    failed = [candidate for candidate in found if isinstance(candidate.result, RuntimeError)]
    assert len(failed) == 3 and not any(candidate.best or candidate.today for candidate in failed)
    assert all(f"fused_step.UPDATE_BLOCK={today}" not in candidate.label for candidate in failed)


def test_constants_come_back_after_a_fault():
    knob = KNOBS["fused_step"][2]
    before = getattr(knob.module, knob.name)
    with pytest.raises(RuntimeError, match="stop"), launch_constants({knob: 1}):
        assert getattr(knob.module, knob.name) == 1
        raise RuntimeError("stop")
    assert getattr(knob.module, knob.name) == before
