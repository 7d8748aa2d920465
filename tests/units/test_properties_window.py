"""The window clock against an oracle that goes through the whole history anew at every step."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zenflow.window import StepPlan, WindowClock


@dataclass
class Oracle:
    """The rules of `WindowClock`, word by word, over all steps so far; ends: last steps of the windows."""

    interval: int
    select: int
    warm_up: int
    overlap: bool
    steps: int = 0
    ends: list[int] = field(default_factory=list)
    selected: list[int] = field(default_factory=list)  # steps at which a selection ran

    def ends_window(self, step: int) -> bool:
        return step <= self.warm_up or step - self.last_end == self.interval

    @property
    def last_end(self) -> int:
        return self.ends[-1] if self.ends else 0

    def plan(self) -> StepPlan:
        self.steps += 1
        ends = self.ends_window(self.steps)
        since = self.selected[-1] if self.selected else 0
        due = any(s % self.select == 0 or s == self.warm_up for s in range(since + 1, self.steps + 1))
        return StepPlan(
            step=self.steps,
            position=self.steps - 1 - self.last_end,
            ends_window=ends,
            synchronous=ends and (self.steps <= self.warm_up or not self.overlap),
            selects=ends and due,
        )


lengths = st.integers(1, 7)
events = st.lists(st.sampled_from(["step", "step", "step", "skipped step", "flush", "resume"]), max_size=60)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(interval=lengths, select=st.integers(1, 20), warm_up=st.integers(0, 9), overlap=st.booleans(), events=events)
def test_every_step_is_what_the_whole_history_says(
    interval: int, select: int, warm_up: int, overlap: bool, events: list[str]
) -> None:
    """Skipped steps do not select, a flush ends a window early, and a resumed clock goes on as if nothing were."""

    def make() -> WindowClock:
        return WindowClock(
            update_interval=interval, select_interval=select, full_warm_up_rounds=warm_up, overlap_step=overlap
        )

    clock, oracle = make(), Oracle(interval, select, warm_up, overlap)
    for event in events:
        if event == "resume":
            state = clock.state_dict()
            clock = make()
            clock.load_state_dict(state)
        elif event == "flush":
            if oracle.steps > oracle.last_end:
                clock.end_window()
                oracle.ends.append(oracle.steps)
        else:
            announced = clock.next_ends_window
            plan, expected = clock.begin_step(), oracle.plan()
            assert plan == expected
            assert announced == plan.ends_window
            if plan.selects and event == "step":
                clock.selection_ran()
                oracle.selected.append(plan.step)
            clock.finish_step(plan)
            oracle.ends += [plan.step] * plan.ends_window
        assert clock.state.window == len(oracle.ends) + 1
        assert clock.state.position == oracle.steps - oracle.last_end < interval


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(interval=lengths, select=st.integers(1, 20), warm_up=st.integers(0, 9), steps=st.integers(0, 80))
def test_no_window_is_too_long_and_no_selection_comes_late(
    interval: int, select: int, warm_up: int, steps: int
) -> None:
    """What follows from the rules: windows of at most U steps, of one in warm-up; a due selection waits for U - 1."""
    clock = WindowClock(
        update_interval=interval, select_interval=select, full_warm_up_rounds=warm_up, overlap_step=True
    )
    began, due = 1, None
    for step in range(1, steps + 1):
        plan = clock.begin_step()
        if step % select == 0 or step == warm_up:
            due = due or step
        if plan.ends_window:
            assert step - began + 1 == (1 if step <= warm_up else interval)
            assert plan.selects == (due is not None)
            assert due is None or step - due < interval
            if plan.selects:
                clock.selection_ran()
                due = None
            began = step + 1
        clock.finish_step(plan)
