"""The window clock: which step ends a window, when its result is visible, and when a selection is due.

It counts calls of `step()` and nothing else: whether a step was skipped on the device never reaches it, so the host
never has to ask.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class StepPlan:
    """What one call of `step()` does. Steps are counted from 1, positions in a window from 0."""

    step: int
    position: int
    ends_window: bool
    synchronous: bool  # this window's result becomes visible in this very step (staleness 0)
    selects: bool  # a selection runs at this window's end, if the step is finite; its window has staleness 0 then


@dataclass
class ClockState:
    """All that a checkpoint needs of the clock."""

    step: int = 0
    window: int = 1
    position: int = 0
    selection_due: bool = False


class WindowClock:
    """Windows of `update_interval` steps; in warm-up, windows of one step with staleness 0.

    A selection is due at every multiple of `select_interval` steps and at the last warm-up step; it runs at the first
    window end at or after that and stays due until `selection_ran()`.
    """

    def __init__(
        self, *, update_interval: int, select_interval: int, full_warm_up_rounds: int, overlap_step: bool
    ) -> None:
        self.update_interval = update_interval
        self.select_interval = select_interval
        self.full_warm_up_rounds = full_warm_up_rounds
        self.overlap_step = overlap_step
        self.state = ClockState()

    @property
    def next_ends_window(self) -> bool:
        """Whether the next step will."""
        state = self.state
        return state.step + 1 <= self.full_warm_up_rounds or state.position + 1 >= self.update_interval

    def begin_step(self) -> StepPlan:
        """Count one call and say what it does."""
        state = self.state
        ends = self.next_ends_window
        state.step += 1
        warming_up = state.step <= self.full_warm_up_rounds
        if state.step % self.select_interval == 0 or state.step == self.full_warm_up_rounds:
            state.selection_due = True
        return StepPlan(
            step=state.step,
            position=state.position,
            ends_window=ends,
            synchronous=ends and (warming_up or not self.overlap_step),
            selects=ends and state.selection_due,
        )

    def finish_step(self, plan: StepPlan) -> None:
        """Move on: to the next position, or to a new window."""
        if plan.ends_window:
            self.end_window()
        else:
            self.state.position += 1

    def end_window(self) -> None:
        """Close the running window, also before its time (`flush`)."""
        self.state.window += 1
        self.state.position = 0

    def selection_ran(self) -> None:
        """A selection has been carried out: none is due until the next multiple of `select_interval`."""
        self.state.selection_due = False

    def state_dict(self) -> dict[str, int | bool]:
        return asdict(self.state)

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        self.state = ClockState(**state)  # type: ignore[arg-type]
