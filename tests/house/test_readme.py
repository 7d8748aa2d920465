"""What README.md says about commands, files and defaults is so."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from zenflow.config import ZenFlowConfig
from zenflow.deepspeed import DEEPSPEED_DEFAULTS, WITHOUT_EFFECT

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
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_every_make_target_is_in_the_help():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (declared,) = re.findall(r"^\.PHONY: (.*)$", makefile, flags=re.M)
    listed = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert re.findall(r"^  make ([a-z0-9-]+)", listed, flags=re.M) == declared.split()


@pytest.mark.parametrize(
    "choice",
    sorted(set(re.findall(r"\b(?:engine|model|data|optimizer|tracking|experiment|debug)=\w+", " ".join(DOCUMENTS)))),
)
def test_configuration_choices_exist(choice):
    group, name = choice.split("=")
    assert (ROOT / "conf" / group / f"{name}.yaml").is_file()


@pytest.mark.parametrize("link", sorted({link for text in DOCUMENTS for link in re.findall(r"\]\(([^)#:]+)\)", text)}))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()


@pytest.mark.parametrize(
    "script", sorted((ROOT / "scripts").glob("*.sh")) + [ROOT / ".ci" / "run"], ids=lambda p: p.name
)
def test_scripts_are_executable_and_parse(script):
    assert script.stat().st_mode & 0o111 == 0o111
    assert subprocess.run(["bash", "-n", script], timeout=60).returncode == 0
