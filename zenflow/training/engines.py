"""Engines: who turns gradients into weights. Each has the optimizer's methods and reports what it did."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow.background_save import copy_to_host
from zenflow.config import ZenFlowConfig
from zenflow.simulate.rule import Rule
from zenflow.simulate.simulation import Simulation
from zenflow.telemetry import StepRecord
from zenflow.training.errors import InputError
from zenflow.training.schema import (
    AdamWEngine,
    EngineConfig,
    OptimizerConfig,
    PeerEngine,
    SimulatedEngine,
    ZenFlowEngine,
    plain,
)


@dataclass(frozen=True)
class Report:
    """Totals since the start; times in seconds, traffic in bytes. `grad_norm` is the last step's, before clipping."""

    grad_norm: float
    skipped_steps: int = 0
    windows: int = 0
    selections: int = 0
    stall_seconds: float = 0.0
    host_wait_seconds: float = 0.0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
    worker_busy_seconds: float = 0.0


# Those that an optimizer counts from its own construction, not from the state that it has loaded.
TOTALS = ("stall_seconds", "host_wait_seconds", "bytes_to_host", "bytes_to_device", "worker_busy_seconds")


class Engine(Protocol):
    """The part of `torch.optim.Optimizer` that a loop needs, what it did, and an end.

    `records` gives each step's record once, as soon as the device has passed the step (`wait` waits for that), and None
    where the engine keeps none. `trace` records the steps inside its block; InputError where the engine cannot.
    `master` gives, after `flush`, the value in fp32 of which a weight is the rounded copy. `state_dict` is a copy on
    the CPU of all that the next step depends on beside the weights, with the totals so far, and `state_bytes` what it
    takes at least; `load_state_dict` raises ValueError before it changes anything. `wrapped` gives the model as the
    loop has to call it, and `backward` makes the gradients of a loss.
    """

    def wrapped(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def records(self, wait: bool = False) -> list[StepRecord] | None:
        return None

    def trace(self, path: Path) -> AbstractContextManager[object]:
        raise InputError(f"{type(self).__name__} has no trace; allowed: trace=null.")

    def __enter__(self) -> Self:
        return self

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state_bytes(self) -> int: ...
    def step(self) -> None: ...
    def zero_grad(self) -> None: ...
    def flush(self) -> None: ...
    def master(self, weight: Parameter) -> Tensor: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def report(self) -> Report: ...
    def __exit__(self, *exception: object) -> None: ...


class AdamW(Engine):
    """torch's fused AdamW; weights below fp32 get fp32 masters, whose rounded copies they are.

    The norm is taken, and the gradient clipped, on the device. A non-finite gradient is not skipped (as in torch).
    Without `masters` the weights are updated as they are, and their moments have their dtype.
    """

    def __init__(
        self, params: Iterable[Parameter], max_grad_norm: float | None, *, masters: bool = True, **settings: Any
    ) -> None:
        self._weights = [weight for weight in params if weight.requires_grad]
        self._masters = [self._new_master(weight) if masters else weight for weight in self._weights]
        self.optimizer = torch.optim.AdamW(self._masters, fused=True, **settings)
        self._max_grad_norm = float("inf") if max_grad_norm is None else max_grad_norm
        self._norm = torch.zeros(())

    @staticmethod
    def _new_master(weight: Parameter) -> Parameter:
        return weight if weight.dtype == torch.float32 else Parameter(weight.detach().float())

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's; a load makes new ones."""
        return self.optimizer.param_groups

    def step(self) -> None:
        copies = [(weight, master) for _, weight, master in self._apart()]
        for weight, master in copies:
            master.grad = None if weight.grad is None else weight.grad.float()
        self._norm = torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm)
        self.optimizer.step()
        if copies:
            with torch.no_grad():
                torch._foreach_copy_([weight for weight, _ in copies], [master for _, master in copies])

    def zero_grad(self) -> None:
        for parameter in (*self._weights, *self._masters):
            parameter.grad = None

    def flush(self) -> None:
        """Nothing is ever pending."""

    def master(self, weight: Parameter) -> Tensor:
        """fp32 on the CPU, in the weight's shape."""
        masters = (master for known, master in zip(self._weights, self._masters, strict=True) if known is weight)
        return next(masters, weight).detach().to("cpu", torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """torch's, and the masters of the weights that have some, by their place."""
        masters = {place: master for place, weight, master in self._apart()}
        return copy_to_host({"optimizer": self.optimizer.state_dict(), "masters": masters})

    @property
    def state_bytes(self) -> int:
        """Moments, and masters that are not the weights."""
        tensors = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in (*tensors, *(master for _, _, master in self._apart())))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        masters = {place: master for place, _, master in self._apart()}
        shapes, here = ({place: tuple(m.shape) for place, m in part.items()} for part in (state["masters"], masters))
        if shapes != here:
            raise ValueError(f"the state has masters of {shapes}; allowed here is {here}")
        self.optimizer.load_state_dict(copy_to_host(state["optimizer"]))  # torch takes what fits without a copy
        with torch.no_grad():
            for place, master in masters.items():
                master.copy_(state["masters"][place])

    def _apart(self) -> list[tuple[int, Parameter, Parameter]]:
        """Place, weight and master where these are two."""
        pairs = enumerate(zip(self._weights, self._masters, strict=True))
        return [(place, weight, master) for place, (weight, master) in pairs if weight is not master]

    def report(self) -> Report:
        return Report(grad_norm=float(self._norm))

    def __exit__(self, *exception: object) -> None:
        self.zero_grad()


