"""Lines, tables and JSON from files; a file that cannot be used is one sentence with the line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zenflow.training.errors import InputError


def read_text(path: Path) -> str:
    """The file as it is, less a byte-order mark. Errors: InputError where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}."
        ) from error


def read_lines(path: Path) -> list[str]:
    """Lines end with a line feed, with or without a carriage return before it, and with nothing else.

    `str.splitlines` would also end them at characters that texts hold, U+2028 for one.
    """
    lines = [line.removesuffix("\r") for line in read_text(path).split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


def json_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each object of a JSON list or of a file with one object a line, with its place, for example `line 3`.

    Errors: InputError, also where there is none.
    """
    records = _listed(path) if path.suffix != ".jsonl" and read_text(path).lstrip()[:1] == "[" else _by_line(path)
    place = None
    for place, record in records:
        if not isinstance(record, dict):
            raise InputError(f"{path}, {place}: expected an object, got {json.dumps(record)[:60]}.")
        yield place, record
    if place is None:
        raise InputError(f"{path} holds no lines.")


def _by_line(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            try:
                yield f"line {number}", json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}.") from error


def _listed(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path}, line {error.lineno} is not JSON: {error.msg} at column {error.colno}.") from error
    for number, record in enumerate(records, start=1):
        yield f"sample {number}", record


def value_of(record: dict[str, Any], name: str, path: Path, place: str) -> Any:
    """One field. Errors: InputError if it is not there."""
    if name not in record:
        raise InputError(f"{path}, {place} has no field {name!r}; it has {', '.join(record) or 'none'}.")
    return record[name]


def text_of(record: dict[str, Any], name: str, path: Path, place: str) -> str:
    """One field that holds text. Errors: InputError if it is not there or is none."""
    text = value_of(record, name, path, place)
    if not isinstance(text, str):
        raise InputError(f"{path}, {place}: {name} is {json.dumps(text)[:60]}; it must be a string.")
    return text
