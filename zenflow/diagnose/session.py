"""`Diagnosis`: the measurement and its verdict around any loop."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor

from zenflow.config import ZenFlowConfig
from zenflow.cores import UNKNOWN_MEMORY, CorePlan, available_memory, cpu_quota, plan_cores
from zenflow.diagnose import ceilings
from zenflow.diagnose.figures import Ceilings, HostMemory, Measured, Offload
from zenflow.diagnose.meter import Meter
from zenflow.diagnose.result import Result
from zenflow.matrices import DTYPE_NAMES, is_deferred
from zenflow.optimizer import ZenFlow
from zenflow.terminal import counted

T = TypeVar("T")
STATE_BYTES = 24  # that the CPU pass reads and writes of a parameter's master and moments
SYNCHRONOUS = {"topk_ratio": 0, "update_interval": 1, "overlap_step": False}


class Diagnosis:
    """Measures a loop without ZenFlow, and says what limits it.

        diagnosis = Diagnosis(optimizer)
        for batch in diagnosis.watch(loader):
            ...
            diagnosis.step_done(loss)
        print(diagnosis.report())

    Args:
        optimizer: a `torch.optim.Optimizer`; for another object with `param_groups`, its step goes into `optimizing()`.
            A `ZenFlow` must be synchronous: `topk_ratio=0, update_interval=1, overlap_step=False`. It alone keeps
            records of what the device waited for, from which offload-bound is told.
        steps, warm_up: measured steps, and the steps before them that are not; integers >= 1.
        triad_bytes: of each of three arrays with which host memory is measured; several times the caches.
        engine: the loop's name in the report.

    Raises ValueError for another ZenFlow, or a number that is not allowed. It makes nothing wait until `result()`.
    """

    def __init__(
        self, optimizer: Any, *, steps: int = 100, warm_up: int = 10, triad_bytes: int = 1 << 30, engine: str = ""
    ) -> None:
        if warm_up < 1 or steps < 1:
            raise ValueError(f"warm_up is {warm_up} and steps {steps}; allowed: integers >= 1")
        self._optimizer, self._triad_bytes = optimizer, triad_bytes
        self._engine = engine or type(optimizer).__name__
        self._zenflow = optimizer if isinstance(optimizer, ZenFlow) else None
        if self._zenflow is not None:
            check_synchronous(self._zenflow.config)
        before = None if self._zenflow is None else self._zenflow.stats()
        self._steps_before = 0 if before is None else before.steps
        self._device = self._params()[0].device
        self.meter = Meter(self._device, warm_up, steps, None if before is None else before.worker_pid)
        # Held-out losses and scores by name, if the loop takes any: the first and the last are told.
        self.validation: list[float] = []
        self.scores: list[dict[str, float]] = []
        self._losses: list[Tensor | float] = []
        self._hooks: list[Any] = []
        self._under_way: AbstractContextManager[None] | None = None
        self._result: Result | None = None
        if isinstance(optimizer, torch.optim.Optimizer):
            self._hooks = [
                optimizer.register_step_pre_hook(lambda *_: self._enter_step()),
                optimizer.register_step_post_hook(lambda *_: self._leave_step()),
            ]

    def watch(self, loader: Iterable[T]) -> Iterator[T]:
        """The loader's batches, each with the time in which it is waited for, until all steps are measured."""
        batches = iter(loader)
        while not self.meter.full:
            with self.meter.waiting():
                batch = next(batches, self)
            if batch is self:
                return
            yield batch

    def optimizing(self) -> AbstractContextManager[None]:
        """A context around the step of an optimizer that is no `torch.optim.Optimizer`."""
        return self.meter.optimizing()

    def step_done(self, loss: Tensor | float | None = None) -> None:
        """A step has ended, its `zero_grad()` included; `loss` is its scalar, read at the end."""
        if self.meter.measuring and loss is not None:
            self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        self.meter.end_step()

    def result(self) -> Result:
        """Measured, figures and verdict; waits for the device, then measures the machine's ceilings, once.

        Call it before the optimizer is closed. RuntimeError if no step has been measured.
        """
        if self._result is None:
            self._result = Result.of(self._measured())
        return self._result

    def report(self) -> str:
        """The result for people; a line break at its end."""
        return self.result().text()

    def _measured(self) -> Measured:
        self.meter.stop()
        for hook in self._hooks:
            hook.remove()
        parts = self.meter.parts()
        if not parts:
            raise RuntimeError(
                f"no step was measured: the loop ended within the {counted(self.meter.warm_up, 'step')} of the warm-up"
            )
        offload = None if self._zenflow is None else self._offload(self._zenflow, len(parts))
        plan = self._plan()
        return Measured(
            engine=self._engine,
            device=torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            offloads=offload is not None or self._keeps_state_on_the_host(),
            parameters=sum(param.numel() for param in self._params()),
            steps=parts,
            losses=[float(loss) for loss in self._losses],
            wall=self.meter.wall,
            trainer_cpu=self.meter.trainer_cpu,
            trainer_cpus=min(len(plan.trainer_cores), cpu_quota()),
            worker_cpu=self.meter.worker_cpu,
            worker_cpus=min(len(plan.worker_cores), cpu_quota()),
            offload=offload,
            host=None if offload is None else self._host(self._zenflow),
            ceilings=self._ceilings(plan),
            memory=self.meter.memory,
            utilisation=self.meter.utilisation,
            skipped_steps=0 if self._zenflow is None else self._zenflow.stats().skipped_steps,
            validation_before=self.validation[0] if self.validation else None,
            validation_after=self.validation[-1] if self.validation else None,
            scores_before=self.scores[0] if self.scores else {},
            scores_after=self.scores[-1] if self.scores else {},
        )

    def _offload(self, optimizer: ZenFlow, steps: int) -> Offload | None:
        first = self._steps_before + self.meter.warm_up + 1
        records = [record for record in optimizer.records(wait=True) if first <= record.step < first + steps]
        if not records:
            return None
        return Offload(
            stalls=[record.stall_seconds for record in sorted(records, key=lambda record: record.step)],
            bytes_to_host=statistics.fmean(record.bytes_to_host for record in records),
            bytes_to_device=statistics.fmean(record.bytes_to_device for record in records),
            worker_busy=statistics.fmean(record.worker_busy_seconds for record in records),
            pass_bytes=sum(
                param.numel() * _pass_bytes(param.dtype, optimizer.config.ring_dtype)
                for param in self._deferred(optimizer)
            ),
        )

    def _host(self, optimizer: ZenFlow) -> HostMemory:
        elements: Counter[str] = Counter()
        for param in self._deferred(optimizer):
            elements[DTYPE_NAMES[param.dtype]] += param.numel()
        available = available_memory()
        known = available < UNKNOWN_MEMORY
        return HostMemory(dict(elements), available + optimizer.stats().host_bytes if known else None)

    def _deferred(self, optimizer: ZenFlow) -> list[Tensor]:
        return [param for param in self._params() if is_deferred(optimizer.config, param)]

    def _plan(self) -> CorePlan:
        """Who has which CPUs; without a CPU optimizer, who would have."""
        plan = None if self._zenflow is None else self._zenflow._pipeline.cores
        return plan or plan_cores(ZenFlowConfig.pt_reserved_cores_perc, bind=False)

    def _ceilings(self, plan: CorePlan) -> Ceilings:
        """Measured on all CPUs: a trainer that is bound to its own would find little of what memory gives."""
        bound = plan.trainer_cores != plan.worker_cores
        plan.restore_trainer()
        try:
            return ceilings.measure(self._device, plan.worker_threads, self._triad_bytes)
        finally:
            if bound:
                plan.bind_trainer()

    def _params(self) -> list[Tensor]:
        found = (param for group in self._optimizer.param_groups for param in group["params"])
        return [param for param in found if param.requires_grad]

    def _keeps_state_on_the_host(self) -> bool:
        states = getattr(self._optimizer, "state", {}).values()
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
        return self._device.type != "cpu" and any(value.device.type == "cpu" for value in tensors)

    def _enter_step(self) -> None:
        self._under_way = self.meter.optimizing()
        self._under_way.__enter__()

    def _leave_step(self) -> None:
        if self._under_way is not None:
            self._under_way.__exit__(None, None, None)
            self._under_way = None


def check_synchronous(config: ZenFlowConfig) -> None:
    """ValueError for settings with which ZenFlow does more than offload: a diagnosis is of what comes before it."""
    for name, allowed in SYNCHRONOUS.items():
        if (value := getattr(config, name)) != allowed:
            raise ValueError(
                f"{name} is {value!r}; allowed: {allowed!r}, since a diagnosis is of a run without ZenFlow"
            )


def _pass_bytes(dtype: torch.dtype, ring_dtype: str) -> int:
    """Bytes that the CPU pass moves for a parameter: state, one gradient, and the rounded weight if there is one."""
    gradient = {"float32": 4, "bfloat16": 2}.get(ring_dtype, 2 if dtype is torch.bfloat16 else 4)
    return STATE_BYTES + gradient + (0 if dtype is torch.float32 else 2)
