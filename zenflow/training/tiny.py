"""A small causal transformer over bytes, which needs nothing installed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zenflow.training.errors import InputError

BYTES = 256
WEIGHTS = "weights.pt"


class TinyBlock(nn.Module):
    """Pre-norm causal attention and a feed-forward layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_feed = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """States `[batch, length, width]` to the same."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, heads, length, width / heads]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm_feed(x))


class TinyModel(nn.Module):
    """A causal transformer over bytes with tied embedding and head, random weights.

    With `checkpointing` set, training keeps each block's input alone and computes the rest again in backward.
    """

    def __init__(self, width: int, layers: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.sizes = {"width": width, "layers": layers, "heads": heads, "max_length": max_length}
        self.checkpointing = False
        self.embedding, self.position = nn.Embedding(BYTES, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[batch, length, 256]`; padding comes last, where no real token looks, so the mask is unused."""
        x = self.embedding(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
        return self.head(self.norm(x))


def load_tiny(folder: Path, max_length: int) -> TinyModel:
    """A saved tiny model in fp32, of the size that it was saved with. Errors: InputError."""
    try:
        model = TinyModel(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(read_weights(folder / WEIGHTS))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{folder} cannot be loaded as a tiny model: {reason}") from error
    if model.sizes["max_length"] < max_length:
        raise InputError(f"data.max_length is {max_length}; the model in {folder} takes {model.sizes['max_length']}.")
    return model


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors that `torch.save` left, on the CPU. Errors: ValueError where the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path.name} is damaged") from error
