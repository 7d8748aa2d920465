"""States of staggered runs: cohorts are kept, also those that have begun in the middle of a window, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.driving import SHAPES, Builder, assert_same_bits, cohorts_of, feed, make_gradients, make_parameters
from tests.engine.resuming import Run, check_resumed, make_script
from zenflow import ZenFlow

SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "topk_ratio": 0.3, "update_interval": 4, "stagger": True}


def test_i7_a_run_whose_parameters_came_late_keeps_their_cohorts(device: str, build: Builder, tmp_path: Path) -> None:
    """The optimizer that is built anew has them from the start, and divides them otherwise, until it loads.

    Its buckets are others, so uploads in backward would be tried in other steps.
    """
    script = make_script(torch.bfloat16, {"stagger": True, "upload": "step"}, 11)
    script.frozen = [0, 5]
    script.steps[2].frozen, script.steps[5].frozen = {5: False}, {0: False}
    run = Run.start(script, device, build)
    for number in range(8):
        run.play(number)
    run.save(tmp_path / "early")
    fresh = build(make_parameters(SHAPES, torch.bfloat16, device), **script.settings)
    members = [number for group in script.groups for number in group[0]]
    assert [cohorts_of(fresh)[number] for number in members] != cohorts_of(run.engine)
    resumed = Run.resume(script, tmp_path / "early", device, build)
    assert cohorts_of(resumed.engine) == cohorts_of(run.engine)
    check_resumed(script, [2, 4, 8], device, build, tmp_path)


def test_a_cohort_that_begins_in_the_middle_of_its_window_is_saved_so(device: str, build: Builder) -> None:
    """Two cohorts of one dtype, U 8; in step 13 eight of another come, for some of which more steps have gone by."""
    shapes, late = [(4, 6)] * 2, [(3, 5)] * 8
    parameters, others = make_parameters(shapes, torch.bfloat16, device), make_parameters(late, torch.float32, device)
    given = {**SETTINGS, "update_interval": 8, "select_interval": 1000}

    def run(engine: ZenFlow, everyone: list[torch.nn.Parameter], first: int, last: int) -> None:
        for step in range(first, last + 1):
            shown = [(8 + step) / (1 + index) for index in range(len(everyone))]
            feed(everyone, [torch.full_like(p, x, device="cpu") for p, x in zip(everyone, shown, strict=True)])
            engine.step()

    engine = build(parameters, **given)
    run(engine, parameters, 1, 12)
    engine.add_param_group({"params": others})
    run(engine, [*parameters, *others], 13, 13)
    assert len(engine._pipeline.hyper_log) < engine._pipeline.clock.longest
    fresh = [
        *make_parameters(shapes, torch.bfloat16, device, seed=5),
        *make_parameters(late, torch.float32, device, seed=6),
    ]
    resumed = build([{"params": fresh[:2]}, {"params": fresh[2:]}], **given)
    resumed.load_state_dict(engine.state_dict())
    run(engine, [*parameters, *others], 14, 30)
    run(resumed, fresh, 14, 30)
    for index, (one, other) in enumerate(zip(fresh, [*parameters, *others], strict=True)):
        assert_same_bits(one, other, f"weight {index}")


@pytest.mark.parametrize(
    ("name", "given"),
    [("stagger", {"stagger": False}), ("visible_after", {"visible_after": 3})],
    ids=["stagger", "after"],
)
def test_states_of_other_windows_are_refused_by_name(
    name: str, given: dict[str, Any], device: str, build: Builder
) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    feed(parameters, make_gradients(SHAPES, torch.bfloat16, 1)[0])
    engine.step()
    engine.flush()
    other = build(make_parameters(SHAPES, torch.bfloat16, device), **{**SETTINGS, **given})
    with pytest.raises(ValueError, match=f"saved with {name}="):
        other.load_state_dict(engine.state_dict())


@pytest.mark.parametrize("ways", [("auto", 2), (2, "auto")], ids=["auto-to-steps", "steps-to-auto"])
@pytest.mark.parametrize("given", [{}, {"stagger": False, "update_interval": 2}], ids=["staggered", "together"])
def test_a_delay_in_steps_is_that_of_auto(
    given: dict[str, Any], ways: tuple[str | int, str | int], device: str, build: Builder
) -> None:
    """In the middle of a window, with a result on its way: the run goes on as if nothing had been."""
    settings = [{**SETTINGS, **given, "visible_after": after} for after in ways]
    stream = make_gradients(SHAPES, torch.bfloat16, 12)
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **settings[0])
    for grads in stream[:5]:
        feed(parameters, grads)
        engine.step()
    assert engine._pipeline.uploads.pending and engine._pipeline.clock.running
    fresh = make_parameters(SHAPES, torch.bfloat16, device, seed=5)
    resumed = build(fresh, **settings[1])
    resumed.load_state_dict(engine.state_dict())
    for grads in stream[5:]:
        for optimizer, everyone in ((engine, parameters), (resumed, fresh)):
            feed(everyone, grads)
            optimizer.step()
    for index, (one, other) in enumerate(zip(fresh, parameters, strict=True)):
        assert_same_bits(one, other, f"weight {index}")


@pytest.mark.parametrize("cohort", [0, 5, "1", None])
def test_a_state_s_cohorts_are_checked(cohort: Any, device: str, build: Builder) -> None:
    parameters = make_parameters(SHAPES, torch.bfloat16, device)
    engine = build(parameters, **SETTINGS)
    for grads in make_gradients(SHAPES, torch.bfloat16, 2):
        feed(parameters, grads)
        engine.step()
    state = engine.state_dict()
    if cohort is None:
        del state["state"][0]["cohort"]
    else:
        state["state"][0]["cohort"] = cohort
    with pytest.raises(ValueError, match="cohort"):
        build(make_parameters(SHAPES, torch.bfloat16, device), **SETTINGS).load_state_dict(state)
