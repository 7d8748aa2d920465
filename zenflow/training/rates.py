"""The learning rate of the CPU process's updates, for the line of the step in which their result became visible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class DeferredRates:
    """Follows a run's lines in their order: which window a result is of, and what it was updated with.

    `deferred_step` is the last step of the newest window that became visible in a step. `deferred_lr` is the sum of the
    learning rates of the updates that did, for a parameter with a gradient in every step: under `accumulate` one update
    a window, with the rate of its last counted step times `deferred_lr_scale`; under `replay` one a counted step. A
    step that was skipped does not count. Which ones were is known where all or none of the steps between two readings
    of the device were; a window with others has no `deferred_lr`. With `stagger` a line is of the cohort whose result
    became visible in that step, and has no rate where those of several cohorts may have, at staleness 0 after warm-up.

    engine: the fields of `ZenFlowConfig`, every `auto` resolved; `visible_after` is 0 under `overlap_step: false`.
    """

    def __init__(self, engine: dict[str, Any]) -> None:
        self._length, self._warm_up = engine["update_interval"], engine["full_warm_up_rounds"]
        self._stagger = engine["stagger"] and self._length > 1  # windows of one step have one cohort
        self._after = engine["visible_after"]
        self._restarted = 0  # the last step at which all windows are known to have ended
        self._replays, self._scale = engine["deferred_rule"] == "replay", engine["deferred_lr_scale"]
        self._steps: dict[int, tuple[float, bool | None]] = {}  # not yet visible: rate, and whether it counts
        self._visible = self._skipped_steps = 0  # the step up to which all is visible; the last reading

    def read(self, lines: Sequence[dict[str, Any]], skipped_steps: int | None) -> None:
        """The lines since the last reading, and the run's skipped steps up to the last of them (None: not known)."""
        new = None if skipped_steps is None else skipped_steps - self._skipped_steps
        counts = {0: True, len(lines): False}.get(new) if new is not None else None
        self._steps |= {line["step"]: (line["lr"], counts) for line in lines}
        self._skipped_steps += new or 0

    def complete(self, line: dict[str, Any]) -> dict[str, Any]:
        """What belongs into a step's line beside its `staleness`, if a result became visible in it."""
        if "staleness" not in line:
            return {}
        last = line["step"] if line["staleness"] == 0 else line["step"] - self._after
        rates = [self._cohort_rate(line, last)] if self._stagger else []
        if self._stagger:
            self._visible = last
        while self._visible < last:
            first = self._visible + 1
            self._visible = first if first <= self._warm_up else first + self._length - 1
            rates.append(self._rate([self._steps.pop(step) for step in range(first, self._visible + 1)]))
        return {"deferred_step": last} | ({} if None in rates else {"deferred_lr": sum(rates)})

    def _cohort_rate(self, line: dict[str, Any], last: int) -> float | None:
        """The rate of the cohort whose window ended with step `last`, None if it may not be the only one."""
        rate, first = None, max(self._restarted + 1, last - self._length + 1)
        if line["staleness"] or last <= self._warm_up:
            rate = self._rate([self._steps[step] for step in range(first, last + 1)])
        if line["staleness"] == 0 and (self._after or last <= self._warm_up):
            self._restarted = last
        self._steps = {step: known for step, known in self._steps.items() if step > last - self._length}
        return rate

    def _rate(self, steps: Sequence[tuple[float, bool | None]]) -> float | None:
        """The rates of one window's updates together; None where it is not known which of its steps count."""
        if any(counts is None for _, counts in steps):
            return None
        rates = [lr for lr, counts in steps if counts]
        if self._replays or not rates:
            return sum(rates)
        scale = {"linear": len(rates), "none": 1}.get(self._scale, self._scale)
        return rates[-1] * scale
