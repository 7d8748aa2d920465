"""ZenFlow in plain torch on the CPU, one process, one step at a time: slow, obvious, and exact.

Nothing is shared with the engine but the table of bias corrections and stochastic rounding. `Reference` is AdamW with
fp32 masters in the written order of operations; `Simulation` adds owners, windows, cohorts, delay, selection, warm-up
and skips. Both are fed gradients and keep, for every channel, its owner, its step count t, its master and its two
moments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from zenflow_kernels.stochastic_rounding import round_stochastically_reference

from tests.engine.simulated_state import Group, State, f32

LARGEST = torch.finfo(torch.float32).max  # what the mean of a sum that overflows counts as
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# The paper's schedule: all windows end in the same step, from the first on, and what is visible are rounded masters.
TOGETHER = {"stagger": False, "weight_prediction": 0.0, "full_warm_up_rounds": 0}
DEFAULTS = {
    "topk_ratio": 0.1,
    "update_interval": 4,
    "select_interval": 100,
    "overlap_step": True,
    "visible_after": "auto",
    **TOGETHER,
    "channel_dim": "column",
    "importance": "square",
    "importance_over": "step",
    "importance_decay": 0.9,
    "deferred_rule": "accumulate",
    "deferred_lr_scale": "linear",
    "accumulate_on": "gpu",
    "on_reselect": "migrate",
    "selected_masters": "float32",
    "rounding_seed": 0,
    "min_deferred_numel": 0,
    "ring_dtype": "auto",
    "max_grad_norm": None,
}


def gradient_norm(grads: Sequence[Tensor | None]) -> float:
    return float(sum(g.double().square().sum() for g in grads if g is not None)) ** 0.5


class Simulation:
    """ZenFlow with the given settings; `groups` holds each parameter's `Group`, and the caller may replace it."""

    def __init__(self, weights: Sequence[Tensor], groups: Sequence[Group], **settings: Any) -> None:
        unknown = settings.keys() - DEFAULTS.keys()
        assert not unknown, unknown
        self.settings = DEFAULTS | settings
        self.groups = list(groups)
        self.shapes = [weight.shape for weight in weights]
        row = self.settings["channel_dim"] == "row"
        smallest = self.settings["min_deferred_numel"]
        self.states = [State.of(w, row, w.dim() < 2 or w.numel() < smallest) for w in weights]
        self.steps = self.skipped = self.windows = 0
        self.position = 0  # steps since all windows began together
        self.due = False
        self.norm = 0.0
        self._lay_out(self.states)

    def visible(self, index: int) -> Tensor:
        return self.states[index].visible.reshape(self.shapes[index])

    def step(self, grads: Sequence[Tensor | None], grad_scale: float = 1.0, found_inf: bool = False) -> None:
        grads = [None if g is None else g.detach().cpu() for g in grads]
        flat = [None if g is None else g.reshape(s.master.shape) for g, s in zip(grads, self.states, strict=True)]
        self._lay_out([s for s, g in zip(self.states, grads, strict=True) if s.cohort is None and g is not None])
        self.steps += 1
        inverse = f32(1 / float(f32(grad_scale)))
        self.norm = gradient_norm(grads) * float(inverse)
        finite = not found_inf and all(bool(g.isfinite().all()) for g in grads if g is not None)
        limit = self.settings["max_grad_norm"]
        clip = f32(1.0) if limit is None or not finite else f32(min(1.0, limit / (self.norm + 1e-6)))
        self.skipped += not finite
        if finite:
            unowned = [None if state.owned else grad for state, grad in zip(self.states, flat, strict=True)]
            self._select(unowned, first=True)
        for number, (state, group, grad) in enumerate(zip(self.states, self.groups, flat, strict=True)):
            if finite and grad is not None:
                scaled = (grad.float() * inverse) * clip
                self._score(state, grad, inverse * clip)
                state.update(state.selected, scaled, group, group.lr, 1 - group.lr * group.weight_decay)
                self._round(state, number)
                self._fold(state, scaled, group)
            state.show_masters(state.selected)
        self.due |= self._falls_due(self.steps)
        self.position += 1
        in_warm_up = self.steps <= self.settings["full_warm_up_rounds"]
        everyone = {self._cohort(s) for s in self.states if self._is_deferred(s) and s.cohort is not None}
        everyone = everyone or {self._longest}
        ends = everyone if in_warm_up else {cohort for cohort in everyone if self._ends_window(cohort)}
        selecting = bool(ends) and self.due and finite and self.settings["topk_ratio"] > 0
        self._age()
        if selecting or ends == everyone:
            self.position = 0
        if ends:
            stale = self.settings["overlap_step"] and not in_warm_up and not selecting
            self._end_windows(everyone if selecting else ends, stale)
        if selecting:
            self._select(flat)
            self.due = False

    def _round(self, state: State, stream: int) -> None:
        """Of the channels that have no fp32 master, as if the whole matrix were rounded."""
        if self.settings["selected_masters"] == "stochastic":
            key = {"seed": self.settings["rounding_seed"], "step": self.steps, "stream": stream}
            rounded = round_stochastically_reference(state.master, **key).float()
            state.master = torch.where(state.per_channel(state.selected), rounded, state.master)

    def flush(self) -> None:
        self.position = 0
        self._end_windows({self._cohort(state) for state in self.states}, stale=False)

    def _age(self) -> None:
        """A step later some results are visible."""
        after = self._visible_after()
        for state in self.states:
            state.age += 1
            if state.pending is not None and state.age >= after:
                state.show(~state.selected, state.pending)
                state.pending = None

    def _visible_after(self) -> int:
        longest, after = self.settings["update_interval"], self.settings["visible_after"]
        if after == "auto":
            return min(2, longest) if self.settings["stagger"] else longest
        return after

    def _ends_window(self, cohort: int) -> bool:
        late = self.position - cohort
        return late >= 0 and late % self.settings["update_interval"] == 0

    def _cohort(self, state: State) -> int:
        return state.cohort if self.settings["stagger"] and self._is_deferred(state) else self._longest

    @property
    def _longest(self) -> int:
        return self.settings["update_interval"]

    def _is_deferred(self, state: State) -> bool:
        return not state.whole and self._wanted(state) < len(state.step)

    def _wanted(self, state: State) -> int:
        ratio = self.settings["topk_ratio"]
        return 0 if ratio == 0 else max(1, round(ratio * len(state.step)))

    def _lay_out(self, states: Sequence[State]) -> None:
        """Cohorts by size, each dtype for itself; those that come later join those that are there."""
        for dtype in {state.visible.dtype for state in states}:
            new = [state for state in states if state.visible.dtype == dtype and self._is_deferred(state)]
            old = [state for state in self.states if state.visible.dtype == dtype and self._is_deferred(state)]
            sums: dict[int, int] = {}
            for state in old:
                if state.cohort is not None:
                    sums[state.cohort] = sums.get(state.cohort, 0) + state.master.numel()
            if not sums:
                count = min(self._longest, len(new))
                sums = {math.floor((number + 1) * self._longest / count): 0 for number in range(count)}
            for state in sorted(new, key=lambda state: -state.master.numel()):
                state.cohort = min(sorted(sums), key=sums.__getitem__)
                sums[state.cohort] += state.master.numel()
        for state in states:
            state.cohort = state.cohort or self._longest

    def _falls_due(self, step: int) -> bool:
        return step % self.settings["select_interval"] == 0 or step == self.settings["full_warm_up_rounds"]

    def _ring_dtype(self, state: State) -> torch.dtype:
        name = self.settings["ring_dtype"]
        if name == "auto":
            return torch.bfloat16 if state.visible.dtype == torch.bfloat16 else torch.float32
        return DTYPES[name]

    def _fold(self, state: State, scaled: Tensor, group: Group) -> None:
        state.kept.append(scaled)
        if state.accumulator is not None:
            scaled = state.accumulator.float() + scaled
        on_host = self.settings["accumulate_on"] == "host"
        state.accumulator = scaled if on_host else scaled.to(self._ring_dtype(state))
        state.counted.append(group)

    def _end_windows(self, cohorts: set[int], stale: bool) -> None:
        self.windows += 1
        for state in self.states:
            if self._cohort(state) not in cohorts:
                continue
            deferred = ~state.selected
            if state.pending is not None:
                state.show(deferred, state.pending)
                state.pending = None
            old, predicted = state.master, bool(state.counted)
            if state.counted and self.settings["deferred_rule"] == "replay":
                for group, scaled in zip(state.counted, state.kept, strict=True):
                    state.update(deferred, scaled, group, group.lr, 1 - group.lr * group.weight_decay)
            elif state.counted:
                assert state.accumulator is not None
                lr, decay = self._deferred_factors(state.counted)
                mean = state.accumulator.float() / f32(len(state.counted))
                state.update(deferred, mean.clamp(-LARGEST, LARGEST), state.counted[-1], lr, decay)
            state.accumulator, state.counted, state.kept = None, [], []
            if stale:
                coming = state.master
                if predicted and self.settings["weight_prediction"]:
                    coming = coming + f32(self.settings["weight_prediction"]) * (coming - old)
                state.pending, state.age = coming.to(state.visible.dtype), 0
            else:
                state.show_masters(deferred)

    def _deferred_factors(self, counted: list[Group]) -> tuple[float, float]:
        scale, last = self.settings["deferred_lr_scale"], counted[-1]
        if scale == "linear":
            decay = 1.0
            for group in counted:
                decay *= 1 - group.lr * group.weight_decay
            return last.lr * len(counted), decay
        return last.lr * (1.0 if scale == "none" else scale), 1 - last.lr * last.weight_decay

    def _score(self, state: State, grad: Tensor, factor: Tensor) -> None:
        """Of a step that counts; `factor` makes of the raw gradient what is applied."""
        new = self._step_scores(state, grad).float() * factor
        if self.settings["importance"] == "square":
            new = new * factor
        old = torch.zeros_like(new) if state.scores is None else state.scores
        if self.settings["importance_over"] == "average":
            rate = f32(1 - self.settings["importance_decay"])
            state.scores = torch.where(new.isfinite(), old + rate * (new - old), old)
        else:
            state.scores = (old if state.counted else 0.0) + torch.where(new.isfinite(), new, 0.0)

    def _step_scores(self, state: State, grad: Tensor) -> Tensor:
        x = grad.double()
        weighed = x.square() if self.settings["importance"] == "square" else x.abs()
        return weighed.sum(1 if state.row_channels else 0)

    def _select(self, grads: Sequence[Tensor | None], first: bool = False) -> None:
        """A parameter without a gradient takes no part: it keeps its owners, or waits for its first selection."""
        for state, grad in zip(self.states, grads, strict=True):
            if grad is None or state.whole:
                continue
            alone = first or self.settings["importance_over"] == "step"
            chosen = self._most_important(state, self._step_scores(state, grad) if alone else state.scores)
            if self.settings["on_reselect"] == "reset":
                changed = state.per_channel(chosen != state.selected)
                state.exp_avg = state.exp_avg.masked_fill(changed, 0.0)
                state.exp_avg_sq = state.exp_avg_sq.masked_fill(changed, 0.0)
                state.step[chosen != state.selected] = 0
            if self.settings["selected_masters"] == "stochastic":
                entering = state.per_channel(chosen & ~state.selected)
                state.master = torch.where(entering, state.master.to(state.visible.dtype).float(), state.master)
            state.selected, state.owned = chosen, True

    def _most_important(self, state: State, scores: Tensor) -> Tensor:
        best = torch.sort(scores, descending=True, stable=True).indices[: self._wanted(state)]
        chosen = torch.zeros(len(state.step), dtype=torch.bool)
        chosen[best] = True
        return chosen


class Reference:
    """AdamW with fp32 masters: the limit that ZenFlow equals at k = 1, and at U = 1 without overlap."""

    def __init__(self, weights: Sequence[Tensor], groups: Sequence[Group], max_grad_norm: float | None = None) -> None:
        self.states = [State.of(weight, row_channels=False, whole=True) for weight in weights]
        self.shapes = [weight.shape for weight in weights]
        self.groups = list(groups)
        self.max_grad_norm = max_grad_norm

    def step(self, grads: Sequence[Tensor | None]) -> None:
        grads = [None if g is None else g.detach().cpu() for g in grads]
        if not all(bool(g.isfinite().all()) for g in grads if g is not None):
            return
        limit = self.max_grad_norm
        clip = f32(1.0 if limit is None else min(1.0, limit / (gradient_norm(grads) + 1e-6)))
        for state, group, grad in zip(self.states, self.groups, grads, strict=True):
            if grad is not None:
                scaled = grad.float().reshape(state.master.shape) * clip
                state.update(state.selected, scaled, group, group.lr, 1 - group.lr * group.weight_decay)
            state.show_masters(state.selected)

    def visible(self, index: int) -> Tensor:
        return self.states[index].visible.reshape(self.shapes[index])
