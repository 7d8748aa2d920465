"""`zenflow-bench step`: every contestant in turn, each in its own child, then the tables."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from zenflow.bench.contention import run_contention
from zenflow.bench.figures import SELECTION_WINDOWS, compare, row_of, selection_row
from zenflow.bench.jobs import plain_job, variant_job
from zenflow.bench.registry import CONTESTANTS, missing
from zenflow.bench.step_session import StepSession
from zenflow.bench.variants import Variant
from zenflow.cores import physical_cores

SELECTION_PERIODS = 3


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
            result = session.run_traced(job)
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
