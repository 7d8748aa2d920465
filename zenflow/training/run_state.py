"""What a run's checkpoint holds besides the optimizer's state: weights, random states, and what it belongs to."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zenflow.background_save import copy_to_host
from zenflow.cores import available_memory
from zenflow.training.data import Dataset, Samples
from zenflow.training.engines import Engine
from zenflow.training.errors import InputError
from zenflow.training.metrics import Recorder

FORMAT = 1
SAMPLES = 64  # of each part of the data that its fingerprint looks at


@dataclass
class RunState:
    """The parts of a run of which a checkpoint is made. `data` is `fingerprint`'s; `wandb_id` None without wandb."""

    model: nn.Module
    engine: Engine
    recorder: Recorder
    device: torch.device
    data: dict[str, Any]
    wandb_id: str | None

    def gather(self, step: int, *, last: bool = False) -> dict[str, Any]:
        """Everything that the run after `step` steps consists of, copied to the CPU; waits for device and worker.

        Order of the samples and learning rate follow from the step, and what was recorded is in metrics.jsonl up to
        `metrics_bytes`. MemoryError where the host has not room for the copy, which would end a run that could go on;
        `last`: this one ends anyway, and tries.
        """
        if not last:
            self._check_memory()
        with _memory_errors():
            return {
                "format": FORMAT,
                "step": step,
                "metrics_bytes": self.recorder.position(),
                "wandb_id": self.wandb_id,
                "data": self.data,
                "random": random_states(self.device),
                "model": copy_to_host(self.model.state_dict()),
                "engine": self.engine.state_dict(),
            }

    def _check_memory(self) -> None:
        needed = (
            sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers())) + self.engine.state_bytes
        )
        if (available := available_memory()) < needed:
            raise MemoryError(
                f"a copy of the run needs {needed:,} bytes of host memory, {available:,} bytes are available"
            )


@contextmanager
def _memory_errors() -> Iterator[None]:
    """MemoryError where torch lacks memory on the host (`ulimit -v`), for which it has no error of its own."""
    try:
        yield
    except RuntimeError as error:
        _, found, refusal = str(error).partition("DefaultCPUAllocator: ")
        if not found:
            raise
        raise MemoryError(refusal) from error


def load_engine(engine: Engine, state: dict[str, Any]) -> None:
    """Errors: InputError if the state is not one of this engine over these weights."""
    try:
        engine.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise InputError(f"The checkpoint's optimizer state cannot be used here: {error}.") from error


def random_states(device: torch.device) -> dict[str, Any]:
    """The states of Python's, NumPy's and torch's generators, and of the GPU's if `device` is one."""
    kind, keys, *rest = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """Put back what `random_states` found; a GPU's, which a CPU cannot take, only where there is one again."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


def fingerprint(data: Dataset) -> dict[str, Any]:
    """Numbers of samples, and SHA-256 of some of them: other texts, or another tokenizer, give other ones."""
    return {"training": _part(data.train), "held out": _part(data.held_out)}


def _part(samples: Samples) -> dict[str, Any]:
    total, count = hashlib.sha256(), len(samples)
    looked_at = min(SAMPLES, count)
    for place in range(looked_at):
        batch = samples.batch([place * (count - 1) // max(1, looked_at - 1)])
        for tensor in (*batch.inputs, batch.labels):
            total.update(f"{tuple(tensor.shape)} {tensor.dtype}\0".encode())
            total.update(tensor.contiguous().numpy())
    return {"samples": count, "sha256": total.hexdigest()}


def check_data(data: Dataset, saved: dict[str, Any]) -> None:
    """Errors: InputError if these are not the samples that the checkpoint's run had."""
    for part, found in fingerprint(data).items():
        if found["samples"] != saved[part]["samples"]:
            raise InputError(
                f"The data has {found['samples']:,} {part} samples, and the checkpoint's had "
                f"{saved[part]['samples']:,}; resume needs the same data."
            )
        if found != saved[part]:
            raise InputError(f"The {part} samples are not those of the checkpoint; resume needs the same data.")


def check_model(model: nn.Module, saved: dict[str, Tensor]) -> None:
    """Errors: InputError naming the first weight or buffer that is missing, too many or of another kind."""
    here = model.state_dict()
    for name in (*saved, *here):
        there = _kind(saved[name]) if name in saved else "not in the checkpoint"
        mine = _kind(here[name]) if name in here else "not in the model"
        if there != mine:
            raise InputError(f"{name} is {mine}, and {there} in the checkpoint; resume needs the same model.")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
