"""What a simulated rule is: the engine's own settings, and those that the engine does not have."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from zenflow.config import ZenFlowConfig

BETAS_PER_WINDOW = ("none", "first", "both")
SECOND_MOMENTS = ("mean", "steps")


@dataclass(frozen=True)
class Rule:
    """A deferred rule.

    config: of its fields those that bear on the mathematics are heeded, with the engine's meaning; the rest (threads,
        buckets, uploads) has no effect. Refused are `on_reselect: reset`, `selected_masters: stochastic`, and
        `importance_over: window` and `average`.
    betas_per_window: moments that a window's one update decays by beta^n instead of beta, n being its steps: none, the
        first, or both. Bias corrections follow: they count n steps for that update.
    second_moment: the one update's second moment takes the square of the window's mean gradient (mean), or the mean of
        its steps' squares (steps).
    delay_compensation: lambda, in 1 / loss. A step's gradient g, taken at the visible weight w, becomes
        `g + lambda * g * g * (master - w)` when its window's update is made: to first order the gradient at the master,
        if lambda * g * g is the curvature (Zheng et al., 2017). 0: off.
    growing_rounds: a window that begins with step s <= growing_rounds has `ceil(U * s / growing_rounds)` steps. 0: all
        windows have U.

    Raises ValueError naming the field, its value and what is allowed.
    """

    config: ZenFlowConfig = field(default_factory=ZenFlowConfig)
    betas_per_window: str = "none"
    second_moment: str = "mean"
    delay_compensation: float = 0.0
    growing_rounds: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", self.config.resolved())
        _require("betas_per_window", self.betas_per_window, BETAS_PER_WINDOW)
        _require("second_moment", self.second_moment, SECOND_MOMENTS)
        if not 0 <= self.delay_compensation < math.inf:
            raise ValueError(f"delay_compensation is {self.delay_compensation!r}; allowed: a finite number >= 0")
        if self.growing_rounds < 0:
            raise ValueError(f"growing_rounds is {self.growing_rounds!r}; allowed: an integer >= 0")
        _require("on_reselect", self.config.on_reselect, ("migrate",))
        _require("selected_masters", self.config.selected_masters, ("float32",))
        _require("importance_over", self.config.importance_over, ("step",))
        if self.config.deferred_rule == "replay":
            for name, only in (("betas_per_window", "none"), ("second_moment", "mean")):
                _require(name, getattr(self, name), (only,), " under deferred_rule='replay', which updates every step")

    @property
    def keeps_steps(self) -> bool:
        """Whether a window's gradients have to be kept one by one, not only their sum."""
        separate = self.config.deferred_rule == "replay" or self.second_moment == "steps"
        return separate or self.delay_compensation > 0

    def window_length(self, first: int) -> int:
        """Steps of a window that begins with step `first`, counted from 1."""
        longest = self.config.update_interval
        assert isinstance(longest, int)
        if first > self.growing_rounds:
            return longest
        return -(-longest * first // self.growing_rounds)


def _require(name: str, value: str, allowed: tuple[str, ...], remark: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; allowed: {' or '.join(map(repr, allowed))}{remark}")
