"""A checkpoint that is written by a thread while training goes on.

What it writes must be a copy: `ZenFlow.state_dict()` is one, a model's state is not, `copy_to_host` makes one of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zenflow import checkpoint_folder
from zenflow.state_tree import flatten, restore

logger = logging.getLogger("zenflow")


def copy_to_host(state: dict[Any, Any]) -> dict[Any, Any]:
    """The same state with tensors of its own on the CPU; those that were one are one. ValueError as in `save`."""
    tree, tensors = flatten(state)
    return restore(tree, {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()})


class BackgroundSave:
    """`checkpoint_folder.save` in a thread that has begun when this is built.

    The interpreter does not end before it has. An error is logged when it happens and raised by `wait()`. Where the
    system refuses a thread, all is written before this returns.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        state: dict[Any, Any],
        *,
        configuration: Mapping[str, Any] | None = None,
        shard_bytes: int = checkpoint_folder.SHARD_BYTES,
    ) -> None:
        self.folder = Path(folder).absolute()  # what is relative is so to the working directory of now
        self._error: BaseException | None = None
        options = {"configuration": configuration, "shard_bytes": shard_bytes}
        self._thread = threading.Thread(target=self._run, args=(state, options), name=f"save {self.folder.name}")
        try:
            self._thread.start()
        except RuntimeError as error:
            logger.warning("%s: %s is written while training waits", error, self.folder)
            self._run(state, options)
            if not isinstance(self._error, Exception | None):  # Ctrl-C, which was the caller's
                raise self._error from None

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Until the folder is there; raises what `save` raised, every time that it is called."""
        if self._thread.ident is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self, state: dict[Any, Any], options: dict[str, Any]) -> None:
        try:
            checkpoint_folder.save(self.folder, state, **options)
        except BaseException as error:
            self._error = error
            logger.error("no checkpoint %s: %s", self.folder, str(error) or repr(error))
