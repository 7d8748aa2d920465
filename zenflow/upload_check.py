"""`upload_check`: whether any weight is used after its gradient exists, which no hook can see.

It is tried once: where a backward pass could upload a bucket for the first time its weights become NaN instead, and
this window's results arrive in `step()`. If a gradient then is not finite, a weight was used late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from zenflow.uploading import Sent

logger = logging.getLogger("zenflow")

TRIES = 3  # a gradient may be non-finite for reasons of its own


class UploadCheck:
    """What has been tried, by index of the records: `passed`, `failed` and not passed since, `poisoned` right now.

    `tries`: how many more may fail; 0: nothing is tried.
    """

    def __init__(self, wanted: bool) -> None:
        self.tries = self._most = TRIES if wanted else 0
        self.passed: set[int] = set()
        self.failed: set[int] = set()
        self.poisoned: set[int] = set()

    def poison(self, sent: Sent) -> bool:
        """Queue NaN for the weights of a bucket that is to be tried, and say whether it is."""
        if not self.tries or self.passed.issuperset(sent.members):
            return False
        self.poisoned.update(sent.members)
        sent.storage.weights[sent.bucket.start : sent.bucket.stop].fill_(float("nan"))
        return True

    def end_backward(self, is_finite: Callable[[], bool]) -> bool:
        """Learn from this step's gradients, about which `is_finite` asks the device; whether uploads may go on."""
        if not self.poisoned:
            return True
        if is_finite():
            self.passed |= self.poisoned
            self.failed -= self.poisoned
            # Others may have failed in between, whose windows end in other steps.
            self.tries = self.tries if self.failed else TRIES
            return True
        self.failed |= self.poisoned
        self.tries -= 1
        if not self.tries:
            logger.warning(
                "weights are used again after their gradient exists (a detached use, a retained graph, or reentrant "
                "checkpointing), or gradients overflow all the time: uploads stay in step(), as with upload='step'; "
                "upload_check found it, at the price of %d skipped steps",
                TRIES,
            )
        return self.tries > 0

    def forget_poison(self) -> None:
        """The weights are whole again, as they are when results have become visible."""
        self.poisoned = set()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists; in the middle of a backward pass there is none."""
        return {"tries": self.tries, "passed": sorted(self.passed), "failed": sorted(self.failed)}

    def load_state_dict(self, state: dict[str, Any], *, checked: bool) -> None:
        """Go on from another run; checked: whether that one checked."""
        self.tries = min(self._most, state["tries"]) if checked else self._most
        self.passed, self.failed = set(state["passed"]), set(state["failed"])
