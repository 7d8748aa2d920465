"""Checkpoint folders: what was saved comes back bit for bit or is refused, and none is ever there in part."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as draw
from safetensors import safe_open

from tests.durability import assert_durable, watch_disk
from tests.shortages import files_up_to
from tests.units.states import assert_same, rewrite
from zenflow import checkpoint_folder
from zenflow.checkpoint_folder import CheckpointError, load, read_manifest, remove, remove_leftovers, save
from zenflow.disk import DiskFullError
from zenflow.safetensors_file import DTYPE_NAMES

SHARD_BYTES = 64


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 3, generator=generator)
    return {
        "optimizer": {
            "state": {
                0: {"master": weight, "step": torch.tensor([1, 2, 3]), "count": 2},
                1: {"master": weight.to(torch.bfloat16).t(), "selected": torch.empty(0, dtype=torch.int64)},
            },
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}],
        },
        "model": {"embedding": weight, "head": weight, "scale": torch.tensor(2.5)},
        "rng": torch.get_rng_state(),
        "loop": {"step": 12, "best": float("inf"), "name": "a\u00e9\udc80", "done": False, "parent": None},
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path / "saved", make_state(), configuration={"topk_ratio": 0.1}, shard_bytes=SHARD_BYTES)
    return tmp_path / "saved"


def test_a_state_comes_back(saved: Path) -> None:
    back = load(saved)
    assert_same(back, make_state())
    assert back["model"]["embedding"] is back["model"]["head"] is back["optimizer"]["state"][0]["master"]


def test_what_comes_back_may_be_written(saved: Path) -> None:
    load(saved)["model"]["embedding"].zero_()
    assert_same(load(saved), make_state())


@pytest.mark.parametrize("dtype", DTYPE_NAMES, ids=str)
def test_every_dtype_keeps_its_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    state = {"before": torch.ones(1, dtype=torch.bool)}
    for shape in [(), (0,), (3, 0), (5,), (7, 3)]:
        content = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
        if dtype != torch.bool:
            content = content * 171  # NaN among them
        state[f"x {shape}"] = content.view(dtype).reshape(shape)
    save(tmp_path / "saved", state)
    assert_same(load(tmp_path / "saved"), state)


def test_shards_are_ordinary_safetensors(saved: Path) -> None:
    shards = sorted(saved.glob("*.safetensors"))
    assert len(shards) > 3
    names = []
    for shard in shards:
        with safe_open(shard, "pt") as file:
            sizes = [file.get_tensor(name).nbytes for name in file.keys()]  # noqa: SIM118, it is no dict
            names += file.keys()
        assert sum(sizes) <= SHARD_BYTES or len(sizes) == 1
    assert "optimizer.state.0.master" in names
    assert len(set(names)) == len(names)


def test_the_manifest_says_what_is_there(saved: Path) -> None:
    manifest = read_manifest(saved)
    assert manifest.version == checkpoint_folder.VERSION
    assert manifest.configuration == {"topk_ratio": 0.1}
    assert manifest.libraries["torch"] == torch.__version__
    assert manifest.bytes == sum(path.stat().st_size for path in saved.glob("*.safetensors"))
    assert set(manifest.shards) | {"manifest.json"} == {path.name for path in saved.iterdir()}


def test_it_is_readable_by_whom_the_umask_allows(saved: Path) -> None:
    mask = os.umask(0o022)
    os.umask(mask)
    assert saved.stat().st_mode & 0o777 == 0o777 & ~mask


def test_nothing_is_ever_written_over(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(FileExistsError, match="saved"):
        save(saved, {"x": 1})
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("kind", ["checkpoint", "file"])
def test_nor_over_what_somebody_else_has_made_meanwhile(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes save to one folder at once: the first wins, the other is told so by the folder's name."""
    rename = os.rename

    def late(scratch: Path, folder: Path) -> None:
        monkeypatch.setattr(os, "rename", rename)
        if kind == "file":
            folder.write_text("mine")
        else:
            save(folder, {"x": 1})
        rename(scratch, folder)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(FileExistsError, match=r"never written over anything.*saved'"):
        save(tmp_path / "saved", {"x": 2})
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    assert (tmp_path / "saved").read_text() == "mine" if kind == "file" else load(tmp_path / "saved") == {"x": 1}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ([1], "the state is a list"),
        ({"x": {1}}, "x is a builtins.set"),
        ({"x": torch.ones(2, dtype=torch.complex128)}, "x is torch.complex128"),
    ],
    ids=["list", "set", "dtype"],
)
def test_what_cannot_be_kept_is_refused_before_anything_is_written(state: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        save(tmp_path / "saved", state)
    assert not list(tmp_path.iterdir())


# Damage


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=draw.data())
def test_a_flipped_bit_or_a_cut_end_is_refused(saved: Path, data: draw.DataObject) -> None:
    """In a shard always; in the manifest unless it says the same, as with a tab for a space."""
    folder = saved.parent / "damaged"
    shutil.copytree(saved, folder)
    try:
        path = data.draw(draw.sampled_from(sorted(folder.iterdir())))
        content = bytearray(path.read_bytes())
        place = data.draw(draw.integers(0, len(content) - 1))
        if data.draw(draw.booleans()):
            content[place] ^= 1 << data.draw(draw.integers(0, 7))
        else:
            del content[place:]
        path.write_bytes(content)
        try:
            back = load(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)
        else:
            assert path.name == "manifest.json"
            assert_same(back, make_state())
    finally:
        shutil.rmtree(folder)


