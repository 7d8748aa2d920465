"""`zenflow-bench step`: every contestant in turn, each in its own child, then the tables.

The files are written anew after each contestant, so that a run that is cut short leaves what it had.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from zenflow.bench import picture, tables
from zenflow.bench.children import run_job
from zenflow.bench.figures import SELECTION_WINDOWS, Row, compare, row_of, selection_row, without_ratios
from zenflow.bench.hog import hog
from zenflow.bench.registry import CONTESTANTS, DEFAULT_U, SYNC, Job, missing
from zenflow.bench.session import Session
from zenflow.bench.variants import Variant
from zenflow.config import ZenFlowConfig
from zenflow.cores import CorePlan, physical_cores, plan_cores

WARM_UP_WINDOWS = 2
SETTLING_WINDOWS = 6  # of ZenFlow, whose worker finds its number of threads meanwhile
SELECTION_PERIODS = 3
FLOOR_STEPS = 16


def run(args: Namespace) -> int:
    """Everything that the arguments ask for; 0, or 1 if tests are red or a contestant failed."""
    session = StepSession(args)
    session.prove("tests.json")
    run_contestants(session)
    if args.selection:
        run_selections(session)
    if args.contention:
        run_contention(session)
    if args.growth:
        run_growth(session)
    print(session.save())
    print(f"written to {session.folder}")
    failed = any("error" in row and row["error"] != "not installed" for row in session.rows)
    return 1 if session.proof.red or failed else 0


class StepSession(Session):
    """The rows so far, and the folder that shows them."""

    def __init__(self, args: Namespace) -> None:
        super().__init__(args)
        self.contestants: list[Row] = []  # of the step table, before anything is compared
        self.more: list[Row] = []
        self._children = 0

    def run(self, job: Job) -> dict:
        """The child's result; a line of progress."""
        self._children += 1
        name = "".join(letter if letter.isalnum() or letter in ".=-" else "_" for letter in job.label)
        result = run_job(job, self.log(f"{self._children:02}-{name}"), self.args.timeout)
        told = result["error"] if "error" in result else f"{result['mean_ms']:,.1f} ms a step"
        self.say(f"{job.shape} {job.label}: {told}")
        return result

    def log(self, name: str) -> Path:
        """Where a child's own words go."""
        return self.folder / "logs" / f"{name}.log"

    def add(self, row: Row) -> None:
        """One more row of the further tables, in the files at once."""
        self.more.append(row)
        self.save()

    @property
    def rows(self) -> list[Row]:
        """All rows as they may be shown: without ratios unless the tests are green."""
        rows = [*compare(self.contestants), *self.more]
        return rows if self.proof.green else without_ratios(rows)

    def save(self) -> str:
        """Write step.csv, step.md and step.png; the text of step.md."""
        rows, args = self.rows, self.args
        job = f"Qwen2.5 {args.shape}'s shape, batch {args.batch} x {args.length}, bf16, clip {args.clip:g}"
        job += ", activation checkpointing" if args.checkpointing else ""
        heading = self.heading(f"Step times: {job}", "RATIOS")
        text = tables.report(rows, heading)
        (self.folder / "step.md").write_text(text, encoding="utf-8")
        tables.write_csv(rows, self.facts, self.folder / "step.csv")
        self._draw(rows)
        return text

    def _draw(self, rows: Sequence[Row]) -> None:
        shown = [row for row in rows if row["table"] == "step" and "error" not in row]
        floors = [row["mean_ms"] for row in shown if row["trainer"] == "floor"]
        if not floors:
            return
        title = f"{self.args.shape}, batch {self.args.batch} x {self.args.length}, {shown[0]['device']}"
        try:
            picture.save_picture(shown, sum(floors) / len(floors), title, self.folder / "step.png")
        except ImportError as error:
            self.say(f"no step.png: {error}")


