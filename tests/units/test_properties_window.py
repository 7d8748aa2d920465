"""The window clock against an oracle that goes through the whole history anew at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zenflow.window import StepPlan, WindowClock, divide


@dataclass
class Oracle:
    """The rules of `WindowClock`, word by word, over all steps so far; ends: last steps of each cohort's windows."""

    interval: int
    select: int
    warm_up: int
    after: int
    cohorts: tuple[int, ...]
    steps: int = 0
    restarted: int = 0  # the step after which all windows began together
    windows: int = 0  # each for all that ended at once
    ends: dict[int, list[int]] = field(default_factory=dict)
    selected: list[int] = field(default_factory=list)  # steps at which a selection ran

    def ends_window(self, cohort: int, step: int) -> bool:
        late = step - self.restarted - cohort
        return step <= self.warm_up or (late >= 0 and late % self.interval == 0)

    def last_end(self, cohort: int) -> int:
        return max([self.restarted, *self.ends.get(cohort, [])])

    def length(self, cohort: int) -> int:
        return self.steps - self.last_end(cohort)

    def end(self, cohorts: Sequence[int]) -> None:
        self.windows += bool(cohorts)
        for cohort in cohorts:
            self.ends.setdefault(cohort, []).append(self.steps)
        if tuple(cohorts) == self.cohorts:
            self.restarted = self.steps

    def plan(self, position: int) -> StepPlan:
        self.steps += 1
        ends = tuple(cohort for cohort in self.cohorts if self.ends_window(cohort, self.steps))
        since = self.selected[-1] if self.selected else 0
        due = any(s % self.select == 0 or s == self.warm_up for s in range(since + 1, self.steps + 1))
        return StepPlan(
            step=self.steps,
            position=position,
            ends=ends,
            synchronous=bool(ends) and (self.steps <= self.warm_up or not self.after),
            selects=bool(ends) and due,
        )


@st.composite
def clocks(draw: st.DrawFn) -> dict:
    interval = draw(st.integers(1, 7))
    cohorts = draw(st.one_of(st.just({interval}), st.sets(st.integers(1, interval), min_size=min(2, interval))))
    return {
        "interval": interval,
        "select": draw(st.one_of(st.integers(1, 20), st.just(1000))),
        "warm_up": draw(st.one_of(st.just(0), st.integers(0, 9))),
        "after": draw(st.integers(0, interval)),
        "cohorts": tuple(sorted(cohorts)),
    }


def make(rules: dict) -> WindowClock:
    clock = WindowClock(
        update_interval=rules["interval"],
        select_interval=rules["select"],
        full_warm_up_rounds=rules["warm_up"],
        visible_after=rules["after"],
    )
    clock.cohorts = rules["cohorts"]
    return clock


# Many steps between two events: a position goes round only after two windows of which nothing ends all.
runs = st.one_of(
    st.integers(1, 20).map(lambda steps: ["step"] * steps),
    st.sampled_from([["skipped step"], ["flush"], ["resume"]]),
)
events = st.lists(runs, max_size=12).map(lambda some: [event for run in some for event in run])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rules=clocks(), events=events)
def test_every_step_is_what_the_whole_history_says(rules: dict, events: list[str]) -> None:
    """Skipped steps do not select, a selection and a flush end all windows early, a resumed clock goes on as if nothing
    were."""
    clock, oracle = make(rules), Oracle(**rules)
    for event in events:
        if event == "resume":
            state = clock.state_dict()
            clock = make(rules)
            clock.load_state_dict(state)
        elif event == "flush":
            oracle.end([cohort for cohort in oracle.cohorts if oracle.length(cohort)])
            oracle.restarted = oracle.steps
            clock.restart()
        else:
            plan = clock.begin_step()
            assert plan == oracle.plan(plan.position)
            selecting = plan.selects and event == "step"
            ends = oracle.cohorts if selecting else plan.ends
            if selecting:
                clock.selection_ran()
                oracle.selected.append(plan.step)
            clock.finish_step(ends)
            oracle.end(ends)
        lengths = {cohort: oracle.length(cohort) for cohort in oracle.cohorts}
        assert {cohort: clock.length(cohort) for cohort in oracle.cohorts} == lengths
        assert clock.running == tuple(cohort for cohort, length in lengths.items() if length)
        assert clock.longest == max(lengths.values()) < oracle.interval
        assert clock.state.window == oracle.windows + 1
        assert 0 <= clock.state.position < 2 * oracle.interval
        for cohort in oracle.cohorts:
            assert clock.due(cohort) == oracle.last_end(cohort) + (oracle.after or oracle.interval)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rules=clocks(), steps=st.integers(0, 60))
def test_a_step_keeps_its_place_while_a_window_needs_it(rules: dict, steps: int) -> None:
    clock, places = make(rules), {}
    for step in range(1, steps + 1):
        plan = clock.begin_step()
        places[step] = plan.position % clock.update_interval
        clock.finish_step(plan.ends)
        latest = range(step - clock.longest + 1, step + 1)
        assert clock.rows(clock.longest) == [places[number] for number in latest]
        assert len({places[number] for number in latest}) == len(latest)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(rules=clocks(), steps=st.integers(0, 80))
def test_no_window_is_too_long_and_no_selection_comes_late(rules: dict, steps: int) -> None:
    """What follows from the rules: windows of at most U steps, of one in warm-up; a due selection waits for U - 1."""
    clock, due = make(rules), None
    began = dict.fromkeys(rules["cohorts"], 1)
    for step in range(1, steps + 1):
        plan = clock.begin_step()
        if step % rules["select"] == 0 or step == rules["warm_up"]:
            due = due or step
        ends = rules["cohorts"] if plan.selects else plan.ends
        for cohort in ends:
            length = step - began[cohort] + 1
            assert length == 1 if step <= rules["warm_up"] else 1 <= length <= rules["interval"]
            began[cohort] = step + 1
        assert all(step - first < rules["interval"] for first in began.values())
        assert plan.selects == (due is not None and bool(plan.ends))
        assert due is None or step - due < rules["interval"]
        if plan.selects:
            clock.selection_ran()
            due = None
        clock.finish_step(ends)


sizes = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(numels=sizes, interval=st.integers(1, 9))
def test_cohorts_are_balanced_and_end_evenly(numels: list[int], interval: int) -> None:
    cohorts = divide(numels, {}, interval)
    used = sorted(set(cohorts))
    count = min(interval, len(numels))
    assert used == [(number + 1) * interval // count for number in range(count)]
    assert {later - earlier for earlier, later in zip([used[-1] - interval, *used], used, strict=False)} <= {
        interval // count,
        -(-interval // count),
    }
    loads = [sum(n for n, cohort in zip(numels, cohorts, strict=True) if cohort == number) for number in used]
    # The largest was the least loaded when its last matrix came.
    smallest = min(n for n, cohort in zip(numels, cohorts, strict=True) if cohort == used[loads.index(max(loads))])
    assert max(loads) - smallest <= min(loads)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(first=sizes, later=sizes, interval=st.integers(1, 9))
def test_later_matrices_join_the_cohorts_that_are_there(first: list[int], later: list[int], interval: int) -> None:
    loads: dict[int, int] = {}
    for numel, cohort in zip(first, divide(first, {}, interval), strict=True):
        loads[cohort] = loads.get(cohort, 0) + numel
    cohorts = divide(later, loads, interval)
    assert set(cohorts) <= set(loads)
    assert cohorts[later.index(max(later))] == min(loads, key=lambda cohort: (loads[cohort], cohort))
