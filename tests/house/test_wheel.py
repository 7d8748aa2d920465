"""The built wheel brings what an installed `zenflow-train` needs, under names that clash with nobody's."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("zenflow", "kernels", "experiments", "conf")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """Built from a copy: building writes beside the sources."""
    tree = tmp_path_factory.mktemp("tree")
    for folder in (*FOLDERS, "tests", "scripts"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", "out", "."]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = (tree / "out").glob("zenflow_triton-*-py3-none-any.whl")
    return zipfile.ZipFile(built)


def installed_name(path: Path) -> str:
    """Where a source file lies in the wheel."""
    name = path.relative_to(ROOT).as_posix()
    for folder, package in (
        ("kernels/zenflow_kernels/", "zenflow_kernels/"),
        ("experiments/", "zenflow_experiments/"),
        ("conf/", "zenflow_experiments/conf/"),
    ):
        if name.startswith(folder):
            return package + name.removeprefix(folder)
    return name


def shipped() -> list[Path]:
    found = [
        path
        for folder in FOLDERS
        for suffix in ("py", "c", "h", "yaml")
        for path in (ROOT / folder).rglob(f"*.{suffix}")
    ]
    return [path for path in found if "bench" not in path.parts]


def test_every_module_configuration_and_c_source_is_in_it(wheel):
    wanted = {installed_name(path) for path in shipped()}
    assert {"zenflow/native_src/rounding.h", "zenflow_kernels/__init__.py", "zenflow_experiments/train.py"} <= wanted
    assert any(name.startswith("zenflow_experiments/conf/engine/") for name in wanted)
    assert not wanted - set(wheel.namelist())


def test_nothing_else_is_in_it(wheel):
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "zenflow",
        "zenflow_kernels",
        "zenflow_experiments",
    }
    assert not [name for name in wheel.namelist() if "test" in name]


def test_console_script_and_licence(wheel):
    names = wheel.namelist()
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "zenflow-train = zenflow_experiments.train:main" in wheel.read(entry_points).decode()
    assert [name for name in names if name.endswith("LICENSE")]


def test_metadata_allows_the_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["name"] == "zenflow-triton"
    assert project["requires-python"] == ">=3.11,<3.14"
    assert {"torch>=2.10", "triton>=3.6"} <= set(project["dependencies"])
