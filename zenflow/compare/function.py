"""Whether what a run ends with can be saved and comes back equal, bit for bit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zenflow.compare.judge import Check


def check_saving(side: str, model: nn.Module, optimizer: Any, folder: Path) -> list[Check]:
    """Save weights and optimizer state in `folder`, read them, load the optimizer's; the files are removed.

    Last thing of a run: loading an optimizer's state may change the weights, to the masters' rounded values.
    """
    weights = model.state_dict()
    again = _through_a_file(weights, folder)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(_through_a_file(saved, folder))
    return [
        _check(side, "saving the weights", first_difference(weights, again), f"{len(weights)} tensors"),
        _check(side, "saving the optimizer", first_difference(saved, optimizer.state_dict()), "loaded back"),
    ]


def first_difference(one: Any, other: Any, name: str = "state") -> str | None:
    """Where two nested states differ, or None; tensors and arrays by dtype, shape and bits, wherever they lie."""
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return f"the keys of {name}"
        found = (first_difference(one[key], other[key], f"{name}[{key!r}]") for key in one)
        return next(filter(None, found), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"the length of {name}"
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (first_difference(*pair, f"{name}[{place}]") for place, pair in pairs)), None)
    return None if _bits(one) == _bits(other) else name


def _through_a_file(state: Any, folder: Path) -> Any:
    with tempfile.TemporaryFile(dir=folder) as file:
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, map_location="cpu", weights_only=False)  # our own file of a moment ago


def _bits(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return value.dtype, tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return value


def _check(side: str, name: str, difference: str | None, what: str) -> Check:
    return Check(
        side, name, difference is None, f"{what}, {'equal' if difference is None else f'{difference} differs'}"
    )
