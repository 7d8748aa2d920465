"""A comparison for people: compare.md. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from zenflow.bench.tables import Column, markdown, number, share
from zenflow.compare.criteria import Criterion
from zenflow.compare.curve import Run
from zenflow.compare.judge import Check, Judgement, span

CRITERIA = (
    Column("criterion", "name"),
    Column("b against a (95%)", "span"),
    Column("has to be", "limit"),
    Column("state", "state"),
)
CHECKS = (Column("side", "side"), Column("what", "name"), Column("works", "works"), Column("seen", "seen"))
SYSTEM = (
    Column("", "name"),
    Column("a", "a"),
    Column("b", "b"),
)
RUNS = (
    Column("run", "place", number(0)),
    Column("side", "side"),
    Column("seed", "seed", str),
    Column("median ms", "median", number(1)),
    Column("p95 ms", "p95", number(1)),
    Column("tokens/s", "tokens_per_second", number(0)),
    Column("idle", "idle_share", share),
    Column("loss before", "before", number(4)),
    Column("loss after", "after", number(4)),
    Column("loss at the pair's shorter time", "at_time", number(4)),
    Column("training s", "seconds", number(1)),
)
LEGEND = """\
Differences are b's from a's on the same seed; the interval is Student's over the seeds, and a criterion is met or
missed only if all of it lies on one side of the limit. Idle: device time spent waiting for data, CPU or PCIe. Loss:
held out. At equal time both runs of a pair are compared where the shorter one ends; the longer one is then still within
its schedule of learning rates."""


def report(
    judgement: Judgement,
    runs: Sequence[Run],
    checks: Sequence[Check],
    sides: dict[str, str],
    machine: dict[str, str],
) -> str:
    """Markdown: verdict and reasons first, then function, system, quality, all runs, and what it ran on."""
    reasons = [f"- {reason}" for reason in (*judgement.reasons, *judgement.remarks)]
    machine_line = ", ".join(f"{name} {value}" for name, value in machine.items() if value)
    parts = [
        f"# {judgement.verdict}",
        "\n".join(f"- {side}: `{words}`" for side, words in sides.items()),
        "\n".join(reasons),
        "## 1. Function\n\n"
        + markdown([vars(check) | {"works": "yes" if check.works else "NO"} for check in checks], CHECKS),
        machine_line,
    ]
    if judgement.criteria:
        parts.insert(3, "## Criteria\n\n" + markdown([_criterion_row(item) for item in judgement.criteria], CRITERIA))
    if runs:
        parts[-1:-1] = [
            "## 2. System, means over the seeds\n\n" + markdown(_system_rows(runs), SYSTEM),
            "## 3. Quality, and every run in its order\n\n" + markdown(_run_rows(runs), [*RUNS, *_scores(runs)]),
            LEGEND,
        ]
    return "\n\n".join(parts) + "\n"


def _criterion_row(item: Criterion) -> dict[str, Any]:
    limit = f"{'above' if item.above else 'below'} {item.limit:+.1%}"
    return {"name": item.name, "span": span(item), "limit": limit, "state": item.state}


def _system_rows(runs: Sequence[Run]) -> list[dict[str, str]]:
    wanted: list[tuple[str, Callable[[Run], float | None], float, str]] = [
        ("step, median ms", lambda run: run.median, 1e3, ".1f"),
        ("step, p95 ms", lambda run: run.p95, 1e3, ".1f"),
        ("tokens a second", lambda run: run.tokens_per_second, 1, ",.0f"),
        ("waiting for CPU or PCIe, ms a step", lambda run: run.stall, 1e3, ".2f"),
        ("waiting for data, ms a step", lambda run: run.data, 1e3, ".2f"),
        ("idle share, %", lambda run: run.idle / run.mean, 1e2, ".1f"),
        ("trainer, CPUs", lambda run: run.trainer_cpus, 1, ".2f"),
        ("CPU optimizer, CPUs", lambda run: run.worker_cpus, 1, ".2f"),
        ("CPU optimizer busy, ms a step", lambda run: run.worker_busy, 1e3, ".2f"),
        ("to the host, MB a step", lambda run: run.bytes_to_host, 1e-6, ".2f"),
        ("to the device, MB a step", lambda run: run.bytes_to_device, 1e-6, ".2f"),
        ("peak device memory, GB", lambda run: run.peak_bytes, 1e-9, ".2f"),
        ("skipped steps", lambda run: run.skipped_steps, 1, ".1f"),
    ]
    return [
        {"name": name, **{side: _mean(runs, side, of, scale, form) for side in "ab"}}
        for name, of, scale, form in wanted
    ]


def _mean(runs: Sequence[Run], side: str, of: Callable[[Run], float | None], scale: float, form: str) -> str:
    values = [value for run in runs if run.side == side and (value := of(run)) is not None]
    return format(scale * statistics.fmean(values), form) if values else "-"


def _scores(runs: Sequence[Run]) -> list[Column]:
    """A column for each score that the task has: of held-out samples, after the last step."""
    names = dict.fromkeys(name for run in runs for name in run.scores)
    return [Column(f"{name} after", name, number(3)) for name in names]


def _run_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        common = min(other.seconds for other in runs if other.seed == run.seed)
        rows.append(
            {
                "place": run.place,
                "side": run.side,
                "seed": run.seed,
                "median": 1e3 * run.median,
                "p95": 1e3 * run.p95,
                "tokens_per_second": run.tokens_per_second,
                "idle_share": run.idle / run.mean,
                "before": run.curve[0].loss,
                "after": run.curve[-1].loss,
                "at_time": run.loss_at(common),
                "seconds": run.seconds,
                **run.scores,
            }
        )
    return rows
