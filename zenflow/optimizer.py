"""`ZenFlow`, a `torch.optim.Optimizer`: AdamW whose important channels move every step on the GPU and whose other
channels are updated by a CPU process while the GPU goes on."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace
from os import PathLike
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from zenflow import checkpoint, checkpoint_checks
from zenflow.adamw_state import from_adamw, is_adamw_state, to_adamw
from zenflow.channel_state import ChannelState, channel_state
from zenflow.checks import check_parameters, group_hyper
from zenflow.closing import close_pipeline
from zenflow.config import ZenFlowConfig
from zenflow.export import full_precision
from zenflow.matrices import Newcomer
from zenflow.outside import adopt_outside_changes
from zenflow.pipeline import Pipeline
from zenflow.roster import Roster, by_index, indices_of, newcomers_of, numbers_of, params_of
from zenflow.stats import Stats
from zenflow.step import run_step
from zenflow.telemetry import StepRecord
from zenflow.trace import Tracer
from zenflow.tracing import start_trace, stop_trace
from zenflow.turn import Turn, in_turn
from zenflow.visible import drop_gradients
from zenflow.warn import warn_caller
from zenflow.window_end import flush_pipeline

_CLOSED = "this ZenFlow optimizer is closed; build a new one"


class ZenFlow(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) with importance-aware offloading to a CPU optimizer process.

    Args:
        params: parameters, `(name, parameter)` pairs or param groups, all on one device; fp32, bf16 or fp16.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`; each may differ between param groups and steps.
        config: a `ZenFlowConfig`; further keyword arguments override its fields, e.g. `topk_ratio=0.05`.

    Raises:
        ValueError: a value or parameter that cannot be used, by name, before any process is started.
        MemoryError: the host lacks the memory for the deferred state; says how much is needed and available.
        WorkerError: (from `step`) the CPU optimizer died or failed; carries its exit code and traceback.

    Use it as a context manager, or call `close()`; `flush()` before final weights are evaluated or exported.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        config: ZenFlowConfig | None = None,
        **config_fields: Any,
    ) -> None:
        self._turn = Turn()
        self._pipeline: Pipeline | None = None
        self._closed = False
        self._warned_no_gradient = False
        self.config = _configuration(config, config_fields)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        everyone = newcomers_of(self.param_groups)
        if not everyone:
            raise ValueError("the param groups hold no parameter; allowed is at least one")
        device = everyone[0].param.device
        check_parameters(everyone, device, self.config)
        try:
            with torch.inference_mode(False):
                self._use(Pipeline(self.config, device, self._turn))
                self._roster.lay_out(self.param_groups, [each for each in everyone if each.param.requires_grad])
        except BaseException:
            self.close(flush=False)
            raise

    @in_turn
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; the new parameters get their place at their first gradient."""
        super().add_param_group(param_group)
        try:
            group_hyper(self.param_groups[-1])
            if self._pipeline is not None:
                check_parameters(newcomers_of(self.param_groups), self._pipeline.device, self.config)
        except BaseException:
            self.param_groups.pop()
            raise

    @in_turn
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch, also for gradients that shall take part in no step.

        Without `set_to_none`, those that are still being copied to the host are zeroed after that; ValueError names one
        that somebody else has changed in place meanwhile.
        """
        pipeline = self._pipeline
        if pipeline is not None and not self._closed and not pipeline.stepping:
            drop_gradients(pipeline)
            if not set_to_none:
                pipeline.sender.release_gradients()
        super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step over the gradients in `.grad`; a `closure` is evaluated once, first, and its value returned."""
        self._running()
        loss = None
        if closure is not None:  # before this thread's turn: others may have to make its backward pass
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    @in_turn
    def _step(self) -> None:
        pipeline = self._running()
        self._roster.welcome(self.param_groups)
        self._warn_without_gradients()
        run_step(pipeline, self.param_groups, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        self._roster.enter(self.state)

    @in_turn
    def flush(self) -> None:
        """End the running window now: its partial sum is applied and every result becomes visible in the weights, which
        are rounded masters afterwards, no predictions (`weight_prediction`)."""
        flush_pipeline(self._running())

    @in_turn
    def reload_weights(self) -> None:
        """Masters follow the weights after edits that autograd cannot see (`param.data[...] = ...`)."""
        adopt_outside_changes(self._running(), force=True)

    def close(self, flush: bool = True) -> None:
        """Stop the CPU optimizer and free its memory; idempotent. The weights stay, `step()` raises afterwards.

        With `flush` (the default) every deferred result is applied first; without, what is on its way is dropped, and
        predictions that are visible stay. A forked copy of the process only lets go of what it shares.
        """
        forked = self._turn.is_foreign
        with nullcontext() if forked else self._turn.lock:
            if self._closed or self._pipeline is None:
                self._closed = True
                return
            try:
                if flush and not forked and not self._pipeline.stepping:
                    self.flush()
            finally:
                self._closed = True
                close_pipeline(self._pipeline)

    def __enter__(self) -> ZenFlow:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(flush=kind is None)

    @in_turn
    def stats(self) -> Stats:
        """Counters and clocks since construction; waits for the device to finish what is queued."""
        return self._running().stats()

    @in_turn
    def records(self, wait: bool = False) -> list[StepRecord]:
        """What the latest steps cost, oldest first, without making anything wait; `wait` waits for all that ended.

        Also after a step that was broken off; RuntimeError after `close()`.
        """
        if self._closed or self._pipeline is None:
            raise RuntimeError(_CLOSED)
        return self._pipeline.telemetry.records(wait)

    @contextmanager
    def trace(self, path: str | PathLike[str]) -> Iterator[Tracer]:
        """Record a Chrome trace of the steps inside the block and write it to `path` (ui.perfetto.dev shows it)."""
        self._refuse_fork()
        with self._turn.lock:
            pipeline = self._running()
            tracer = start_trace(pipeline)
        try:
            yield tracer
        finally:
            with self._turn.lock:
                stop_trace(pipeline)
        tracer.write(path)

    @in_turn
    def channel_state(self, param: Parameter) -> ChannelState:
        """The state of one parameter, wherever it lives; waits for the worker, makes nothing visible.

        KeyError if the parameter has no state (frozen, or without a gradient so far).
        """
        pipeline = self._running()
        record = next((record for record in pipeline.records if record.param is param), None)
        if record is None:
            raise KeyError(f"no state for a parameter of shape {tuple(param.shape)}: frozen, or not of this optimizer")
        adopt_outside_changes(pipeline)
        pipeline.wait_for_worker()
        return channel_state(record, int(pipeline.control.advance[record.index].item()))

    @in_turn
    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, on the CPU; `"state"` is empty before the first step."""
        pipeline = self._running()
        if pipeline.uploads.in_transit:
            raise RuntimeError(
                "state_dict() between backward() and step(), while the next weights are being uploaded; save after "
                "step(), or build the optimizer with upload='step'"
            )
        packed = copy.deepcopy(super().state_dict())  # of groups, whose settings may be tensors that schedulers fill
        if pipeline.clock.state.step:
            packed["state"], packed["zenflow"] = checkpoint.save(pipeline, indices_of(self.param_groups))
        return packed

    @in_turn
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a `state_dict()`; masters win over weights. An empty state changes only the groups' settings.

        That of a `torch.optim.AdamW` too, see `load_adamw_state_dict`. ValueError names what does not fit, before
        anything is changed.
        """
        checkpoint_checks.check_form(state_dict, numbers_of(self.param_groups))
        if is_adamw_state(state_dict):
            self.load_adamw_state_dict(state_dict)
        else:
            self._load(state_dict)

    @in_turn
    def load_adamw_state_dict(self, state_dict: dict[str, Any], masters: Sequence[Tensor] | None = None) -> None:
        """Go on where a `torch.optim.AdamW` over the same parameters stopped: moments, t and settings are its own.

        masters: fp32 values of all parameters in the order of the groups, in their shapes, where AdamW trained fp32
        copies of them; None: the weights are the masters. Warm-up steps count as made if AdamW made them. ValueError
        names what does not fit (amsgrad, maximize, other shapes), before anything is changed.
        """
        checkpoint_checks.check_form(state_dict, numbers_of(self.param_groups))
        if not is_adamw_state(state_dict):
            raise ValueError("this is not the state of a torch.optim.AdamW that has made a step")
        self._load(from_adamw(self._running(), by_index(self.param_groups), state_dict, masters))

    @in_turn
    def adamw_state_dict(self) -> dict[str, Any]:
        """This state for a `torch.optim.AdamW` over the same parameters in fp32; `export_weights` has its weights.

        RuntimeError without a `flush()` first. Where channels of a parameter have received different numbers of
        updates, the largest is AdamW's step, and the moments of the others are scaled so that, corrected for bias, they
        are what they were; with one number for all nothing is rounded.
        """
        state = to_adamw(self._running(), indices_of(self.param_groups), self.param_groups)
        return {"state": state, "param_groups": copy.deepcopy(super().state_dict()["param_groups"])}

    @in_turn
    def export_weights(self, model: Module) -> dict[str, Tensor]:
        """`model.state_dict()` on the CPU with fp32 masters for weights; `flush()` first if they shall be the final
        ones. `zenflow.export.save_weights` makes a safetensors file of it.
        """
        adopt_outside_changes(self._running())
        return full_precision(self._running(), model)

    def _load(self, state_dict: dict[str, Any]) -> None:
        pipeline, everyone = self._running(), by_index(self.param_groups)
        state = state_dict["state"]
        if state:
            if "zenflow" not in state_dict:
                raise ValueError(
                    "the state has no 'zenflow' part; allowed is the state_dict() of a ZenFlow optimizer or of a "
                    "torch.optim.AdamW"
                )
            checkpoint_checks.check(pipeline, everyone, state_dict)
            saved = [newcomer for index, newcomer in everyone.items() if index in state]
            layout = checkpoint.saved_layout(everyone, state_dict)
            self._lay_out_saved(saved, layout, checkpoint.saved_cohorts(everyone, state_dict, self.config))
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        if state:
            checkpoint.load(self._running(), state, state_dict["zenflow"], indices_of(self.param_groups))
        self._roster.enter(self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a ZenFlow optimizer owns a process and shared memory and cannot be copied; use state_dict()")

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ZenFlow optimizer owns a process and shared memory and cannot be pickled; use state_dict()")

    def _use(self, pipeline: Pipeline) -> None:
        self._pipeline, self._roster = pipeline, Roster(pipeline)

    def _running(self) -> Pipeline:
        if self._closed or self._pipeline is None:
            raise RuntimeError(_CLOSED)
        if self._pipeline.stepping:
            if self._pipeline.client is not None:
                self._pipeline.client.check()
            raise RuntimeError(
                "a step, flush or load of this ZenFlow optimizer was broken off in the middle, so its state is no "
                "longer consistent; close(flush=False), build a new one and load the last state_dict()"
            )
        return self._pipeline

    def _refuse_fork(self) -> None:
        pipeline = None if self._closed else self._pipeline
        if pipeline is not None and pipeline.client is not None:
            self._turn.refuse_fork()

    def _lay_out_saved(self, saved: list[Newcomer], layout: list[list[Newcomer]], cohorts: dict[int, int]) -> None:
        """Give the parameters of a checked state their places as the run that saved it had them: laid out together,
        in the same cohorts. Which bucket is tried (`upload_check`), and a later parameter's cohort, depend on it."""
        pipeline = self._running()
        mine = [[id(record.param) for record in together] for together in checkpoint.laid_out(pipeline)]
        wanted = [[id(newcomer.param) for newcomer in together] for together in layout]
        here = {id(record.param): record.storage.cohort for record in pipeline.records if record.storage is not None}
        if (wanted and mine != wanted[: len(mine)]) or (cohorts and not here.items() <= cohorts.items()):
            close_pipeline(pipeline)
            self._use(Pipeline(self.config, pipeline.device, self._turn, pipeline.telemetry))
        try:
            for together in (*layout, saved):
                self._roster.lay_out(self.param_groups, together, cohorts or None)
        except BaseException:
            if self._pipeline is not pipeline:
                self.close(flush=False)
            raise

    def _warn_without_gradients(self) -> None:
        if self._warned_no_gradient or any(param.grad is not None for param in params_of(self.param_groups)):
            return
        self._warned_no_gradient = True
        warn_caller(
            "ZenFlow.step() found no gradient in any of its parameters; if the model's parameters were replaced "
            "(load_state_dict(assign=True)), build the optimizer from the new ones"
        )


def _configuration(config: ZenFlowConfig | None, overrides: dict[str, Any]) -> ZenFlowConfig:
    allowed = [field.name for field in fields(ZenFlowConfig)]
    for name in overrides:
        if name not in allowed:
            raise TypeError(f"ZenFlow has no setting {name!r}; allowed are {', '.join(allowed)}")
    return replace(config or ZenFlowConfig(), **overrides).resolved()
