"""A run is the same with, without and despite wandb."""

from __future__ import annotations

import sys

SMOKE = ("debug=smoke", "plot=false", "steps=4", "evaluate_every=null", "threads=1", "engine=adamw")


def losses(outcome) -> list[float]:
    return [record["loss"] for record in outcome.metrics() if "loss" in record]


def test_a_missing_wandb_is_a_warning_and_changes_nothing(command, monkeypatch, tmp_path):  # F13
    plain = command(*SMOKE, folder=tmp_path / "plain")
    monkeypatch.delitem(sys.modules, "zenflow.training.wandb_tracking", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracked = command(*SMOKE, "tracking=offline", folder=tmp_path / "tracked")
    assert tracked.code == 0
    assert "pip install wandb" in tracked.out and tracked.summary()["wandb_id"] is None
    assert losses(tracked) == losses(plain)
