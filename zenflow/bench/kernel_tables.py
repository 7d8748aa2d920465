"""The kernels' figures as tables."""

from __future__ import annotations

from collections.abc import Sequence

from zenflow.bench import tables
from zenflow.bench.figures import Row
from zenflow.bench.tables import REMARK, Column, number, share

OURS, REFERENCE, COMPILED, KNOWN = "triton", "torch", "torch.compile", "known kernel"
LAUNCHES = "its launches are in the time"  # the remark of a call that was not captured in a graph
SHARES = ("share", "bus_share", "times_copy", "times_bus_copy")
LEGEND = """\
p20, p50, p80: of the calls, second-level cache flushed before each. GB/s: the bytes that the job must move, by p50.
Of copy: time of a device copy that reads and writes as many bytes, measured in this run, over p50. With sectors: the
same for what the bus carries at best, where single elements of 32-byte sectors are read or written. x copy: p50 over
the copy's time. On a GPU launches are captured in a graph, unless the remark says that they are in the time."""


def _flag(value: bool) -> str:
    return "yes" if value else ""


TIMES = (Column("p20 ms", "p20_ms", number(4)), Column("p50", "p50_ms", number(4)), Column("p80", "p80_ms", number(4)))
OPS = (
    Column("op", "op"),
    Column("layout", "layout"),
    Column("dtype", "dtype"),
    Column("elements", "numel", number(0)),
    Column("by", "contestant"),
    *TIMES,
    Column("MB", "bytes", lambda value: f"{value / 1e6:,.1f}"),
    Column("GB/s", "gb_per_s", number(0)),
    Column("of copy", "share", share),
    Column("with sectors", "bus_share", share),
    REMARK,
)
MODEL = (
    Column("op", "op"),
    Column("shape", "shape"),
    Column("layout", "layout"),
    Column("dtype", "dtype"),
    Column("parameters", "parameters"),
    *TIMES,
    Column("GB", "bytes", lambda value: f"{value / 1e9:,.2f}"),
    Column("GB/s", "gb_per_s", number(0)),
    Column("x copy", "times_copy", number(3)),
    Column("with sectors", "times_bus_copy", number(3)),
    REMARK,
)
TUNE = (
    Column("op", "op"),
    Column("layout", "layout"),
    Column("dtype", "dtype"),
    Column("constants", "constants"),
    *TIMES,
    Column("of copy", "share", share),
    Column("with sectors", "bus_share", share),
    Column("same bits", "same_bits", _flag),
    Column("today", "today", _flag),
    Column("best", "best", _flag),
    REMARK,
)
TABLES = {"op": ("Ops", OPS), "model": ("A whole model in one launch a class", MODEL), "tune": ("Constants", TUNE)}


def without_shares(rows: Sequence[Row]) -> list[Row]:
    """The rows without what compares them with a copy."""
    return [{name: value for name, value in row.items() if name not in SHARES} for row in rows]


def report(rows: Sequence[Row], heading: Sequence[str]) -> str:
    """All tables that have rows, the heading above them, what the words mean below."""
    return tables.report(rows, heading, TABLES, LEGEND)
