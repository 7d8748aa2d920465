"""Forms that a state may have and a manifest must not: each is kept, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.units.states import assert_same, rewrite
from zenflow.checkpoint_folder import CheckpointError, load, read_manifest, save
from zenflow.export import save_weights


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def endless() -> dict[str, Any]:
    value: dict[str, Any] = {"tensor": torch.ones(1)}
    value["itself"] = value
    return value


@pytest.mark.parametrize("make", [lambda: nested(5000), endless], ids=["deep", "endless"])
@pytest.mark.parametrize("where", ["state", "configuration"])
def test_what_has_no_reachable_bottom_is_refused(where: str, make: Callable[[], Any], tmp_path: Path) -> None:
    state, configuration = ({"x": make()}, {}) if where == "state" else ({}, {"x": make()})
    with pytest.raises(ValueError, match="nested too deeply, or that holds itself"):
        save(tmp_path / "saved", state, configuration=configuration)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "__metadata__", "a.b", "\ud800", "a\udcffb", "\\ud800", "é\n", "x\0y", "$tensor"])
def test_a_tensor_comes_back_under_any_name(name: str, tmp_path: Path) -> None:
    """Also one that UTF-8 has no bytes for, as file names that Python has read may be."""
    state = {name: torch.ones(2), "\\ud800 too": torch.zeros(3), "a": {"b": torch.zeros(1)}}
    save(tmp_path / "saved", state)
    assert_same(load(tmp_path / "saved"), state)


STRIDES: dict[str, Callable[[], torch.Tensor]] = {
    "every-other": lambda: torch.arange(6.0)[1::2],
    "one-of-them": lambda: torch.arange(6.0)[1::2][:1],
    "one-by-one": lambda: torch.arange(12.0).view(3, 4)[1:2, 2:3],
    "imaginary": lambda: torch.tensor([1 + 2j]).imag,
    "conjugate": lambda: torch.tensor([1 + 2j]).conj(),
    "expanded": lambda: torch.ones(1, 1).expand(3, 2),
    "transposed": lambda: torch.arange(6.0).view(2, 3).t(),
    "scalar-of-a-row": lambda: torch.arange(6.0, dtype=torch.bfloat16)[3],
    "none-of-them": lambda: torch.arange(6.0)[::2][:0],
}


@pytest.mark.parametrize("name", STRIDES)
def test_a_tensor_may_lie_in_memory_as_it_likes(name: str, tmp_path: Path) -> None:
    tensor = STRIDES[name]()
    state = {"x": tensor, "flag": torch.tensor([True])}
    save(tmp_path / "saved", state)
    assert_same(load(tmp_path / "saved"), {**state, "x": torch.tensor(tensor.tolist(), dtype=tensor.dtype)})
    save_weights(tmp_path / "weights", state)
    assert torch.equal(load_file(tmp_path / "weights")["x"], tensor)


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": True}, "version True; this program reads version 1"),
    "tensors": ({"shards": [{"tensors": ["x", 1]}]}, r"names tensors of shard-00001.safetensors as \['x', 1\]"),
    "tensors-nested": ({"shards": [{"tensors": [["x"], {}]}]}, "names tensors of shard-00001.safetensors as"),
    "tree": ({"tree": {"x": nested(600)}}, "nested too deeply"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved", {"x": torch.ones(3)}, configuration={"topk_ratio": 0.1})
    return tmp_path / "saved"


@pytest.mark.parametrize("name", FORGED)
def test_a_manifest_of_another_form_is_refused_by_name(name: str, saved: Path) -> None:
    """With the hash that belongs to it."""
    change, words = FORGED[name]

    def forge(body: dict[str, Any]) -> None:
        for key, value in change.items():
            if key == "shards":
                body[key][0].update(value[0])
            else:
                body[key] = value

    rewrite(saved, forge)
    with pytest.raises(CheckpointError, match=words) as refusal:
        load(saved)
    assert str(saved) in str(refusal.value)


def test_a_configuration_of_another_form_is_refused_by_name(saved: Path) -> None:
    rewrite(saved, lambda body: body.update(configuration={"x": nested(600)}))
    with pytest.raises(CheckpointError, match="configuration in .* cannot be read.*nested too deeply"):
        read_manifest(saved)


def test_numbers_that_json_has_not_are_damage(saved: Path) -> None:
    path = saved / "manifest.json"
    assert "0.1" in path.read_text()
    path.write_text(path.read_text().replace("0.1", "NaN"))
    assert json.loads(path.read_text())
    with pytest.raises(CheckpointError, match="is damaged"):
        load(saved)
