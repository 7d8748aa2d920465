"""States as JSON trees and named tensors, and back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as draw
from torch import nn

from tests.units.states import assert_same
from zenflow.state_tree import flatten, restore

KEYS = draw.text(max_size=5) | draw.integers() | draw.sampled_from(["$tensor", "$", "a.b", "", "0"])
LEAVES = draw.none() | draw.booleans() | draw.integers() | draw.floats(allow_nan=False) | draw.text(max_size=8)
TREES = draw.recursive(
    LEAVES | draw.integers(0, 3).map(torch.arange),
    lambda inner: (
        draw.lists(inner, max_size=3)
        | draw.lists(inner, max_size=3).map(tuple)
        | draw.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=12,
)


def there_and_back(state: Any) -> Any:
    tree, tensors = flatten(state)
    return restore(json.loads(json.dumps(tree, allow_nan=False)), tensors)


@given(TREES)
def test_any_state_comes_back(state: Any) -> None:
    assert_same(there_and_back(state), state)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, -0.0, 5e-324, 2**200, True, 1, 1.0])
def test_numbers_keep_value_and_type(value: Any) -> None:
    back = there_and_back({"x": value})["x"]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_names_are_paths_and_never_meet() -> None:
    one, other, third = (torch.tensor(number) for number in (1, 2, 3))
    state = {"a": {"b": one}, "a.b": other, "__metadata__": third, "": torch.tensor(4), 0: {"0": torch.tensor(5)}}
    tree, tensors = flatten(state)
    assert tensors["a.b"] is one
    assert tensors["a.b'"] is other
    assert len(tensors) == 5
    assert not {"", "__metadata__"} & set(tensors)
    assert_same(restore(tree, tensors), state)


def test_b18_tied_tensors_are_one() -> None:
    """B18: the same Parameter under two names is one tensor, also as two views that `state_dict()` makes of it."""
    tied = nn.Linear(3, 3, bias=False)
    model = nn.ModuleDict({"embedding": tied, "head": tied, "other": nn.Linear(3, 3, bias=False)})
    state = {"model": model.state_dict(), "half": tied.weight.detach()[:1], "empty": [torch.empty(0), torch.empty(0)]}
    tree, tensors = flatten(state)
    assert len(tensors) == 5
    back = restore(tree, tensors)
    assert back["model"]["embedding.weight"] is back["model"]["head.weight"]
    assert back["half"].shape == (1, 3)


def test_subclasses_become_the_plain_type() -> None:
    state = {"model": OrderedDict(a=1), "milestones": Counter({30: 1}), "weight": nn.Parameter(torch.ones(2))}
    back = there_and_back(state)
    assert type(back["model"]) is dict
    assert_same(back["milestones"], {30: 1})
    assert torch.equal(back["weight"], torch.ones(2))


class Colour(Enum):
    RED = 1


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": [1, {2, 3}]}}, r"a\.b\.1 is a builtins\.set"),
        ({"a": {(1, 2): 3}}, r"a has the key \(1, 2\)"),
        ({True: 1}, "the state has the key True"),
        ({"a": b"bytes"}, "a is a builtins.bytes"),
        ({"a": Colour.RED}, "a is a .*Colour"),
        ({"a": 1j}, "a is a builtins.complex"),
        ({"a": torch.eye(2).to_sparse()}, "a is a tensor without plain memory"),
        ({"a": torch.empty(2, device="meta")}, "a is a tensor without plain memory"),
    ],
    ids=["set", "tuple-key", "bool-key", "bytes", "enum", "complex", "sparse", "meta"],
)
def test_what_cannot_be_kept_is_named(state: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        flatten(state)


@pytest.mark.parametrize(
    "tree",
    [
        {"$tensor": "absent"},
        {"$tensor": ["x"]},
        {"$tensor": "x", "more": 1},
        {"$float": "1e400"},
        {"$tuple": {"a": 1}},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[None, 2]]},
        {"$dict": [[True, 2]]},
        {"$dict": [[[], 2]]},
        {"$unknown": 1},
        [{"a": {"$dict": 3}}],
    ],
    ids=repr,
)
def test_what_is_no_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="nothing that a state holds"):
        restore(tree, {"x": torch.ones(1)})
