"""How many gradients a parameter gets before each `step()`: what tells the last backward pass from the others."""

from __future__ import annotations

from typing import Any


class Arrivals:
    """How many gradients each parameter gets a step: known once it was the same in `steps` steps that had any."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._now: dict[int, int] = {}
        self._seen: dict[int, list[int]] = {}
        self._usual: dict[int, int] = {}

    @property
    def any(self) -> bool:
        """Whether any gradient has come in this step."""
        return bool(self._now)

    def begin_step(self) -> None:
        """Forget what has come since the last step."""
        self._now = {}

    def count(self, index: int) -> int:
        """One more for this parameter; how many it has in this step."""
        self._now[index] = self._now.get(index, 0) + 1
        return self._now[index]

    def end_step(self) -> None:
        """This step's gradients are complete: learn from those that came."""
        for index, count in self._now.items():
            if index not in self._usual:
                seen = self._seen.setdefault(index, [])
                seen.append(count)
                if len(seen) == self._steps:
                    del self._seen[index]
                    self._usual[index] = count if all(other == count for other in seen) else 0
        self._now = {}

    def state_dict(self) -> dict[str, dict[int, Any]]:
        """What has been learned, by parameter."""
        return {"seen": {index: list(seen) for index, seen in self._seen.items()}, "usual": dict(self._usual)}

    def load_state_dict(self, state: dict[str, dict[int, Any]]) -> None:
        """Go on from what another has learned."""
        self._seen = {index: list(seen) for index, seen in state["seen"].items()}
        self._usual, self._now = dict(state["usual"]), {}

    def usual(self, index: int) -> int | None:
        """The number, 0 if it varied, None before it is known."""
        return self._usual.get(index)
