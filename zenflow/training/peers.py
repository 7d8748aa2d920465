"""Other projects' offloads as engines, so that losses can be compared at equal time. Imported where they are built.

They are used as their own documentation says. What they count of themselves is not asked for: it would cost them time.
No checkpoint is made of them.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow.cores import affinities, own_cpus, set_affinities
from zenflow.training.engines import Engine, Report, adamw_settings
from zenflow.training.errors import InputError
from zenflow.training.schema import (
    DeepSpeedZenFlowEngine,
    Device,
    OptimizerConfig,
    Peer,
    PeerEngine,
    TrainConfig,
    plain,
)

log = logging.getLogger(__name__)
PACKAGES = {Peer.torchao_offload: "torchao", Peer.deepspeed_offload: "deepspeed", Peer.deepspeed_zenflow: "deepspeed"}
_CHUNK = 1 << 22  # elements of a weight that are looked at at once
# Port 0: whichever is free, so that several runs on one machine never ask for the same.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


class PeerRun(Engine):
    """What the engines of other projects have in common: no state that can be saved, no records, no trace."""

    state_bytes = 0

    def __init__(self, name: str) -> None:
        self._name = name

    def flush(self) -> None:
        """They have no call for it: what is pending at a run's end is never seen."""

    def master(self, weight: Parameter) -> Tensor:
        """fp32 on the CPU, in the weight's shape."""
        return weight.detach().to("cpu", torch.float32)

    def state_dict(self) -> dict[str, Any]:
        raise InputError(f"engine={self._name} keeps no state from which a run could go on.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise InputError(f"engine={self._name} takes no state from which a run could go on.")

    def report(self) -> Report:
        """Zeros: nothing is known."""
        return Report(grad_norm=0.0)


class TorchAO(PeerRun):
    """torchao's CPUOffloadOptimizer: weights and moments in the weights' dtype on the host, without masters.

    It takes the gradients during backward, so that a global norm cannot clip them.
    """

    def __init__(self, model: nn.Module, name: str, **settings: Any) -> None:
        from torchao.optim import CPUOffloadOptimizer

        super().__init__(name)
        self._optimizer = CPUOffloadOptimizer(
            model.parameters(), torch.optim.AdamW, offload_gradients=False, fused=True, **settings
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One for each weight on the host, and one for the small ones on the device."""
        return self._optimizer.param_groups

    def step(self) -> None:
        self._optimizer.step()

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def __exit__(self, *exception: object) -> None:
        self.zero_grad()


class DeepSpeed(PeerRun):
    """ZeRO-2 with AdamW on the CPU, in a process group of one; `config` is DeepSpeed's JSON (`deepspeed_config`).

    With a `zenflow` block a process of its own updates, which DeepSpeed starts in the first window's last step, on
    cores that it takes from this one.
    """

    def __init__(self, model: nn.Module, name: str, config: dict[str, Any]) -> None:
        super().__init__(name)
        with ExitStack() as stack:
            stack.enter_context(_process_of_one())
            import deepspeed
            from deepspeed.utils import safe_get_full_fp32_param

            with _changes_told(model, name):
                self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
            self._process = stack.pop_all()
        # With a `zenflow` block the masters of the selected channels are not those of the weights.
        self._master = None if "zenflow" in config["zero_optimization"] else safe_get_full_fp32_param

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer on the CPU, whose learning rates hold for all channels."""
        return self._engine.optimizer.param_groups

    def wrapped(self, model: nn.Module) -> nn.Module:
        """DeepSpeed's module around the model: it has to be called in its place."""
        return self._engine

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self) -> None:
        """`step` has done it."""

    def master(self, weight: Parameter) -> Tensor:
        """fp32 on the CPU, in the weight's shape."""
        master = None if self._master is None else self._master(weight)
        return super().master(weight if master is None else master)

    def report(self) -> Report:
        """The norm is that of the last update on the CPU, as DeepSpeed scales it; 0 before the first."""
        return Report(
            grad_norm=float(self._engine.get_global_grad_norm() or 0), skipped_steps=self._engine.skipped_steps
        )

    def __exit__(self, *exception: object) -> None:
        with self._process:
            updating = getattr(self._engine.optimizer, "process", None)
            if updating is not None:  # which `destroy` leaves running
                updating.kill()
                updating.join()
            self._engine.destroy()
            self._engine = self._master = None
            gc.collect()  # it refers to itself, and holds memory of the device


@contextmanager
def _changes_told(model: nn.Module, name: str) -> Iterator[None]:
    """A warning if the block changes weights, as DeepSpeed 0.19 does where it has a `zenflow` block."""
    before = _digests(model)
    yield
    changed = int((_digests(model) != before).sum())
    if changed:
        log.warning(
            "engine=%s: deepspeed.initialize has changed %d of the model's %d weights. What is trained is not the "
            "model that was given, and its losses are not to be compared with those of other engines.",
            name, changed, len(before),
        )  # fmt: skip


def _digests(model: nn.Module) -> Tensor:
    """int64 `[weights]`, on the CPU with one wait for the device: of every weight's bits at their places.

    Not of a copy of the weights, for which there may be no room.
    """
    weights = [weight.detach() for weight in model.parameters()]
    places = torch.arange(1, 1 + min(_CHUNK, max(map(torch.numel, weights))), device=weights[0].device)
    return torch.stack([_digest(weight, places) for weight in weights]).cpu()


def _digest(weight: Tensor, places: Tensor) -> Tensor:
    bits = weight.reshape(-1).view({2: torch.int16, 4: torch.int32}[weight.element_size()])
    total = places.new_zeros(())
    for part in bits.split(_CHUNK):
        total = 31 * total + (part * places[: len(part)]).sum()  # int64, which may wrap around
    return total


@contextmanager
def _process_of_one() -> Iterator[None]:
    """What DeepSpeed looks for in a process; afterwards that is as it was, with the cores that DeepSpeed takes."""
    cores, own, method = affinities(), own_cpus(), multiprocessing.get_start_method(allow_none=True)
    before = {name: os.environ.get(name) for name in (*ALONE, "OMP_NUM_THREADS")}
    os.environ.update(ALONE)
    if method not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("spawn", force=True)  # joblib's is one that DeepSpeed's child does not know
    try:
        yield
    finally:
        multiprocessing.set_start_method(method, force=True)
        set_affinities(cores, own)
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ |= {} if value is None else {name: value}


def deepspeed_config(
    optimizer: OptimizerConfig, dtype: torch.dtype, zenflow: dict[str, Any] | None = None
) -> dict[str, Any]:
    """DeepSpeed's JSON: ZeRO-2 with the optimizer on the CPU, for weights of this dtype; with a `zenflow` block or not.

    The batch's size is known to the loop alone; DeepSpeed logs it.
    """
    zero = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
    }
    if zenflow is not None:
        zero["zenflow"] = {"select_strategy": "step", **zenflow}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": optimizer.max_grad_norm or 0.0,
        "bf16": {"enabled": dtype is torch.bfloat16},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": adamw_settings(optimizer)},
    }


