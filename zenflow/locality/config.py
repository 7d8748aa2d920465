"""The settings of `zenflow-locality`: zenflow-train's, and what is looked at."""

from __future__ import annotations

from dataclasses import dataclass, field

from zenflow.training.errors import InputError
from zenflow.training.schema import PeerEngine, TrainConfig


@dataclass
class LocalitySettings:
    """Which channels are counted, and after how many steps they are looked for again."""

    shares: list[float] = field(default_factory=lambda: [0.01, 0.05, 0.1])  # of a matrix's channels, at least one
    lags: list[int] = field(default_factory=lambda: [1, 4, 16, 64, 256])  # steps between two selections
    topk_ratio: float = 0.1  # of the selections that are compared
    min_numel: int = 4096  # matrices with fewer elements are left out


@dataclass
class LocalityConfig(TrainConfig):
    """A run whose gradients are watched; `plot` is for the study's own picture.

    Of its settings checkpoint_every, checkpoint_minutes, keep_checkpoints, log_every, save_model, trace and tracking
    have no effect.
    """

    locality: LocalitySettings = field(default_factory=LocalitySettings)


def check_settings(config: LocalityConfig) -> None:
    """Errors: InputError naming a setting, its value and what is allowed."""
    if isinstance(config.engine, PeerEngine):
        raise InputError(
            f"engine={config.engine.peer.name} is another project's and takes the gradients away before they can be "
            "watched. Allowed: engine=zenflow, zero_offload, adamw, adamw_offload or simulated."
        )
    chosen = config.locality
    shares, lags = list(chosen.shares), list(chosen.lags)
    if not shares or shares != sorted(set(shares)) or not 0 < shares[0] <= shares[-1] <= 1:
        raise InputError(f"locality.shares is {shares}; allowed: numbers above 0 and up to 1, each above the last.")
    if not lags or lags != sorted(set(lags)) or lags[0] < 1:
        raise InputError(f"locality.lags is {lags}; allowed: integers >= 1, each above the last.")
    if lags[0] >= config.steps:
        raise InputError(
            f"locality.lags begins with {lags[0]}, but steps is {config.steps}; allowed: a first lag below steps."
        )
    if not 0 < chosen.topk_ratio <= 1:
        raise InputError(f"locality.topk_ratio is {chosen.topk_ratio}; allowed: a number above 0 and up to 1.")
    if chosen.min_numel < 1:
        raise InputError(f"locality.min_numel is {chosen.min_numel}; allowed: an integer >= 1.")
