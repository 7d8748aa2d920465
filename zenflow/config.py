"""The engine's configuration: one frozen dataclass that refuses every bad value by name, before anything is taken.

Importable without torch. What the words mean is in the README (window, channel, selected, deferred).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal

import numpy as np

from zenflow.deepspeed import read_deepspeed

logger = logging.getLogger("zenflow")

AUTO_TOPK_RATIO = 0.1
AUTO_UPDATE_INTERVAL = 4
AUTO_SELECT_STRATEGY = "step"
AUTO_SELECT_INTERVAL = {"step": 100, "epoch": 1}


def usual_delay(update_interval: int, *, overlap_step: bool, stagger: bool) -> int:
    """What `visible_after: auto` comes to, in steps; 0 under `overlap_step: false`."""
    if not overlap_step:
        return 0
    return min(2, update_interval) if stagger else update_interval


@dataclass(frozen=True)
class ZenFlowConfig:
    """How the channels are divided, when each half moves, and what the worker gets.

    NumPy scalars are accepted and stored as Python numbers. Raises ValueError naming the field, its value and what is
    allowed; a name that is no field is the TypeError of any call.
    """

    topk_ratio: float | Literal["auto"] = AUTO_TOPK_RATIO
    """k, the share of the channels of each matrix that the GPU owns: 0 if k = 0, else `max(1, round(k * channels))`."""

    update_interval: int | Literal["auto"] = AUTO_UPDATE_INTERVAL
    """U, the length of a window in steps: the deferred half moves once a window."""

    select_strategy: Literal["auto", "step", "epoch"] = AUTO_SELECT_STRATEGY
    """The unit of `select_interval`."""

    select_interval: int | Literal["auto"] = AUTO_SELECT_INTERVAL["step"]
    """Steps, or epochs, between two selections."""

    steps_per_epoch: int | None = None
    """Steps in an epoch; needed under `select_strategy: epoch` alone."""

    full_warm_up_rounds: int = 4
    """Steps at the start in which every channel moves in every step, and the device waits for it."""

    overlap_step: bool = True
    """True: a window's deferred result is visible `visible_after` steps later. False: at its own end."""

    stagger: bool = True
    """True: the deferred matrices form up to U cohorts whose windows end one step after another. False: all end in the
    same step, as in the paper."""

    visible_after: int | Literal["auto"] = "auto"
    """Steps from a window's last to the one at whose end its result is visible, 1 to U; auto: 2 with `stagger` (U at
    most), U without: one window later. Only auto under `overlap_step: false`."""

    weight_prediction: float = 1.0
    """a, 0 to 2: a result that becomes visible late is shown as `master + a * (the window's update)`, because weights
    and gradients will have gone on by then. Masters never hold a prediction, nor do weights after `flush()`. 0: off."""

    channel_dim: Literal["column", "row"] = "column"
    """What a channel is in `[shape[0], prod(shape[1:])]`: an input feature (column) or an output feature (row)."""

    importance: Literal["square", "magnitude"] = "square"
    """A channel's score: the sum of its squared or of its absolute gradients."""

    importance_over: Literal["step", "window", "average"] = "step"
    """The steps whose gradients a score is of: the selecting one, all of the window that ends with it (their sum), or
    all so far (a moving average). The latter two take the gradient as it is applied, unscaled and clipped, and leave
    out what is skipped; they read it once more, in the windows in which a selection can come or in every step."""

    importance_decay: float = 0.9
    """Of that average, 0 to below 1: what all steps before weigh beside a new one, which weighs `1 - importance_decay`.
    A selection then looks back over some `1 / (1 - importance_decay)` steps."""

    deferred_rule: Literal["accumulate", "replay"] = "accumulate"
    """One AdamW update a window with the mean of the window's gradients, or (`replay`, which needs `accumulate_on:
    host`) one update for each of its steps, in one pass over memory."""

    deferred_lr_scale: float | Literal["linear", "none"] = "linear"
    """The deferred update's learning rate, times n steps (`linear`), times 1 (`none`), or times a number."""

    on_reselect: Literal["migrate", "reset"] = "migrate"
    """A channel that changes owner takes its moments and step count with it, or (ablation only) starts from zero."""

    selected_masters: Literal["float32", "stochastic"] = "float32"
    """What the GPU keeps of its channels beside the moments: fp32 masters, or (`stochastic`, for bf16 weights) nothing
    but the weights, which are updated in fp32 and rounded stochastically: up or down at random, right on average."""

    rounding_seed: int = 0
    """Of that rounding's draws, which are a function of it, of the step, the parameter and the place in it."""

    min_deferred_numel: int = 4096
    """A parameter with fewer elements is selected whole, like one with fewer than two dimensions."""

    accumulate_on: Literal["gpu", "host"] = "gpu"
    """Where a window's gradients are summed: in one accumulator on the device, or by the worker, to which every step's
    raw gradient then travels. `host` saves the accumulator's device memory, for more traffic and more host memory."""

    ring_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the sum on the device; auto: the gradient's dtype, but float32 for float16. Under `accumulate_on:
    host` the ring holds the gradients themselves, and auto is the only choice."""

    upload: Literal["backward", "step"] = "backward"
    """When a deferred result is copied into the weights: in the last backward pass of its window, as soon as a bucket's
    gradients exist, or inside `step()`. `backward` is right if no weight is used again after its gradient exists."""

    upload_check: bool = True
    """Try that once: at a bucket's first upload in backward its weights become NaN instead. If that reaches a gradient,
    the step is skipped; after three such steps `upload` falls back to `step` with a warning."""

    backward_passes_per_step: int | None = None
    """Backward passes before each `step()`; None: learned for each parameter in its first window."""

    bucket_bytes: int = 128 * 2**20
    """Bytes of weights that travel in one copy."""

    max_grad_norm: float | None = None
    """Clip the gradient's global norm to this on the device; None: no clipping."""

    worker_threads: int | Literal["auto"] = "auto"
    """Threads of the CPU optimizer. auto: one for each of its cores; where they are its own, no more than each window's
    time asks for, because all of them together take the memory bandwidth that launching kernels needs."""

    core_binding: bool | Literal["auto"] = "auto"
    """Give trainer and worker disjoint cores; auto: only where the parameters are on a GPU."""

    pt_reserved_cores_perc: float = 0.25
    """Share (0 to 1) of the available cores that is kept for the trainer."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule(name, getattr(self, name)))
        if self.deferred_rule == "replay" and self.accumulate_on != "host":
            raise _refuse("deferred_rule", "replay", "'replay' needs accumulate_on='host', which is 'gpu'")
        if self.accumulate_on == "host" and self.ring_dtype != "auto":
            raise _refuse("ring_dtype", self.ring_dtype, "'auto' under accumulate_on='host'")
        longest = AUTO_UPDATE_INTERVAL if self.update_interval == "auto" else self.update_interval
        if self.visible_after != "auto" and not self.overlap_step:
            raise _refuse("visible_after", self.visible_after, "'auto' under overlap_step=False")
        if self.visible_after != "auto" and self.visible_after > longest:
            raise _refuse("visible_after", self.visible_after, f"1 to {longest}, which is update_interval, or auto")
        if self.select_strategy == "epoch" and self.steps_per_epoch is None:
            raise ValueError(
                "select_strategy is 'epoch' but steps_per_epoch is None; allowed: an integer >= 1 (without it no "
                "selection would ever come due)"
            )

    def resolved(self) -> ZenFlowConfig:
        """Every "auto" that is no property of the machine replaced by its fixed value, logged once a process.

        `topk_ratio` 0.1, `update_interval` 4, `select_strategy` step, `select_interval` 100 steps or 1 epoch.
        `ring_dtype`, `worker_threads` and `core_binding` stay: only the engine knows dtypes, devices and cores. So does
        `visible_after`, which follows the others (`visible_after_steps`).
        """
        strategy = AUTO_SELECT_STRATEGY if self.select_strategy == "auto" else self.select_strategy
        values = {
            "topk_ratio": AUTO_TOPK_RATIO,
            "update_interval": AUTO_UPDATE_INTERVAL,
            "select_strategy": strategy,
            "select_interval": AUTO_SELECT_INTERVAL[strategy],
        }
        chosen = {name: value for name, value in values.items() if getattr(self, name) == "auto"}
        if chosen:
            _log_once("auto: " + ", ".join(f"{name} = {value}" for name, value in chosen.items()))
        return replace(self, **chosen)

    @property
    def select_interval_steps(self) -> int:
        """Steps between two selections, whatever the unit of `select_interval`, every "auto" resolved."""
        config = self.resolved()
        assert isinstance(config.select_interval, int)
        if config.select_strategy == "step":
            return config.select_interval
        assert config.steps_per_epoch is not None
        return config.select_interval * config.steps_per_epoch

    @property
    def visible_after_steps(self) -> int:
        """`visible_after`, every "auto" resolved; 0 under `overlap_step: false`."""
        longest = self.resolved().update_interval
        assert isinstance(longest, int)
        if self.visible_after == "auto":
            return usual_delay(longest, overlap_step=self.overlap_step, stagger=self.stagger)
        return self.visible_after

    @property
    def predicts(self) -> bool:
        """Whether results are shown as predictions: under `overlap_step: false` none is late."""
        return self.overlap_step and self.weight_prediction > 0

    @classmethod
    def from_deepspeed(cls, source: str | PathLike[str] | Mapping[str, Any], **overrides: Any) -> ZenFlowConfig:
        """Read a DeepSpeed configuration (a JSON file's path, or the dictionary) with a `zenflow` block.

        Keys that the block leaves out take DeepSpeed's defaults, not ours; `overrides` are fields of this class and win
        over the file, for what DeepSpeed learns at run time (`steps_per_epoch=len(loader)`) or cannot say
        (`deferred_lr_scale`). Raises ValueError for a file that is no JSON, has no `zenflow` block, or has an
        unsupported key in it.
        """
        return cls(**(read_deepspeed(source, overrides) | overrides))


@cache
def _log_once(message: str) -> None:
    logger.info(message)


def _refuse(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{name} is {value!r}; allowed: {allowed}")


def _integer(low: int, *words: str | None, below: float = math.inf):
    allowed = _either(f"an integer >= {low}" + (f" and < {below}" if below < math.inf else ""), *words)

    def rule(name: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            if value in words:
                return value
        elif isinstance(value, Integral) and not isinstance(value, bool) and low <= value < below:
            return int(value)
        raise _refuse(name, value, allowed)

    return rule


def _number(what: str, within: Callable[[float], bool], *words: str | None):
    allowed = _either(what, *words)

    def rule(name: str, value: Any) -> Any:
        if value is None or isinstance(value, str):
            if value in words:
                return value
        elif isinstance(value, Real) and not isinstance(value, bool):
            with suppress(OverflowError):
                number = float(value)
                if within(number):
                    return number
        raise _refuse(name, value, allowed)

    return rule


def _word(*words: str):
    allowed = _either(*words)

    def rule(name: str, value: Any) -> str:
        if isinstance(value, str) and value in words:
            return value
        raise _refuse(name, value, allowed)

    return rule


def _switch(*words: str):
    allowed = _either("True", "False", *words)

    def rule(name: str, value: Any) -> Any:
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        if isinstance(value, str) and value in words:
            return value
        raise _refuse(name, value, allowed)

    return rule


def _either(*choices: str | None) -> str:
    return " or ".join(str(choice) for choice in choices)


_SHARE = "a number from 0 to 1", lambda value: 0 <= value <= 1
_FACTOR = "a number from 0 to 2", lambda value: 0 <= value <= 2
_POSITIVE = "a finite number > 0", lambda value: 0 < value < math.inf
_MOST_STEPS = 2**24  # of a window, each of which has its scalars in the shared memory
_RULES = {
    "topk_ratio": _number(*_SHARE, "auto"),
    "update_interval": _integer(1, "auto", below=_MOST_STEPS),
    "select_strategy": _word("auto", "step", "epoch"),
    "select_interval": _integer(1, "auto"),
    "steps_per_epoch": _integer(1, None),
    "full_warm_up_rounds": _integer(0),
    "overlap_step": _switch(),
    "stagger": _switch(),
    "visible_after": _integer(1, "auto"),
    "weight_prediction": _number(*_FACTOR),
    "channel_dim": _word("column", "row"),
    "importance": _word("square", "magnitude"),
    "importance_over": _word("step", "window", "average"),
    "importance_decay": _number("a number from 0 to below 1", lambda value: 0 <= value < 1),
    "deferred_rule": _word("accumulate", "replay"),
    "deferred_lr_scale": _number(*_POSITIVE, "linear", "none"),
    "on_reselect": _word("migrate", "reset"),
    "selected_masters": _word("float32", "stochastic"),
    "rounding_seed": _integer(0, below=2**64),
    "min_deferred_numel": _integer(0),
    "accumulate_on": _word("gpu", "host"),
    "upload": _word("backward", "step"),
    "upload_check": _switch(),
    "backward_passes_per_step": _integer(1, None),
    "ring_dtype": _word("auto", "float32", "bfloat16"),
    "bucket_bytes": _integer(1),
    "max_grad_norm": _number(*_POSITIVE, None),
    "worker_threads": _integer(1, "auto"),
    "core_binding": _switch("auto"),
    "pt_reserved_cores_perc": _number(*_SHARE),
}
assert _RULES.keys() == {field.name for field in fields(ZenFlowConfig)}