def job_for(args: Namespace, trainer: str, label: str, window: int, settings: dict, **changes) -> Job:
    """A job of whole windows, after some that do not count, of at least 8 steps; no selection after the first."""
    windows = SETTLING_WINDOWS if trainer == "zenflow" else WARM_UP_WINDOWS
    warm_up = max(windows * window, -(-8 // window) * window)
    steps = args.windows * window
    if trainer in ("zenflow", "sync"):
        settings = {"select_interval": 10 * (warm_up + steps), **settings}
    floor_steps = 0 if trainer == "floor" else FLOOR_STEPS
    job = Job(
        trainer, label, args.shape, args.batch, args.length, warm_up, steps, window, floor_steps, settings=settings
    )
    same = {name: getattr(args, name) for name in ("clip", "lr", "checkpointing", "device")}
    return replace(job, **same, **changes)


def variant_job(args: Namespace, variant: Variant, label: str = "", **changes) -> Job:
    """ZenFlow with a variant's settings."""
    label = label or f"zenflow {variant.text}".strip()
    return job_for(args, "zenflow", label, variant.window, variant.settings, **changes)


def plain_job(args: Namespace, trainer: str, label: str = "", **changes) -> Job:
    """A contestant without settings: as many steps as ZenFlow's first variant, so that it takes as long a run."""
    window = args.zenflow[0].window if args.zenflow else DEFAULT_U
    if trainer == "sync":
        # Its windows are one step; the counts stay those of the others.
        job = job_for(args, trainer, label or trainer, window, SYNC, **changes)
        return replace(job, window=1)
    return job_for(args, trainer, label or trainer, window, {}, **changes)


def run_contestants(session: StepSession) -> None:
    """The floor, the trainers in the order of the registry, and the floor again."""
    args = session.args
    jobs = [plain_job(args, "floor", "floor, at the start")]
    for trainer in CONTESTANTS:
        if trainer == "zenflow" and trainer in args.trainers:
            jobs += [variant_job(args, variant) for variant in args.zenflow]
        elif trainer in args.trainers and trainer != "floor":
            jobs.append(plain_job(args, trainer))
    jobs.append(plain_job(args, "floor", "floor, at the end"))
    for job in jobs:
        if missing(job.trainer):
            session.say(f"{job.label}: not installed")
            result = {"error": "not installed"}
        else:
            result = session.run(job)
        session.contestants.append(row_of(job, result))
        session.save()


def run_selections(session: StepSession) -> None:
    """Each variant that selects, once more with a selection at the end of every `SELECTION_WINDOWS`-th window."""
    for variant in session.args.zenflow if "zenflow" in session.args.trainers else []:
        if variant.settings.get("topk_ratio") in (0, 1):
            continue
        period = SELECTION_WINDOWS * variant.window
        often = {**variant.settings, "select_strategy": "step", "select_interval": period}
        job = variant_job(session.args, Variant(variant.text, often))
        job = replace(
            job,
            label=f"{job.label}, selecting",
            warm_up=period,
            steps=SELECTION_PERIODS * period,
            floor_steps=0,
        )
        session.add(selection_row(job, session.run(job)))


def run_contention(session: StepSession) -> None:
    """The floor and launching: alone, beside N threads that run the CPU optimizer's pass, beside copies over PCIe."""
    available = len(physical_cores())
    for threads in session.args.contention:
        cores = plan_cores(1 - threads / available, True, threads)
        beside = ContentionJob(f"floor beside {threads} threads", cores, hog_threads=threads)
        _contend(session, [ContentionJob("floor alone", cores), beside])
    if session.args.contention and session.args.device != "cpu" and session.facts["gpu"]:
        cores = plan_cores(ZenFlowConfig.pt_reserved_cores_perc, True)
        copies = [ContentionJob(f"floor beside copies {way}", cores, copies=way) for way in ("to host", "to device")]
        _contend(session, [ContentionJob("floor alone", cores), *copies])


@dataclass(frozen=True)
class ContentionJob:
    """The floor on the trainer's cores of a plan, and what runs beside it."""

    label: str
    cores: CorePlan
    hog_threads: int = 0
    copies: str | None = None


def _contend(session: StepSession, jobs: Sequence[ContentionJob]) -> None:
    """Rows with ratios to the first of these jobs."""
    rows = [_contended(session, job) for job in jobs]
    for row in rows:
        if not any("error" in row for row in rows):
            row["ratio"] = row["mean_ms"] / rows[0]["mean_ms"]
            row["launch_ratio"] = row["launch_ms"] / rows[0]["launch_ms"]
        session.add(row | {"table": "contention", "note": ""})


def _contended(session: StepSession, contention: ContentionJob) -> Row:
    args, cores = session.args, contention.cores
    job = plain_job(args, "floor", contention.label, cores=cores.trainer_cores, copies=contention.copies)
    launching = replace(job, label=f"{job.label}, launching", batch=1, length=min(16, args.length))
    more: Row = {"trainer_cores": len(cores.trainer_cores)}
    try:
        with ExitStack() as stack:
            if contention.hog_threads:
                log = session.log(f"hog-{contention.hog_threads}")
                busy = stack.enter_context(hog(cores.worker_cores, contention.hog_threads, log, args.hog_matrices))
            results = [session.run(job), session.run(launching)]
        if contention.hog_threads:
            more["hog_gb_per_s"] = busy.gb_per_s[0]
    except RuntimeError as error:
        results = [{"error": str(error)}] * 2
    if errors := [result["error"] for result in results if "error" in result]:
        return row_of(job, {"error": errors[0]}) | more
    return row_of(job, results[0]) | more | {"launch_ms": results[1]["mean_ms"]}


def run_growth(session: StepSession) -> None:
    """The first variant at each size of the model and each number of worker cores, beside that size's floor."""
    available = len(physical_cores())
    variant = session.args.zenflow[0]
    for shape in session.args.growth_shapes:
        args = Namespace(**{**vars(session.args), "shape": shape})
        job = plain_job(args, "floor")
        rows = [row_of(job, session.run(job))]
        for cores in session.args.growth_cores:
            share = {"worker_threads": cores, "pt_reserved_cores_perc": 1 - cores / available, "core_binding": True}
            chosen = Variant(variant.text, {**variant.settings, **share})
            job = variant_job(args, chosen, f"zenflow {variant.text}, {cores} worker cores")
            row = row_of(job, session.run(job)) | {"worker_cores": cores}
            if "error" not in row:
                row["window_ms"] = job.window * row["mean_ms"]
            rows.append(row)
        for row in compare(rows):
            session.add(row | {"table": "growth", "note": ""})
