"""No green tests, no ratios: when a run of tests counts, and for how long."""

from __future__ import annotations

import json
import time

import pytest

from zenflow.bench import machine, proof
from zenflow.bench.proof import prove

TESTS = {
    "green": "def test_it(): pass",
    "red": "def test_it(): assert 1 == 2",
    "skipped": "import pytest\ndef test_it(): pytest.skip('not here')",
    "empty": "",
    "broken": "import nothing_of_this_name",
}


@pytest.fixture
def written(tmp_path):
    """The path of a test file of that kind."""

    def write(kind: str) -> str:
        path = tmp_path / f"test_{kind}.py"
        path.write_text(TESTS[kind])
        return str(path)

    return write


@pytest.mark.parametrize("kind", ["red", "skipped", "empty", "broken"])
def test_what_is_not_green_is_red(kind, written, tmp_path):
    told = prove([written(kind)], tmp_path / "tests.json")
    assert (told.green, told.red) == (False, True)
    assert f"test_{kind}.py" in told.reason
    assert not (tmp_path / "tests.json").exists()


def test_a_green_run_is_remembered(written, tmp_path, monkeypatch):
    path, memory = written("green"), tmp_path / "out" / "tests.json"
    first = prove([path], memory)
    assert (first.green, first.red) == (True, False)
    assert "1 passed" in first.reason
    monkeypatch.setattr(proof, "_run", lambda *_: pytest.fail("they ran again"))
    assert prove([path], memory).green


@pytest.mark.parametrize("change", ["older than a day", "other sources", "other paths", "other GPU", "no JSON"])
def test_another_run_counts_for_nothing(change, written, tmp_path, monkeypatch):
    path, memory = written("green"), tmp_path / "tests.json"
    record = {"time": time.time(), "sources": machine.digest(), "paths": [path], "gpu": machine.facts()["gpu"]}
    changes = {
        "older than a day": {"time": time.time() - 25 * 3600},
        "other sources": {"sources": "0"},
        "other paths": {"paths": []},
        "other GPU": {"gpu": "another"},
        "no JSON": {},
    }
    memory.write_text("{" if change == "no JSON" else json.dumps(record | changes[change]))
    ran = []
    monkeypatch.setattr(proof, "_run", lambda *_: ran.append(True))
    prove([path], memory)
    assert ran


def test_lost_paths_are_named(tmp_path):
    told = prove(["tests/no_such_file.py"], tmp_path / "tests.json")
    assert (told.green, told.red) == (False, False)
    assert "tests/no_such_file.py is not in the source tree" in told.reason


def test_an_installed_package_has_no_tests(tmp_path, monkeypatch):
    monkeypatch.setattr(proof, "source_root", lambda: None)
    told = prove(["tests"], tmp_path / "tests.json")
    assert (told.green, told.red) == (False, False)
    assert "installed from a wheel" in told.reason
