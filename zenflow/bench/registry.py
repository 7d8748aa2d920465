"""The contestants by name, importable without torch: where each is built, what it needs, what to know about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

DEFAULT_U = 4
TRACED_WINDOWS = 3
LAUNCH_LENGTH = 16  # tokens of one sequence: the device has next to nothing to do, so launching is what takes the time


@dataclass(frozen=True)
class Contestant:
    """`build` is `module:class`, called in the child as `class(model, job)`; `needs` a package that may be missing.

    leaves: after `close()` the model is as it was, but for its weights; peer: another project's offload, which takes
    several times as long a step; traces: it records its steps on request.
    """

    build: str
    needs: str | None = None
    note: str = ""
    leaves: bool = False
    peer: bool = False
    traces: bool = False


CONTESTANTS = {
    "floor": Contestant("zenflow.bench.ours:Floor", note="forward and backward alone"),
    "adamw": Contestant("zenflow.bench.ours:OnDevice", note="fp32 masters and moments on the device", leaves=True),
    "zenflow": Contestant("zenflow.bench.ours:Offloaded", leaves=True, traces=True),
    "sync": Contestant(
        "zenflow.bench.ours:Offloaded",
        note="everything on the CPU, every step, synchronous",
        leaves=True,
        traces=True,
    ),
    "torch-offload": Contestant(
        "zenflow.bench.ours:OnHost",
        note="fp32 masters and moments on the CPU, torch's fused AdamW",
        leaves=True,
        peer=True,
    ),
    "torchao": Contestant(
        "zenflow.bench.peers:TorchAO", "torchao", "bf16 state on the CPU, no masters, no clipping", peer=True
    ),
    "deepspeed-offload": Contestant(
        "zenflow.bench.peers:DeepSpeed", "deepspeed", "ZeRO-2, optimizer on the CPU", peer=True
    ),
    "deepspeed-zenflow": Contestant(
        "zenflow.bench.peers:DeepSpeed", "deepspeed", "k 0.1, U 4, overlap_step", peer=True
    ),
}
SYNC = {"topk_ratio": 0.0, "update_interval": 1, "overlap_step": False}


@dataclass(frozen=True)
class Job:
    """What one child measures. It travels as JSON.

    `warm_up` and `steps` are counts of steps, `window` the steps of a window, `floor_steps` those of forward and
    backward alone that the same process times before them, and after them where it can. `settings` are ZenFlowConfig's
    fields; `cores` are the logical CPUs that the child binds itself to before it loads anything, None for all.
    `copies`, of the floor alone: "to host" or "to device", which PCIe then is as busy with as it can be. `trace`: the
    file that records `TRACED_WINDOWS` more, after the timed ones, if the contestant can; it names `command`, of which
    the job is a part.
    """

    trainer: str
    label: str
    shape: str
    batch: int
    length: int
    warm_up: int
    steps: int
    window: int
    floor_steps: int = 0
    clip: float = 1.0
    lr: float = 1e-5
    checkpointing: bool = False
    device: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)
    cores: Sequence[int] | None = None
    copies: str | None = None
    trace: str | None = None
    command: str = ""


def missing(trainer: str) -> str | None:
    """The package that this contestant lacks on this machine, or None."""
    needs = CONTESTANTS[trainer].needs
    return needs if needs is not None and find_spec(needs) is None else None
