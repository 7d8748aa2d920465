"""`ZenFlowConfig.from_deepspeed`: every key of the block, DeepSpeed's defaults, and what is refused."""

from __future__ import annotations

import json
import logging

import pytest

from zenflow.config import ZenFlowConfig

FULL = {
    "topk_ratio": 0.05,
    "select_strategy": "step",
    "select_interval": 64,
    "update_interval": 8,
    "full_warm_up_rounds": 16,
    "overlap_step": True,
    "offload": False,
    "auto_ratio": 0.99,
    "pt_reserved_cores_perc": 0.5,
}


def document(block: object, **rest: object) -> dict:
    return {
        "train_batch_size": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "zenflow": block},
        **rest,
    }


def test_every_key_is_read(tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(document(FULL, gradient_clipping=1.0)))
    expected = ZenFlowConfig(
        topk_ratio=0.05,
        select_strategy="step",
        select_interval=64,
        update_interval=8,
        full_warm_up_rounds=16,
        overlap_step=True,
        pt_reserved_cores_perc=0.5,
        max_grad_norm=1.0,
    )
    assert ZenFlowConfig.from_deepspeed(path) == expected
    assert ZenFlowConfig.from_deepspeed(str(path)) == expected
    assert ZenFlowConfig.from_deepspeed(document(FULL, gradient_clipping=1.0)) == expected


def test_missing_keys_take_deepspeeds_defaults():
    config = ZenFlowConfig.from_deepspeed(document({}))
    assert config == ZenFlowConfig(
        topk_ratio=0.1,
        select_strategy="auto",
        select_interval="auto",
        update_interval="auto",
        full_warm_up_rounds=0,
        overlap_step=False,
        pt_reserved_cores_perc=0.5,
        max_grad_norm=None,
    )
    resolved = config.resolved()
    assert (resolved.update_interval, resolved.select_strategy, resolved.select_interval) == (4, "step", 100)


def test_what_deepspeed_has_no_key_for_is_as_it_is_here():
    """Windows of cohorts and predictions, also from a file; its own schedule has to be asked for."""
    usual = ZenFlowConfig.from_deepspeed(document(FULL))
    assert (usual.stagger, usual.weight_prediction, usual.visible_after_steps) == (True, 1.0, 2)
    theirs = ZenFlowConfig.from_deepspeed(document(FULL), stagger=False, weight_prediction=0.0)
    assert (theirs.stagger, theirs.predicts, theirs.visible_after_steps) == (False, False, 8)


def test_the_recommended_file_is_accepted():
    """The block of DeepSpeed's own tutorial."""
    block = {
        "topk_ratio": 0.05,
        "select_strategy": "auto",
        "select_interval": "auto",
        "update_interval": 4,
        "full_warm_up_rounds": 0,
        "overlap_step": True,
    }
    config = ZenFlowConfig.from_deepspeed(document(block)).resolved()
    assert (config.topk_ratio, config.update_interval, config.overlap_step) == (0.05, 4, True)
    assert config.select_interval_steps == 100


def test_epochs_need_a_length_from_the_file_or_the_caller():
    block = {"select_strategy": "epoch", "select_interval": 2}
    with pytest.raises(ValueError, match="steps_per_epoch is None"):
        ZenFlowConfig.from_deepspeed(document(block))
    assert ZenFlowConfig.from_deepspeed(document(block), steps_per_epoch=50).select_interval_steps == 100
    assert ZenFlowConfig.from_deepspeed(document({**block, "steps_per_epoch": 25})).select_interval_steps == 50


def test_overrides_win_over_the_file():
    config = ZenFlowConfig.from_deepspeed(document(FULL), update_interval=2, deferred_lr_scale="none")
    assert (config.update_interval, config.deferred_lr_scale, config.topk_ratio) == (2, "none", 0.05)


@pytest.mark.parametrize("key", ["topk", "channel_dim", "deferred_rule", "Offload"])
def test_unsupported_key_is_named(key):
    with pytest.raises(ValueError, match=f"unsupported key '{key}'; allowed: topk_ratio, "):
        ZenFlowConfig.from_deepspeed(document({**FULL, key: 1}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topk_ratio", 1.5),
        ("update_interval", 2.5),
        ("update_interval", "4"),
        ("select_interval", 0),
        ("select_strategy", "custom"),
        ("overlap_step", "true"),
        ("full_warm_up_rounds", -1),
        ("pt_reserved_cores_perc", 2),
        ("steps_per_epoch", 0),
        ("offload", "cpu"),
        ("auto_ratio", 1.5),
        ("auto_ratio", True),
    ],
)
def test_bad_value_in_the_block_is_named(key, value):
    with pytest.raises(ValueError, match=rf"^{key} is {value!r}; allowed: "):
        ZenFlowConfig.from_deepspeed(document({**FULL, key: value}))


@pytest.mark.parametrize(
    ("clipping", "norm"), [(0, None), (0.0, None), (1, 1.0), (0.5, 0.5)], ids=["0", "0.0", "1", "0.5"]
)
def test_gradient_clipping(clipping, norm):
    assert ZenFlowConfig.from_deepspeed(document(FULL, gradient_clipping=clipping)).max_grad_norm == norm


@pytest.mark.parametrize("clipping", ["auto", "1.0", -1, float("nan"), float("inf"), True, None])
def test_bad_gradient_clipping_is_named(clipping):
    source = document(FULL, gradient_clipping=clipping)
    with pytest.raises(ValueError, match=f"gradient_clipping is {clipping!r}"):
        ZenFlowConfig.from_deepspeed(source)
    assert ZenFlowConfig.from_deepspeed(source, max_grad_norm=1.0).max_grad_norm == 1.0


@pytest.mark.parametrize(
    "source",
    [{}, {"zero_optimization": {}}, {"zero_optimization": {"zenflow": None}}, {"zero_optimization": True}],
    ids=["empty", "no-block", "null", "no-object"],
)
def test_file_without_the_block(source):
    with pytest.raises(ValueError, match="no zero_optimization.zenflow block"):
        ZenFlowConfig.from_deepspeed(source)


@pytest.mark.parametrize(("text", "message"), [("{topk", "is not JSON"), ("[1]", "holds a JSON list")])
def test_file_that_is_no_configuration(tmp_path, text, message):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"broken.json {message}"):
        ZenFlowConfig.from_deepspeed(path)


def test_missing_file_is_the_usual_error(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent.json"):
        ZenFlowConfig.from_deepspeed(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("block", "rest", "message"),
    [
        ({"offload": True}, {}, "offload: true has no effect"),
        ({"auto_ratio": 0.9}, {}, "auto_ratio 0.9 has no effect"),
        ({}, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps 4 is not read"),
    ],
    ids=["offload", "auto_ratio", "accumulation"],
)
def test_what_does_not_carry_over_is_said(caplog, block, rest, message):
    with caplog.at_level(logging.WARNING, logger="zenflow"):
        ZenFlowConfig.from_deepspeed(document(block, **rest))
    assert len(caplog.messages) == 1
    assert message in caplog.messages[0]
