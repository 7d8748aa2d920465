"""Fault injection: `python -m tests.soak --seconds 60 --seed 1`, or `make soak`.

Small models are trained by ZenFlow while workers and trainers are killed and stopped, slots are corrupted and lost,
descriptors and memory run short, gradients are not finite and the clock jumps. Meanwhile learning rates change,
gradients are missing, frozen parameters begin to train, and weights are swapped as for an evaluation. A fault that is
noticed must be named; the trainer then goes on from its last `state_dict()`, and ends with the bits of a run in which
nothing happened.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

import torch

from tests.shared_entries import left_since, shared_entries
from tests.soak.driver import Play, Tally, count_orphans
from tests.soak.scenario import Scenario


def main(arguments: list[str] | None = None) -> int:
    """0 if every fault was noticed or survived and nothing was lost or left behind."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.split("\n\n")[1])
    parser.add_argument("--seconds", type=float, default=120.0, help="start scenarios for so long")
    parser.add_argument("--seed", type=int, default=0, help="of the first scenario; the others count on from it")
    parser.add_argument("--scenarios", type=int, help="so many instead, however long they take")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)  # trainers are forked
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # what torch imports with its first optimizer, it imports once
    entries, descriptors = shared_entries(), len(os.listdir("/proc/self/fd"))
    tally, started, seed = Tally(), time.monotonic(), options.seed
    while _goes_on(options, tally, started):
        known = len(tally.wrong)
        Play(Scenario(seed), tally).run()
        for text in tally.wrong[known:]:
            print(f"WRONG, {text}\n  again: python -m tests.soak --scenarios 1 --seed {seed}", flush=True)
        seed += 1
    tally.orphans += count_orphans(tally.trainers)  # also one that was killed before its first instruction
    tally.leaked_descriptors += max(0, len(os.listdir("/proc/self/fd")) - descriptors)
    tally.wrong += [f"/dev/shm has new entries: {new}" for new in [left_since(entries, seconds=10)] if new]
    print(f"seeds {options.seed} to {seed - 1}, {time.monotonic() - started:.0f} s\n\n{tally.table()}")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figures = {"seed": options.seed, "seconds": time.monotonic() - started, **tally.figures()}
        options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    return 0 if tally.well else 1


def _goes_on(options: argparse.Namespace, tally: Tally, started: float) -> bool:
    if options.scenarios is not None:
        return tally.scenarios < options.scenarios
    return not tally.scenarios or time.monotonic() - started < options.seconds


if __name__ == "__main__":
    sys.exit(main())
