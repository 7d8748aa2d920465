"""Files that are whole or not there: written beside their place, then moved to it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zenflow.disk import replacing


def write(path: Path, content: bytes | str) -> None:
    """Write text as UTF-8, or bytes; whoever reads `path` meanwhile sees the old file.

    What UTF-8 has no bytes for, as in a folder's name that is no text, is written as \\udcff.
    """
    with replacing(path) as partial:
        partial.write_bytes(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """A header with every name that a row has, in order of appearance, and a line a row; None is empty."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(path, text.getvalue())


def remove_others(folder: Path, stems: Sequence[str], kept: Sequence[Path]) -> None:
    """Take away pictures of an older report: files named by one of `stems`, with a number or without, not in `kept`."""
    ours = re.compile(rf"({'|'.join(stems)})(-\d+)?\.(png|svg)")
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and path not in kept:
            path.unlink()
