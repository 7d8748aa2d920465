"""How many threads the CPU optimizer takes: no more than finish a window's work before the next window's comes.

More of them finish earlier, which buys nothing, and draw the host's memory bandwidth away from the thread that launches
the device's kernels: on one H200 host 12 threads slowed forward and backward by up to a half while they ran. Where that
bandwidth is used up, more threads do not even finish earlier: there 12 took 455 ms for what 8 did in 490, and the steps
beside them took 140 ms instead of 120. So more are taken on trial, and kept if windows follow each other sooner.

How many there are changes no bit of any result, so they may follow the clock.
"""

from __future__ import annotations

import math

HIGH = 0.95  # share of a window's time that the work may fill before threads are added
AIM = 0.9  # the share up to which threads are taken away
RUN = 2  # windows in a row that must be so short, and that a trial of more threads lasts
GAIN = 0.97  # a trial's windows must come within this share of the time that they took before
PATIENCE = 16  # windows after a trial without gain until the next


class Pace:
    """The number of threads, 1 to `most`; it stays `most` unless `adapt`, which begins with two thirds of them."""

    def __init__(self, most: int, adapt: bool) -> None:
        self.most, self.adapt = most, adapt
        self._threads = -(-2 * most // 3) if adapt else most
        self._began: int | None = None  # when the first slot of the last window came; None if that does not count
        self._busy = 0  # ns
        self._windows: list[tuple[int, float]] = []  # period in ns and share, of those with this number of threads
        self._trial: tuple[int, int] | None = None  # the threads before it, and their windows' period
        self._patience = 0

    def begin(self, now: int, urgent: bool) -> int:
        """A window's first slot is there, at `now` ns: the threads for this window.

        urgent: the trainer waits for its result, so it takes all threads, and nothing is learned from its time.
        """
        if self.adapt and self._began is not None and now > self._began:
            self._follow(now - self._began)
        self._began, self._busy = None if urgent else now, 0
        return self.most if urgent else self._threads

    def worked(self, nanoseconds: int) -> None:
        """A slot of this window has taken so long."""
        self._busy += nanoseconds

    def _follow(self, period: int) -> None:
        """Learn from a window that took `period` ns until the next one came."""
        self._windows = [*self._windows, (period, self._busy / period)][-RUN:]
        self._patience = max(0, self._patience - 1)
        shares = [share for _, share in self._windows]
        shortest = min(period for period, _ in self._windows)
        if self._trial is not None:
            if len(shares) < RUN:
                return
            before, trial = self._trial
            self._trial = None
            if shortest > GAIN * trial:
                self._patience = PATIENCE
                self._take(before)
                return
        if shares[-1] > HIGH and self._threads < self.most and not self._patience:
            self._trial = self._threads, shortest
            self._take(min(self.most, self._threads + max(1, self._threads // 2)))
        elif len(shares) == RUN and (fewer := math.ceil(self._threads * max(shares) / AIM)) < self._threads:
            self._take(max(1, fewer))

    def _take(self, threads: int) -> None:
        self._threads = threads
        self._windows.clear()
