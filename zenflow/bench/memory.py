"""`zenflow-bench memory`: the CPU optimizer's pass beside what the host's memory gives (triad), by threads."""

from __future__ import annotations

import sys
from argparse import Namespace

from zenflow.bench import tables
from zenflow.bench.tables import Column, number, share

COLUMNS = (
    Column("threads", "threads"),
    Column("triad GB/s", "triad", number(1)),
    Column("pass GB/s", "pass", number(1)),
    Column("pass / triad", "ratio", share),
)


def run(args: Namespace) -> int:
    """Measure and print one row a number of threads."""
    from zenflow.bench.bandwidth import pass_bandwidth, triad

    rows = []
    for threads in args.threads:
        print(f"{threads} threads", file=sys.stderr, flush=True)
        row = {"threads": threads, "triad": triad(threads), "pass": pass_bandwidth(threads)}
        rows.append(row | {"ratio": row["pass"] / row["triad"]})
    print(tables.markdown(rows, COLUMNS))
    return 0
