"""Whether what has its name on the disk would outlive a power cut: what was brought down before, and what after."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Calls = list[tuple[str, Path, Path]]


def watch_disk(patch: pytest.MonkeyPatch) -> Calls:
    """What happens from now on, in order: ("sync", path, path) and ("rename", from, to)."""
    calls: Calls = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("sync", path, path))
        fsync(descriptor)

    def watched(renaming: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            calls.append(("rename", Path(source), Path(target)))
            renaming(source, target, **options)

        return renamed

    patch.setattr(os, "fsync", synced)
    patch.setattr(os, "rename", watched(os.rename))
    patch.setattr(os, "replace", watched(os.replace))
    return calls


def assert_durable(calls: Calls, folder: Path) -> None:
    """All files of `folder`, which may be a file, and their names were brought down before it got its own, and that one
    afterwards."""
    (place,) = (number for number, (kind, _, target) in enumerate(calls) if (kind, target) == ("rename", folder))
    scratch = calls[place][1]
    wanted = {scratch / path.relative_to(folder) for path in (folder, *folder.rglob("*"))}
    assert wanted - {path for kind, path, _ in calls[:place] if kind == "sync"} == set()
    assert ("sync", folder.parent, folder.parent) in calls[place:]
