"""Whose turn it is: threads use an optimizer one after another, and a forked copy of its process does not.

A fork shares the CPU optimizer's memory with the trainer and knows nothing of what the trainer does next: what it reads
is torn, and what it writes the trainer trains on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Method = TypeVar("Method", bound=Callable[..., Any])
# Keeps a function out of the graphs of a training step that is compiled as a whole. Private, so never relied on: the
# public one loads the compiler at once, not at the first call.
untraced = getattr(torch, "_disable_dynamo", torch.compiler.disable)


class Turn:
    """`lock` is held by whatever reads or changes the state; a thread may take it again while it has it."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._owner = os.getpid()

    @property
    def is_foreign(self) -> bool:
        """Whether this process is a forked copy of the one in which the optimizer was made."""
        return os.getpid() != self._owner

    def refuse_fork(self) -> None:
        """RuntimeError in such a copy."""
        if self.is_foreign:
            raise RuntimeError(
                "this process is a forked copy of the one that trains and shares the CPU optimizer's memory with it: "
                "use the ZenFlow optimizer there, and take a state_dict() that a copy needs before the fork"
            )


def in_turn(method: Method) -> Method:
    """A method of what has a `Turn` as `_turn`, and `_refuse_fork()`: waits until no other thread is inside one.

    Nothing in it is recorded by autograd or traced by `torch.compile`. What it keeps are no inference tensors, which
    nothing later could change.
    """

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_fork()
        with self._turn.lock, torch.inference_mode(False), torch.no_grad():
            return method(self, *args, **kwargs)

    return untraced(call)  # type: ignore[return-value]
