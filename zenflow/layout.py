"""Giving parameters their place: segments, records, kernel tables, and the worker that the first segment needs.

It happens at construction, and again for parameters that come or wake up later; then the worker is idle (a drain).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields

import torch
from zenflow_kernels.control import StepControl
from zenflow_kernels.table import Table

from zenflow.arena import require_memory
from zenflow.client import WorkerClient
from zenflow.cores import CorePlan, gpu_bus_id, plan_cores
from zenflow.matrices import DTYPE_NAMES, Newcomer, is_deferred
from zenflow.param_record import ParamRecord, record_deferred, record_whole
from zenflow.pipeline import Pipeline
from zenflow.ring_layout import bytes_of
from zenflow.storage import SegmentStorage, new_segment
from zenflow.window import divide
from zenflow.worker_settings import WorkerSettings


def lay_out(
    pipeline: Pipeline, newcomers: Sequence[Newcomer], n_groups: int, cohorts: Mapping[int, int] | None = None
) -> None:
    """Place `newcomers`, by dtype; what fails leaves the pipeline as it was.

    cohorts: by `id(param)`, of those that are deferred; None: as `divide` finds them.
    """
    pipeline.wait_for_worker()
    for dtype in dict.fromkeys(newcomer.param.dtype for newcomer in newcomers):
        alike = [newcomer for newcomer in newcomers if newcomer.param.dtype == dtype]
        _lay_out_dtype(pipeline, alike, n_groups, _cohorts(pipeline, alike) if cohorts is None else cohorts)
    records = pipeline.records
    pipeline.control = _grown(pipeline.control, records, pipeline.config.update_interval)
    if pipeline.storages:
        pipeline.clock.cohorts = tuple(sorted({storage.cohort for storage in pipeline.storages}))
    pipeline.present_log = [row + [False] * (len(records) - len(row)) for row in pipeline.present_log]
    total = sum(table.n_partials for table in pipeline.tables)
    pipeline.partials = torch.zeros(total, dtype=torch.float64, device=pipeline.device)


def _cohorts(pipeline: Pipeline, newcomers: Sequence[Newcomer]) -> dict[int, int]:
    """The cohort of each deferred one, by `id(param)`; newcomers are of one dtype, and join the cohorts that it has."""
    config = pipeline.config
    deferred = [newcomer.param for newcomer in newcomers if is_deferred(config, newcomer.param)]
    if not config.stagger:
        return {id(param): config.update_interval for param in deferred}
    loads: dict[int, int] = {}
    for storage in pipeline.storages:
        if storage.segment.weight_dtype == DTYPE_NAMES[newcomers[0].param.dtype]:
            numel = sum(matrix.numel for matrix in storage.segment.matrices)
            loads[storage.cohort] = loads.get(storage.cohort, 0) + numel
    found = divide([param.numel() for param in deferred], loads, config.update_interval) if deferred else []
    return {id(param): cohort for param, cohort in zip(deferred, found, strict=True)}


def _lay_out_dtype(pipeline: Pipeline, newcomers: list[Newcomer], n_groups: int, cohorts: Mapping[int, int]) -> None:
    config, first = pipeline.config, len(pipeline.records)
    deferred: dict[int, list[Newcomer]] = {}
    for newcomer in newcomers:
        if is_deferred(config, newcomer.param):
            deferred.setdefault(cohorts[id(newcomer.param)], []).append(newcomer)
    segments = {
        cohort: new_segment(config, number, newcomers[0].param.dtype, members, n_groups)
        for number, (cohort, members) in enumerate(sorted(deferred.items()), start=len(pipeline.storages))
    }
    require_memory(sum(map(bytes_of, segments.values())))
    storages: dict[int, SegmentStorage] = {}
    with ExitStack() as undo:
        for cohort, segment in segments.items():
            storages[cohort] = SegmentStorage(segment, cohort, pipeline.device, _plan(pipeline).worker_cores)
            undo.callback(storages[cohort].close)
        records = _make_records(pipeline, newcomers, first, storages, cohorts)
        for storage in storages.values():
            _hand_over(pipeline, storage)
        table = Table([record.entry() for record in records], first=first)
        undo.pop_all()
    pipeline.records += records
    pipeline.tables.append(table)
    pipeline.scores.follow(table)
    pipeline.storages += storages.values()


def _make_records(
    pipeline: Pipeline,
    newcomers: Sequence[Newcomer],
    first: int,
    storages: Mapping[int, SegmentStorage],
    cohorts: Mapping[int, int],
) -> list[ParamRecord]:
    """Records from number `first` on; matrices travel in reverse order: the first is the last in its segment."""
    config, records = pipeline.config, []
    left = {cohort: len(storage.segment.matrices) for cohort, storage in storages.items()}
    for index, newcomer in enumerate(newcomers, start=first):
        if not is_deferred(config, newcomer.param):
            records.append(record_whole(newcomer, index, config))
            continue
        cohort = cohorts[id(newcomer.param)]
        left[cohort] -= 1
        records.append(record_deferred(newcomer, index, storages[cohort], left[cohort], config))
    for storage in storages.values():
        storage.indices = [record.index for record in reversed(records) if record.storage is storage]
        storage.members = [
            tuple({storage.indices[piece.matrix]: None for piece in bucket.pieces})
            for bucket in storage.segment.buckets
        ]
    return records


def _hand_over(pipeline: Pipeline, storage: SegmentStorage) -> None:
    """Fill a new segment's host side and tell the worker about it, which starts with the first."""
    storage.fill_host_from_weights()
    if pipeline.client is None:
        pipeline.client = _start_worker(pipeline)
        pipeline.sender.client = pipeline.client
        pipeline.uploader.follow(pipeline.client)
    pipeline.client.attach(storage.segment, storage.memory)


def _binds(pipeline: Pipeline) -> bool:
    binding = pipeline.config.core_binding
    return pipeline.device.type == "cuda" if binding == "auto" else bool(binding)


def _plan(pipeline: Pipeline) -> CorePlan:
    """Made before the first memory is: its pages are to lie where the worker will run."""
    if pipeline.cores is None:
        config = pipeline.config
        pipeline.cores = plan_cores(
            config.pt_reserved_cores_perc, _binds(pipeline), config.worker_threads, gpu_bus_id(pipeline.device)
        )
    return pipeline.cores


def _start_worker(pipeline: Pipeline) -> WorkerClient:
    config, cores, bind = pipeline.config, _plan(pipeline), _binds(pipeline)
    settings = WorkerSettings(
        deferred_rule=config.deferred_rule,
        deferred_lr_scale=config.deferred_lr_scale,
        adapt_threads=bind and config.worker_threads == "auto",
        weight_prediction=config.weight_prediction,
    )
    client = WorkerClient(settings=settings, cores=cores.worker_cores, threads=cores.worker_threads)
    if bind:
        cores.bind_trainer()
    return client


def _grown(control: StepControl, records: Sequence[ParamRecord], max_steps: int) -> StepControl:
    larger = StepControl.create(len(records), max_steps, control.finite.device)
    for field in fields(control):
        old = getattr(control, field.name)
        getattr(larger, field.name)[: old.numel()].copy_(old)
    cohorts = [max_steps if record.storage is None else record.storage.cohort for record in records]
    larger.cohort.copy_(torch.tensor(cohorts, dtype=torch.int32, device="cpu"))
    return larger
