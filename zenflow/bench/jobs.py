"""The jobs of `zenflow-bench step`, from its arguments: who trains how, and for how many steps."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace

from zenflow.bench.registry import CONTESTANTS, DEFAULT_U, SYNC, Job
from zenflow.bench.variants import Variant

WARM_UP_WINDOWS = 2
SETTLING_WINDOWS = 6  # of ZenFlow, whose worker finds its number of threads meanwhile
FLOOR_STEPS = 16


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
    """A contestant without settings: as many steps as ZenFlow's first variant, so that it takes as long a run; a peer
    as many as `--peer-windows` says."""
    window = args.zenflow[0].window if args.zenflow else DEFAULT_U
    if trainer == "sync":
        # Its windows are one step; the counts stay those of the others.
        job = job_for(args, trainer, label or trainer, window, SYNC, **changes)
        return replace(job, window=1)
    job = job_for(args, trainer, label or trainer, window, {}, **changes)
    if CONTESTANTS[trainer].peer and args.peer_windows:
        job = replace(job, steps=args.peer_windows * window)
    return job
