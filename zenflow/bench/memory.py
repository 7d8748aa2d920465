"""`zenflow-bench memory`: the CPU optimizer's pass beside what the host's memory gives (triad), by threads."""

from __future__ import annotations

from argparse import Namespace

from zenflow.bench import tables
from zenflow.bench.session import Session
from zenflow.bench.tables import Column, number, share
from zenflow.terminal import counted

COLUMNS = (
    Column("threads", "threads"),
    Column("triad GB/s", "triad", number(1)),
    Column("pass GB/s", "pass", number(1)),
    Column("pass / triad", "ratio", share),
)


def run(args: Namespace) -> int:
    """Measure one row a number of threads; memory.md, which is printed, and memory.csv."""
    from zenflow.bench.bandwidth import pass_bandwidth, triad

    session, rows = Session(args), []
    for threads in args.threads:
        session.say(counted(threads, "thread"))
        row = {"threads": threads, "triad": triad(threads), "pass": pass_bandwidth(threads)}
        rows.append(row | {"ratio": row["pass"] / row["triad"]})
    text = "\n".join([*session.about("Host memory"), tables.markdown(rows, COLUMNS)])
    (session.folder / "memory.md").write_text(text + "\n", encoding="utf-8")
    tables.write_csv(rows, session.facts, session.folder / "memory.csv")
    print(text)
    return 0
