"""Tokenizers: of a Hugging Face folder, and of bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from zenflow.training.errors import InputError

Pair = tuple[str, str]


class Tokenizer(Protocol):
    """What the data needs to know of a model's tokenizer: the numbers that pad a row, begin a text and end one."""

    pad: int
    begin: Sequence[int]
    end: int | None

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        """Token numbers of each text, special tokens included; cut at `max_length` where it is given."""

    def encode_bare(self, texts: list[str]) -> list[list[int]]:
        """Token numbers of each text without special tokens, uncut."""

    def encode_pairs(self, pairs: list[Pair], max_length: int) -> tuple[list[list[int]], list[list[int]] | None]:
        """Both texts of each pair as one row, the longer one cut first, and the types of its tokens if it has any."""

    def save(self, folder: Path) -> None:
        """Write what a later run needs to have the same tokenizer."""


class ByteTokenizer:
    """UTF-8 bytes as they are; byte 0, which texts do not have, ends a text and parts a pair."""

    pad = 0
    end = 0
    begin: tuple[int, ...] = ()

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        return [list(text.encode()[:max_length]) for text in texts]

    def encode_bare(self, texts: list[str]) -> list[list[int]]:
        return self.encode(texts)

    def encode_pairs(self, pairs: list[Pair], max_length: int) -> tuple[list[list[int]], None]:
        rows = []
        for first, second in pairs:
            a, b, room = first.encode(), second.encode(), max_length - 1
            kept = min(len(b), max(room // 2, room - len(a)))  # of the second
            rows.append([*a[: room - kept], self.end, *b[:kept]])
        return rows, None

    def save(self, folder: Path) -> None:
        """There is nothing to write."""


class PretrainedTokenizer:
    """The tokenizer of a Hugging Face folder; whole documents (no `max_length`) end with its end-of-text token.

    Rows are padded with its padding token, or where it has none that the model knows, with the one that ends a text.
    Errors: InputError at a token that is not among the model's (`vocab_size` in config.json).
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._size = _vocabulary(folder)
        self.end = self._tokenizer.eos_token_id
        paddings = (self._tokenizer.pad_token_id, self.end)
        self.pad = next((token for token in paddings if token is not None and self._knows(token)), 0)
        self.begin = [token for token in self._tokenizer("")["input_ids"] if token != self.end]

    def _knows(self, token: int) -> bool:
        return self._size is None or token < self._size

    def encode(self, texts: list[str], max_length: int | None = None) -> list[list[int]]:
        if max_length is not None:
            return self._rows(texts, truncation=True, max_length=max_length)["input_ids"]
        ids = self._rows(texts, verbose=False)["input_ids"]
        return [row if self.end is None or row[-1:] == [self.end] else [*row, self.end] for row in ids]

    def encode_bare(self, texts: list[str]) -> list[list[int]]:
        return self._rows(texts, verbose=False, add_special_tokens=False)["input_ids"]

    def encode_pairs(self, pairs: list[Pair], max_length: int) -> tuple[list[list[int]], list[list[int]] | None]:
        first, second = (list(texts) for texts in zip(*pairs, strict=True))
        found = self._rows(first, second, truncation=True, max_length=max_length)
        return found["input_ids"], found.get("token_type_ids")

    def _rows(self, *texts: list[str], **settings: Any) -> dict[str, list[list[int]]]:
        found = self._tokenizer(*texts, return_attention_mask=False, **settings)
        for row in found["input_ids"]:
            if row and not self._knows(max(row)):
                word = self._tokenizer.convert_ids_to_tokens(max(row))
                raise InputError(
                    f"The tokenizer in {self._folder} gives token {max(row)} ({word!r}); the model knows 0 to "
                    f"{self._size - 1} (vocab_size in its config.json): give a folder whose model and tokenizer match."
                )
        return found

    def save(self, folder: Path) -> None:
        """The files of a Hugging Face tokenizer."""
        self._tokenizer.save_pretrained(folder)


def _vocabulary(folder: Path) -> int | None:
    """The model's `vocab_size`, None where its configuration does not say so plainly."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config["vocab_size"] if isinstance(config.get("vocab_size"), int) else None
