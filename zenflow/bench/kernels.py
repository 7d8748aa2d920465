"""`zenflow-bench kernels`: every op of the kernels beside torch, a copy of as many bytes, and the well-known kernel.

What matters most comes first: all ops, then the whole model, then the search for constants and torch.compile, both on
the smallest size alone, as their compilations take longest. The files are written anew after each op, so that a run
that is cut short leaves what it had.
"""

from __future__ import annotations

import gc
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from zenflow_kernels import cards

from zenflow.bench import kernel_picture, kernel_tables, tables
from zenflow.bench.figures import Row
from zenflow.bench.kernel_clock import Clock, Times
from zenflow.bench.kernel_model import model_ops, parameter_problems
from zenflow.bench.kernel_ops import OPS, REFERENCE_NAMES, Call, Work
from zenflow.bench.kernel_problem import Moved, Problem, make_problem
from zenflow.bench.kernel_tables import COMPILED, LAUNCHES, OURS, REFERENCE
from zenflow.bench.kernel_tune import SHIPPED, card_entry, entry_of, tune
from zenflow.bench.session import Session

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DEFAULTS = {  # by device and quickness: sizes, dtypes, model's shape
    ("cuda", False): ([1 << 26, 1 << 28], ["bf16", "fp32"], "3B"),
    ("cuda", True): ([1 << 26], ["bf16"], "0.5B"),
    ("cpu", False): ([1 << 12], ["bf16", "fp32"], "tiny"),
    ("cpu", True): ([1 << 12], ["bf16"], "tiny"),
}

NOTHING = Moved(0, 0)


def run(args: Namespace) -> int:
    """Everything that the arguments ask for; 0, 1 if tests are red or a measurement failed, 2 without a GPU."""
    if args.device == "cuda" and not torch.cuda.is_available():
        print("zenflow-bench kernels needs a GPU, and torch sees none; --device cpu tries the runner.", file=sys.stderr)
        return 2
    session = KernelSession(args)
    session.prove("kernel-tests.json")
    problems = list(_problems(session))
    for op, problem in problems:
        measure_op(session, op, problem)
    for dtype in [] if args.no_model else session.dtypes:
        for layout in args.layouts:
            measure_model(session, dtype, layout)
            _settle(session)
    smallest = [(op, problem) for op, problem in problems if problem.numel <= min(session.sizes)]
    for op, problem in smallest:
        if op in args.tune:
            measure_constants(session, op, problem)
    if session.on_gpu and not args.no_compile:
        for op, problem in smallest:
            if OPS[op].compiles:
                measure_compiled(session, op, problem)
    print(session.save(final=True))
    print(f"written to {session.folder}")
    failed = any("error" in row for row in session.rows)
    return 1 if session.proof.red or failed else 0


