"""Windows of cohorts that end one step after another, and results that are visible some steps after their window."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import (
    DTYPES,
    RULES,
    SHAPES,
    USUAL,
    Builder,
    Pair,
    ReferencePair,
    assert_same_bits,
    cohorts_of,
    feed,
    make_gradients,
    make_parameters,
    snapshot,
)
from tests.engine.uploading import UNCHECKED
from tests.engine.uploading import step as step_after_worker
from tests.processes import ends_within, within
from zenflow import WorkerError, ZenFlow
from zenflow.pipeline import Pipeline
from zenflow.uploading import Sent

EQUAL = [(6, 8)] * 4  # a cohort each, in their order, at U 4
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 4, "stagger": True}


DELAYS = {
    "usual": USUAL,
    "staggered": {"stagger": True},
    "staggered-1": {"stagger": True, "visible_after": 1},
    "staggered-U": {"stagger": True, "visible_after": 4},
    "together-2": {"stagger": False, "visible_after": 2},
    "staggered-1-predicted": {"stagger": True, "visible_after": 1, "weight_prediction": 1.3},
    "staggered-prompt": {"stagger": True, "overlap_step": False},
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", DELAYS)
def test_selections_skips_warm_up_and_flushes_equal_the_simulation(
    name: str, rule: str, device: str, build: Builder
) -> None:
    """Warm-up to step 3, selections due at 7, 14 and 21, the second in a step that is skipped, flushes after 17, 24."""
    settings = {**SETTINGS, **DELAYS[name], **RULES[rule], "full_warm_up_rounds": 3, "select_interval": 7}
    pair = Pair(build, make_parameters(SHAPES, torch.bfloat16, device), **settings, bucket_bytes=256)
    stream = make_gradients(SHAPES, torch.bfloat16, 26)
    for skipped in (6, 14):
        stream[skipped - 1][0][0, 0] = float("nan")
    for number, grads in enumerate(stream, start=1):
        pair.engine.param_groups[0]["lr"] = 0.02 / number
        grads[1] = None if number % 5 == 0 else grads[1]
        pair.step(grads)
        if number in (17, 24):
            pair.engine.flush()
            pair.model.flush()
            pair.check_weights()
    pair.check_state()
    assert pair.engine.stats().selections == 5


@pytest.mark.parametrize("restarted", [False, True], ids=["from-the-start", "after-a-flush"])
@pytest.mark.parametrize("after", ["auto", 1, 3, 4, None])
@pytest.mark.parametrize("stagger", [True, False], ids=["staggered", "together"])
def test_a_gradient_is_visible_when_its_delay_is_over_and_not_a_step_sooner(
    stagger: bool, after: Any, restarted: bool, device: str, build: Builder
) -> None:
    """One gradient in step 7 and zeros elsewhere: weights change first in the step that the cohort's clock says."""
    parameters = make_parameters(EQUAL, torch.float32, device)
    delay = {"overlap_step": False} if after is None else {"visible_after": after}
    engine = build(parameters, lr=0.1, weight_decay=0.0, topk_ratio=0, update_interval=4, stagger=stagger, **delay)
    before, seen = snapshot(parameters), [0] * 4
    for step in range(1, 17):
        feed(parameters, [torch.full(shape, float(step == 7)) for shape in EQUAL])
        engine.step()
        for index, (parameter, weight) in enumerate(zip(parameters, before, strict=True)):
            if not torch.equal(parameter.detach().cpu(), weight):
                seen[index] = seen[index] or step
        if restarted and step == 5:
            engine.flush()
    start = 5 if restarted else 0
    ends = [
        next(e for e in range(start + cohort, 17, 4) if e >= 7) for cohort in ([1, 2, 3, 4] if stagger else [4] * 4)
    ]
    steps = {"auto": 2 if stagger else 4, None: 0}.get(after, after)
    assert seen == [end + steps for end in ends]


def test_records_tell_that_a_cohort_s_result_became_visible(device: str, build: Builder) -> None:
    """Two cohorts at U 4: windows end in steps 2, 4, 6, ..., results are visible two steps later."""
    parameters = make_parameters(EQUAL[:2], torch.bfloat16, device)
    engine = build(parameters, **SETTINGS, full_warm_up_rounds=1, select_interval=100)
    for grads in make_gradients(EQUAL[:2], torch.bfloat16, 9):
        feed(parameters, grads)
        engine.step()
    assert cohorts_of(engine) == [2, 4]
    staleness = [record.staleness for record in engine.records(wait=True)]
    assert staleness == [0, None, None, None, 1, None, 1, None, 1]
    assert engine.stats().windows == 5


