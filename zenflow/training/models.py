"""Models: an encoder with a linear head, a causal language model, by path or by configuration, and a tiny one.

Every model maps `input_ids`, `attention_mask` (int64 `[batch, length]`) to logits: `[batch, classes]` for an encoder,
`[batch, length, vocabulary]` for a language model. `transformers` (the extra `hf`) is imported only where it is used.
Folders that `saving.save_model` left are loaded like any other.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import pickle
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
from zenflow.training.schema import ModelConfig, ModelKind, TokenizerKind
from zenflow.training.sources import package_folder

log = logging.getLogger(__name__)
BYTES = 256
WEIGHTS, HEAD = "weights.pt", "head.pt"  # of the tiny model, and of a classifier beside its encoder
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.bpe", "*.tiktoken")


class Tokenizer(Protocol):
    """What the data needs to know of a model's tokenizer."""

    pad: int

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Token numbers of each text, special tokens included; cut at `max_length` where it is given."""

    def save(self, folder: Path) -> None:
        """Write what a later run needs to have the same tokenizer."""


class ByteTokenizer:
    """UTF-8 bytes as they are."""

    pad = 0

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        return [list(text.encode()[:max_length]) for text in texts]

    def save(self, folder: Path) -> None:
        """There is nothing to write."""


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

    def save(self, folder: Path) -> None:
        """The files of a Hugging Face tokenizer."""
        self._tokenizer.save_pretrained(folder)


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
        self.sizes = {"width": width, "layers": layers, "heads": heads, "max_length": max_length}
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
    if config.config and config.kind is not ModelKind.causal:
        raise InputError(f"model.config is {config.config}; allowed with model.kind={config.kind.name}: {{}}.")
    if config.kind is ModelKind.tiny and config.path is None:
        if min(config.width, config.layers, config.heads) < 1 or config.width % config.heads:
            raise InputError(
                f"model.width={config.width}, model.layers={config.layers}, model.heads={config.heads}: "
                "all must be at least 1, and the width a multiple of the heads."
            )
        return
    needed = [] if config.kind is ModelKind.tiny else ["transformers"]
    needed += ["gguf", "accelerate"] if config.gguf_file else []
    if missing := [name for name in needed if find_spec(name) is None]:
        raise InputError(f"This model needs {' and '.join(missing)}: pip install {' '.join(missing)}.")
    if _is_random(config):
        if "model_type" not in config.config:
            raise InputError("model.config has no model_type; give one, for example model_type: qwen2.")
        if config.tokenizer is not TokenizerKind.bytes:
            raise InputError("model.config comes without a tokenizer; allowed is model.tokenizer=bytes.")
        return
    folder = locate_model(config)
    wanted = [config.gguf_file or "config.json"] + ([WEIGHTS] if config.kind is ModelKind.tiny else [])
    for name in wanted:
        if not (folder / name).is_file():
            what = "the model folder of a run" if config.kind is ModelKind.tiny else "a Hugging Face model folder"
            raise InputError(f"{folder} holds no {name}; give {what} as model.path.")
    if config.kind is ModelKind.tiny or config.tokenizer is TokenizerKind.bytes or config.gguf_file:
        return
    # transformers makes an empty tokenizer of a folder that has none.
    if not any(file for pattern in TOKENIZER_FILES for file in folder.glob(pattern)):
        raise InputError(f"{folder} holds no tokenizer; give one, or model.tokenizer=bytes for a model over bytes.")


def _is_random(config: ModelConfig) -> bool:
    """Whether a Hugging Face model with random weights is asked for."""
    return bool(config.config) and config.path is None


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
    if config.kind is ModelKind.tiny or config.tokenizer is TokenizerKind.bytes:
        return ByteTokenizer()
    return _readable(lambda folder: PretrainedTokenizer(folder), config)


def load_model(config: ModelConfig, *, classes: int | None, max_length: int, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in `dtype`; new layers take torch's current random state.

    Errors: InputError if the folder's files cannot be used.
    """
    if config.kind is ModelKind.tiny:
        if config.path is None:
            return TinyModel(config.width, config.layers, config.heads, max_length).to(dtype)
        return _load_tiny(locate_model(config), max_length).to(dtype)
    if _is_random(config):
        return CausalModel(_require_bytes(_random_model(config.config))).to(dtype)
    return _readable(lambda folder: _load_pretrained(folder, config, classes, dtype), config)


def _load_pretrained(folder: Path, config: ModelConfig, classes: int | None, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM

    if config.kind is ModelKind.causal:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return CausalModel(_require_bytes(model) if config.tokenizer is TokenizerKind.bytes else model)
    assert classes is not None
    encoder = AutoModel.from_pretrained(folder, dtype=dtype, local_files_only=True)
    model = Classifier(encoder, encoder.config.hidden_size, classes)
    if (folder / HEAD).is_file():
        head = _read_weights(folder / HEAD)
        if head["bias"].numel() != classes:
            raise InputError(f"{folder / HEAD} has {head['bias'].numel()} classes, the data has {classes}.")
        model.head.load_state_dict(head)
    return model.to(dtype)


def _load_tiny(folder: Path, max_length: int) -> TinyModel:
    """A saved tiny model in fp32, of the size that it was saved with."""
    try:
        model = TinyModel(**json.loads((folder / "config.json").read_text(encoding="utf-8")))
        model.load_state_dict(_read_weights(folder / WEIGHTS))
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InputError(f"{folder} cannot be loaded as a tiny model: {reason}") from error
    if model.sizes["max_length"] < max_length:
        raise InputError(f"data.max_length is {max_length}; the model in {folder} takes {model.sizes['max_length']}.")
    return model


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise ValueError(f"{path.name} is damaged") from error


def _random_model(values: dict[str, Any]) -> nn.Module:
    """A Hugging Face causal model in fp32 of this configuration, from torch's current random state."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = dict(values)
    kind = settings.pop("model_type")
    _require_known("model.config.model_type", kind, list(CONFIG_MAPPING.keys()))
    try:
        known = list(CONFIG_MAPPING[kind]().to_dict())
        for name in settings:
            _require_known("model.config key", name, known)
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**settings))
    except InputError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, StrictDataclassError) as error:
        raise InputError(f"model.config makes no causal {kind}: {' '.join(str(error).split())[:200]}") from error


def _require_known(what: str, name: Any, known: list[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f"did you mean {close[0]}?" if close else "transformers knows no such."
        raise InputError(f"{what} is {name!r}: {hint}")


def _require_bytes(model: nn.Module) -> nn.Module:
    if (size := model.get_input_embeddings().num_embeddings) < BYTES:
        raise InputError(f"The model has a vocabulary of {size}; model.tokenizer=bytes needs at least {BYTES}.")
    return model


def _readable(load: Any, config: ModelConfig) -> Any:
    """`load(folder)`, with what Hugging Face raises for unusable files made one sentence."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    folder = locate_model(config)
    try:
        return load(_converted(folder, config.gguf_file) if config.gguf_file else folder)
    except InputError:
        raise
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
