"""By what a selection chooses channels, where that is more than the selecting step's gradient (`importance_over`).

The scores of each step are taken in on the device, and the device leaves out what is skipped or absent
(`running_scores.py`). A window's sum begins anew with the window of its matrix, like the sum of its gradients, and is
taken only in windows in which a selection can come; an average, in every step. A parameter's first selection goes by
its first finite gradient alone, whatever is configured. Under `importance_over: step` there is nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from zenflow_kernels.control import StepControl
from zenflow_kernels.running_scores import RunningScores
from zenflow_kernels.table import Table

from zenflow.config import ZenFlowConfig
from zenflow.param_record import ParamRecord
from zenflow.window import WindowClock


class Scores:
    """The running scores of all parameters of which some channels are selected and others not, by their tables."""

    def __init__(self, config: ZenFlowConfig) -> None:
        self.config = config
        self._tables: list[RunningScores] = []
        self._clear = True  # all are zero

    def follow(self, table: Table) -> None:
        """Keep scores of the parameters of one more table."""
        if self.config.importance_over == "step":
            return
        rate = 1 - self.config.importance_decay if self.config.importance_over == "average" else None
        self._tables.append(RunningScores(table, self.config.importance, rate))

    def add(self, control: StepControl, clock: WindowClock) -> None:
        """Take in the step that has begun, with the gradients that are bound; waits for nothing."""
        if self.config.importance_over == "window" and not clock.may_select_within(clock.update_interval):
            self.clear()  # what a window has left would not be all of the next one
            return
        for running in self._tables:
            running.add(control)
        self._clear = False

    def clear(self) -> None:
        """Begin anew."""
        if not self._clear:
            for running in self._tables:
                running.clear()
        self._clear = True

    def of(self, record: ParamRecord) -> Tensor | None:
        """fp32 `[channels]` on the device, to read or to write; None where none are kept."""
        for running in self._tables:
            number = record.index - running.table.first
            if 0 <= number < len(running.scores):
                return running.scores[number]
        return None

    def of_all(self, records: Sequence[ParamRecord]) -> list[Tensor] | None:
        """Of records that a selection may choose in; None: the step's own gradient decides."""
        return [self.of(record) for record in records] if self._tables else None

    def load(self, saved: dict[int, Tensor], records: Sequence[ParamRecord]) -> None:
        """Go on from scores that were saved, by `record.index`; those of others begin anew."""
        self.clear()
        for record in records:
            kept = self.of(record)
            if kept is not None and record.index in saved:
                kept.copy_(saved[record.index])
                self._clear = False
