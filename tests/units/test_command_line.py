"""What a record says of the command that made it: as the README writes it, and no folder of the machine."""

from __future__ import annotations

import pytest

from zenflow.command_line import as_typed, command_line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["/opt/venv/bin/zenflow-train", "debug=smoke"], "zenflow-train debug=smoke"),
        (["/src/experiments/train.py", "-m", "seed=0,1"], "zenflow-train -m seed=0,1"),
        (["/opt/site-packages/zenflow_experiments/compare.py", "repeats=2"], "zenflow-compare repeats=2"),
        (["/src/zenflow/bench/__main__.py", "step", "--trace"], "zenflow-bench step --trace"),
        (["/opt/torch/accelerate/__main__.py", "launch"], "python -m accelerate launch"),
        (["/srv/somebody/train.py", "--lr", "1e-5"], "python train.py --lr 1e-5"),
        (["train.py", "a b"], "python train.py 'a b'"),
        (["-c", "7"], "python -c ... 7"),
        ([""], "python"),
    ],
)
def test_a_command_is_told_as_it_is_typed(arguments, told):
    assert command_line(arguments) == told


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("/srv/somebody/text.txt", ".../text.txt"),
        ("data.path=/srv/somebody/text.txt", "data.path=.../text.txt"),
        ("data.files=[/a/b/c,/a/d]", "'data.files=[.../c,.../d]'"),
        ("hydra/launcher=joblib", "hydra/launcher=joblib"),
        ("runs/sweep/1", "runs/sweep/1"),
        ("../runs/1", "../runs/1"),
        ("a=engine=zenflow engine.update_interval=8", "'a=engine=zenflow engine.update_interval=8'"),
        ("U=4,accumulate_on=host", "U=4,accumulate_on=host"),
    ],
)
def test_absolute_paths_lose_their_folders_and_nothing_else_changes(word, told):
    assert as_typed([word]) == told


def test_the_command_is_this_process_s(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/opt/venv/bin/zenflow-train", "debug=smoke"])
    assert command_line() == "zenflow-train debug=smoke"
