"""Settings and arguments as they are typed: what is taken, and what is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch

from zenflow import ZenFlowConfig
from zenflow.bench.command import main
from zenflow.bench.peers import deepspeed_config
from zenflow.bench.registry import CONTESTANTS, Job, missing
from zenflow.bench.variants import parse_variant


@pytest.mark.parametrize(
    ("text", "settings", "window"),
    [
        ("U=4", {"update_interval": 4}, 4),
        ("k=0.05, U=8", {"topk_ratio": 0.05, "update_interval": 8}, 8),
        ("overlap_step=false,channel_dim=row", {"overlap_step": False, "channel_dim": "row"}, 4),
        ("deferred_lr_scale=none,max_grad_norm=None", {"deferred_lr_scale": "none", "max_grad_norm": None}, 4),
        ("U=auto", {"update_interval": "auto"}, 4),
        ("", {}, 4),
    ],
)
def test_a_variant_is_read(text, settings, window):
    variant = parse_variant(text)
    assert variant.settings == settings
    assert variant.window == window


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("U=4,accumulate_at=host", "'accumulate_at' in 'U=4,accumulate_at=host' is no setting"),
        ("U", "'U' in 'U' has no '='; allowed: key=value"),
        ("U=4,update_interval=8", "sets update_interval twice"),
        ("U=0", "update_interval is 0; allowed: an integer >= 1"),
        ("k=2", "topk_ratio is 2; allowed: a number from 0 to 1"),
    ],
)
def test_a_bad_variant_is_refused_by_name(text, said):
    with pytest.raises(ValueError, match="allowed") as caught:
        parse_variant(text)
    assert said in str(caught.value)


def test_an_unknown_setting_names_every_allowed_one():
    with pytest.raises(ValueError) as caught:
        parse_variant("nothing=1")
    allowed = str(caught.value).partition("allowed: ")[2].split(", ")
    assert set(allowed) == {"k", "U"} | {field.name for field in fields(ZenFlowConfig)}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["step", "--shape", "7B"], "'7B'"),
        (["step", "--batch", "0"], "'0'; allowed: an integer >= 1"),
        (["step", "--length", "1"], "'1'; allowed: an integer >= 2"),
        (["step", "--windows", "many"], "'many'; allowed: an integer >= 1"),
        (["step", "--clip", "nan"], "'nan'; allowed: a finite number > 0"),
        (["step", "--trainers", "lomo"], "'lomo'"),
        (["step", "--zenflow", "U=4,nothing=1"], "'nothing' in 'U=4,nothing=1' is no setting"),
        (["step", "--contention", "100000"], "'100000'; allowed: an integer from 1 to"),
        (["memory", "--threads", "-1"], "threads"),
        ([], "required"),
        (["step", "--out", "/proc/none"], "'/proc/none'"),
        pytest.param(
            ["step", "--device", "cuda"],
            "torch sees no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bad_arguments_end_before_anything_runs(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["step", "--help"], ["memory", "--help"]], ids=" ".join)
def test_help(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "zenflow-bench" in capsys.readouterr().out


def test_the_help_names_every_trainer(capsys):
    with pytest.raises(SystemExit):
        main(["step", "--help"])
    text = "".join(capsys.readouterr().out.split())  # a name may be wrapped at its hyphen
    assert not [name for name in CONTESTANTS if name not in text]


def test_only_peers_can_be_missing():
    assert [missing(name) for name in ("floor", "adamw", "zenflow", "sync")] == [None] * 4


@pytest.mark.parametrize("trainer", ["deepspeed-offload", "deepspeed-zenflow"])
def test_deepspeed_selects_beyond_the_run(trainer):
    job = Job(trainer, trainer, "tiny", batch=3, length=8, warm_up=9, steps=41, window=4)
    config = json.loads(json.dumps(deepspeed_config(job)))
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] == 3
    zenflow = config["zero_optimization"].get("zenflow")
    assert (zenflow is not None) == (trainer == "deepspeed-zenflow")
    if zenflow is not None:
        assert zenflow["select_interval"] > job.warm_up + job.steps
        assert zenflow["select_interval"] % zenflow["update_interval"] == 0