class ZenFlowRun(Engine):
    """`zenflow.ZenFlow` as an `Engine`."""

    def __init__(self, params: Iterable[Parameter], config: ZenFlowConfig, **settings: Any) -> None:
        from zenflow import ZenFlow

        self.optimizer = ZenFlow(params, config=config, **settings)
        self._last_record = 0  # the step whose record was given out last
        self._before = Report(grad_norm=0.0)  # the totals of the processes before this one

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """torch's; a load makes new ones."""
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def flush(self) -> None:
        self.optimizer.flush()

    def master(self, weight: Parameter) -> Tensor:
        """fp32 on the CPU, in the weight's shape."""
        try:
            return self.optimizer.channel_state(weight).master.reshape(weight.shape)
        except KeyError:  # frozen, or without a gradient so far
            return weight.detach().to("cpu", torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, and the totals that it begins anew after a load."""
        report = self.report()
        return {"optimizer": self.optimizer.state_dict(), "totals": {name: getattr(report, name) for name in TOTALS}}

    @property
    def state_bytes(self) -> int:
        """fp32 masters and moments."""
        return _fp32_bytes(self.param_groups)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = Report(grad_norm=0.0, **state["totals"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._before = before

    def report(self) -> Report:
        stats = self.optimizer.stats()
        found = {item.name: getattr(stats, item.name) for item in fields(Report)}
        return Report(**found | {name: found[name] + getattr(self._before, name) for name in TOTALS})

    def records(self, wait: bool = False) -> list[StepRecord]:
        """The records that have become known since the last call, oldest first."""
        known = self.optimizer.records(wait)
        new = list(takewhile(lambda record: record.step > self._last_record, reversed(known)))[::-1]
        self._last_record = new[-1].step if new else self._last_record
        return new

    def trace(self, path: Path) -> AbstractContextManager[object]:
        return self.optimizer.trace(path)

    def __exit__(self, *exception: object) -> None:
        self.optimizer.__exit__(*exception)


class SimulatedRun(Engine):
    """`zenflow.simulate` as an `Engine`."""

    def __init__(self, params: Iterable[Parameter], rule: Rule, **settings: Any) -> None:
        self._simulation = Simulation(params, rule, **settings)
        for name in ("step", "zero_grad", "flush", "state_dict", "load_state_dict"):
            setattr(self, name, getattr(self._simulation, name))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._simulation.param_groups

    @property
    def state_bytes(self) -> int:
        """fp32 masters and moments."""
        return _fp32_bytes(self.param_groups)

    def master(self, weight: Parameter) -> Tensor:
        """fp32 on the CPU, in the weight's shape."""
        master = self._simulation.master(weight)
        return (weight if master is None else master).detach().to("cpu", torch.float32)

    def report(self) -> Report:
        """Counts alone: nothing is copied, and nobody waits."""
        done = self._simulation
        return Report(done.norm, done.skipped, done.windows, done.selections)

    def __exit__(self, *exception: object) -> None:
        self._simulation.zero_grad()


def _fp32_bytes(groups: Iterable[dict[str, Any]]) -> int:
    """Of master and moments of all weights that are trained."""
    return sum(12 * weight.numel() for group in groups for weight in group["params"] if weight.requires_grad)


def simulated_rule(engine: SimulatedEngine, optimizer: OptimizerConfig) -> Rule:
    """The rule that `engine` describes. Errors: InputError naming field, value and what is allowed."""
    values = plain(engine)
    own = {item.name: values.pop(item.name) for item in fields(Rule) if item.name in values}
    try:
        return Rule(ZenFlowConfig(**values, max_grad_norm=optimizer.max_grad_norm), **own)
    except ValueError as error:
        raise InputError(f"engine.{error}.") from error


def zenflow_config(engine: ZenFlowEngine, optimizer: OptimizerConfig, steps_per_epoch: int) -> ZenFlowConfig:
    """The engine's own configuration, `auto` resolved. Errors: InputError naming field, value and what is allowed."""
    values = plain(engine)
    if values["select_strategy"] == "epoch" and values["steps_per_epoch"] is None:
        values["steps_per_epoch"] = steps_per_epoch
    try:
        return ZenFlowConfig(**values, max_grad_norm=optimizer.max_grad_norm).resolved()
    except ValueError as error:
        raise InputError(f"engine.{error}.") from error


def check_masters(engine: EngineConfig, dtype: str) -> None:
    """Errors: InputError for an engine without masters on weights of this dtype, which have none to do without."""
    if isinstance(engine, AdamWEngine) and not engine.masters and dtype == "float32":
        raise InputError("engine.masters is false, but the weights are float32; give model.dtype=bfloat16 with it.")
    if isinstance(engine, AdamWEngine) and engine.offload and not engine.masters:
        raise InputError("engine.offload is true and engine.masters false; what is kept on the host are fp32 masters.")
    if isinstance(engine, ZenFlowEngine) and engine.selected_masters.name == "stochastic" and dtype != "bfloat16":
        raise InputError(
            f"engine.selected_masters is stochastic, but the weights are {dtype}; give model.dtype=bfloat16."
        )


def adamw_settings(optimizer: OptimizerConfig) -> dict[str, Any]:
    """As `torch.optim.AdamW` takes them."""
    betas = (optimizer.beta1, optimizer.beta2)
    return {"lr": optimizer.lr, "betas": betas, "eps": optimizer.eps, "weight_decay": optimizer.weight_decay}


def build_engine(model: nn.Module, engine: EngineConfig, optimizer: OptimizerConfig, steps_per_epoch: int) -> Engine:
    """The engine that `engine` asks for, on this model's parameters; a worker process may start here."""
    if isinstance(engine, PeerEngine):
        from zenflow.training.peers import build_peer

        return build_peer(model, engine, optimizer)
    params, settings = model.parameters(), adamw_settings(optimizer)
    if isinstance(engine, AdamWEngine) and engine.offload:
        from zenflow.training.cpu_adamw import OffloadedAdamW

        return OffloadedAdamW(params, optimizer.max_grad_norm, **settings)
    if isinstance(engine, AdamWEngine):
        return AdamW(params, optimizer.max_grad_norm, masters=engine.masters, **settings)
    if isinstance(engine, SimulatedEngine):
        return SimulatedRun(params, simulated_rule(engine, optimizer), **settings)
    assert isinstance(engine, ZenFlowEngine)
    return ZenFlowRun(params, zenflow_config(engine, optimizer, steps_per_epoch), **settings)
