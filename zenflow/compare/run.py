"""`zenflow-compare` from its two configurations to its folder."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from zenflow.bench.machine import facts
from zenflow.bench.topology import topology
from zenflow.compare.config import CompareConfig, check_alike, check_settings
from zenflow.compare.curve import Run
from zenflow.compare.function import Tried, release, try_side
from zenflow.compare.judge import Judgement, judge, pairs_of, works
from zenflow.compare.side import Finished, run_side
from zenflow.compare.text import report
from zenflow.cores import gpu_bus_id
from zenflow.diagnose.result import finite
from zenflow.terminal import show
from zenflow.training.checks import check
from zenflow.training.errors import errors_logged, require_free
from zenflow.training.schema import plain

log = logging.getLogger(__name__)
OUTPUTS = ("runs.jsonl", "compare.md", "compare.json", "compare.png")
Sides = dict[str, CompareConfig]


def compare(sides: Sides, words: dict[str, str], folder: Path, *, part_of_sweep: bool = False) -> float:
    """Run both sides and leave `OUTPUTS` in `folder`; b's mean gain in tokens a second, as a share.

    First a short run of each is tried, with a checkpoint; a side that does not work ends it, without a gain (NaN).
    words: what each side was given, for people. Errors: InputError (one sentence) for what the user can mend, before
    anything is run; anything else is logged with its traceback and raised.
    """
    with errors_logged(log, "comparison", folder, part_of_sweep=part_of_sweep):
        _check(sides, folder)
        folder.mkdir(parents=True, exist_ok=True)
        tried = _try(sides, folder)
        finished = list(_session(sides, folder)) if all(works(one.checks) for one in tried.values()) else []
        judgement = _leave(sides, words, tried, finished, folder)
        if sides["a"].plot and judgement.criteria:
            _draw(judgement, finished, words, folder)
        log.info("everything is in %s", folder)
        return judgement.criteria[0].difference.mean if judgement.criteria else math.nan


def schedule(repeats: int) -> list[tuple[str, int]]:
    """Side and repeat of every run: a b, b a, a b, ... so that a drift of the machine favours neither."""
    return [(side, repeat) for repeat in range(repeats) for side in ("ab" if repeat % 2 == 0 else "ba")]


def _check(sides: Sides, folder: Path) -> None:
    check_alike(sides["a"], sides["b"])
    require_free(folder, OUTPUTS)
    for config in sides.values():
        check_settings(config)
        check(replace(config, trace=None), folder)


def _try(sides: Sides, folder: Path) -> dict[str, Tried]:
    """Whether both sides work, in a short run of each, which also compiles and reads what all others find ready."""
    tried = {}
    for side, config in sides.items():
        log.info("%s, to warm up, with a checkpoint", side)
        tried[side] = try_side(side, _of(config, 0, steps=config.compare.warm_up + 2), folder)
    return tried


def _session(sides: Sides, folder: Path) -> Iterator[Finished]:
    """All runs in their order; ends after a side's first if something does not work in it."""
    seen: list[Run] = []
    for place, (side, repeat) in enumerate(plan := schedule(sides["a"].repeats), start=1):
        done = run_side(side, _of(sides[side], repeat), place)
        release()
        run = done.run
        with open(folder / "runs.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps(finite(asdict(run))), file=file)
        log.info(
            "run %d of %d, %s, seed %d: median step %.1f ms, %.0f tokens/s, held-out loss %.4f", place, len(plan), side,
            run.seed, 1e3 * run.median, run.tokens_per_second, run.curve[-1].loss,
        )  # fmt: skip
        seen.append(run)
        if len(seen) % 2 == 0:
            pairs_of(seen[-2:])  # another start, or other batches, end it before more is run
        yield done
        if repeat == 0 and not works(done.checks):
            return


def _of(config: CompareConfig, repeat: int, **changes: Any) -> CompareConfig:
    return replace(config, seed=config.seed + repeat, trace=None, **changes)


def _leave(
    sides: Sides, words: dict[str, str], tried: dict[str, Tried], finished: Sequence[Finished], folder: Path
) -> Judgement:
    runs = [done.run for done in finished]
    checks = [check for done in (*tried.values(), *finished) for check in done.checks]
    limits, same = sides["a"].compare, plain(sides["a"].engine) == plain(sides["b"].engine)
    judgement = judge(runs, checks, min_gain=limits.min_gain, max_loss_rise=limits.max_loss_rise, same=same)
    machine = facts() | topology(gpu_bus_id())
    text = report(judgement, runs, checks, words, machine)
    everything = {
        "judgement": asdict(judgement),
        "limits": asdict(limits),
        "checks": [asdict(check) for check in checks],
        "runs": [asdict(run) for run in runs],
        "sides": words,
        "settings": {side: one.settings | {"steps": sides[side].steps} for side, one in tried.items()},
        "machine": machine,
    }
    (folder / "compare.md").write_text(text, encoding="utf-8")
    (folder / "compare.json").write_text(json.dumps(finite(everything), indent=2), encoding="utf-8")
    show(text)
    return judgement


def _draw(judgement: Judgement, finished: Sequence[Finished], words: dict[str, str], folder: Path) -> None:
    try:
        from zenflow.compare.picture import save_picture

        save_picture(judgement, [done.run for done in finished], words, folder / "compare.png")
    except ImportError as error:
        log.info("no picture: %s (the extra `plot`)", error)
