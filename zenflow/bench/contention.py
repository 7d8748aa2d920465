"""The table of `zenflow-bench step --contention`: the floor and launching beside others on the same memory and PCIe."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from zenflow.bench.figures import Row, row_of
from zenflow.bench.hog import hog
from zenflow.bench.jobs import plain_job
from zenflow.bench.registry import LAUNCH_LENGTH
from zenflow.bench.step_session import StepSession
from zenflow.config import ZenFlowConfig
from zenflow.cores import CorePlan, physical_cores, plan_cores
from zenflow.terminal import counted


def run_contention(session: StepSession) -> None:
    """The floor and launching: alone, beside N threads that run the CPU optimizer's pass, beside copies over PCIe."""
    available = len(physical_cores())
    for threads in session.args.contention:
        cores = plan_cores(1 - threads / available, True, threads)
        beside = ContentionJob(f"floor beside {counted(threads, 'thread')}", cores, hog_threads=threads)
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
    launching = replace(job, label=f"{job.label}, launching", batch=1, length=min(LAUNCH_LENGTH, args.length))
    more: Row = {"trainer_cores": len(cores.trainer_cores)}
    threads = contention.hog_threads
    log = session.log(f"hog-{threads}")
    try:
        with hog(cores.worker_cores, threads, log, args.hog_matrices) if threads else nullcontext() as busy:
            results = [session.run(job), session.run(launching)]
    except RuntimeError as error:
        results = [{"error": str(error)}] * 2
    else:
        if busy is not None:
            more["hog_gb_per_s"] = busy.gb_per_s[0]
    if errors := [result["error"] for result in results if "error" in result]:
        return row_of(job, {"error": errors[0]}) | more
    return row_of(job, results[0]) | more | {"launch_ms": results[1]["mean_ms"]}
