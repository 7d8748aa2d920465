"""A state as a folder: `manifest.json` and safetensors shards, whole or absent.

The folder is made beside its place under a hidden name, brought down to the disk and renamed: what has the right name
is complete, whatever kills the process, and a full disk leaves nothing. The manifest has the format's version, the
libraries' versions, the configuration, the state's tree (`state_tree`), size and SHA-256 of every shard, and its own
SHA-256, so that `load` gives back what was saved, bit for bit, or refuses. Nothing is pickled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zenflow import safetensors_file
from zenflow.disk import check_room, opened, room_for, sync
from zenflow.folder_lock import locked
from zenflow.own_lock import OwnLock
from zenflow.state_tree import flatten, restore

FORMAT = "zenflow-checkpoint"
VERSION = 1
PROJECT = "zenflow-triton"  # the distribution whose version a manifest names
MANIFEST = "manifest.json"
SHARD_BYTES = 4 * 2**30
LEFTOVER = ".zenflow-partial"  # the end of the hidden names
_SHARD = re.compile(r"shard-\d{5}\.safetensors")
_PARTS = {
    "version": int,
    "libraries": dict,
    "configuration": dict,
    "shards": list,
    "tree": dict,
    "sha256": str,
}


class CheckpointError(ValueError):
    """A folder that is no whole checkpoint of a version that this program reads; says which and why."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint says of itself. `libraries`: name -> version when it was saved; `bytes`: of its shards."""

    version: int
    libraries: dict[str, str]
    configuration: dict[str, Any]
    shards: tuple[str, ...]
    bytes: int


