"""The settings of `zenflow-diagnose`: zenflow-train's, and how to measure."""

from __future__ import annotations

from dataclasses import dataclass, field

from zenflow.training.errors import InputError
from zenflow.training.schema import AdamWEngine, PeerEngine, TrainConfig

MAX_STEPS = 500


@dataclass
class DiagnoseSettings:
    """How long to measure."""

    steps: int = 100  # 100 to 500; fewer are measured, with a remark
    warm_up: int = 10  # steps before them that are not measured
    triad_bytes: int = 1 << 30  # of each of three arrays with which host memory is measured: several times the caches


@dataclass
class DiagnoseConfig(TrainConfig):
    """A run without ZenFlow, measured; `plot` is for the diagnosis' own picture.

    Of its settings steps, evaluate_every, checkpoint_every, checkpoint_minutes, keep_checkpoints, log_every,
    save_model, trace and tracking have no effect.
    """

    diagnose: DiagnoseSettings = field(default_factory=DiagnoseSettings)


def check_settings(config: DiagnoseConfig) -> None:
    """Errors: InputError naming a setting, its value and what is allowed."""
    chosen = config.diagnose
    for name, value, low, high in (
        ("steps", chosen.steps, 2, MAX_STEPS),
        ("warm_up", chosen.warm_up, 1, MAX_STEPS),
        ("triad_bytes", chosen.triad_bytes, 64, 1 << 40),
    ):
        if not low <= value <= high:
            raise InputError(f"diagnose.{name} is {value}; allowed: an integer from {low} to {high}.")
    engine = config.engine
    if isinstance(engine, AdamWEngine):
        return
    if isinstance(engine, PeerEngine):
        raise InputError(
            f"engine={engine.peer.name} is another project's and does not say where its time goes. Allowed: "
            "engine=zero_offload, adamw or adamw_offload."
        )
    for name, allowed in (("topk_ratio", 0), ("update_interval", 1), ("overlap_step", False)):
        if (value := getattr(engine, name)) != allowed:
            raise InputError(
                f"engine.{name} is {value}; a diagnosis is of a run without ZenFlow. Allowed: engine=zero_offload or "
                f"engine=adamw, with engine.{name}={str(allowed).lower()} if it is given."
            )
