"""The arithmetic needs no torch, and CPU time is read as /proc writes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from zenflow.diagnose.processes import cpu_seconds

ROOT = Path(__file__).resolve().parents[2]
LIGHT = ("numbers", "health", "figures", "advice", "verdict", "result", "processes")


def test_arithmetic_loads_no_torch():
    modules = ", ".join(f"zenflow.diagnose.{name}" for name in LIGHT)
    code = f"import sys, {modules}; print('torch' in sys.modules or 'hydra' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False", done.stderr


def test_cpu_seconds_of_a_name_with_spaces_and_brackets(tmp_path):
    (tmp_path / "7").mkdir()
    numbers = [*range(1, 11), 250, 50, *range(20)]  # from the process's state on; user and system are 12th and 13th
    (tmp_path / "7" / "stat").write_text(f"7 (a) b) S {' '.join(map(str, numbers))}\n")
    assert cpu_seconds(7, tmp_path) == pytest.approx(300 / os.sysconf("SC_CLK_TCK"))


def test_a_process_that_is_gone_has_none(tmp_path):
    assert cpu_seconds(7, tmp_path) is None


def test_our_own_grow():
    before = cpu_seconds(os.getpid())
    while cpu_seconds(os.getpid()) == before:
        sum(range(10_000))
    assert cpu_seconds(os.getpid()) > before


@pytest.mark.parametrize("name", ["diagnose", "compare"])
def test_the_command_and_its_package_are_installed(name):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["scripts"][f"zenflow-{name}"] == f"zenflow_experiments.{name}:main"
    assert f"zenflow.{name}" in project["tool"]["setuptools"]["packages"]
