"""Launch constants of the cards on which they were measured; on others the defaults beside the kernels are taken.

`CARDS` goes by the device's name, the op, and the class of a launch. Of an op it may hold what `TUNABLE` names: the
shape of a launch, on which no bit depends (the blocks of sums are not among them). What is not so is left out with a
warning. Nothing is tried where it is used: `zenflow-bench kernels --tune OP` tries, and prints a card's entry.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

logger = logging.getLogger("zenflow")

# Card -> op -> class ("column bfloat16", see `launch_class`, or ALL) -> constants.
CARDS: dict[str, dict[str, dict[str, dict[str, int]]]] = {
    "NVIDIA H200": {
        "fused_step": {
            "column bfloat16": {
                "STEP_TILE": 65536,
                "FOLD_BLOCK": 4096,
                "UPDATE_BLOCK": 1024,
                "WARPS": 4,
                "REGISTERS": 128,
            },
            "row bfloat16": {"STEP_TILE": 32768, "FOLD_BLOCK": 2048, "UPDATE_BLOCK": 512, "PARTS": 4, "WARPS": 4},
            "whole bfloat16": {"STEP_TILE": 4096, "UPDATE_BLOCK": 1024, "WARPS": 4},
            "column bfloat16 alone": {"STEP_TILE": 65536, "UPDATE_BLOCK": 512, "PARTS": 4, "WARPS": 4},
            "row bfloat16 alone": {"STEP_TILE": 65536, "UPDATE_BLOCK": 1024, "PARTS": 4, "WARPS": 4},
            "column bfloat16 stochastic": {
                "STEP_TILE": 65536,
                "FOLD_BLOCK": 2048,
                "UPDATE_BLOCK": 512,
                "WARPS": 4,
                "REGISTERS": 128,
            },
            "row bfloat16 stochastic": {
                "STEP_TILE": 32768,
                "FOLD_BLOCK": 2048,
                "UPDATE_BLOCK": 512,
                "PARTS": 4,
                "WARPS": 4,
            },
            "whole bfloat16 stochastic": {"STEP_TILE": 8192, "UPDATE_BLOCK": 512, "WARPS": 2},
            "column float32": {
                "STEP_TILE": 65536,
                "FOLD_BLOCK": 2048,
                "UPDATE_BLOCK": 512,
                "WARPS": 4,
                "REGISTERS": 128,
            },
            "row float32": {"STEP_TILE": 32768, "FOLD_BLOCK": 2048, "UPDATE_BLOCK": 512, "PARTS": 4, "WARPS": 4},
            "whole float32": {"STEP_TILE": 4096, "UPDATE_BLOCK": 1024, "WARPS": 8},
            "column float32 alone": {"STEP_TILE": 32768, "UPDATE_BLOCK": 512, "PARTS": 4, "WARPS": 4},
            "row float32 alone": {"STEP_TILE": 65536, "UPDATE_BLOCK": 1024, "PARTS": 4, "WARPS": 4},
        },
        "gather_channels": {
            "column bfloat16": {"TILE_ROWS": 1, "TILE_COLS": 512, "WARPS": 1},
            "row bfloat16": {"TILE_ROWS": 16, "TILE_COLS": 256, "WARPS": 2},
            "column float32": {"TILE_ROWS": 4, "TILE_COLS": 128, "WARPS": 8},
            "row float32": {"TILE_ROWS": 8, "TILE_COLS": 512, "WARPS": 2},
        },
        "scatter_channels": {
            "column bfloat16": {"TILE_ROWS": 1, "TILE_COLS": 512, "WARPS": 1},
            "row bfloat16": {"TILE_ROWS": 8, "TILE_COLS": 256, "WARPS": 4},
            "column float32": {"TILE_ROWS": 4, "TILE_COLS": 512, "WARPS": 2},
            "row float32": {"TILE_ROWS": 4, "TILE_COLS": 256, "WARPS": 4},
        },
    },
}

ALL = "all"  # the class of ops that have one
# Op -> constant -> lowest and highest value; powers of two.
_COMPACT = {"TILE_ROWS": (1, 32), "TILE_COLS": (32, 512), "WARPS": (1, 16)}
TUNABLE = {
    "fused_step": {
        "STEP_TILE": (1024, 131072),
        "FOLD_BLOCK": (512, 16384),
        "UPDATE_BLOCK": (64, 4096),
        "PARTS": (1, 16),
        "WARPS": (1, 16),
        "REGISTERS": (64, 256),
    },
    "gather_channels": _COMPACT,
    "scatter_channels": _COMPACT,
    "select_channels": {"BLOCK": (512, 8192), "WARPS": (1, 32)},
    "stochastic_rounding": {"WARPS": (1, 16)},
}

_ignored = False


@cache
def launch_class(kind: str, dtype: torch.dtype, *, stochastic: bool = False, alone: bool = False) -> str:
    """The class of launches on parameters of a kind ("column", "row", "whole") with weights of `dtype`.

    stochastic: without fp32 masters. alone: of columns or rows without an accumulator, for `fused_step`.
    """
    return f"{kind} {str(dtype).removeprefix('torch.')}{' stochastic' * stochastic}{' alone' * alone}"


def constants(op: str, launch: str, device: torch.device, **defaults: int) -> dict[str, int]:
    """The launch constants of an op for the class `launch` on this device: `defaults`, or what its card has instead."""
    found = {} if _ignored else _of_card(card(device)).get((op, launch), {})
    return {name: found.get(name, value) for name, value in defaults.items()} if found else defaults


@contextmanager
def ignored() -> Iterator[None]:
    """Launches inside have the defaults on every card: for a search, which sets them."""
    global _ignored
    before, _ignored = _ignored, True
    try:
        yield
    finally:
        _ignored = before


@cache
def card(device: torch.device) -> str:
    """The name of a CUDA device; "" for any other."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@cache
def _of_card(name: str) -> dict[tuple[str, str], dict[str, int]]:
    """By op and class, what can be used of the card's entry."""
    usable: dict[tuple[str, str], dict[str, int]] = {}
    for op, classes in _items(CARDS.get(name, {}), name):
        for launch, values in _items(classes, f"{name}, {op}"):
            for constant, value in _items(values, f"{name}, {op}, {launch}"):
                if _allowed(op, constant, value):
                    usable.setdefault((op, launch), {})[constant] = value
                else:
                    bounds = TUNABLE.get(op, {}).get(constant)
                    allowed = f"powers of two from {bounds[0]} to {bounds[1]}" if bounds else f"those of {TUNABLE}"
                    _warn(f"{name}, {op}, {launch}", f"{constant}={value!r}; allowed are {allowed}")
    return usable


def _items(entry: Any, place: str) -> list[tuple[Any, Any]]:
    if isinstance(entry, dict):
        return list(entry.items())
    _warn(place, f"{entry!r}; allowed is a dict")
    return []


def _allowed(op: str, constant: str, value: Any) -> bool:
    low, high = TUNABLE.get(op, {}).get(constant, (1, 0))
    return type(value) is int and low <= value <= high and value & (value - 1) == 0


def _warn(place: str, what: str) -> None:
    logger.warning("launch constants of %s: %s; the default is used", place, what)
