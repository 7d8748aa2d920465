"""From text to batches, in an order that depends on nothing but the seed and the position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from zenflow.training.errors import InputError
from zenflow.training.models import Tokenizer
from zenflow.training.schema import DataConfig
from zenflow.training.sources import Documents, Labelled, read

PAD_TO = 8  # tokens: few distinct batch shapes


@dataclass(frozen=True)
class Batch:
    """`input_ids`, `attention_mask` int64 `[batch, length]`; `labels` int64 `[batch]` or `[batch, length]`.

    A language model's label at a position is the token after it. `tokens` counts the real ones.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int

    def to(self, device: torch.device) -> Batch:
        """The same on `device`; the copy does not wait for work that is queued there."""
        parts = (self.input_ids, self.attention_mask, self.labels)
        if device.type == "cuda":
            parts = tuple(part.pin_memory() for part in parts)
        return Batch(*(part.to(device, non_blocking=True) for part in parts), tokens=self.tokens)


class Samples(Protocol):
    """A fixed list of samples that can be put into batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> Batch:
        """The samples of these numbers as one batch."""


class LabelledSamples:
    """Tokenised texts with a class each; a batch is padded to its longest text."""

    def __init__(self, sequences: list[list[int]], labels: list[int], pad: int) -> None:
        self._sequences, self._labels, self._pad = sequences, labels, pad

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, indices: list[int]) -> Batch:
        rows = [self._sequences[index] for index in indices]
        length = -(-max(map(len, rows)) // PAD_TO) * PAD_TO
        ids = torch.tensor([row + [self._pad] * (length - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
        labels = torch.tensor([self._labels[index] for index in indices])
        return Batch(ids, mask, labels, tokens=sum(map(len, rows)))


class Stream:
    """Running text cut into samples of `length` tokens, each with the tokens that follow as labels."""

    def __init__(self, tokens: Tensor, length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._length)

    def batch(self, indices: list[int]) -> Batch:
        starts = torch.tensor(indices) * self._length
        windows = self._tokens[starts.unsqueeze(1) + torch.arange(self._length + 1)].long()  # [batch, length + 1]
        ids = windows[:, :-1].contiguous()
        return Batch(ids, torch.ones_like(ids), windows[:, 1:].contiguous(), tokens=ids.numel())


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples; `classes` is None for language modelling."""

    train: Samples
    held_out: Samples
    classes: int | None


def load_data(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Read and tokenise. Errors: InputError where the text is missing, malformed or too short."""
    source = read(config)
    if isinstance(source, Labelled):
        train, held_out = (_labelled(part, tokenizer, config.max_length) for part in (source.train, source.held_out))
        return Dataset(train, held_out, source.classes)
    return Dataset(*_streams(source, tokenizer, config), classes=None)


def _labelled(samples: list[tuple[str, int]], tokenizer: Tokenizer, max_length: int) -> LabelledSamples:
    sequences = tokenizer.encode([text for text, _ in samples], max_length)
    return LabelledSamples(sequences, [label for _, label in samples], tokenizer.pad)


def _streams(source: Documents, tokenizer: Tokenizer, config: DataConfig) -> tuple[Stream, Stream]:
    streams = []
    for part, texts in (("training", source.train), ("held-out", source.held_out)):
        tokens = [token for row in tokenizer.encode(texts) for token in row]
        streams.append(Stream(torch.tensor(tokens, dtype=torch.int32), config.max_length))
        if len(streams[-1]) == 0:
            raise InputError(
                f"The {part} text has {len(tokens)} tokens; data.max_length={config.max_length} needs at least "
                f"{config.max_length + 1}: give more text, a smaller length or another data.held_out."
            )
    return streams[0], streams[1]


class Order:
    """Which sample comes at which position: a new permutation of all samples each epoch.

    A position fixes its sample, so a run can be taken up anywhere.
    """

    def __init__(self, samples: int, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def _permute(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self._samples, generator=generator).tolist()

    def take(self, position: int, count: int) -> list[int]:
        """The numbers of `count` samples from `position` on."""
        pairs = (divmod(place, self._samples) for place in range(position, position + count))
        return [self._permutation(epoch)[offset] for epoch, offset in pairs]


def evaluation_batches(samples: Samples, limit: int, batch_size: int) -> Iterator[Batch]:
    """The same first `limit` samples every time, in order."""
    numbers = range(min(limit, len(samples)))
    for start in range(0, len(numbers), batch_size):
        yield samples.batch(list(numbers[start : start + batch_size]))
