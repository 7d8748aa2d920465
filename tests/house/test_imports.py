"""Who may import whom, read from the source, and what really gets loaded in a fresh interpreter."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("kernels", "zenflow", "experiments", "conf", "scripts")
LIGHT = (
    *("config", "deepspeed", "geometry", "bias", "ring", "worker", "client", "cpu_pass", "native", "cores"),
    *("arena", "header", "planning", "exchange", "stats", "window", "signals", "ring_layout", "worker_settings"),
)
TEXT_SUFFIXES = {".py", ".sh", ".c", ".h", ".md", ".yaml", ".toml"}


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            yield node.module or ""


def importers(name: str, paths: list[Path]) -> list[str]:
    return [
        str(path.relative_to(ROOT)) for path in paths if any(module.split(".")[0] == name for module in imported(path))
    ]


def in_fresh_interpreter(code: str) -> str:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd="/", capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kernels_import_torch_and_triton_only():
    paths = sources("kernels/zenflow_kernels")
    assert len(paths) >= 8
    allowed = sys.stdlib_module_names | {"torch", "triton", "zenflow_kernels"}
    strangers = {(path.name, name) for path in paths for name in imported(path) if name.split(".")[0] not in allowed}
    assert not strangers


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_stay_light(module):
    heavy = {"triton", "hydra", "omegaconf", "wandb", "transformers", "matplotlib"}
    assert not heavy & {name.split(".")[0] for name in imported(ROOT / "zenflow" / f"{module}.py")}


@pytest.mark.parametrize("name", ["hydra", "omegaconf"])
def test_hydra_stays_at_the_edge(name):
    outside = [
        file
        for file in importers(name, sources(*PRODUCT))
        if not file.startswith(("experiments/", "conf/")) and file != "zenflow/training/command.py"
    ]
    assert not outside


def test_wandb_lives_in_one_file():
    assert len(importers("wandb", sources(*PRODUCT))) == 1


@pytest.mark.parametrize("name", ["experiments", "zenflow_experiments", "conf", "scripts", "tests"])
def test_nobody_imports_the_edge(name):
    inside = sources("experiments") if name == "zenflow_experiments" else []
    assert not importers(name, [path for path in sources(*PRODUCT) if path not in inside])


def test_training_is_not_needed_by_the_engine():
    engine = [path for path in sources("zenflow") if path.parent.name == "zenflow"]
    assert not [path.name for path in engine if any(name.startswith("zenflow.training") for name in imported(path))]


def test_no_package_named_kernels():
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not importers("kernels", sources(*PRODUCT, "tests"))


def test_worker_loads_neither_torch_nor_triton():
    heavy = "{'torch', 'triton', 'hydra', 'omegaconf', 'wandb'}"
    assert in_fresh_interpreter(f"import sys, zenflow.worker; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_engine_needs_neither_triton_nor_the_experiments_libraries():
    """A11: a CPU step where Triton, Hydra and wandb cannot be imported."""
    code = """
import sys
sys.modules.update(dict.fromkeys(("triton", "hydra", "omegaconf", "wandb", "transformers")))
import torch
from zenflow import ZenFlow
weight = torch.nn.Parameter(torch.ones(8, 8))
with ZenFlow([weight], lr=0.5, weight_decay=0.0, topk_ratio=1.0) as optimizer:
    weight.sum().backward()
    optimizer.step()
print(weight.mean().item())
"""
    assert float(in_fresh_interpreter(code)) == pytest.approx(0.5, abs=1e-6)


def test_no_file_names_a_path_of_somebodys_machine():
    files = [path for folder in (*PRODUCT, "tests") for path in (ROOT / folder).rglob("*.*")] + list(ROOT.glob("*.*"))
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix in TEXT_SUFFIXES}
    assert len(texts) > 50
    assert not [
        str(path) for path, text in texts.items() if re.search(r"(?<![\w.~])/(?:root|home|work|Users)/\w", text)
    ]
