"""`python -m tests.ring_model --buckets 3 --windows 5`: the protocol's model, larger than the tests explore it."""

from __future__ import annotations

import argparse
import itertools
import sys
import time

from tests.ring_model.explore import Explorer
from tests.ring_model.protocol import build
from tests.ring_model.scan import explore
from tests.ring_model.setup import Setup


def main() -> int:
    """0 if nothing is wrong; else the shortest way to the first fault is printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.ring_model", description=__doc__)
    parser.add_argument("--buckets", type=int, default=2, help="of each cohort; 2 or more")
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--intervals", type=int, nargs="+", default=[1, 2], help="steps in a window")
    parser.add_argument("--cohorts", type=int, default=2, help="as many at most")
    arguments = parser.parse_args()
    states, started = 0, time.monotonic()
    for interval in arguments.intervals:
        steps = range(1, interval * arguments.windows + 1)
        ends = frozenset(steps[interval - 1 :: interval])
        events = [{}, {"selecting": ends}, {"saving": frozenset(steps)}, {"flushing": frozenset(steps[::2])}]
        events += [
            {"checked": True, "dropping": ends},
            {"dropping": frozenset(steps)},
            {"selecting": frozenset([max(ends)]), "saving": ends},
            {"predicted": True, "selecting": frozenset([max(ends)]), "saving": ends, "flushing": frozenset(steps[::2])},
        ]
        choices = itertools.product(
            range(1, min(interval, arguments.cohorts) + 1), range(interval + 1), ("backward", "step"), (True, False),
            ((False, False), (True, False), (True, True)),
        )  # fmt: skip
        for (segments, delay, upload, words, (on_host, zeroed)), event in itertools.product(choices, events):
            setup = Setup(
                arguments.buckets, arguments.windows, interval, segments, delay, upload, on_host, words, zeroed, **event
            )
            result = Explorer(build(setup), deaths=True).run()
            states += result.states
            if result.fault:
                print(setup, result, sep="\n")
                return 1
            rounds, fault = explore(setup) if upload == "step" and words and not on_host else (0, "")
            if fault:
                print(setup, fault, sep="\n")
                return 1
            print(f"{result.states:>10,} states, {rounds:>10,} rounds of the worker  {setup}", flush=True)
    print(f"{states:,} states in {time.monotonic() - started:.0f} s, nothing wrong")
    return 0


if __name__ == "__main__":
    sys.exit(main())
