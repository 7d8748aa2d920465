"""Checkpoints that a thread writes while the trainer goes on."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import pytest
import torch

from zenflow import checkpoint_folder
from zenflow.background_save import BackgroundSave, copy_to_host
from zenflow.checkpoint_folder import load, read_manifest


def test_training_goes_on_while_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is what is saved, whatever happens to the weights meanwhile; the folder is not there before it ends."""
    go_on, writing, prepare = threading.Event(), threading.Event(), checkpoint_folder._prepare

    def held(*arguments: object) -> object:
        writing.set()
        assert go_on.wait(30)
        return prepare(*arguments)

    monkeypatch.setattr(checkpoint_folder, "_prepare", held)
    weight = torch.ones(5)
    saving = BackgroundSave(tmp_path / "saved", copy_to_host({"model": weight}), configuration={"k": 0.1})
    assert writing.wait(30)
    weight.zero_()
    assert not saving.done
    assert not saving._thread.daemon  # the interpreter ends after it
    assert not list(tmp_path.iterdir())
    go_on.set()
    saving.wait()
    assert saving.done
    assert load(tmp_path / "saved")["model"].tolist() == [1] * 5
    assert read_manifest(tmp_path / "saved").configuration == {"k": 0.1}


def test_a_relative_name_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the working directory changes while it is written, as a notebook's may."""
    prepare = checkpoint_folder._prepare

    def moved(*arguments: object) -> object:
        os.chdir(tmp_path / "other")
        return prepare(*arguments)

    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint_folder, "_prepare", moved)
    BackgroundSave("saved", {"x": 1}).wait()
    assert load(tmp_path / "saved") == {"x": 1}
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["other", "saved"]


def test_a_copy_has_memory_of_its_own_and_ties_stay() -> None:
    weight = torch.ones(3)
    state = {"a": weight, "b": weight.view(3), 3: [weight[:2], (1, 2)]}
    copied = copy_to_host(state)
    weight.zero_()
    assert copied["a"] is copied["b"]
    assert copied["a"].tolist() == [1, 1, 1]
    assert copied[3][0].tolist() == [1, 1]
    assert copied[3][1] == (1, 2)


def test_without_a_thread_it_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The system has none left, as in a container with a limit on them: better late than lost."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    saving, again = (BackgroundSave(tmp_path / "saved", {"x": torch.ones(2)}) for _ in range(2))
    assert saving.done and again.done
    saving.wait()
    assert load(tmp_path / "saved")["x"].tolist() == [1, 1]
    with pytest.raises(FileExistsError, match="saved"):
        again.wait()
    assert f"can't start new thread: {tmp_path / 'saved'} is written while training waits" in caplog.text


def test_without_a_thread_ctrl_c_is_the_caller_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(checkpoint_folder, "save", interrupt)
    with pytest.raises(KeyboardInterrupt):
        BackgroundSave(tmp_path / "saved", {"x": 1})


def test_its_error_is_logged_and_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "saved").mkdir()
    with caplog.at_level(logging.ERROR, logger="zenflow"):
        saving = BackgroundSave(tmp_path / "saved", {"x": 1})
        for _ in range(2):
            with pytest.raises(FileExistsError, match="saved"):
                saving.wait()
    assert [record.message for record in caplog.records if "no checkpoint" in record.message]
