"""What wandb keeps of an offline run: its file of records, read without wandb's own program."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, FILE_HEADER, HEADER = 32768, 7, 7  # bytes; LevelDB's log format
FULL, LAST = 1, 4  # kinds of a piece that ends a record


class Kept:
    """The one wandb run in a folder, as `wandb sync` would send it; `kind` is `run` of one that was sent as it went."""

    def __init__(self, folder: Path, kind: str = "offline-run") -> None:
        (path,) = folder.glob(f"wandb/{kind}-*/run-*.wandb")
        self._records = list(_records(path.read_bytes()))
        (run,) = self._of("run")[:1]
        self.id, self.group, self.name, self.tags = run.run_id, run.run_group, run.display_name, list(run.tags)
        self.config: dict[str, Any] = _values(run.config.update)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Each `log`, less wandb's own keys."""
        return [
            {name: value for name, value in _values(line.item).items() if name[0] != "_"}
            for line in self._of("history")
        ]

    @property
    def summary(self) -> dict[str, Any]:
        """The last value of each name."""
        return {name: value for update in self._of("summary") for name, value in _values(update.update).items()}

    @property
    def axes(self) -> dict[str, str]:
        """Metric, or pattern of metrics, to its horizontal axis."""
        return {metric.glob_name or metric.name: metric.step_metric for metric in self._of("metric")}

    @property
    def exit_code(self) -> int | None:
        """What the run finished with, None of one that did not; of one that is cut short wandb writes another later."""
        ends = self._of("exit")
        return ends[0].exit_code if ends else None

    def _of(self, kind: str) -> list[Any]:
        return [getattr(record, kind) for record in self._records if record.WhichOneof("record_type") == kind]


def _values(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _records(data: bytes) -> Iterator[Any]:
    place, parts = FILE_HEADER, b""
    while place + HEADER <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record