def save(
    folder: str | os.PathLike[str],
    state: dict[Any, Any],
    *,
    configuration: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `state` as the new folder `folder`, whose parent exists; it appears whole, or not at all.

    Args:
        state: nested dicts (keys int or str), lists, tuples, tensors of any device, numbers, strings, booleans, None.
            Nobody may change its tensors meanwhile. Tensors over exactly the same memory stay one.
        configuration: for whoever reads the manifest; the same without tensors.
        shard_bytes: a shard holds no more than this, or one tensor.

    Raises:
        FileExistsError: there is something at `folder`, which stays what it is.
        ValueError: the state holds what cannot be kept, by its path; nothing has been written.
        DiskFullError: an OSError that says how many bytes are needed and available; nothing is left.
        FolderBusyError: an OSError that names the process which makes a checkpoint beside this one and does not end.
    """
    folder = Path(folder).absolute()  # the working directory may change meanwhile
    _refuse_what_exists(folder)
    body, shards = _prepare(state, configuration, shard_bytes)
    needed = sum(shard["bytes"] for shard in body["shards"]) + len(_manifest_text(body))
    with room_for(folder, needed), _scratch(folder.parent) as scratch:
        check_room(folder, needed)
        for entry, tensors in zip(body["shards"], shards, strict=True):
            entry["sha256"] = safetensors_file.write(scratch / entry["file"], tensors, safetensors_file.METADATA)
        _write(scratch / MANIFEST, _manifest_text(body))
        sync(scratch)
        try:
            os.rename(scratch, folder)
        except OSError:
            _refuse_what_exists(folder)  # by now, as another process has made it
            raise
        sync(folder.parent)


def _refuse_what_exists(folder: Path) -> None:
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "a checkpoint is never written over anything; this exists", str(folder))


def load(folder: str | os.PathLike[str]) -> dict[Any, Any]:
    """The state that was saved as `folder`, tensors on the CPU: pages of the files, read when they are used.

    Everything is verified before anything is given back. CheckpointError names what is foreign, newer, damaged or
    missing; FileNotFoundError if there is no such folder.
    """
    folder = Path(folder)
    body = _read_body(folder)
    for entry in body["shards"]:
        _check_size(folder, entry)
    for entry in body["shards"]:
        _check_hash(folder, entry)
    tensors: dict[str, Tensor] = {}
    for entry in body["shards"]:
        tensors |= _read_shard(folder, entry, tensors)
    try:
        state = restore(body["tree"], tensors)
    except ValueError as error:
        raise CheckpointError(f"the tree in {folder / MANIFEST} cannot be read: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the tree in {folder / MANIFEST} is no dict")
    return state


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """What a checkpoint says of itself, without its tensors; errors as in `load`, shards are looked for only."""
    folder = Path(folder)
    body = _read_body(folder)
    for entry in body["shards"]:
        _check_size(folder, entry)
    try:
        configuration = restore(body["configuration"], {})
    except ValueError as error:
        raise CheckpointError(f"the configuration in {folder / MANIFEST} cannot be read: {error}") from error
    names = tuple(entry["file"] for entry in body["shards"])
    total = sum(entry["bytes"] for entry in body["shards"])
    return Manifest(body["version"], body["libraries"], configuration, names, total)


def _prepare(
    state: dict[Any, Any], configuration: Mapping[str, Any] | None, shard_bytes: int
) -> tuple[dict[str, Any], list[dict[str, Tensor]]]:
    """The manifest's body, its shards' hashes still to come, and each shard's tensors."""
    if not isinstance(state, dict):
        raise ValueError(f"the state is a {type(state).__name__}; allowed is a dict")
    tree, tensors = flatten(state)
    safetensors_file.check_dtypes(tensors)
    described, strays = flatten(dict(configuration or {}))
    if strays:
        raise ValueError(f"the configuration holds tensors: {', '.join(strays)}; allowed are numbers and strings")
    shards = list(_shards(tensors, shard_bytes))
    return {
        "format": FORMAT,
        "version": VERSION,
        "libraries": libraries(),
        "configuration": described,
        "shards": [
            {
                "file": f"shard-{number:05}.safetensors",
                "bytes": safetensors_file.file_bytes(shard, safetensors_file.METADATA),
                "sha256": "0" * 64,
                "tensors": list(shard),
            }
            for number, shard in enumerate(shards, start=1)
        ],
        "tree": tree,
    }, shards


def _shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    filled = 0
    for name, tensor in tensors.items():
        if shard and filled + tensor.nbytes > shard_bytes:
            yield shard
            shard, filled = {}, 0
        shard[name] = tensor
        filled += tensor.nbytes
    if shard:
        yield shard


def libraries() -> dict[str, str]:
    """Name -> version of what a checkpoint that is saved now says it was saved with."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    with suppress(PackageNotFoundError):  # a source tree that is not installed has no version
        found[PROJECT] = version(PROJECT)
    return found


def _manifest_text(body: Mapping[str, Any]) -> bytes:
    """As it is written: the body and its own hash, with a line an entry so that people can read it."""
    return json.dumps({**body, "sha256": _hash_of(body)}, indent=1, allow_nan=False).encode()


def _hash_of(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


# Writing


@contextmanager
def _scratch(parent: Path) -> Iterator[Path]:
    """A new hidden folder in `parent`, removed at the end if it is still there, with those of killed processes."""
    scratch = parent / f".{secrets.token_hex(8)}{LEFTOVER}"
    with ExitStack() as held:
        # Meanwhile nobody takes a folder that is not locked yet for that of a dead process.
        with opened(parent) as descriptor, locked(descriptor, parent):
            remove_leftovers(parent)
            scratch.mkdir()
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
            held.enter_context(locked(held.enter_context(opened(scratch)), scratch))
        yield scratch


def remove(folder: str | os.PathLike[str]) -> None:
    """Remove a checkpoint: it is whole or gone, whatever kills the process.

    What is left then has a hidden name, and goes with the next `save` or `remove_leftovers` beside it. OSError.
    """
    folder = Path(folder)
    doomed = folder.with_name(f".{secrets.token_hex(8)}{LEFTOVER}")
    os.rename(folder, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes have left of checkpoints in `parent`."""
    for path in parent.glob(f".*{LEFTOVER}"):
        with suppress(OSError), closing(OwnLock(path, os.O_RDONLY | os.O_DIRECTORY)) as lock:
            if lock.take():  # not while the process that made it lives
                shutil.rmtree(path)


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


# Reading


def _read_body(folder: Path) -> dict[str, Any]:
    """The manifest without its hash, of a known version, whole, and with shards' names that stay in the folder."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no checkpoint folder", str(folder))
    try:
        body = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {path.name} cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of a {FORMAT}")
    if type(body.get("version")) is not int or body["version"] != VERSION:
        raise CheckpointError(f"{path} has version {body.get('version')!r}; this program reads version {VERSION}")
    for name, kind in _PARTS.items():
        if not isinstance(body.get(name), kind):
            raise CheckpointError(f"{path} is damaged: {name} is missing or no {kind.__name__}")
    written = body.pop("sha256")
    try:
        found = _hash_of(body)
    except (ValueError, RecursionError) as error:  # NaN, which JSON does not know, or nested to the limit
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if found != written:
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one that it names")
    _check_shards(path, body["shards"])
    return body


def _check_shards(path: Path, shards: Sequence[Any]) -> None:
    names = []
    for entry in shards:
        kinds = {"file": str, "bytes": int, "sha256": str, "tensors": list}
        if not isinstance(entry, dict) or {name: type(value) for name, value in entry.items()} != kinds:
            raise CheckpointError(f"{path} describes a shard as {entry!r:.200}")
        if not _SHARD.fullmatch(entry["file"]):
            raise CheckpointError(f"{path} names the shard {entry['file']!r}; allowed is shard-NNNNN.safetensors")
        if not all(isinstance(name, str) for name in entry["tensors"]):
            raise CheckpointError(f"{path} names tensors of {entry['file']} as {entry['tensors']!r:.200}")
        names.append(entry["file"])
    if len(set(names)) < len(names):
        raise CheckpointError(f"{path} names a shard twice")


def _check_size(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / entry["file"]
    try:
        size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"the shard {path} is missing ({error.strerror})") from error
    if size != entry["bytes"]:
        raise CheckpointError(f"the shard {path} has {size:,} bytes; {entry['bytes']:,} were saved")


def _check_hash(folder: Path, entry: Mapping[str, Any]) -> None:
    path = folder / entry["file"]
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry["sha256"]:
        raise CheckpointError(f"the shard {path} is damaged: its SHA-256 is not the manifest's")


def _read_shard(folder: Path, entry: Mapping[str, Any], known: Iterable[str]) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / entry["file"]
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"the shard {path} is damaged: {error}") from error
    if sorted(tensors) != sorted(entry["tensors"]) or not tensors.keys().isdisjoint(known):
        raise CheckpointError(f"the shard {path} does not hold the tensors that the manifest names")
    return tensors