class KernelSession(Session):
    """The rows so far, the clock, and the folder that shows them."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.device = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
        sizes, dtypes, shape = DEFAULTS[args.device, args.quick]
        self.sizes, self.dtypes, self.shape = args.sizes or sizes, args.dtypes or dtypes, args.shape or shape
        self.clock = Clock(self.device, *((10, 30) if args.quick else (25, 100)))
        self.deadline = time.monotonic() + args.budget
        self.rows: list[Row] = []
        self.best: dict[str, dict[str, dict[str, int]]] = {}  # of the search for constants, see `entry_of`

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def time(self, call: Call) -> Times:
        """RuntimeError if the budget is spent, or what the call raises."""
        if time.monotonic() > self.deadline:
            raise RuntimeError(f"not measured: the budget of {self.args.budget:g} s was spent")
        return self.clock.time(call.run, call.captured)

    def add(self, row: Row, moved: Moved, measure: Callable[[], Times]) -> None:
        """A row with its times and what they mean, or with the error that came instead."""
        row = row | {"bytes": moved.must, "bus_bytes": moved.bus}
        try:
            times = measure()
            row |= self.figures(times, moved) | {"captured": times.captured}
            if self.on_gpu and not times.captured:
                row["note"] = ", ".join(filter(None, [row.get("note"), LAUNCHES]))
        except Exception as error:  # one op's fault costs its own row alone
            row["error"] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        self.rows.append(row)
        name = " ".join(str(row[field]) for field in ("table", "op", "layout", "dtype", "contestant") if field in row)
        self.say(f"{name}: {row.get('error') or format(row['p50_ms'], '.4f') + ' ms'}")

    def figures(self, times: Times, moved: Moved) -> Row:
        """Times in ms, GB/s, and shares of a copy of as many bytes."""
        copy, bus_copy = self.clock.copy_ms(moved.must), self.clock.copy_ms(moved.bus)
        return {
            **{f"{name}_ms": getattr(times, name) for name in ("p20", "p50", "p80")},
            "gb_per_s": moved.must / times.p50 / 1e6,
            "copy_ms": copy,
            "copy_gb_per_s": moved.must / copy / 1e6,
            "share": copy / times.p50,
            "bus_share": bus_copy / times.p50,
            "times_copy": times.p50 / copy,
            "times_bus_copy": times.p50 / bus_copy,
        }

    def save(self, final: bool = False) -> str:
        """Write kernels.csv and kernels.md, and the pictures at the end; the text of kernels.md."""
        rows = self.rows if self.proof.green else kernel_tables.without_shares(self.rows)
        text = kernel_tables.report(rows, self.heading("Kernels", "SHARES")) + (self.constants() if final else "")
        (self.folder / "kernels.md").write_text(text, encoding="utf-8")
        tables.write_csv(rows, self.facts, self.folder / "kernels.csv")
        if final and self.proof.green:
            self.draw()
        return text

    def draw(self) -> None:
        """roofline.png and shares.png, if an op has figures and matplotlib is there."""
        shown = [row for row in self.rows if row["table"] == "op" and "error" not in row]
        title = f"{self.facts['gpu'] or 'CPU'}, torch {self.facts['torch']}, triton {self.facts['triton']}"
        if shown:
            try:
                kernel_picture.save_roofline(shown, self.clock.copies(), title, self.folder / "roofline.png")
                kernel_picture.save_shares(self.rows, title, self.folder / "shares.png")
            except ImportError as error:
                self.say(f"no pictures: {error}")

    def constants(self) -> str:
        """What a search found for this card, as the lines that ship it; empty without one, and with red tests."""
        card = cards.card(self.device)
        if not card or self.proof.red or not any(op in SHIPPED for op in self.args.tune):
            return ""
        found = "Nothing: of what was tried, today's constants are the best.\n"
        if self.best:
            entry = card_entry(card, self.best)
            found = f"The card's entry in `CARDS`, in the place of the one that is there:\n\n```py\n{entry}\n```\n"
        return f"\n## For zenflow_kernels/cards.py\n\n{found}"


def _problems(session: KernelSession) -> Iterator[tuple[str, Problem]]:
    args = session.args
    for numel in session.sizes:
        for dtype in session.dtypes:
            for name in args.ops or OPS:
                for layout in OPS[name].layouts:
                    wanted = layout == "whole" or layout in args.layouts
                    if wanted and DTYPES[dtype] in OPS[name].dtypes:
                        yield name, make_problem(numel, DTYPES[dtype], layout, args.ratio, session.device)


def _described(op: str, problem: Problem) -> Row:
    return {
        "table": "op",
        "op": op,
        "layout": problem.layout,
        "dtype": next(name for name, dtype in DTYPES.items() if dtype == problem.dtype),
        "rows": problem.rows,
        "cols": problem.cols,
        "numel": problem.numel,
        "ratio": problem.ratio,
        "note": "",
    }


def measure_op(session: KernelSession, op: str, problem: Problem) -> None:
    """Ours, the reference and the well-known kernel; on a CPU ours is the reference."""
    moved, described = OPS[op].moved(problem), _described(op, problem)
    work: list[Work] = []

    def timed(pick: Callable[[Work], Call]) -> Callable[[], Times]:
        def measure() -> Times:
            if not work:
                work.append(OPS[op].build(problem))
            return session.time(pick(work[0]))

        return measure

    contestants = [(REFERENCE, REFERENCE_NAMES.get(op, ""), lambda work: work.reference)]
    if session.on_gpu:
        contestants.insert(0, (OURS, "", lambda work: work.ours))
    if OPS[op].known:
        contestants.append((OPS[op].known, "", lambda work: work.known))
    for contestant, note, pick in contestants:
        session.add(described | {"contestant": contestant, "note": note}, moved, timed(pick))
    work.clear()
    _settle(session)


def measure_compiled(session: KernelSession, op: str, problem: Problem) -> None:
    """torch.compile of the reference."""

    def measure() -> Times:
        call = OPS[op].build(problem).reference
        return session.time(replace(call, run=torch.compile(call.run, dynamic=False)))

    session.add(_described(op, problem) | {"contestant": COMPILED}, OPS[op].moved(problem), measure)
    torch.compiler.reset()
    _settle(session)


def measure_model(session: KernelSession, dtype: str, layout: str) -> None:
    """All parameters of a model together, against one copy of the sum of their bytes."""
    problems = parameter_problems(session.shape, DTYPES[dtype], layout, session.args.ratio, session.device)
    described = {"table": "model", "layout": layout, "dtype": dtype, "shape": session.shape}
    described["contestant"] = OURS if session.on_gpu else REFERENCE
    described |= {"parameters": len(problems), "numel": sum(problem.numel for problem in problems)}
    try:
        ops = model_ops(problems)
    except Exception as error:  # the card may be too small for it
        return session.add(described | {"op": "all"}, NOTHING, partial(_times, error))
    for op in ops:
        session.add(described | {"op": op.name}, op.moved, partial(session.time, op.call))


def measure_constants(session: KernelSession, op: str, problem: Problem) -> None:
    """A row for each setting of the op's launch constants."""
    moved, described = OPS[op].moved(problem), _described(op, problem) | {"table": "tune", "contestant": OURS}
    try:
        found = tune(op, problem, lambda work: session.time(work.ours))
    except Exception as error:  # without a call of today's constants there is nothing to compare with
        return session.add(described, moved, partial(_times, error))
    for name, classes in entry_of(op, problem, found).items():
        session.best.setdefault(name, {}).update(classes)
    for candidate in found:
        row = described | {"constants": candidate.label, "same_bits": candidate.same_bits}
        row |= {"today": candidate.today, "best": candidate.best}
        session.add(row, moved, partial(_times, candidate.result))
    _settle(session)


def _times(result: Any) -> Times:
    """A result, which may be the error that came instead."""
    if isinstance(result, Exception):
        raise result
    return result


def _settle(session: KernelSession) -> None:
    """After a group of measurements: what there is goes to the files, and the device's memory is free again."""
    session.save()
    if session.on_gpu:
        gc.collect()
        torch.cuda.empty_cache()
