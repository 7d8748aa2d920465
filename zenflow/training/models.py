"""Models: an encoder with a linear head, a causal language model, by path or by configuration, and a tiny one.

Every model maps `input_ids`, `attention_mask` (int64 `[batch, length]`) to logits: `[batch, classes]` for an encoder,
which takes the token types of text pairs too, and `[batch, length, vocabulary]` for a language model. `transformers`
(the extra `hf`) is imported only where it is used. Folders that `saving.save_model` left are loaded like any other.
"""

from __future__ import annotations

import difflib
import hashlib
import inspect
import logging
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zenflow import native
from zenflow.terminal import is_watched
from zenflow.training.errors import InputError
from zenflow.training.schema import ModelConfig, ModelKind, TokenizerKind
from zenflow.training.sources import package_folder
from zenflow.training.tiny import BYTES, WEIGHTS, TinyModel, load_tiny, read_weights
from zenflow.training.tokenizer import ByteTokenizer, PretrainedTokenizer, Tokenizer

log = logging.getLogger(__name__)
HEAD = "head.pt"  # of a classifier, beside its encoder
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.spm", "*.bpe", "*.tiktoken")


class Classifier(nn.Module):
    """A pretrained encoder, the mean of its last states over the real tokens, and one new linear layer."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(width, classes)
        known = getattr(getattr(encoder, "config", None), "type_vocab_size", None) or 0
        self._has_types = known > 1 and "token_type_ids" in inspect.signature(encoder.forward).parameters

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Logits `[batch, classes]`; `token_types` int64 `[batch, length]`, unused where the encoder has none."""
        types = {"token_type_ids": token_types} if self._has_types and token_types is not None else {}
        states = self.encoder(input_ids=input_ids, attention_mask=attention_mask, **types).last_hidden_state
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
    return _readable(PretrainedTokenizer, config)


def load_model(config: ModelConfig, *, classes: int | None, max_length: int, dtype: torch.dtype) -> nn.Module:
    """The model on the CPU in `dtype`; new layers take torch's current random state.

    Errors: InputError if the folder's files cannot be used.
    """
    if config.kind is ModelKind.tiny:
        if config.path is None:
            model = TinyModel(config.width, config.layers, config.heads, max_length)
        else:
            model = load_tiny(locate_model(config), max_length)
        model.checkpointing = config.checkpointing
        return model.to(dtype)
    if _is_random(config):
        model = CausalModel(_require_bytes(_random_model(config.config))).to(dtype)
    else:
        model = _readable(lambda folder: _load_pretrained(folder, config, classes, dtype), config)
    inner = model.model if isinstance(model, CausalModel) else model.encoder
    _require_positions(inner, max_length)
    if config.checkpointing:
        _enable_checkpointing(inner)
    return model


def _load_pretrained(folder: Path, config: ModelConfig, classes: int | None, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel, AutoModelForCausalLM

    if config.kind is ModelKind.causal:
        model = _load_whole(AutoModelForCausalLM, folder, dtype)
        return CausalModel(_require_bytes(model) if config.tokenizer is TokenizerKind.bytes else model)
    assert classes is not None
    encoder = _load_whole(AutoModel, folder, dtype)
    if getattr(encoder.config, "is_encoder_decoder", False):
        raise InputError(f"{folder} holds an encoder with a decoder; give a folder with an encoder alone.")
    model = Classifier(encoder, encoder.config.hidden_size, classes)
    if (folder / HEAD).is_file():
        head = read_weights(folder / HEAD)
        if head["bias"].numel() != classes:
            raise InputError(f"{folder / HEAD} has {head['bias'].numel()} classes, the data has {classes}.")
        model.head.load_state_dict(head)
    return model.to(dtype)


def _load_whole(kind: Any, folder: Path, dtype: torch.dtype) -> nn.Module:
    """The folder's model. Errors: InputError where weights are missing, which transformers would make up.

    An encoder's pooler is never used and may be missing.
    """
    model, found = kind.from_pretrained(folder, dtype=dtype, local_files_only=True, output_loading_info=True)
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith("pooler.")):
        raise InputError(
            f"{folder} lacks {len(missing)} of the weights of its {type(model).__name__}, {missing[0]} for one; give a "
            "folder with all of them."
        )
    return model


def _require_positions(model: nn.Module, max_length: int) -> None:
    known = getattr(model.config, "max_position_embeddings", None)
    if not isinstance(known, int) or known < 1:
        return
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
            known -= module.padding_idx + 1  # RoBERTa counts from behind its padding
    if known < max_length:
        raise InputError(f"data.max_length is {max_length}; the model takes up to {known} tokens.")


def _enable_checkpointing(model: nn.Module) -> None:
    """Non-reentrant: no weight is used after its gradient exists, which `upload: backward` needs."""
    if not model.supports_gradient_checkpointing:
        raise InputError(f"model.checkpointing is true; allowed for {type(model).__name__}: false.")
    # transformers renamed it; both take the same first argument.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


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
    from safetensors import SafetensorError
    from transformers.utils import logging as transformers_logging

    if not is_watched():
        transformers_logging.disable_progress_bar()
    folder = locate_model(config)
    try:
        return load(_converted(folder, config.gguf_file) if config.gguf_file else folder)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
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
