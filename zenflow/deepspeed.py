"""The `zenflow` block of a DeepSpeed configuration, translated to the fields of `ZenFlowConfig`.

Keys and defaults are those of DeepSpeed's own `deepspeed/runtime/zenflow/zenflow_config.py`; DeepSpeed is not needed.
Three keys do not carry over as they are, and the log says so where a file has them:

- `offload` moves the moments of the *selected* channels to the host between steps. Here they stay on the GPU (with
  their masters 12 k bytes a parameter): the arithmetic is the same, the memory is not saved.
- `auto_ratio` is the threshold by which DeepSpeed ends a window under `update_interval: auto`, a fixed length here.
- `gradient_accumulation_steps` (outside the block) is overwritten with `update_interval` by DeepSpeed: there every
  micro batch is a step. Here accumulation is the training loop's own affair.

Of the schedule it has no key: there all windows end in the same step and nothing is predicted, which is
`stagger=False, weight_prediction=0.0` here and not the default.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import Any

logger = logging.getLogger("zenflow")

DEEPSPEED_DEFAULTS = {
    "topk_ratio": 0.1,
    "select_strategy": "auto",
    "select_interval": "auto",
    "update_interval": "auto",
    "overlap_step": False,
    "full_warm_up_rounds": 0,
    "pt_reserved_cores_perc": 0.5,
    "steps_per_epoch": None,
}
WITHOUT_EFFECT = ("offload", "auto_ratio")


def read_deepspeed(source: str | PathLike[str] | Mapping[str, Any], overridden: Collection[str] = ()) -> dict[str, Any]:
    """Fields of `ZenFlowConfig` from a DeepSpeed JSON file or dictionary; names in `overridden` are not looked at.

    Raises ValueError naming the file, the missing block or the unsupported key.
    """
    document, origin = _load(source)
    zero = document.get("zero_optimization")
    block = zero.get("zenflow") if isinstance(zero, Mapping) else None
    if not isinstance(block, Mapping):
        raise ValueError(f"{origin} has no zero_optimization.zenflow block (found {block!r}); allowed: an object")
    known = (*DEEPSPEED_DEFAULTS, *WITHOUT_EFFECT)
    unknown = [key for key in block if key not in known]
    if unknown:
        raise ValueError(
            f"zero_optimization.zenflow has the unsupported key {unknown[0]!r}; allowed: {', '.join(known)}"
        )
    _check_without_effect(block)
    accumulation = document.get("gradient_accumulation_steps", 1)
    if accumulation != 1:
        logger.warning("gradient_accumulation_steps %s is not read: the training loop accumulates", accumulation)
    values = DEEPSPEED_DEFAULTS | {key: value for key, value in block.items() if key not in WITHOUT_EFFECT}
    if "max_grad_norm" not in overridden:
        values["max_grad_norm"] = _max_grad_norm(document.get("gradient_clipping", 0.0))
    return values


def _load(source: str | PathLike[str] | Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "the DeepSpeed configuration"
    path = Path(fspath(source))
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds a JSON {type(document).__name__}; allowed: an object")
    return document, str(path)


def _check_without_effect(block: Mapping[str, Any]) -> None:
    offload = block.get("offload", False)
    if not isinstance(offload, bool):
        raise ValueError(f"offload is {offload!r}; allowed: true or false")
    if offload:
        logger.warning("offload: true has no effect: the state of selected channels stays on the device")
    ratio = block.get("auto_ratio", 0.99)
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 <= ratio <= 1:
        raise ValueError(f"auto_ratio is {ratio!r}; allowed: a number from 0 to 1")
    if "auto_ratio" in block:
        logger.warning("auto_ratio %s has no effect: update_interval auto is a fixed number of steps", ratio)


def _max_grad_norm(clipping: Any) -> Any:
    """DeepSpeed's `gradient_clipping`: 0 is off."""
    if clipping == "auto":
        raise ValueError(
            "gradient_clipping is 'auto', which another program fills in; allowed: a number >= 0, or pass max_grad_norm"
        )
    number = not isinstance(clipping, bool) and isinstance(clipping, (int, float))
    if not number or not 0 <= clipping < float("inf"):
        raise ValueError(f"gradient_clipping is {clipping!r}; allowed: a number >= 0 (0: no clipping)")
    return clipping or None
