"""What every measurement that writes a folder has: the folder, the facts about the machine, the tests before it."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from zenflow.bench.machine import facts
from zenflow.bench.proof import Proof, prove
from zenflow.command_line import as_typed

PLACE = ("--out", "--commit")  # options with one value, of how the result is kept


def what_is_measured(words: Sequence[str]) -> list[str]:
    """The command line's words, which argparse has taken, without those of `PLACE`."""
    left, rest = [], iter(words)
    for word in rest:
        name, with_value, _ = word.partition("=")
        if name not in PLACE:
            left.append(word)
        elif not with_value:
            next(rest)
    return left


class Session:
    """A run of `zenflow-bench`, with its arguments `out`, `commit`, `words` and, where it proves anything, `tests`."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        started = datetime.now().astimezone()
        self.folder: Path = args.out or Path("bench-results") / f"{started:%Y-%m-%d_%H-%M-%S}"
        self.folder.mkdir(parents=True, exist_ok=True)
        command = as_typed(["zenflow-bench", *what_is_measured(args.words)])
        self.facts = facts() | {"command": command, "date": f"{started:%Y-%m-%d %H:%M:%S %z}"}
        self.facts["commit"] = args.commit or self.facts["commit"]
        self.proof = Proof(False, False, "the tests have not run yet")

    def say(self, line: str) -> None:
        """A line of progress, beside the tables."""
        print(line, file=sys.stderr, flush=True)

    def prove(self, memory: str) -> None:
        """Run the tests; `memory`: the file beside the folder that remembers green ones."""
        self.say(f"tests: {' '.join(self.args.tests)} first, some minutes on a machine without a GPU")
        self.proof = prove(self.args.tests, self.folder.parent / memory)
        self.say(f"tests: {self.proof.reason}")

    def about(self, title: str) -> list[str]:
        """The lines above the tables: the command and the machine."""
        machine = ", ".join(f"{name} {value}" for name, value in self.facts.items() if value and name != "command")
        return [f"# {title}", "", f"`{self.facts['command']}`\n", f"{machine}\n"]

    def heading(self, title: str, withheld: str) -> Sequence[str]:
        """These and the tests; `withheld`: what the tables lack unless they are green."""
        verdict = "" if self.proof.green else f" NO {withheld}: "
        return [*self.about(title), f"Tests:{verdict or ' '}{self.proof.reason}"]
