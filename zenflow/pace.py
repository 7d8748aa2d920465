"""How many threads the CPU optimizer takes: no more than finish a window's work before the next window's comes.

More of them finish earlier, which buys nothing, and draw the host's memory bandwidth away from the thread that launches
the device's kernels: on one H200 host 12 threads slowed forward and backward by up to a half while they ran. How many
there are changes no bit of any result, so they may follow the clock.
"""

from __future__ import annotations

LOW, HIGH = 0.85, 0.95  # share of a window's time that the work may fill: below, threads are taken away; above, added
CALM = 2  # windows in a row that must be below


class Pace:
    """The number of threads, 1 to `most`; it stays `most` unless `adapt`."""

    def __init__(self, most: int, adapt: bool) -> None:
        self.most, self.adapt = most, adapt
        self._steady = most
        self._began: int | None = None  # when the first slot of the last window came; None if that does not count
        self._busy = self._calm = 0

    def begin(self, now: int, urgent: bool) -> int:
        """A window's first slot is there, at `now` ns: the threads for this window.

        urgent: the trainer waits for its result, so it takes all threads, and nothing is learned from its time.
        """
        if self._began is not None and now > self._began:
            self._follow(self._busy / (now - self._began))
        self._began, self._busy = None if urgent else now, 0
        return self._steady if self.adapt and not urgent else self.most

    def worked(self, nanoseconds: int) -> None:
        """A slot of this window has taken so long."""
        self._busy += nanoseconds

    def _follow(self, share: float) -> None:
        self._calm = self._calm + 1 if share < LOW else 0
        if share > HIGH:
            self._steady = min(self.most, self._steady + max(1, self._steady // 4))
        elif self._calm == CALM:
            self._steady = max(1, self._steady - max(1, self._steady // 6))
            self._calm = 0