def test_cohorts_are_balanced_and_independent_of_buckets(device: str, build: Builder) -> None:
    shapes = [(9, 10), (5, 4), (4,), (8, 10), (7, 10), (2, 5), (6, 10), (5, 10)]
    engines = [
        build(make_parameters(shapes, torch.bfloat16, device), **SETTINGS, bucket_bytes=size) for size in (64, 1 << 20)
    ]
    assert cohorts_of(engines[0]) == cohorts_of(engines[1]) == [1, 3, None, 2, 3, 2, 4, 4]
    loads = {s.cohort: sum(m.numel for m in s.segment.matrices) for s in engines[0]._pipeline.storages}
    assert loads == {1: 90, 2: 90, 3: 90, 4: 110}


def test_each_dtype_has_cohorts_of_its_own_and_late_parameters_join_them(device: str, build: Builder) -> None:
    halves = make_parameters(EQUAL, torch.bfloat16, device)
    singles = make_parameters([(6, 8), (3, 5)], torch.float32, device)
    late = [
        *make_parameters([(2, 4), (6, 8)], torch.bfloat16, device),
        *make_parameters([(4, 4)], torch.float16, device),
    ]
    engine = build([*halves, *singles], **SETTINGS)
    assert cohorts_of(engine) == [1, 2, 3, 4, 2, 4]
    engine.add_param_group({"params": late})
    for parameters in ([*halves, *singles], [*halves, *singles, *late]):
        feed(parameters, [torch.ones_like(parameter) for parameter in parameters])
        engine.step()
    assert cohorts_of(engine)[-3:] == [2, 1, 4], (
        "the larger first, to the cohort with least; of a new dtype like a start"
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("topk_ratio", [0, 0.3])
def test_i4_staggered_replay_without_delay_is_adamw_at_each_cohort_s_window_end(
    topk_ratio: float, dtype: str, device: str, build: Builder
) -> None:
    """Also where a selection ends all windows before their time, which it does in just the step in which it is due."""
    settings = {"accumulate_on": "host", "deferred_rule": "replay", "overlap_step": False, "select_interval": 7}
    pair = ReferencePair(
        build,
        make_parameters(SHAPES, DTYPES[dtype], device),
        **{**SETTINGS, **USUAL, **settings, "topk_ratio": topk_ratio},
    )
    cohorts, start = cohorts_of(pair.engine), 0
    assert set(cohorts) == {None, 1, 2, 3, 4}
    for step, grads in enumerate(make_gradients(SHAPES, DTYPES[dtype], 20), start=1):
        pair.engine.param_groups[0].update(lr=0.03 / step, weight_decay=0.2 / step)
        pair.step(grads, check=False)
        drained = bool(topk_ratio) and step % 7 == 0
        for index, (parameter, cohort) in enumerate(zip(pair.parameters, cohorts, strict=True)):
            if drained or cohort is None or (step - start) % 4 == cohort % 4:
                assert_same_bits(parameter, pair.model.visible(index), f"weight {index} after step {step}")
        if drained:
            start = step
            pair.check_state(owners=False)
    assert pair.engine.stats().selections == (3 if topk_ratio else 0)


@pytest.mark.parametrize("given", [{"bucket_bytes": 32}, {"worker_threads": 2}], ids=["bucket=32", "threads=2"])
def test_i6_staggered_the_machine_changes_no_bit(given: dict[str, Any], device: str, build: Builder) -> None:
    runs = []
    for settings in (SETTINGS, {**SETTINGS, **given}):
        parameters = make_parameters(SHAPES, torch.bfloat16, device)
        engine = build(parameters, **settings, max_grad_norm=0.5, select_interval=6)
        for grads in make_gradients(SHAPES, torch.bfloat16, 14, exact=True):
            feed(parameters, grads)
            engine.step()
        runs.append([*snapshot(parameters), *(engine.channel_state(parameter).master for parameter in parameters)])
    for index, (one, other) in enumerate(zip(*runs, strict=True)):
        assert_same_bits(one, other, f"tensor {index}")


def test_a_due_selection_runs_in_that_very_step_and_is_the_only_question(
    device: str, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is some cohort's window end; the step that is skipped leaves the selection to the next."""
    asked: list[int] = []
    question = Pipeline.is_finite
    monkeypatch.setattr(Pipeline, "is_finite", lambda self: asked.append(self.clock.state.step) or question(self))
    parameters = make_parameters(EQUAL, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS, **UNCHECKED, select_interval=6)
    selections = []
    for step, grads in enumerate(make_gradients(EQUAL, torch.bfloat16, 20), start=1):
        if step == 12:
            grads[2][0, 0] = float("inf")
        feed(parameters, grads)
        engine.step()
        selections.append(engine.stats().selections)
        assert engine._pipeline.clock.running == {6: (), 13: (), 18: ()}.get(step, engine._pipeline.clock.running)
        assert bool(engine._pipeline.uploads.pending) == (step not in (6, 13, 18))
    assert selections == [1 + sum(due <= step for due in (6, 13, 18)) for step in range(1, 21)]
    assert asked == [1, 6, 12, 13, 18]


@pytest.mark.parametrize("rule", RULES)
def test_each_cohort_s_buckets_land_in_the_backward_pass_before_they_are_due(
    rule: str, device: str, build: Builder, taken: list[tuple[Sent, bool]]
) -> None:
    """The numbers of passes are learned in the first U steps; then every step's backward takes one cohort."""
    settings = {**SETTINGS, **UNCHECKED, **RULES[rule], "bucket_bytes": 32, "select_interval": 1000}
    pair = Pair(build, make_parameters(EQUAL, torch.bfloat16, device), **settings)
    for number, grads in enumerate(make_gradients(EQUAL, torch.bfloat16, 12), start=1):
        taken.clear()
        step_after_worker(pair, grads)
        assert {sent.storage.cohort for sent, _ in taken} == ({(number - 3) % 4 + 1} if number > 2 else set())
        assert {in_backward for _, in_backward in taken} == ({number > 4} if number > 2 else set())
    pair.check_state()


def test_weights_used_after_their_gradient_are_found_and_uploads_stay_in_step(device: str, build: Builder) -> None:
    """upload_check, cohort by cohort: a detached use of all weights brings NaN into gradients; three skips, no more."""
    parameters = make_parameters(EQUAL, torch.float32, device)
    engine = build(parameters, **SETTINGS)
    for _ in range(16):
        engine._pipeline.wait_for_worker()
        engine.zero_grad()
        # Gradients arrive from the last parameter to the first, and each is made of those that came before.
        y = torch.ones(8, device=device, requires_grad=True)
        for parameter in parameters:
            y = y + parameter.sum(0) * LateUse.apply(y, parameters)
        y.sum().backward()
        engine.step()
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)
    assert engine.stats().skipped_steps == 3
    assert not engine._pipeline.uploads._in_backward


class LateUse(torch.autograd.Function):
    """1, whose backward looks at weights that autograd does not know it needs."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
        ctx.parameters = parameters
        return torch.ones_like(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * 0 * sum(parameter.detach().sum() for parameter in ctx.parameters), None


@pytest.mark.parametrize("rule", ["gpu", "host"])
def test_e7_staggered_a_dead_worker_is_noticed_and_leaves_whole_weights(rule: str, device: str) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    given = {"full_warm_up_rounds": 0, "min_deferred_numel": 0, "worker_threads": 1}
    engine = ZenFlow(parameters, **SETTINGS, **given, **UNCHECKED, **RULES[rule])
    stream = make_gradients(SHAPES, torch.bfloat16, 40)

    def run(count: int) -> None:
        for _ in range(count):
            feed(parameters, stream.pop())
            engine.step()

    run(7)
    pid = engine.stats().worker_pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match="-9|SIGKILL"):
        within(5.0, run, 30)
    engine.close(flush=False)
    assert ends_within(pid, 5.0)
    assert all(bool(parameter.isfinite().all()) for parameter in parameters)


def test_a_trace_shows_each_cohort_s_windows(device: str, build: Builder, tmp_path: Path) -> None:
    """One bucket a step goes to the ring, is processed and lands, each window of a number of its own."""
    pair = Pair(build, make_parameters(EQUAL, torch.bfloat16, device), **SETTINGS, **UNCHECKED, select_interval=1000)
    stream = make_gradients(EQUAL, torch.bfloat16, 12)
    for grads in stream[:6]:
        step_after_worker(pair, grads)
    pair.engine._pipeline.wait_for_worker()
    with pair.engine.trace(tmp_path / "trace.json"):
        for grads in stream[6:]:
            step_after_worker(pair, grads)
    events = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    windows: dict[str, list[int]] = {}
    for event in events:
        if event["ph"] == "X" and event["name"].startswith("bucket"):
            windows.setdefault(lanes[event["tid"]], []).append(event["args"]["window"])
    assert {lane: sorted(numbers) for lane, numbers in windows.items()} == {
        "copy to ring": [7, 8, 9, 10, 11, 12],
        "CPU optimizer": [7, 8, 9, 10, 11, 12],
        "upload": [5, 6, 7, 8, 9, 10],
    }
