"""A simulated optimizer: which step selects, moves and shows what, as the engine's clock has it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from zenflow.background_save import copy_to_host
from zenflow.simulate.matrix import Hyper, Matrix
from zenflow.simulate.rule import Rule
from zenflow.window import divide

COUNTS = ("steps", "skipped", "windows", "selections", "due", "norm")


class Simulation:
    """AdamW whose deferred channels follow `rule`, on the device of the parameters; it waits for the device.

    For a rule that the engine has, on weights in fp32 or bf16 on a CPU, every weight, moment and owner is the engine's,
    bit for bit, unless the norms that both sum in float64, in different orders, give clipping factors that differ by a
    rounding. It differs in what a rule does not say: all parameters have their place from the start, also those without
    a gradient, and memory is not saved: fp32 masters and moments of all channels lie on the device, and with
    `rule.keeps_steps` the gradients of a window.

    steps, skipped, windows, selections: counts so far, as in `zenflow.Stats`. norm: the last gradient's, before
    clipping.
    """

    def __init__(
        self,
        params: Iterable[Parameter],
        rule: Rule,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        """params: contiguous fp32 or bf16 parameters; frozen ones have no part. ValueError for anything else."""
        self.rule, self._config = rule, rule.config
        chosen = [param for param in params if param.requires_grad]
        strangers = {str(param.dtype) for param in chosen} - {"torch.float32", "torch.bfloat16"}
        if strangers:
            raise ValueError(f"parameters are {', '.join(sorted(strangers))}; allowed: torch.float32, torch.bfloat16")
        settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        self.param_groups: list[dict[str, Any]] = [{"params": chosen} | settings]
        self._matrices = [Matrix.of(param, rule) for param in chosen]
        self._deferred = [matrix for matrix in self._matrices if matrix.deferred]
        self.steps = self.skipped = self.windows = self.selections = 0
        self.due = False  # whether a selection is
        self.norm = 0.0
        self._lay_out()
        self._restart()

    def _lay_out(self) -> None:
        """Cohorts, each dtype for itself."""
        longest = self._config.update_interval
        for dtype in {matrix.visible.dtype for matrix in self._deferred}:
            alike = [matrix for matrix in self._deferred if matrix.visible.dtype == dtype]
            cohorts = [longest] * len(alike)
            if self._config.stagger:
                cohorts = divide([matrix.visible.numel() for matrix in alike], {}, longest)
            for matrix, cohort in zip(alike, cohorts, strict=True):
                matrix.cohort = cohort

    def _restart(self) -> None:
        """All windows begin with the next step; the first of a cohort is shorter, so that their ends spread."""
        length = self.rule.window_length(self.steps + 1)
        for matrix in self._deferred:
            matrix.left = -(-matrix.cohort * length // self._config.update_interval)

    @torch.no_grad()
    def step(self) -> None:
        """One step on the gradients in `.grad`: one that is None takes no part, one not finite skips all."""
        self.steps += 1
        config, hyper = self._config, Hyper.of(self.param_groups[0])
        grads = [None if m.param.grad is None else m.param.grad.reshape(m.visible.shape) for m in self._matrices]
        finite, clip = self._clip(grads)
        self.skipped += not finite
        if finite:
            self._update(grads, clip, hyper)
        for matrix in self._matrices:
            matrix.show_masters(matrix.selected)
        for matrix in self._deferred:
            matrix.begun = True
            matrix.left -= 1
            matrix.age += 1
            if matrix.age >= config.visible_after_steps:
                matrix.show_pending()
        warming_up = self.steps <= config.full_warm_up_rounds
        self.due |= self.steps % config.select_interval_steps == 0 or self.steps == config.full_warm_up_rounds
        ending = [matrix for matrix in self._deferred if warming_up or not matrix.left]
        selecting = bool(ending) and self.due and finite and config.topk_ratio > 0
        ending = self._deferred if selecting else ending
        self._end_windows(ending, late=bool(config.visible_after_steps) and not (warming_up or selecting))
        if selecting:
            self._select(grads)

    def _clip(self, grads: Sequence[Tensor | None]) -> tuple[bool, float]:
        """Whether all is finite, and the factor, an fp32 number; the norm in float64."""
        sums = [grad.double().square().sum() for grad in grads if grad is not None]
        self.norm = float(torch.stack(sums).sum().sqrt()) if sums else 0.0
        finite = self.norm < float("inf")
        limit = self._config.max_grad_norm
        if limit is None or not finite:
            return finite, 1.0
        return finite, float(torch.tensor(min(1.0, limit / (self.norm + 1e-6)), dtype=torch.float32))

    def _update(self, grads: Sequence[Tensor | None], clip: float, hyper: Hyper) -> None:
        present = [(matrix, grad) for matrix, grad in zip(self._matrices, grads, strict=True) if grad is not None]
        self.selections += any(not matrix.owned for matrix, _ in present)
        for matrix, grad in present:
            if not matrix.owned:
                matrix.select(grad)
            matrix.step(grad.float() * clip, hyper)

    def _end_windows(self, ending: Sequence[Matrix], *, late: bool) -> None:
        for matrix in ending:
            matrix.end_window(late=late)
            matrix.left = self.rule.window_length(self.steps + 1)
        self.windows += bool(ending)
        if len(ending) == len(self._deferred):
            self._restart()

    def _select(self, grads: Sequence[Tensor | None]) -> None:
        self.due = False
        self.selections += 1
        for matrix, grad in zip(self._matrices, grads, strict=True):
            if matrix.deferred and grad is not None:
                matrix.select(grad)

    @torch.no_grad()
    def flush(self) -> None:
        """End all running windows: every gradient seen so far is in the weights, which are the rounded masters."""
        windows = self.windows + any(matrix.begun for matrix in self._deferred)
        self._end_windows(self._deferred, late=False)
        self.windows = windows

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for matrix in self._matrices:
            matrix.param.grad = None

    def master(self, param: Parameter) -> Tensor | None:
        """A parameter's master, fp32 in its shape, on its device; None where it has none."""
        return next((m.master.view(param.shape) for m in self._matrices if m.param is param), None)

    def selected(self, param: Parameter) -> Tensor:
        """The channels that are selected now, int64 ascending. KeyError for a parameter that is not here."""
        for matrix in self._matrices:
            if matrix.param is param:
                return matrix.selected
        raise KeyError(f"a parameter of shape {tuple(param.shape)} is none of the {len(self._matrices)} simulated here")

    def state_dict(self) -> dict[str, Any]:
        """A copy on the CPU of all that the next step depends on, beside the weights."""
        counts = {name: getattr(self, name) for name in COUNTS}
        return copy_to_host(counts | {"matrices": [matrix.state_dict() for matrix in self._matrices]})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken. ValueError, before anything changes, if it is of other parameters."""
        theirs = [tuple(one["master"].shape) for one in state["matrices"]]
        ours = [tuple(matrix.master.shape) for matrix in self._matrices]
        if theirs != ours:
            raise ValueError(f"the state is of matrices {theirs}; allowed here: {ours}")
        for name in COUNTS:
            setattr(self, name, state[name])
        for matrix, one in zip(self._matrices, state["matrices"], strict=True):
            matrix.load_state_dict(one)
