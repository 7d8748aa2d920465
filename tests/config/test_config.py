"""ZenFlowConfig: the documented defaults, every bad value refused by name (A8), intervals (A4), "auto" (F10)."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np
import pytest

from zenflow import config as config_module
from zenflow.config import ZenFlowConfig

NAN, INF = math.nan, math.inf

BAD = {
    "topk_ratio": [-0.1, 1.5, NAN, INF, -INF, True, "0.1", "Auto", None, [0.1], 1 + 0j, np.float64(-1e-9), np.nan],
    "update_interval": [
        0,
        -1,
        2.5,
        4.0,
        True,
        NAN,
        "4",
        "AUTO",
        None,
        np.int64(0),
        np.float32(2),
        np.bool_(True),
        2**24,
    ],
    "select_strategy": ["steps", "", None, 1, True, ["step"]],
    "select_interval": [0, -3, 1.5, True, "eight", None, NAN],
    "steps_per_epoch": [0, -1, 7.5, True, "auto", NAN],
    "full_warm_up_rounds": [-1, 0.5, True, "auto", None, NAN],
    "overlap_step": ["true", "auto", 1, 0, None, 0.0],
    "stagger": ["true", "auto", 1, 0, None],
    "visible_after": [0, -1, 5, 2.0, True, NAN, "2", "AUTO", None, np.int64(0)],
    "weight_prediction": [-0.1, 2.01, NAN, INF, True, "auto", None, np.float64(-1e-9), 10**400],
    "channel_dim": ["columns", 0, 1, None, True],
    "importance": ["squared", "abs", None, 2],
    "importance_over": ["steps", "mean", None, True, 4],
    "importance_decay": [-0.1, 1, 1.0, NAN, INF, True, "auto", None, np.float64(-1e-9)],
    "deferred_rule": ["replayed", "replay", None, True],
    "deferred_lr_scale": [0, 0.0, -1, NAN, INF, True, "sqrt", None, "2.0"],
    "on_reselect": ["keep", None, False],
    "selected_masters": ["bfloat16", "none", None, False],
    "rounding_seed": [-1, 2**64, 1.0, True, "auto", None],
    "min_deferred_numel": [-1, 4096.0, True, "auto", None],
    "accumulate_on": ["cpu", "auto", None, True, 0],
    "ring_dtype": ["float16", "fp32", None, np.float32, 32],
    "upload": ["backwards", "forward", "auto", None, True],
    "upload_check": ["true", "auto", 1, 0, None],
    "backward_passes_per_step": [0, -1, 2.0, True, "auto", NAN],
    "bucket_bytes": [0, -1, 0.5, True, "auto", None],
    "max_grad_norm": [0, 0.0, -1.0, NAN, INF, True, "auto", 10**400],
    "worker_threads": [0, -2, 1.0, True, "all", None],
    "core_binding": ["yes", 1, 0, None],
    "pt_reserved_cores_perc": [-0.01, 1.01, NAN, True, "auto", None],
}

GOOD = {
    "topk_ratio": [0, 1, 0.0, 1.0, 0.05, "auto", np.float32(0.5), np.int64(1)],
    "update_interval": [1, 4, "auto", np.int32(16), 2**24 - 1],
    "select_strategy": ["auto", "step"],
    "select_interval": [1, 100, "auto", np.uint8(8)],
    "steps_per_epoch": [None, 1, np.int64(1000)],
    "full_warm_up_rounds": [0, 10, np.int16(3)],
    "overlap_step": [True, False, np.bool_(False)],
    "stagger": [True, False, np.bool_(True)],
    "visible_after": ["auto", 1, 4, np.int64(2)],
    "weight_prediction": [0, 0.0, 0.5, 1, 2, np.float32(1.5)],
    "channel_dim": ["column", "row"],
    "importance": ["square", "magnitude"],
    "importance_over": ["step", "window", "average"],
    "importance_decay": [0, 0.5, 0.999, np.float32(0.5)],
    "deferred_rule": ["accumulate"],
    "deferred_lr_scale": ["linear", "none", 2, 0.5, np.float64(1.5)],
    "on_reselect": ["migrate", "reset"],
    "selected_masters": ["float32", "stochastic"],
    "rounding_seed": [0, 2**64 - 1, np.uint64(2**64 - 1)],
    "min_deferred_numel": [0, 1, np.int64(4096)],
    "accumulate_on": ["gpu", "host"],
    "ring_dtype": ["auto", "float32", "bfloat16"],
    "upload": ["backward", "step"],
    "upload_check": [True, False, np.bool_(True)],
    "backward_passes_per_step": [None, 1, np.int64(8)],
    "bucket_bytes": [1, 2**40],
    "max_grad_norm": [None, 1, 1e-3, np.float32(0.5)],
    "worker_threads": ["auto", 1, 64],
    "core_binding": ["auto", True, False],
    "pt_reserved_cores_perc": [0, 0.25, 1],
}


def pairs(table: dict[str, list]) -> list:
    return [pytest.param(name, value, id=f"{name}-{value!r:.24}") for name, values in table.items() for value in values]


def test_tables_cover_every_field():
    names = [field.name for field in dataclasses.fields(ZenFlowConfig)]
    assert list(BAD) == names
    assert list(GOOD) == names


@pytest.mark.parametrize(("name", "value"), pairs(BAD))
def test_bad_value_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"^{name} is .*; allowed: .+") as caught:
        ZenFlowConfig(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), pairs(GOOD))
def test_good_value_is_kept_as_a_python_value(name, value):
    kept = getattr(ZenFlowConfig(**{name: value}), name)
    assert kept == value
    assert type(kept) in (int, float, bool, str, type(None))


def test_defaults_are_the_documented_ones():
    assert dataclasses.asdict(ZenFlowConfig()) == {
        "topk_ratio": 0.1,
        "update_interval": 4,
        "select_strategy": "step",
        "select_interval": 100,
        "steps_per_epoch": None,
        "full_warm_up_rounds": 4,
        "overlap_step": True,
        "stagger": True,
        "visible_after": "auto",
        "weight_prediction": 1.0,
        "channel_dim": "column",
        "importance": "square",
        "importance_over": "step",
        "importance_decay": 0.9,
        "deferred_rule": "accumulate",
        "deferred_lr_scale": "linear",
        "on_reselect": "migrate",
        "selected_masters": "float32",
        "rounding_seed": 0,
        "min_deferred_numel": 4096,
        "accumulate_on": "gpu",
        "ring_dtype": "auto",
        "upload": "backward",
        "upload_check": True,
        "backward_passes_per_step": None,
        "bucket_bytes": 134217728,
        "max_grad_norm": None,
        "worker_threads": "auto",
        "core_binding": "auto",
        "pt_reserved_cores_perc": 0.25,
    }


@pytest.mark.parametrize("rule", ["accumulate", "replay"])
def test_on_the_host_both_rules_are_allowed(rule):
    config = ZenFlowConfig(accumulate_on="host", deferred_rule=rule)
    assert (config.accumulate_on, config.deferred_rule, config.ring_dtype) == ("host", rule, "auto")


def test_replay_without_the_host_s_gradients_is_refused():
    with pytest.raises(
        ValueError, match=r"^deferred_rule is 'replay'; allowed: .*accumulate_on='host', which is 'gpu'"
    ):
        ZenFlowConfig(deferred_rule="replay", accumulate_on="gpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_ring_of_raw_gradients_has_their_dtype(dtype):
    assert ZenFlowConfig(ring_dtype=dtype).ring_dtype == dtype
    with pytest.raises(ValueError, match=rf"^ring_dtype is '{dtype}'; allowed: 'auto' under accumulate_on='host'"):
        ZenFlowConfig(accumulate_on="host", ring_dtype=dtype)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 2),
        ({"update_interval": 7}, 2),
        ({"update_interval": 1}, 1),
        ({"update_interval": "auto", "visible_after": 4}, 4),
        ({"overlap_step": False}, 0),
        ({"stagger": False}, 4),
        ({"stagger": False, "update_interval": 7}, 7),
        ({"stagger": False, "visible_after": 3}, 3),
        ({"stagger": False, "overlap_step": False}, 0),
    ],
    ids=str,
)
def test_steps_until_a_result_is_visible(fields, steps):
    assert ZenFlowConfig(**fields).visible_after_steps == steps


def test_a_result_waits_for_its_next_window_s_end_at_most():
    with pytest.raises(ValueError, match=r"^visible_after is 9; allowed: 1 to 8, which is update_interval"):
        ZenFlowConfig(update_interval=8, visible_after=9)
    with pytest.raises(ValueError, match=r"^visible_after is 1; allowed: 'auto' under overlap_step=False"):
        ZenFlowConfig(overlap_step=False, visible_after=1)


@pytest.mark.parametrize(
    ("fields", "predicts"),
    [
        ({}, True),
        ({"weight_prediction": 0}, False),
        ({"weight_prediction": 0.5, "stagger": False}, True),
        ({"weight_prediction": 0.5, "visible_after": 1}, True),
        ({"overlap_step": False}, False),
    ],
    ids=str,
)
def test_only_what_is_late_is_predicted(fields, predicts):
    assert ZenFlowConfig(**fields).predicts is predicts


def test_unknown_field_is_named():
    with pytest.raises(TypeError, match="topk"):
        ZenFlowConfig(topk=0.1)


def test_config_cannot_be_changed_afterwards():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ZenFlowConfig().update_interval = 8


def test_epochs_without_a_length_are_an_error():
    """A4: an epoch of unknown length once meant that selection silently never repeated."""
    with pytest.raises(ValueError, match="steps_per_epoch is None; allowed: an integer >= 1"):
        ZenFlowConfig(select_strategy="epoch", select_interval=1)


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, 100),
        ({"select_interval": 8}, 8),
        ({"select_strategy": "auto"}, 100),
        ({"select_strategy": "auto", "select_interval": "auto"}, 100),
        ({"select_strategy": "epoch", "select_interval": 2, "steps_per_epoch": 37}, 74),
        ({"select_strategy": "epoch", "select_interval": "auto", "steps_per_epoch": 37}, 37),
        ({"select_strategy": "step", "select_interval": 8, "steps_per_epoch": 37}, 8),
    ],
    ids=["default", "steps", "auto-unit", "all-auto", "epochs", "auto-epochs", "length-unused"],
)
def test_select_interval_in_steps(fields, steps):
    assert ZenFlowConfig(**fields).select_interval_steps == steps


def test_auto_resolves_to_fixed_numbers_logged_once(caplog):
    """F10: what is logged afterwards is a number."""
    config_module._log_once.cache_clear()
    auto = ZenFlowConfig(topk_ratio="auto", update_interval="auto", select_strategy="auto", select_interval="auto")
    with caplog.at_level(logging.INFO, logger="zenflow"):
        first, second = auto.resolved(), auto.resolved()
    assert first == second == ZenFlowConfig()
    assert caplog.messages == [
        "auto: topk_ratio = 0.1, update_interval = 4, select_strategy = step, select_interval = 100"
    ]


def test_properties_of_the_machine_stay_auto(caplog):
    with caplog.at_level(logging.INFO, logger="zenflow"):
        config = ZenFlowConfig(ring_dtype="auto", worker_threads="auto", core_binding="auto").resolved()
    assert (config.ring_dtype, config.worker_threads, config.core_binding) == ("auto", "auto", "auto")
    assert not caplog.messages
