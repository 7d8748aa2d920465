"""The engine's settings of a scenario: every field of `ZenFlowConfig`, and every value that takes a path of its own.

`draw_settings` decides all of them by a seed's draws; `draw_places` only those that change no bit (I6) and may change
whenever a saved state is loaded: each trainer that goes on has others.
"""

from __future__ import annotations

import random
from typing import Any

import torch

# What is not drawn, with the reason: fields, or single values of a field.
NOT_DRAWN: dict[str | tuple[str, str], str] = {
    ("select_interval", "auto"): "is 100 steps or an epoch, and no scenario has 100 steps",
}


def draw_settings(draw: random.Random, dtype: torch.dtype, passes: int) -> dict[str, Any]:
    """Of an optimizer over parameters of `dtype` that get `passes` gradients a step."""
    on_host = draw.random() < 0.4
    overlap = draw.random() < 0.7
    interval = draw.choice([1, 2, 3, 4, 5, "auto"])
    late = draw.choice(["auto", draw.randint(1, 4 if interval == "auto" else interval)])
    stochastic = dtype == torch.bfloat16 and draw.random() < 0.5
    return {
        "topk_ratio": draw.choice([0.0, 0.1, 0.1, 0.5, 0.5, 0.5, "auto"] * 3 + [1.0]),
        "update_interval": interval,
        **_draw_selections(draw),
        "full_warm_up_rounds": draw.choice([0, 0, 0, 2, 3]),
        "overlap_step": overlap,
        "stagger": draw.random() < 0.5,
        "visible_after": late if overlap else "auto",
        "weight_prediction": draw.choice([0.0, 0.0, 0.5, 1.0, 2.0]),
        "channel_dim": draw.choice(["column", "row"]),
        "deferred_rule": draw.choice(["accumulate", "replay"]) if on_host else "accumulate",
        "deferred_lr_scale": draw.choice(["linear", "linear", "none", 0.5, 1.5]),
        "selected_masters": "stochastic" if stochastic else "float32",
        "rounding_seed": draw.choice([0, 1, 2**64 - 1]),
        "min_deferred_numel": draw.choice([0, 0, 0, 65]),
        "accumulate_on": "host" if on_host else "gpu",
        "ring_dtype": "auto" if on_host else draw.choice(["auto", "auto", "float32", "bfloat16"]),
        "max_grad_norm": draw.choice([None, 0.05, 0.5]),
        **draw_places(draw, passes),
    }


def _draw_selections(draw: random.Random) -> dict[str, Any]:
    strategy = draw.choice(["step", "step", "auto", "epoch"])
    epoch = strategy == "epoch"
    return {
        "select_strategy": strategy,
        "select_interval": draw.choice([1, 2]) if epoch else draw.choice([1, 2, 5, 5, 50]),
        "steps_per_epoch": draw.choice([3, 7]) if epoch else None,
        "importance": draw.choice(["square", "magnitude"]),
        "importance_over": draw.choice(["step", "window", "average"]),
        "importance_decay": draw.choice([0.0, 0.5, 0.9]),
        "on_reselect": draw.choice(["migrate", "migrate", "reset"]),
    }


def draw_places(draw: random.Random, passes: int) -> dict[str, Any]:
    """How the work is spread over the machine, and when results are copied: what may change with every trainer."""
    return {
        "upload": draw.choice(["backward", "backward", "step"]),
        "upload_check": draw.random() < 0.5,
        "backward_passes_per_step": draw.choice([None, passes]),
        "bucket_bytes": draw.choice([64, 512, 1 << 20]),
        "worker_threads": draw.choice([1, 2, "auto"]),
        "core_binding": draw.choice([False, True, "auto"]),
        "pt_reserved_cores_perc": draw.choice([0.0, 0.25, 1.0]),
    }
