"""Weights in full precision: the fp32 masters of a whole model, as a state dict and as a safetensors file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from tests.durability import assert_durable, watch_disk
from tests.engine.driving import Builder, assert_same_bits
from tests.shortages import files_up_to
from zenflow import ZenFlow
from zenflow.disk import DiskFullError
from zenflow.export import save_weights


class Model(nn.Module):
    """Tied weights, a frozen layer, buffers, a layer without gradients and one that is smaller than a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("scale", torch.ones(3))
        self.unused = nn.Linear(3, 5)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.tanh(self.frozen(self.embedding(tokens)))))


@pytest.fixture
def trained(device: str, build: Builder) -> tuple[Model, ZenFlow]:
    torch.manual_seed(0)
    model = Model().to(device, torch.bfloat16)
    model.scale = torch.full((3,), 1 / 3, dtype=torch.float64, device=device)
    engine = build(model.parameters(), lr=0.01, topk_ratio=0.3, update_interval=2)
    tokens = torch.arange(11, device=device)
    for _ in range(3):
        torch.nn.functional.cross_entropy(model(tokens).float(), tokens.roll(1)).backward()
        engine.step()
        engine.zero_grad()
    engine.flush()
    return model, engine


def test_masters_take_the_place_of_weights(trained: tuple[Model, ZenFlow]) -> None:
    """And round to them; everything else is as it is."""
    model, engine = trained
    exported = engine.export_weights(model)
    state = model.state_dict()
    assert list(exported) == list(state)
    assert exported["head.weight"] is exported["embedding.weight"]
    moved = 0
    for name, parameter in model.named_parameters():
        assert (exported[name].dtype, exported[name].device.type) == (torch.float32, "cpu")
        assert_same_bits(exported[name].to(torch.bfloat16), state[name].cpu(), name)
        if parameter.requires_grad:
            assert_same_bits(exported[name], engine.channel_state(parameter).master.view(parameter.shape), name)
            moved += not torch.equal(exported[name], state[name].cpu().float())
    assert moved >= 3  # what rounding to bf16 would have lost
    for name, buffer in model.named_buffers():
        assert_same_bits(exported[name], buffer.cpu(), name)


def test_the_export_is_a_copy(trained: tuple[Model, ZenFlow]) -> None:
    model, engine = trained
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for tensor in engine.export_weights(model).values():
        tensor.zero_()
    for name, tensor in model.state_dict().items():
        assert_same_bits(tensor, before[name], name)


def test_the_file_loads_into_an_fp32_model_still_tied(trained: tuple[Model, ZenFlow], tmp_path: Path) -> None:
    model, engine = trained
    exported = engine.export_weights(model)
    (tmp_path / "model.safetensors").write_text("an older file")
    save_weights(tmp_path / "model.safetensors", exported)
    assert "head.weight" not in load_file(tmp_path / "model.safetensors")
    fresh = Model()
    fresh.scale = fresh.scale.double()
    missing, unexpected = load_model(fresh, tmp_path / "model.safetensors")
    assert not missing and not unexpected
    assert fresh.head.weight is fresh.embedding.weight
    for name, tensor in fresh.state_dict().items():
        assert_same_bits(tensor, exported[name], name)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_full_disk_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_weights(path, {"weight": torch.ones(3)})
    words = r"[\d,]+ bytes needed, [\d,]+ available.*model\.safetensors"
    with files_up_to(4096), pytest.raises(DiskFullError, match=words):
        save_weights(path, {"weight": torch.ones(4096)})
    with pytest.raises(DiskFullError, match=words):
        save_weights(path, {"weight": torch.ones(1).expand(2**50)})
    with pytest.raises(ValueError, match="weight is torch.complex128"):
        save_weights(path, {"weight": torch.ones(1, dtype=torch.complex128)})
    assert load_file(path)["weight"].tolist() == [1, 1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_what_is_no_tensor_is_named(trained: tuple[Model, ZenFlow]) -> None:
    model, engine = trained

    class WithExtra(nn.Module):
        def get_extra_state(self) -> str:
            return "words"

    model.more = WithExtra()
    with pytest.raises(ValueError, match=r"more\._extra_state is a str"):
        engine.export_weights(model)


def test_a_file_of_weights_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_disk(monkeypatch)
    save_weights(tmp_path / "model.safetensors", {"x": torch.ones(3)})
    assert_durable(calls, tmp_path / "model.safetensors")
