"""Room on a disk, in numbers; files that are whole or not there; names that outlive a power cut."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """There is no room for a file or folder: says how many bytes it needs and how many are available.

    Where these would do, the disk's inodes may have run out: says how many are free, now that nothing is left of it.
    """


def check_room(path: Path, needed: int) -> None:
    """DiskFullError unless the disk of the coming `path` has `needed` bytes."""
    available = shutil.disk_usage(path.parent).free
    if available < needed:
        raise _too_full(errno.ENOSPC, path, needed, available)


@contextmanager
def room_for(path: Path, needed: int) -> Iterator[None]:
    """DiskFullError if the disk fills up in the block, which has tidied up by then."""
    try:
        yield
    except DiskFullError:
        raise
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise _too_full(error.errno, path, needed, shutil.disk_usage(path.parent).free) from error


def _too_full(number: int, path: Path, needed: int, available: int) -> DiskFullError:
    said = f"no room: {needed:,} bytes needed, {available:,} available"
    disk = os.statvfs(path.parent)
    if number == errno.ENOSPC and needed <= available and disk.f_files:  # some file systems have no fixed number
        said += f"; of {disk.f_files:,} inodes {disk.f_favail:,} are free"
    return DiskFullError(number, said, str(path))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path`, for a file that takes its place at the block's end; whoever reads `path` meanwhile sees the
    old file, and so does everybody if the block fails."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    """A descriptor of a folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(folder: Path) -> None:
    """Names that were made or changed in `folder` outlive a power cut from now on."""
    with opened(folder) as descriptor:
        os.fsync(descriptor)


def sync_all(folder: Path) -> None:
    """So do all names below `folder`, and what is in the files."""
    for path in folder.iterdir():
        if path.is_dir():
            sync_all(path)
        else:
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    sync(folder)