def edit(folder: Path) -> None:
    """As somebody would who knows of no hash."""
    path = folder / "manifest.json"
    assert '"step": 12' in path.read_text()
    path.write_text(path.read_text().replace('"step": 12', '"step": 13'))


def forge_shard(folder: Path) -> None:
    """A shard with other tensors, with its right size and hash in the manifest."""
    other = folder.parent / "other"
    save(other, {"stranger": torch.ones(3)})
    shard = json.loads((other / "manifest.json").read_text())["shards"][0]
    shutil.copy(other / shard["file"], folder / "shard-00001.safetensors")
    rewrite(folder, lambda body: body["shards"][0].update(bytes=shard["bytes"], sha256=shard["sha256"]))


DAMAGE = {
    "no-manifest": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json cannot be read"),
    "foreign-json": (lambda folder: (folder / "manifest.json").write_text("[1, 2]"), "not the manifest"),
    "no-json": (lambda folder: (folder / "manifest.json").write_bytes(b"\x80\x02pickle"), "is damaged"),
    "deep-json": (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "is damaged"),
    "newer": (lambda folder: rewrite(folder, lambda body: body.update(version=2)), "version 2.*reads version 1"),
    "no-tree": (lambda folder: rewrite(folder, lambda body: body.pop("tree")), "tree is missing"),
    "edited": (edit, "SHA-256"),
    "missing-shard": (lambda folder: (folder / "shard-00002.safetensors").unlink(), "shard-00002.*missing"),
    "longer-shard": (
        lambda folder: (folder / "shard-00002.safetensors").open("ab").write(b" "),
        "shard-00002.* bytes; .* were saved",
    ),
    "traversal": (
        lambda folder: rewrite(folder, lambda body: body["shards"][0].update(file="../shard-00001.safetensors")),
        r"'\.\./shard-00001\.safetensors'; allowed",
    ),
    "absolute": (
        lambda folder: rewrite(folder, lambda body: body["shards"][0].update(file="/etc/passwd")),
        "'/etc/passwd'; allowed",
    ),
    "line-end": (
        lambda folder: rewrite(folder, lambda body: body["shards"][0].update(file="shard-00001.safetensors\n")),
        "allowed is shard",
    ),
    "twice": (
        lambda folder: rewrite(folder, lambda body: body["shards"].append(body["shards"][0])),
        "names a shard twice",
    ),
    "shard-form": (lambda folder: rewrite(folder, lambda body: body["shards"].append(3)), "describes a shard as 3"),
    "forged-shard": (forge_shard, "does not hold the tensors"),
    "tree-form": (lambda folder: rewrite(folder, lambda body: body["tree"].update(x={"$tensor": "y"})), "tree in"),
    "tree-tuple": (lambda folder: rewrite(folder, lambda body: body.update(tree={"$tuple": []})), "is no dict"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_named(name: str, saved: Path) -> None:
    damage, words = DAMAGE[name]
    damage(saved)
    with pytest.raises(CheckpointError, match=words) as refusal:
        load(saved)
    assert str(saved) in str(refusal.value)


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        load(tmp_path / "absent")


def test_nothing_is_unpickled(saved: Path) -> None:
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}
    for path in saved.iterdir():
        assert path.read_bytes()[:2] not in (b"\x80\x02", b"\x80\x04", b"PK")


# Kills and full disks


def save_until_call(folder: Path, fatal: int) -> bool:
    """In a forked child: SIGKILL at call number `fatal` of what reaches the file system; whether it came to that."""
    child = os.fork()
    if child == 0:
        calls = iter(range(1, 1 << 30))
        for name in ("mkdir", "open", "write", "fsync", "rename", "close"):
            real = getattr(os, name)

            def reach(*arguments: Any, real: Any = real, **options: Any) -> Any:
                if next(calls) == fatal:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            setattr(os, name, reach)
        try:
            save(folder, make_state(), shard_bytes=256)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_killed_at_any_moment_it_is_whole_or_absent(tmp_path: Path) -> None:
    """And what a killed process leaves is removed by the next save beside it."""
    save(tmp_path / "previous", make_state())
    fatal, absent, whole = 1, 0, 0
    while save_until_call(tmp_path / "saved", fatal):
        assert_same(load(tmp_path / "previous"), make_state())
        if (tmp_path / "saved").exists():
            whole += 1
            assert_same(load(tmp_path / "saved"), make_state())
            shutil.rmtree(tmp_path / "saved")
        else:
            absent += 1
        assert len([path for path in tmp_path.iterdir() if path.name.startswith(".")]) <= 1
        fatal += 1
    assert absent > 20
    assert whole > 0
    assert_same(load(tmp_path / "saved"), make_state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["previous", "saved"]


def test_what_has_its_name_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = watch_disk(monkeypatch)
    save(tmp_path / "saved", make_state(), shard_bytes=SHARD_BYTES)
    assert_durable(calls, tmp_path / "saved")


def test_a_save_in_progress_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = checkpoint_folder.sync

    def meanwhile(folder: Path) -> None:
        monkeypatch.setattr(checkpoint_folder, "sync", sync)
        save(tmp_path / "second", make_state())
        sync(folder)

    monkeypatch.setattr(checkpoint_folder, "sync", meanwhile)
    save(tmp_path / "first", make_state())
    for name in ("first", "second"):
        assert_same(load(tmp_path / name), make_state())


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path / "previous", make_state())
    with pytest.raises(
        DiskFullError, match=r"4,503,599,62\d,\d\d\d,\d\d\d bytes needed, [\d,]+ available.*saved"
    ) as refusal:
        save(tmp_path / "saved", {"x": torch.zeros(1).expand(2**50), "y": torch.ones(2**18)})
    assert refusal.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]


def test_a_disk_that_fills_up_meanwhile_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "previous", make_state())
    with files_up_to(4096), pytest.raises(DiskFullError, match=r"[\d,]+ bytes needed, [\d,]+ available") as refusal:
        save(tmp_path / "saved", {"small": torch.ones(7), "large": torch.ones(4096)}, shard_bytes=64)
    assert refusal.value.errno == errno.EFBIG
    assert [path.name for path in tmp_path.iterdir()] == ["previous"]
    assert_same(load(tmp_path / "previous"), make_state())


def test_a_state_without_tensors_needs_no_shard(tmp_path: Path) -> None:
    save(tmp_path / "saved", {})
    assert load(tmp_path / "saved") == {}
    assert [path.name for path in (tmp_path / "saved").iterdir()] == ["manifest.json"]


def test_a_parent_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        save(tmp_path / "absent" / "saved", {"x": 1})


def test_killed_while_it_is_removed_it_is_gone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path, **_: object) -> None:
        raise SystemExit(137)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(checkpoint_folder.shutil, "rmtree", killed)
        remove(saved)
    (left,) = saved.parent.iterdir()
    assert left.name.startswith(".")
    remove_leftovers(saved.parent)
    assert list(saved.parent.iterdir()) == []
