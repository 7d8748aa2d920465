"""A model's weights in full precision: fp32 masters, and as one safetensors file."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from zenflow import safetensors_file
from zenflow.channel_state import full_master
from zenflow.disk import check_room, replacing, room_for, sync
from zenflow.pipeline import Pipeline


def full_precision(pipeline: Pipeline, model: nn.Module) -> dict[str, Tensor]:
    """`with_masters`, all in memory of its own; weights without a state are given in fp32 as they are. Waits for the
    worker."""
    pipeline.wait_for_worker()
    records = {id(record.param): record for record in pipeline.records}

    def master(weight: Parameter) -> Tensor:
        record = records.get(id(weight))
        return weight.detach().to("cpu", torch.float32, copy=True) if record is None else full_master(record)

    return with_masters(model, master)


def with_masters(model: nn.Module, master: Callable[[Parameter], Tensor]) -> dict[str, Tensor]:
    """`model.state_dict()` on the CPU, with `master(weight)` for each weight and buffers in their own dtype.

    Names that share a weight share its master. ValueError names what is no tensor.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    masters: dict[int, Tensor] = {}
    state = {}
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__} in the model's state; allowed are tensors")
        weight = weights.get(name)
        if weight is None:
            state[name] = tensor.to("cpu", copy=True)
            continue
        if id(weight) not in masters:
            masters[id(weight)] = master(weight).view(weight.shape)
        state[name] = masters[id(weight)]
    return state


def save_weights(path: str | os.PathLike[str], weights: Mapping[str, Tensor]) -> None:
    """Write a state dict as the safetensors file `path`, whole or not at all; one that is there is replaced.

    Of names that share a tensor only the first is in the file, and its metadata has the others, as
    `safetensors.torch.load_model` and Hugging Face's models expect. ValueError names a dtype that such a file cannot
    hold; DiskFullError says how many bytes are needed and available, and leaves the old file.
    """
    path = Path(path)
    first: dict[int, str] = {}
    for name, tensor in weights.items():
        first.setdefault(id(tensor), name)
    kept = {name: weights[name] for name in first.values()}
    safetensors_file.check_dtypes(kept)
    aliases = {name: first[id(tensor)] for name, tensor in weights.items() if first[id(tensor)] != name}
    metadata = safetensors_file.METADATA | aliases
    needed = safetensors_file.file_bytes(kept, metadata)
    check_room(path, needed)
    with room_for(path, needed), replacing(path) as partial:
        safetensors_file.write(partial, kept, metadata)
    sync(path.parent)
