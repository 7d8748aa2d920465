"""Giving parameters their place: segments, records, kernel tables, and the worker that the first segment needs.

It happens at construction, and again for parameters that come or wake up later; then the worker is idle (a drain).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

import torch
from zenflow_kernels.control import StepControl
from zenflow_kernels.table import Table

from zenflow.client import WorkerClient
from zenflow.cores import CorePlan, plan_cores
from zenflow.ring import WorkerSettings
from zenflow.storage import (
    Newcomer,
    ParamRecord,
    SegmentStorage,
    is_deferred,
    new_segment,
    record_deferred,
    record_whole,
)

if TYPE_CHECKING:
    from zenflow.pipeline import Pipeline


def lay_out(pipeline: Pipeline, newcomers: Sequence[Newcomer], n_groups: int) -> None:
    """Place `newcomers`, by dtype; what fails leaves the pipeline as it was."""
    pipeline.wait_for_worker()
    for dtype in dict.fromkeys(newcomer.param.dtype for newcomer in newcomers):
        _lay_out_dtype(pipeline, [newcomer for newcomer in newcomers if newcomer.param.dtype == dtype], n_groups)
    records = pipeline.records
    pipeline.control = _grown(pipeline.control, len(records), pipeline.config.update_interval)
    pipeline.present_log = [row + [False] * (len(records) - len(row)) for row in pipeline.present_log]
    total = sum(table.n_partials for table in pipeline.tables)
    pipeline.partials = torch.zeros(total, dtype=torch.float64, device=pipeline.device)


def _lay_out_dtype(pipeline: Pipeline, newcomers: list[Newcomer], n_groups: int) -> None:
    config, first = pipeline.config, len(pipeline.records)
    deferred = [newcomer for newcomer in newcomers if is_deferred(config, newcomer.param)]
    storage = None
    if deferred:
        segment = new_segment(config, len(pipeline.storages), newcomers[0].param.dtype, deferred, n_groups)
        storage = SegmentStorage(segment, pipeline.device, _plan(pipeline).worker_cores)
    try:
        records: list[ParamRecord] = []
        # Matrices travel in reverse registration order: the first registered is the last in the segment.
        number = len(deferred)
        for index, newcomer in enumerate(newcomers, start=first):
            if storage is not None and is_deferred(config, newcomer.param):
                number -= 1
                records.append(record_deferred(newcomer, index, storage, number, config))
            else:
                records.append(record_whole(newcomer, index))
        if storage is not None:
            storage.indices = [record.index for record in reversed(records) if record.matrix is not None]
            storage.members = [
                tuple({storage.indices[piece.matrix]: None for piece in bucket.pieces})
                for bucket in storage.segment.buckets
            ]
            _hand_over(pipeline, storage)
        table = Table([record.entry() for record in records], first=first)
    except BaseException:
        if storage is not None:
            storage.close()
        raise
    pipeline.records += records
    pipeline.tables.append(table)
    if storage is not None:
        pipeline.storages.append(storage)


def _hand_over(pipeline: Pipeline, storage: SegmentStorage) -> None:
    """Fill a new segment's host side and tell the worker about it, which starts with the first."""
    storage.fill_host_from_weights()
    if pipeline.client is None:
        pipeline.client = _start_worker(pipeline)
        pipeline.sender.client = pipeline.client
        pipeline.uploads.follow(pipeline.client)
    pipeline.client.attach(storage.segment, storage.memory)


def _binds(pipeline: Pipeline) -> bool:
    binding = pipeline.config.core_binding
    return pipeline.device.type == "cuda" if binding == "auto" else bool(binding)


def _plan(pipeline: Pipeline) -> CorePlan:
    """Made before the first memory is: its pages are to lie where the worker will run."""
    if pipeline.cores is None:
        config = pipeline.config
        pipeline.cores = plan_cores(
            config.pt_reserved_cores_perc, _binds(pipeline), config.worker_threads, _bus_id(pipeline.device)
        )
    return pipeline.cores


def _bus_id(device: torch.device) -> str | None:
    """As sysfs spells it; None where torch does not know."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    place = [getattr(found, name, None) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id")]
    return None if None in place else "{:04x}:{:02x}:{:02x}.0".format(*place)


def _start_worker(pipeline: Pipeline) -> WorkerClient:
    config, cores, bind = pipeline.config, _plan(pipeline), _binds(pipeline)
    settings = WorkerSettings(
        deferred_rule=config.deferred_rule,
        deferred_lr_scale=config.deferred_lr_scale,
        adapt_threads=bind and config.worker_threads == "auto",
    )
    client = WorkerClient(settings=settings, cores=cores.worker_cores, threads=cores.worker_threads)
    if bind:
        cores.bind_trainer()
        # More threads than cores would spin against each other in every host operation.
        pipeline.unbound_threads = torch.get_num_threads()
        torch.set_num_threads(min(pipeline.unbound_threads, len(cores.trainer_cores)))
    return client


def _grown(control: StepControl, n_params: int, max_steps: int) -> StepControl:
    larger = StepControl.create(n_params, max_steps, control.finite.device)
    for field in fields(control):
        old = getattr(control, field.name)
        getattr(larger, field.name)[: old.numel()].copy_(old)
    return larger
