"""Nested states compared to the last bit, and their manifests forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zenflow import checkpoint_folder


def assert_same(actual: Any, expected: Any) -> None:
    """The same types, keys in the same order, and bits: of tensors, which need not lie alike, and of numbers."""
    assert type(actual) is type(expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in actual] == [(type(key), key) for key in expected]
        for key in expected:
            assert_same(actual[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(actual) == len(expected)
        for one, other in zip(actual, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert actual.reshape(-1).view(torch.uint8).tolist() == expected.reshape(-1).view(torch.uint8).tolist()
    elif isinstance(expected, float):
        assert actual.hex() == expected.hex()
    else:
        assert actual == expected


def rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest as somebody would who can compute hashes."""
    path = folder / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("sha256")
    change(body)
    path.write_bytes(checkpoint_folder._manifest_text(body))
