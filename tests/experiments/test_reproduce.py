"""scripts/reproduce.sh: the baselines once, an ablation's other variants beside them, and nothing a second time."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.sh"
BASELINES = {"adamw", "adamw_bf16", "adamw_offload", "zero_offload"}


def reproduce(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(SCRIPT), *words[:1], str(folder), *words[1:]]
    given = os.environ | {"PYTHON": sys.executable, "WANDB_MODE": "disabled", "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=given, capture_output=True, text=True, check=False)


def test_an_ablation_is_reported_beside_baselines_that_are_run_once(tmp_path):
    parts = {"PARTS": "engine on_reselect"}
    first = reproduce(tmp_path / "made", "debug", "threads=1", **parts)
    assert first.returncode == 0, first.stderr
    runs = {name: len(list((tmp_path / "made" / name).glob("[0-9]*"))) for name in ("baselines", "ablation_engine")}
    assert runs == {"baselines": 4, "ablation_engine": 1}
    for name, own in {"engine": 1, "on_reselect": 4}.items():
        with (tmp_path / "made" / "report" / f"ablation_{name}" / "groups.csv").open() as file:
            groups = list(csv.DictReader(file))
        assert len(groups) == 4 + own and {group["engine"] for group in groups} == BASELINES | {"zenflow"}
    again = reproduce(tmp_path / "made", "debug", "threads=1", **parts)
    assert again.returncode == 0 and again.stdout.count("has ended before") == 4
    assert "step 1 of" not in again.stdout + again.stderr


def test_what_reproduce_does_not_know_is_named(tmp_path):
    assert "SIZE is 'medium'; allowed: debug, small, full." in reproduce(tmp_path, "medium").stderr
    assert "PARTS names 'topk'; allowed: locality" in reproduce(tmp_path / "new", "debug", PARTS="topk").stderr
    assert reproduce(tmp_path / "new", "debug", PARTS="topk").returncode == 2


def test_a_list_of_variants_that_cannot_be_read_ends_it(tmp_path):
    """And does not make of the ablation the one run that has no variant."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = - ] && exit 3\necho "runs $*"\n')
    python.chmod(0o755)
    made = reproduce(tmp_path / "made", "debug", PARTS="engine", PYTHON=str(python))
    assert made.returncode == 3
    assert made.stdout.count("runs -m experiments.train") == 1, "the baselines alone"
    assert [path.name for path in (tmp_path / "made" / ".ended").iterdir() if path.name != "settings"] == ["baselines"]
