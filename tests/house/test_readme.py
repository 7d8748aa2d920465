"""What README.md says about commands, files and defaults is so."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import subprocess
import tomllib
import types
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from experiments.train import CONF
from zenflow import ZenFlow
from zenflow.bench import command as bench
from zenflow.config import ZenFlowConfig
from zenflow.deepspeed import DEEPSPEED_DEFAULTS, WITHOUT_EFFECT
from zenflow.trace_view import main as trace_main
from zenflow.training.checks import _check_trace, _check_values
from zenflow.training.command import register

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = [README, (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")]


def rows(heading: str) -> dict[str, list[str]]:
    """The table under a heading: first cell without its backticks -> the other cells."""
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {first.strip("`"): rest for first, *rest in cells[2:]}


def test_configuration_table_is_complete_and_true():
    table = rows("Configuration")
    expected = {
        field.name: str(field.default) if isinstance(field.default, (bool, float, int, type(None))) else field.default
        for field in dataclasses.fields(ZenFlowConfig)
    }
    assert {name: cells[0].strip("`") for name, cells in table.items()} == expected


def test_deepspeed_table_names_every_key():
    assert set(rows("Coming from DeepSpeed")) == {*DEEPSPEED_DEFAULTS, *WITHOUT_EFFECT, "gradient_clipping"}


def test_every_dependency_has_a_reason():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = project["dependencies"] + [name for extra in project["optional-dependencies"].values() for name in extra]
    explained = {name for cell in rows("Dependencies") for name in cell.replace("`", "").split(", ")}
    assert explained == {re.split("[<>=]", requirement)[0] for requirement in required}


TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z0-9-]+)", "\n".join(DOCUMENTS), flags=re.M)))


@pytest.mark.parametrize("target", TARGETS)
def test_make_targets_exist(target):
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_make_target_is_in_the_help():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (declared,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.M)
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=300).stdout
    assert re.findall(r"^  make ([a-z0-9-]+)", listed, flags=re.M) == declared.split()


@pytest.mark.parametrize(
    "choice",
    sorted(set(re.findall(r"\b(?:engine|model|data|optimizer|tracking|experiment|debug)=\w+", " ".join(DOCUMENTS)))),
)
def test_configuration_choices_exist(choice):
    group, name = choice.split("=")
    assert (ROOT / "conf" / group / f"{name}.yaml").is_file()


def blocks(language: str = "") -> list[str]:
    """The README's code blocks in a language, or in none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.M | re.S)
    return [text for named, text in found if named == language]


def commands(program: str) -> list[str]:
    """The lines of the README's code blocks that call a program, without its name and their comments."""
    lines = [line.split("  #")[0].strip() for block in blocks() for line in block.splitlines()]
    return [line.removeprefix(program).strip() for line in lines if line.startswith(program)]


def test_the_example_commands_are_found():
    assert [len(commands(name)) > 0 for name in ("zenflow-train", "zenflow-bench", "python -m zenflow.trace")] == [
        True
    ] * 3


@pytest.mark.parametrize("words", commands("zenflow-train"))
def test_training_commands_compose(words):
    overrides = [word for word in shlex.split(words) if word != "-m"]
    first = [re.sub(r"=([^\[,]+),.*", r"=\1", word) for word in overrides]  # of a sweep, its first job
    register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_object(compose("train", first))
    config.resume = None  # which run it is, zenflow-train finds out first
    _check_values(config)
    _check_trace(config)


@pytest.mark.parametrize("words", commands("zenflow-bench"))
def test_bench_commands_parse(words, monkeypatch):
    monkeypatch.setattr(bench, "physical_cores", lambda: list(range(16)))
    assert callable(bench._parser().parse_args(shlex.split(words)).run)


def test_the_commands_of_the_bench_script_parse(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "physical_cores", lambda: list(range(16)))
    env = os.environ | {"PYTHON": "echo"}
    script = [str(ROOT / "scripts" / "bench.sh"), str(tmp_path / "out")]
    printed = subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout
    lines = [line.split()[2:] for line in printed.splitlines() if line.startswith("-m zenflow.bench")]
    assert {words[0] for words in lines} == {"step", "memory", "kernels"} and len(lines) == 7
    assert all(callable(bench._parser().parse_args(words).run) for words in lines)
    again = subprocess.run(script, env=env, capture_output=True, text=True, check=True).stdout
    assert again.count("has ended before") == 7 and "-m zenflow.bench" not in again
    wrong = subprocess.run(script, env=env | {"PARTS": "steps"}, capture_output=True, text=True)
    assert wrong.returncode == 2 and "'steps'; allowed: step step_1024" in wrong.stderr


def test_the_examples_in_python_run(tmp_path, monkeypatch):
    """All but DeepSpeed's, one after another, and the trace that they leave is read and drawn."""
    monkeypatch.chdir(tmp_path)
    first, second = (block for block in blocks("python") if "deepspeed" not in block)
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))

    class Model:
        parameters = layers.parameters

        def __call__(self, batch):
            return types.SimpleNamespace(loss=layers(batch).square().mean())

    names = {
        "model": Model(),
        "loader": torch.randn(14, 8, 64),
        "scheduler": types.SimpleNamespace(step=lambda: None),
    }
    exec(first, names)
    with ZenFlow(layers.parameters(), topk_ratio=0.1, min_deferred_numel=64) as names["optimizer"]:
        exec(second, names)
    (words,) = commands("python -m zenflow.trace")
    trace_main(shlex.split(words))
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("link", sorted({link for text in DOCUMENTS for link in re.findall(r"\]\(([^)#:]+)\)", text)}))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts").glob("*.sh")) + [ROOT / ".ci" / "run"], ids=lambda p: p.name
)
def test_scripts_are_executable_and_parse(script):
    assert script.stat().st_mode & 0o111 == 0o111
    assert subprocess.run(["bash", "-n", script], timeout=300).returncode == 0


@pytest.mark.parametrize("script", sorted((ROOT / "scripts").glob("*.sh")), ids=lambda p: p.name)
def test_scripts_say_what_they_do(script, tmp_path):
    """Run as a command in a folder of its own, where it must leave nothing."""
    done = subprocess.run([script, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and not done.stderr and len(done.stdout.splitlines()) > 1
    assert not list(tmp_path.iterdir()) and "set -euo" not in done.stdout
