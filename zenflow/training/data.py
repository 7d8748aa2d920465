"""From text to batches, in an order that depends on nothing but the seed and the position."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from zenflow.training.errors import InputError
from zenflow.training.schema import DataConfig
from zenflow.training.sources import Documents, Labelled, Responses, read
from zenflow.training.tokenizer import Tokenizer

log = logging.getLogger(__name__)
PAD_TO = 8  # tokens: few distinct batch shapes
IGNORED = -100  # the label of a token that is not to be predicted


@dataclass(frozen=True)
class Batch:
    """`input_ids`, `attention_mask`, and `token_types` of text pairs, int64 `[batch, length]`.

    `labels`: classes int64 `[batch]`, numbers float32 `[batch]`, or of a language model int64 `[batch, length]`: the
    token after the position, or `IGNORED`. `tokens` counts the real ones, `targets` the labels that are not ignored.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor
    tokens: int
    targets: int
    token_types: Tensor | None = None

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """What the model takes."""
        inputs = (self.input_ids, self.attention_mask)
        return inputs if self.token_types is None else (*inputs, self.token_types)

    def to(self, device: torch.device) -> Batch:
        """The same on `device`; the copy does not wait for work that is queued there."""
        parts = (self.input_ids, self.attention_mask, self.labels, self.token_types)
        if device.type == "cuda":
            parts = tuple(None if part is None else part.pin_memory() for part in parts)
        ids, mask, labels, types = (None if part is None else part.to(device, non_blocking=True) for part in parts)
        return Batch(ids, mask, labels, self.tokens, self.targets, types)


class Samples(Protocol):
    """A fixed list of samples that can be put into batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: list[int]) -> Batch:
        """The samples of these numbers as one batch."""


def _padded(rows: list[list[int]], value: int) -> Tensor:
    length = -(-max(map(len, rows)) // PAD_TO) * PAD_TO
    return torch.tensor([row + [value] * (length - len(row)) for row in rows])


def _mask(rows: list[list[int]]) -> Tensor:
    return _padded([[1] * len(row) for row in rows], 0)


class LabelledSamples:
    """Tokenised texts with a class, or a number, each; a batch is padded to its longest text.

    `types` are the token types of text pairs, as long as the texts.
    """

    def __init__(
        self,
        sequences: list[list[int]],
        labels: list[int] | list[float],
        pad: int,
        types: list[list[int]] | None = None,
    ) -> None:
        self._sequences, self._labels, self._pad, self._types = sequences, labels, pad, types

    def __len__(self) -> int:
        return len(self._sequences)

    def batch(self, indices: list[int]) -> Batch:
        rows = [self._sequences[index] for index in indices]
        types = None if self._types is None else _padded([self._types[index] for index in indices], 0)
        labels = torch.tensor([self._labels[index] for index in indices])
        return Batch(_padded(rows, self._pad), _mask(rows), labels, sum(map(len, rows)), len(rows), types)


class ResponseSamples:
    """Prompts with the responses that a language model is to learn; a batch is padded to its longest sample.

    A row is the prompt's tokens and then the response's; `prompts` are the lengths of the first part.
    """

    def __init__(self, rows: list[list[int]], prompts: list[int], pad: int) -> None:
        assert all(0 < prompt < len(row) for row, prompt in zip(rows, prompts, strict=True))
        self._rows, self._prompts, self._pad = rows, prompts, pad

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: list[int]) -> Batch:
        rows, prompts = ([part[index] for index in indices] for part in (self._rows, self._prompts))
        inputs = [row[:-1] for row in rows]
        labels = [[IGNORED] * (start - 1) + row[start:] for row, start in zip(rows, prompts, strict=True)]
        targets = sum(map(len, rows)) - sum(prompts)
        # Padding is found by length and never by its number, which may be that of the token that ends a response.
        return Batch(
            _padded(inputs, self._pad), _mask(inputs), _padded(labels, IGNORED), sum(map(len, inputs)), targets
        )


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
        return Batch(ids, torch.ones_like(ids), windows[:, 1:].contiguous(), tokens=ids.numel(), targets=ids.numel())


@dataclass(frozen=True)
class Dataset:
    """Training and held-out samples; `classes` is None for language modelling, and 1 where labels are numbers.

    `scores` names what is measured on the held-out samples besides the loss (`scores.SCORES`).
    """

    train: Samples
    held_out: Samples
    classes: int | None
    scores: tuple[str, ...] = ()


def load_data(config: DataConfig, tokenizer: Tokenizer) -> Dataset:
    """Read and tokenise. Errors: InputError where the text is missing, malformed or too short."""
    source = read(config)
    if isinstance(source, Labelled):
        train, held_out = (_labelled(part, tokenizer, config.max_length) for part in (source.train, source.held_out))
        return Dataset(train, held_out, source.classes, source.scores)
    if isinstance(source, Responses):
        return Dataset(*_responses(source, tokenizer, config), classes=None)
    return Dataset(*_streams(source, tokenizer, config), classes=None)


def _labelled(samples: list[tuple], tokenizer: Tokenizer, max_length: int) -> LabelledSamples:
    texts, labels = [text for text, _ in samples], [label for _, label in samples]
    if isinstance(texts[0], tuple):
        sequences, types = tokenizer.encode_pairs(texts, max_length)
        return LabelledSamples(sequences, labels, tokenizer.pad, types)
    return LabelledSamples(tokenizer.encode(texts, max_length), labels, tokenizer.pad)


def _responses(source: Responses, tokenizer: Tokenizer, config: DataConfig) -> list[ResponseSamples]:
    if tokenizer.end is None:
        raise InputError(
            f"The model's tokenizer has no end-of-text token (eos_token); data.kind={config.kind.name} ends responses "
            "with it: give a model whose tokenizer has one."
        )
    parts = (("training", source.train), ("held-out", source.held_out))
    return [_response_part(part, samples, tokenizer, config.max_length) for part, samples in parts]


def _response_part(part: str, samples: list[tuple[str, str]], tokenizer: Tokenizer, length: int) -> ResponseSamples:
    """The prompts' tokens as a prompt alone would have them, then the responses' and the token that ends a text.

    A row is cut at `length`, and a cut response has no end. Samples of whose response nothing is left are dropped.
    """
    prompts, responses = (tokenizer.encode_bare(list(texts)) for texts in zip(*samples, strict=True))
    rows, starts, empty = [], [], 0
    for prompt, response in zip(prompts, responses, strict=True):
        start = len(tokenizer.begin) + len(prompt)
        empty += not response
        if response and start < length:
            rows.append([*tokenizer.begin, *prompt, *response, tokenizer.end][:length])
            starts.append(start)
    if not rows:
        raise InputError(
            f"None of the {len(samples):,} {part} samples has a response within data.max_length={length} tokens; "
            "give a larger length."
        )
    if dropped := len(samples) - len(rows):
        what = "%d of %d %s samples are dropped: %d without a response, %d whose prompt fills data.max_length=%d"
        log.warning(what, dropped, len(samples), part, empty, dropped - empty, length)
    return ResponseSamples(rows, starts, tokenizer.pad)


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
