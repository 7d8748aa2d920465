"""A nested state as a JSON tree and named tensors, and back.

Dicts with int or str keys, lists, tuples, numbers, strings, None and tensors. What JSON has not is an object with one
key that begins with `$`: `{"$tensor": name}`, `{"$tuple": [...]}`, `{"$float": "nan"}`, and `{"$dict": [[key, value],
...]}` for a dict with other keys than plain strings. Tensors over exactly the same memory are one, before and after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Tree = Any  # what `json` reads and writes
FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def flatten(state: Any) -> tuple[Tree, dict[str, Tensor]]:
    """`(tree, tensors by name)`; a name is the path to the tensor's first place, such as `optimizer.state.0.master`.

    Subclasses become the plain type: an OrderedDict a dict, a Parameter a tensor. ValueError names the path of what
    cannot be kept.
    """
    flat = _Flattener()
    with _no_deeper():
        return flat.encode(state, ()), flat.tensors


@contextmanager
def _no_deeper() -> Iterator[None]:
    """ValueError where Python's stack does not reach down to the bottom of a state, which may have none."""
    try:
        yield
    except RecursionError:
        raise ValueError("the state holds something that is nested too deeply, or that holds itself") from None


class _Flattener:
    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}  # by what makes two tensors one
        self._reserved = {"", "__metadata__"}  # a safetensors file means something else by it

    def encode(self, value: Any, path: tuple[str, ...]) -> Tree:
        if value is None or isinstance(value, bool | str) or type(value) is int:
            return value
        if isinstance(value, float):
            number = float(value)
            return number if math.isfinite(number) else {"$float": repr(number)}
        if isinstance(value, Tensor):
            return {"$tensor": self._name(value, path)}
        if isinstance(value, dict):
            return self._encode_dict(value, path)
        if isinstance(value, list | tuple):
            items = [self.encode(item, (*path, str(place))) for place, item in enumerate(value)]
            return items if isinstance(value, list) else {"$tuple": items}
        raise ValueError(
            f"{_place(path)} is a {type(value).__module__}.{type(value).__qualname__}; allowed are dicts, lists, "
            "tuples, tensors, numbers, strings, booleans and None"
        )

    def _encode_dict(self, value: dict[Any, Any], path: tuple[str, ...]) -> Tree:
        for key in value:
            if not isinstance(key, str) and type(key) is not int:
                raise ValueError(f"{_place(path)} has the key {key!r}; allowed are strings and whole numbers")
        pairs = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
            return dict(pairs)
        return {"$dict": [list(pair) for pair in pairs]}

    def _name(self, tensor: Tensor, path: tuple[str, ...]) -> str:
        if tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
            raise ValueError(f"{_place(path)} is a tensor without plain memory ({tensor.layout}, {tensor.device})")
        memory = (tensor.data_ptr(), tensor.device, tensor.dtype, tuple(tensor.shape), tensor.stride())
        same = (*memory, tensor.is_conj(), tensor.is_neg()) if tensor.numel() else (id(tensor),)
        if same not in self._names:
            # Not every string of Python's is one in UTF-8, as which the names are kept.
            name = ".".join(path).encode(errors="backslashreplace").decode()
            while name in self.tensors or name in self._reserved:
                name += "'"
            self.tensors[name] = tensor
            self._names[same] = name
        return self._names[same]


def restore(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    """The state of which `flatten` made these; ValueError says what is no such tree."""
    with _no_deeper():
        return _restore(tree, tensors)


def _restore(tree: Tree, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_restore(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    mark = next((key for key in tree if key.startswith("$")), None)
    if mark is None:
        return {key: _restore(item, tensors) for key, item in tree.items()}
    content = tree[mark]
    if len(tree) == 1:
        if mark == "$tensor" and isinstance(content, str) and content in tensors:
            return tensors[content]
        if mark == "$float" and isinstance(content, str) and content in FLOATS:
            return FLOATS[content]
        if mark == "$tuple" and isinstance(content, list):
            return tuple(_restore(item, tensors) for item in content)
        if mark == "$dict" and _is_pairs(content):
            return {key: _restore(item, tensors) for key, item in content}
    raise ValueError(f"{tree!r:.200} is nothing that a state holds")


def _is_pairs(content: Any) -> bool:
    if not isinstance(content, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        return False
    keys = [key for key, _ in content]
    return all(isinstance(key, str) or type(key) is int for key in keys) and len(set(keys)) == len(keys)


def _place(path: tuple[str, ...]) -> str:
    return ".".join(path) or "the state"
