"""A run's final weights as a folder from which another run starts (`model.path`)."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow.disk import DiskFullError, check_room, room_for, sync, sync_all
from zenflow.export import with_masters
from zenflow.terminal import is_watched
from zenflow.training.errors import InputError
from zenflow.training.models import HEAD, CausalModel, Classifier
from zenflow.training.tiny import WEIGHTS, TinyModel
from zenflow.training.tokenizer import Tokenizer


def save_model(model: nn.Module, tokenizer: Tokenizer, master: Callable[[Parameter], Tensor], folder: Path) -> None:
    """Write the weights in fp32 to `folder`, which must not exist; whole or absent, also after a power cut.

    `master` gives a weight's fp32 value on the CPU (`Engine.master`, after `flush`). A Hugging Face model becomes an
    ordinary model folder (safetensors), a classifier's head lies beside it, and the tiny model is torch's format.
    DiskFullError where the disk has not room for the weights.
    """
    needed = _bytes_of(model)
    check_room(folder, needed)
    with room_for(folder, needed), tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
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
        sync_all(made)
        made.rename(folder)
        sync(folder.parent)


def check_room_for_model(model: nn.Module, folder: Path) -> None:
    """InputError unless the disk of a coming run's folder has room for the weights that it will leave there."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    try:
        check_room(place / "model", _bytes_of(model))
    except DiskFullError as error:
        raise InputError(f"save_model in {folder}: {error.strerror}; give another folder as hydra.run.dir.") from error


def _bytes_of(model: nn.Module) -> int:
    """What the weights of a saved model take on the disk, and hardly more."""
    return 4 * sum(weight.numel() for weight in model.parameters())


def _save_pretrained(model: nn.Module, master: Callable[[Parameter], Tensor], folder: Path) -> None:
    """Through an fp32 twin without memory of its own, since what is written as the type is that of the module."""
    from transformers.utils import logging as transformers_logging

    if not is_watched():
        transformers_logging.disable_progress_bar()
    with torch.device("meta"):
        twin = type(model)(copy.deepcopy(model.config))
    twin.load_state_dict(with_masters(model, master), assign=True)
    twin.tie_weights()
    twin.save_pretrained(folder)
