"""Runs of versions with other settings: what is said of them, since no command can go on with one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.experiments.interrupted import TINY, contents, goes_on
from zenflow.checkpoint_folder import load, read_manifest, save
from zenflow.training.checkpoints import all_of


def rewrite_configurations(folder: Path, change: Callable[[dict], None]) -> None:
    for place in all_of(folder):
        state, recorded = load(place), read_manifest(place).configuration
        change(recorded["asked"])
        change(recorded["resolved"])
        shutil.rmtree(place)
        save(place, state, configuration=recorded)
    recorded = json.loads((folder / "config.json").read_text())
    change(recorded)
    (folder / "config.json").write_text(json.dumps(recorded))


@pytest.mark.parametrize("how", ["checkpoint", "auto", "unsaved", "with a model"])
@pytest.mark.parametrize("name", ["stagger", "weight_prediction"])
def test_a_run_of_a_version_without_a_schedule_s_setting_is_refused_by_its_name(command, saved, name, how):
    """It had another default then: the run must not go on with today's as if nothing had been."""
    rewrite_configurations(saved.folder, lambda values: values["engine"].pop(name))
    model = saved.folder / "model"
    if how == "with a model":
        model.mkdir()
    if how == "unsaved":
        shutil.rmtree(saved.folder / "checkpoints")
    before = contents(saved.folder)
    automatic = how in ("auto", "unsaved")
    refused = command(*TINY, "resume=auto", folder=saved.folder) if automatic else goes_on(command, saved.folder)
    weights = f" from its final weights, with model.path={model}" if how == "with a model" else ""
    assert refused.code == 1 and refused.err == (
        f"zenflow-train: The run in {saved.folder} was begun with another version, which had no engine.{name}. This "
        f"version cannot go on with it: use that one, or begin a new run{weights}."
    )
    assert contents(saved.folder) == before


def test_a_run_of_a_version_with_a_setting_that_is_gone_is_refused_by_its_name(command, saved):
    rewrite_configurations(saved.folder, lambda values: values["engine"].update(gone=1))
    refused = goes_on(command, saved.folder)
    assert refused.code == 1 and refused.err == (
        f"zenflow-train: The run in {saved.folder} was begun with another version: ZenFlowEngine has no gone here. "
        "This version cannot go on with it: use that one, or begin a new run."
    )


def test_the_version_that_began_a_run_is_named_where_it_is_another(command, saved, monkeypatch):
    monkeypatch.setattr("zenflow.checkpoint_folder.libraries", lambda: {"zenflow-triton": "0.0.7"})
    rewrite_configurations(saved.folder, lambda values: values["engine"].pop("stagger"))
    refused = goes_on(command, saved.folder)
    assert "was begun with another version (0.0.7), which had no engine.stagger." in refused.err
