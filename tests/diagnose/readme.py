"""What the README says, for the tests of the commands that it names."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")


def blocks(language: str = "") -> list[str]:
    """The code blocks in a language, or in none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    return [text for named, text in found if named == language]


def commands(program: str) -> list[list[str]]:
    """The words behind `program` in the lines of the code blocks, without remarks."""
    lines = [shlex.split(line, comments=True) for block in blocks() for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == [program]]