def build_peer(model: nn.Module, engine: PeerEngine, optimizer: OptimizerConfig) -> PeerRun:
    """The engine that `engine` asks for; it takes the model, and what it needs of the machine."""
    name = engine.peer.name
    if engine.peer is Peer.torchao_offload:
        return TorchAO(model, name, **adamw_settings(optimizer))
    zenflow = None
    if isinstance(engine, DeepSpeedZenFlowEngine):
        zenflow = {key: value for key, value in plain(engine).items() if key != "peer"}
    return DeepSpeed(model, name, deepspeed_config(optimizer, next(model.parameters()).dtype, zenflow))


def check_peer(config: TrainConfig) -> None:
    """Errors: InputError, one sentence, for a package that is missing or what the engine cannot do."""
    engine, wants = config.engine, config.optimizer
    assert isinstance(engine, PeerEngine)
    name, package = engine.peer.name, PACKAGES[engine.peer]
    zenflow = isinstance(engine, DeepSpeedZenFlowEngine)
    if zenflow != (engine.peer is Peer.deepspeed_zenflow):
        raise InputError(f"engine.peer is {name} here; give engine={name} instead.")
    if find_spec(package) is None:
        raise InputError(f"engine={name} needs the package {package}, which is not installed: pip install {package}.")
    if config.checkpoint_every is not None:
        raise InputError(
            f"checkpoint_every is {config.checkpoint_every}; allowed with engine={name}: null, since it keeps no state "
            "from which a run could go on."
        )
    on_gpu = config.device is not Device.cpu and torch.cuda.is_available()
    if engine.peer is Peer.torchao_offload:
        if not on_gpu:
            raise InputError(
                f"device is {config.device.name}, the CPU here; allowed with engine={name}: a GPU, which it offloads."
            )
        if wants.max_grad_norm is not None:
            raise InputError(
                f"optimizer.max_grad_norm is {wants.max_grad_norm}; allowed with engine={name}: null, since it takes "
                "each gradient during backward, before the norm of all is known."
            )
        return
    if torch.cuda.is_available() and not on_gpu:
        raise InputError(f"device is cpu, but engine={name} takes the GPU that there is; give device=auto.")
    if config.accumulate != 1:
        raise InputError(f"accumulate is {config.accumulate}; allowed with engine={name}: 1.")
    if config.autocast:
        raise InputError(f"autocast is true; allowed with engine={name}: false, since DeepSpeed turns it off.")
    if zenflow:
        _check_zenflow(engine)


def _check_zenflow(engine: DeepSpeedZenFlowEngine) -> None:
    k, window, interval = engine.topk_ratio, engine.update_interval, engine.select_interval
    for name, value, allowed, right in (
        ("topk_ratio", k, "a number between 0 and 1", 0 < k < 1),
        ("update_interval", window, "an integer >= 1", window >= 1),
        ("select_interval", interval, f"0 (once) or an integer >= {window}, the update_interval",
         interval == 0 or interval >= window),
        ("full_warm_up_rounds", engine.full_warm_up_rounds, "an integer >= 0", engine.full_warm_up_rounds >= 0),
    ):  # fmt: skip
        if not right:
            raise InputError(f"engine.{name} is {value}; allowed: {allowed}.")
