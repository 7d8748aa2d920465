"""Whether what has its name on the disk would outlive a power cut: what was brought down before, and what after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

Calls = list[tuple[str, Path, Path]]


def watch_disk(patch: pytest.MonkeyPatch) -> Calls:
    """What happens from now on, in order: ("sync", path, path) and ("rename", from, to)."""
    calls: Calls = []
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        calls.append(("sync", path, path))
        fsync(descriptor)

    def renamed(source: Any, target: Any, **options: Any) -> None:
        calls.append(("rename", Path(source), Path(target)))
        rename(source, target, **options)

    patch.setattr(os, "fsync", synced)
    patch.setattr(os, "rename", renamed)
    return calls


def assert_durable(calls: Calls, folder: Path) -> None:
    """All files of `folder`, and their names, were brought down before it got its own, and that one afterwards."""
    (place,) = (number for number, (kind, _, target) in enumerate(calls) if (kind, target) == ("rename", folder))
    scratch = calls[place][1]
    wanted = {scratch / path.relative_to(folder) for path in (folder, *folder.rglob("*"))}
    assert wanted - {path for kind, path, _ in calls[:place] if kind == "sync"} == set()
    assert ("sync", folder.parent, folder.parent) in calls[place:]
