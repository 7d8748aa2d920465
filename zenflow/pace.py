"""How many threads the CPU optimizer takes: no more than finish a window's work before the next window's comes.

More of them finish earlier, which buys nothing, and draw the host's memory bandwidth away from the thread that launches
the device's kernels: on one H200 host 12 threads slowed forward and backward by up to a half while they ran. Where that
bandwidth is used up, more threads do not even finish earlier: there 12 took 455 ms for what 8 did in 490, and the steps
beside them took 140 ms instead of 120. So more are taken on trial, and kept if windows follow each other sooner.

How many there are changes no bit of any result, so they may follow the clock.
"""

from __future__ import annotations

import math

HIGH = 0.95  # share of the time that the work may fill before threads are added
AIM = 0.9  # the share up to which threads are taken away
RUN_NS = 1_000_000_000  # over which the share is taken: some steps, of which single ones take half as long again
RUN_WINDOWS = 2  # of which a run has at least so many
GAIN = 0.97  # with more threads, windows must come within this share of the time that they took before
PATIENCE_NS = 20_000_000_000  # after more threads without gain, until the next trial


class Pace:
    """The number of threads, 1 to `most`; it stays `most` unless `adapt`, which begins with two thirds of them."""

    def __init__(self, most: int, adapt: bool) -> None:
        self.most, self.adapt = most, adapt
        self._threads = -(-2 * most // 3) if adapt else most
        self._began: int | None = None  # when the first slot of the last window came; None if that does not count
        self._busy = 0  # ns of the last window
        self._run = 0, 0, 0  # windows with this number of threads, their ns, the ns that were work
        self._trial: tuple[int, float] | None = None  # the threads before it, and their windows' mean ns
        self._patient_until = -math.inf

    def begin(self, now: int, urgent: bool) -> int:
        """A window's first slot is there, at `now` ns: the threads for this window.

        urgent: the trainer waits for its result, so it takes all threads, and nothing is learned from its time.
        """
        if self.adapt and self._began is not None and now > self._began:
            windows, total, work = self._run
            self._run = windows + 1, total + now - self._began, work + self._busy
            if windows + 1 >= RUN_WINDOWS and self._run[1] >= RUN_NS:
                self._decide(now)
        self._began, self._busy = None if urgent else now, 0
        return self.most if urgent else self._threads

    def worked(self, nanoseconds: int) -> None:
        """A slot of this window has taken so long."""
        self._busy += nanoseconds

    def _decide(self, now: int) -> None:
        windows, total, work = self._run
        mean, share, before = total / windows, work / total, self._trial
        self._run, self._trial = (0, 0, 0), None
        if before is not None and mean > GAIN * before[1]:
            self._threads, self._patient_until = before[0], now + PATIENCE_NS
        elif share > HIGH and self._threads < self.most and now >= self._patient_until:
            self._trial = self._threads, mean
            self._threads = min(self.most, self._threads + max(1, self._threads // 2))
        else:
            self._threads = max(1, min(self._threads, math.ceil(self._threads * share / AIM)))
