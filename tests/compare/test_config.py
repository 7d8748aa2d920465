"""What both sides must have in common, and how each side's settings are read."""

from __future__ import annotations

import pytest

from experiments.compare import quoted
from zenflow.compare.config import CompareConfig, CompareSettings, check_alike, check_settings, differences, words_of
from zenflow.training.errors import InputError
from zenflow.training.schema import (
    AdamWEngine,
    DeepSpeedZenFlowEngine,
    ModelConfig,
    OptimizerConfig,
    PeerEngine,
    ZenFlowEngine,
)


def test_engines_may_differ_in_kind_and_settings():
    check_alike(CompareConfig(engine=ZenFlowEngine()), CompareConfig(engine=AdamWEngine()))
    check_alike(CompareConfig(engine=ZenFlowEngine()), CompareConfig(engine=ZenFlowEngine(update_interval=8)))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model": ModelConfig(path="other")}, "model.path is None in a and 'other' in b"),
        ({"seed": 1}, "seed is 0 in a and 1 in b"),
        ({"autocast": True}, "autocast is False in a and True in b"),
        ({"batch_size": 8}, "batch_size is 32 in a and 8 in b"),
        ({"accumulate": 2}, "accumulate is 1 in a and 2 in b"),
        ({"steps": 7}, "steps is 100 in a and 7 in b"),
        ({"optimizer": OptimizerConfig(lr=1e-3)}, "optimizer.lr is 5e-05 in a and 0.001 in b"),
        ({"repeats": 5}, "repeats is 3 in a and 5 in b"),
        ({"compare": CompareSettings(min_gain=0.0)}, "compare.min_gain is 0.05 in a and 0.0 in b"),
    ],
)
def test_anything_else_that_differs_is_refused_with_both_values(change, told):
    with pytest.raises(InputError) as error:
        check_alike(CompareConfig(), CompareConfig(**change))
    assert told in str(error.value) and "Only engine settings may differ" in str(error.value)


@pytest.mark.parametrize("other", [ZenFlowEngine(), AdamWEngine()], ids=["zenflow", "adamw"])
def test_weights_without_masters_are_another_precision(other):
    for sides in ((AdamWEngine(masters=False), other), (other, AdamWEngine(masters=False))):
        with pytest.raises(InputError, match="engine.masters is .* another precision"):
            check_alike(*(CompareConfig(engine=engine) for engine in sides))
    check_alike(*(CompareConfig(engine=AdamWEngine(masters=False)) for _ in "ab"))


def test_every_difference_is_named_and_absent_is_none():
    one, other = {"x": {"y": 1, "z": 2}, "same": [1]}, {"x": {"y": 3}, "same": [1], "new": 0}
    assert list(differences(one, other)) == [("x.y", 1, 3), ("x.z", 2, None), ("new", None, 0)]


@pytest.mark.parametrize("peer", [PeerEngine(), DeepSpeedZenFlowEngine()], ids=lambda peer: peer.peer.name)
def test_another_project_s_engine_is_refused_on_either_side(peer):
    for place, sides in enumerate(((peer, ZenFlowEngine()), (ZenFlowEngine(), peer))):
        with pytest.raises(InputError, match=f"engine={peer.peer.name} in {'ab'[place]} is another project's") as error:
            check_alike(*(CompareConfig(engine=engine) for engine in sides))
        assert f"zenflow-train -m seed=0,1,2 engine={peer.peer.name},zenflow" in str(error.value)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"repeats": 0}, "repeats is 0; allowed: an integer from 1 to 100"),
        (
            {"compare": CompareSettings(warm_up=99)},
            "compare.warm_up is 99; allowed: an integer from 1 to steps - 2 = 98",
        ),
        ({"compare": CompareSettings(min_gain=-0.1)}, "compare.min_gain is -0.1; allowed: a number from 0"),
        ({"compare": CompareSettings(max_loss_rise=float("nan"))}, "compare.max_loss_rise is nan"),
        ({"evaluate_every": None}, "evaluate_every is None; allowed: an integer from 1 to steps / 2 = 50"),
        ({"evaluate_every": 51}, "evaluate_every is 51"),
    ],
)
def test_values_are_refused_by_name(change, told):
    with pytest.raises(InputError) as error:
        check_settings(CompareConfig(**({"evaluate_every": 20} | change)))
    assert told in str(error.value)


def test_settings_stand_in_words_or_in_a_file(tmp_path):
    assert words_of("a", " engine=zenflow  engine.update_interval=4 ") == ["engine=zenflow", "engine.update_interval=4"]
    assert words_of("a", "") == []
    file = tmp_path / "b.txt"
    file.write_text("engine=zenflow  # as found\n\nengine.topk_ratio=0.05\n")
    assert words_of("b", f"@{file}") == ["engine=zenflow", "engine.topk_ratio=0.05"]


@pytest.mark.parametrize(
    ("text", "told"), [("@nowhere.txt", "b=@nowhere.txt cannot be read"), ("x='y", "an open quote")]
)
def test_words_that_cannot_be_read(text, told):
    with pytest.raises(InputError, match=told):
        words_of("b", text)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("a=engine=zenflow engine.update_interval=4", "a='engine=zenflow engine.update_interval=4'"),
        ("b=@file.txt", "b='@file.txt'"),
        ("b='engine=adamw'", "b='engine=adamw'"),
        ("a=x='y'", r"a='x=\'y\''"),
        ("a=", "a="),
        ("steps=4", "steps=4"),
        ("--help", "--help"),
    ],
)
def test_hydra_s_quotes_are_put_back(word, expected):
    assert quoted(word) == expected
