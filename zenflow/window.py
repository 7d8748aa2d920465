"""The window clock: which steps end windows, when their results are visible, and when a selection is due.

It counts calls of `step()` and nothing else: whether a step was skipped on the device never reaches it, so the host
never has to ask.

Matrices are divided into *cohorts*, numbered by the steps at which their windows end: cohort c, 1 <= c <= U, ends its
windows c, c + U, c + 2U, ... steps after the clock's last restart. Without `stagger` all are cohort U. A restart ends
all windows at once; it comes with the end of each warm-up step, with a selection, and with `flush()`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepPlan:
    """What one call of `step()` does. Steps are counted from 1."""

    step: int
    position: int  # of the clock before this step, see `ClockState`
    ends: tuple[int, ...]  # cohorts whose windows end
    synchronous: bool  # their results become visible in this very step (staleness 0)
    selects: bool  # a selection runs now if the step is finite; then all windows end, with staleness 0


@dataclass
class ClockState:
    """All that a checkpoint needs of the clock.

    window: the number of the next window that ends, one number for all that end in the same step. position: steps since
    the last restart; after 2U of them U are taken off.
    """

    step: int = 0
    window: int = 1
    position: int = 0
    selection_due: bool = False


class WindowClock:
    """Windows of `update_interval` steps, shorter after a restart; in warm-up, windows of one step with staleness 0.

    A selection is due at every multiple of `select_interval` steps and at the last warm-up step; it runs at the first
    window end at or after that and stays due until `selection_ran()`. A result is visible at the end of the step that
    comes `visible_after` steps after its window's last; 0: in that step. `cohorts`: those that have members, ascending.
    """

    def __init__(
        self,
        *,
        update_interval: int,
        select_interval: int,
        full_warm_up_rounds: int,
        visible_after: int,
    ) -> None:
        self.update_interval = update_interval
        self.select_interval = select_interval
        self.full_warm_up_rounds = full_warm_up_rounds
        self.visible_after = visible_after
        self.cohorts: tuple[int, ...] = (update_interval,)
        self.state = ClockState()

    def begin_step(self) -> StepPlan:
        """Count one call and say what it does."""
        state = self.state
        state.step += 1
        warming_up = state.step <= self.full_warm_up_rounds
        if state.step % self.select_interval == 0 or state.step == self.full_warm_up_rounds:
            state.selection_due = True
        ending = state.position % self.update_interval + 1
        ends = self.cohorts if warming_up else tuple(cohort for cohort in self.cohorts if cohort == ending)
        return StepPlan(
            step=state.step,
            position=state.position,
            ends=ends,
            synchronous=bool(ends) and (warming_up or not self.visible_after),
            selects=bool(ends) and state.selection_due,
        )

    def finish_step(self, ended: Sequence[int]) -> None:
        """Move on; `ended`: the cohorts whose windows have ended in this step."""
        state = self.state
        state.window += bool(ended)
        state.position += 1
        if tuple(ended) == self.cohorts:
            state.position = 0
        elif state.position == 2 * self.update_interval:
            state.position -= self.update_interval

    def restart(self) -> None:
        """End the running windows before their time (`flush`)."""
        self.state.window += bool(self.running)
        self.state.position = 0

    def length(self, cohort: int) -> int:
        """Steps so far in a cohort's running window; 0 between two windows."""
        position = self.state.position
        return position if position < cohort else (position - cohort) % self.update_interval

    @property
    def running(self) -> tuple[int, ...]:
        """The cohorts whose windows have begun."""
        return tuple(cohort for cohort in self.cohorts if self.length(cohort))

    @property
    def longest(self) -> int:
        """Steps so far in the longest running window."""
        return max(map(self.length, self.cohorts))

    def rows(self, length: int) -> list[int]:
        """Where the last `length` steps stand in what keeps the latest `update_interval` steps, oldest first."""
        position = self.state.position
        return [step % self.update_interval for step in range(position - length, position)]

    @property
    def hurried(self) -> bool:
        """Whether a result has less time than lies between two windows' ends, and the step in which it travels."""
        between = -(-self.update_interval // len(self.cohorts))
        return self.visible_after < min(between + 1, self.update_interval)

    def due(self, cohort: int) -> int:
        """The step at whose end the result of a cohort's last window becomes visible."""
        return self.state.step - self.length(cohort) + (self.visible_after or self.update_interval)

    def may_select_within(self, steps: int) -> bool:
        """Whether a selection is due in the step that has begun, or falls due in one of the `steps - 1` after it.

        Not the one at the end of warm-up, before that step: its window has no other.
        """
        step, last = self.state.step, self.state.step + steps - 1
        return self.state.selection_due or last // self.select_interval > step // self.select_interval

    def selection_ran(self) -> None:
        """A selection has been carried out: none is due until the next multiple of `select_interval`."""
        self.state.selection_due = False

    def state_dict(self) -> dict[str, int | bool]:
        """The fields of `ClockState`, in steps and windows; cohorts are not among them."""
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go on from what `state_dict` gave; checked by `checkpoint_checks`."""
        self.state = ClockState(**state)  # type: ignore[arg-type]


def divide(numels: Sequence[int], loads: Mapping[int, int], update_interval: int) -> list[int]:
    """The cohort of each matrix, by its number of elements: largest first, each to the one that has least so far.

    loads: elements that each cohort has already; empty: `min(update_interval, matrices)` cohorts begin, as evenly over
    the steps as can be. Equals go in the order in which they come, and to the lower cohort.
    """
    if not loads:
        count = min(update_interval, len(numels))
        loads = {(number + 1) * update_interval // count: 0 for number in range(count)}
    sums, cohorts = dict(sorted(loads.items())), [0] * len(numels)
    for place in sorted(range(len(numels)), key=lambda place: -numels[place]):
        cohorts[place] = min(sums, key=sums.__getitem__)
        sums[cohorts[place]] += numels[place]
    return cohorts
