"""A run's final weights as a folder from which another run starts (`model.path`)."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow.export import with_masters
from zenflow.training.models import HEAD, CausalModel, Classifier
from zenflow.training.tiny import WEIGHTS, TinyModel
from zenflow.training.tokenizer import Tokenizer


def save_model(model: nn.Module, tokenizer: Tokenizer, master: Callable[[Parameter], Tensor], folder: Path) -> None:
    """Write the weights in fp32 to `folder`, which must not exist; renamed into place, so it is whole or absent.

    `master` gives a weight's fp32 value on the CPU (`Engine.master`, after `flush`). A Hugging Face model becomes an
    ordinary model folder (safetensors), a classifier's head lies beside it, and the tiny model is torch's format.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        made = Path(scratch) / folder.name
        made.mkdir()
        tokenizer.save(made)
        if isinstance(model, TinyModel):
            (made / "config.json").write_text(json.dumps(model.sizes, indent=2), encoding="utf-8")
            torch.save(with_masters(model, master), made / WEIGHTS)
        elif isinstance(model, CausalModel):
            _save_pretrained(model.model, master, made)
        else:
            assert isinstance(model, Classifier)
            _save_pretrained(model.encoder, master, made)
            torch.save(with_masters(model.head, master), made / HEAD)
        made.rename(folder)


def _save_pretrained(model: nn.Module, master: Callable[[Parameter], Tensor], folder: Path) -> None:
    """Through an fp32 twin without memory of its own, since what is written as the type is that of the module."""
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    twin.load_state_dict(with_masters(model, master), assign=True)
    twin.tie_weights()
    twin.save_pretrained(folder)
