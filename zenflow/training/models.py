"""Models by path: an encoder with a linear head, a causal language model, and a tiny one that needs no files.

Every model maps `input_ids`, `attention_mask` (int64 `[batch, length]`) to logits: `[batch, classes]` for an encoder,
`[batch, length, vocabulary]` for a language model. `transformers` (the extra `hf`) is imported only for real models.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from zenflow import native
from zenflow.training.errors import InputError
from zenflow.training.schema import ModelConfig, ModelKind
from zenflow.training.sources import package_folder

log = logging.getLogger(__name__)
BYTES = 256


class Tokenizer(Protocol):
    """What the data needs to know of a model's tokenizer."""

    pad: int

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Token numbers of each text, special tokens included; cut at `max_length` where it is given."""


class ByteTokenizer:
    """UTF-8 bytes as they are."""

    pad = 0

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        return [list(text.encode()[:max_length]) for text in texts]


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face folder; whole documents (no `max_length`) end with its end-of-text token."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._end = self._tokenizer.eos_token_id
        self.pad = next((token for token in (self._tokenizer.pad_token_id, self._end) if token is not None), 0)

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        if max_length is not None:
            return self._tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
        ids = self._tokenizer(texts, verbose=False)["input_ids"]
        return [row if self._end is None else [*row, self._end] for row in ids]


class Classifier(nn.Module):
    """A pretrained encoder, the mean of its last states over the real tokens, and one new linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[batch, classes]`."""
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        weight = attention_mask.unsqueeze(-1).to(states.dtype)  # [batch, length, 1]
        return self.head((states * weight).sum(dim=1) / weight.sum(dim=1))


class CausalModel(nn.Module):
    """A Hugging Face causal language model that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[batch, length, vocabulary]`."""
        return self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits


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
    """A causal transformer over bytes with tied embedding and head, random weights."""

    def __init__(self, width: int, layers: int, heads: int, max_length: int) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(BYTES, width), nn.Embedding(max_length, width)
        self.blocks = nn.ModuleList(TinyBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[batch, length, 256]`; the mask is all ones in running text, hence unused."""
        x = self.embedding(input_ids) + self.position.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def check_model(config: ModelConfig) -> None:
    """Errors: InputError if the model cannot be loaded here; nothing heavy is imported or read."""
    if config.kind is ModelKind.tiny:
        if min(config.width, config.layers, config.heads) < 1 or config.width % config.heads:
            raise InputError(
                f"model.width={config.width}, model.layers={config.layers}, model.heads={config.heads}: "
                "all must be at least 1, and the width a multiple of the heads."
            )
        return
    needed = ["transformers"] + (["gguf", "accelerate"] if config.gguf_file else [])
    if missing := [name for name in needed if find_spec(name) is None]:
        raise InputError(f"This model needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    folder = locate_model(config)
    wanted = config.gguf_file or "config.json"
    if not (folder / wanted).is_file():
        raise InputError(f"{folder} holds no {wanted}; give a Hugging Face model folder as model.path.")


def locate_model(config: ModelConfig) -> Path:
    """The model's folder. Errors: InputError if it is not there."""
    if config.path is not None:
        folder = Path(config.path).expanduser().absolute()
        if not folder.is_dir():
            raise InputError(f"model.path={config.path} is no folder (as {folder}); give a Hugging Face model folder.")
        return folder
    if config.package is None:
        raise InputError("The model has no weights yet: give a Hugging Face model folder as model.path.")
    return package_folder(config.package, "This model") / config.subfolder


def load_tokenizer(config: ModelConfig) -> Tokenizer:
    """The tokenizer that belongs to the model. Errors: InputError if the folder's files cannot be used."""
    if config.kind is ModelKind.tiny:
        return ByteTokenizer()
    return _readable(lambda folder: PretrainedTokenizer(folder), config)


def load_model(config: ModelConfig, *, classes: int | None, max_length: int, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in `dtype`; new layers take torch's current random state.

    Errors: InputError if the folder's files cannot be used.
    """
    if config.kind is ModelKind.tiny:
        return TinyModel(config.width, config.layers, config.heads, max_length).to(dtype)
    return _readable(lambda folder: _load_pretrained(folder, config, classes, dtype), config)


def _load_pretrained(folder: Path, config: ModelConfig, classes: int | None, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM

    if config.kind is ModelKind.causal:
        return CausalModel(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True))
    assert classes is not None
    encoder = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return Classifier(encoder, encoder.config.hidden_size, classes).to(dtype)


def _readable(load: Any, config: ModelConfig) -> Any:
    """`load(folder)`, with what Hugging Face raises for unusable files made one sentence."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    folder = locate_model(config)
    try:
        return load(_converted(folder, config.gguf_file) if config.gguf_file else folder)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{folder} cannot be loaded as a model: {reason}") from error


def _converted(folder: Path, gguf_file: str) -> Path:
    """The same model as safetensors, from the cache or made now; renamed into place, so it is whole or absent."""
    with open(folder / gguf_file, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:16]
    target = native.cache_folder() / "models" / f"{Path(gguf_file).stem}-{digest}"
    if target.is_dir():
        return target
    from transformers import AutoModelForCausalLM, AutoTokenizer

    log.info("converting %s once (half a minute for 100 MB), into %s", gguf_file, target)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        AutoTokenizer.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True).save_pretrained(made)
        quantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf_file, local_files_only=True)
        # transformers refuses to save a model that remembers its quantisation: the weights go into one that does not.
        settings = quantised.config.to_dict()
        del settings["quantization_config"]
        model = AutoModelForCausalLM.from_config(type(quantised.config)(**settings))
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(made)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # else another run was quicker
                raise
    return target
