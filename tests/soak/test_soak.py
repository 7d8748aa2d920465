"""`make soak` at the size of a test, and that it can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.engine.driving import environment
from tests.soak.driver import Play, Tally
from tests.soak.scenario import KINDS, LETHAL, Scenario

FIRST, SCENARIOS = 49604, 3  # between them, faults of nearly every kind
BROKEN = """
import sys
import torch
from tests.soak.__main__ import main
from zenflow import ZenFlow, arena

load = ZenFlow.load_state_dict

def forgetting(self, state):
    load(self, state)
    self.param_groups[0]["lr"] *= 2

def leaking(self):
    self._mapping = None

ZenFlow.load_state_dict = forgetting
codes = [main(["--scenarios", "1", "--seed", sys.argv[1]])]
ZenFlow.load_state_dict, arena.Arena.close = load, leaking
codes.append(main(["--scenarios", "1", "--seed", sys.argv[1]]))
print(codes)
"""


def run(*arguments: str, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True, timeout=seconds)


def test_faults_of_every_kind_are_named_and_cost_no_bit(tmp_path: Path) -> None:
    """E7, and the rest of issue 5's list: what is lost, left behind or noticed late is zero."""
    out = tmp_path / "soak.json"
    done = run("-m", "tests.soak", "--scenarios", str(SCENARIOS), "--seed", str(FIRST), "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    kinds = {kind: counts for kind, counts in figures["by_kind"].items() if counts["injected"]}
    assert len(kinds) >= 10 and figures["injected"] >= 14
    assert all(counts["injected"] == counts["survived"] for counts in kinds.values())
    assert all(counts["injected"] == counts["detected"] for kind, counts in kinds.items() if kind in LETHAL)
    assert figures["notice_seconds"]["count"] >= 2 and figures["notice_seconds"]["p99"] < 5
    zero = ("data_lost", "orphans", "hung", "leaked_descriptors", "leaked_bytes")
    assert {name: figures[name] for name in zero} == dict.fromkeys(zero, 0)
    assert "data lost 0, orphans 0" in done.stdout and f"seeds {FIRST} to {FIRST + SCENARIOS - 1}" in done.stdout


def test_an_engine_that_forgets_or_leaks_is_found() -> None:
    done = run("-c", BROKEN, str(FIRST))
    assert done.stdout.rstrip().endswith("[1, 1]"), done.stdout + done.stderr
    assert f"WRONG, seed {FIRST}: the final weights are not those of the undisturbed run" in done.stdout
    assert f"again: python -m tests.soak --scenarios 1 --seed {FIRST}" in done.stdout
    assert "leaked descriptors 0" not in done.stdout.rsplit("data lost", 1)[1]


@pytest.mark.parametrize(
    "bad",
    [
        {"data_lost": 1}, {"orphans": 1}, {"leaked_descriptors": 1}, {"leaked_bytes": 4096}, {"hung": 1},
        {"wrong": ["x"]}, {"survived": Counter(kill=1)}, {"detected": Counter(kill=1)},
    ],
    ids=lambda bad: next(iter(bad)),
)  # fmt: skip
def test_whatever_is_not_zero_fails(bad: dict[str, object]) -> None:
    def tally(**more: object) -> Tally:
        counts = {name: Counter(kill=2, **{"slow worker": 1}) for name in ("injected", "detected", "survived")}
        return Tally(scenarios=1, **{**counts, **more})

    assert tally().well
    assert not tally(**bad).well


def test_quantiles_of_the_time_to_notice() -> None:
    tally = Tally(notices=[0.3, 0.1, 0.2, 0.4])
    assert (tally.quantile(0.5), tally.quantile(0.99), Tally().quantile(0.5)) == (0.3, 0.4, None)


def test_a_seed_is_one_scenario_and_seeds_reach_every_kind() -> None:
    first, again = Scenario(5), Scenario(5)
    assert (first.settings, first.shapes, first.faults) == (again.settings, again.shapes, again.faults)
    assert {fault.kind for seed in range(60) for fault in Scenario(seed).faults} == set(KINDS)


def test_a_fault_that_the_trainer_did_not_live_to_notice_does_not_count() -> None:
    play = Play(Scenario(FIRST), Tally())
    lethal = next(fault for fault in play.scenario.faults if fault.kind in LETHAL)

    class Ended:
        def recv(self) -> None:
            raise EOFError

    play._on_struck(lethal.index)
    play._drain(Ended())
    assert play.tally.injected[lethal.kind] == play.here[lethal.kind] == 0
