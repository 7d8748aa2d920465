"""The ablations: every value of every file is valid and beside AdamW, and a report tells them apart."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from torch.nn import Parameter

from experiments.train import CONF
from tests.commands import BRIEF
from zenflow.report.runs import find, read
from zenflow.report.study import studies
from zenflow.training.checks import _check_values
from zenflow.training.command import register
from zenflow.training.cpu_adamw import OffloadedAdamW
from zenflow.training.engines import AdamW, check_masters, zenflow_config
from zenflow.training.schema import AdamWEngine, TrainConfig, ZenFlowEngine, plain

FILES = sorted((CONF / "experiment").glob("ablation_*.yaml"))
# What a file is for, and the values that are tried at least.
VARIED = {
    "ablation_topk_ratio": ("topk_ratio", {0.01, 0.05, 0.1, 1}),
    "ablation_k_u": ("update_interval", {2, 4, 8}),
    "ablation_update_interval": ("update_interval", {1, 2, 4, 8, 16}),
    "ablation_deferred_rule": ("deferred_rule", {"accumulate", "replay"}),
    "ablation_deferred_lr_scale": ("deferred_lr_scale", {"none", 2, "linear"}),
    "ablation_staleness": ("overlap_step", {True, False}),
    "ablation_weight_prediction": ("weight_prediction", {0.0, 0.5, 1.0, 1.5}),
    "ablation_channels": ("channel_dim", {"column", "row"}),
    "ablation_importance": ("importance_over", {"step", "window", "average"}),
    "ablation_select_interval": ("select_interval", {4, 16, 1000}),
    "ablation_on_reselect": ("on_reselect", {"migrate", "reset"}),
    "ablation_full_warm_up_rounds": ("full_warm_up_rounds", {0, 8}),
    "ablation_ring_dtype": ("ring_dtype", {"float32", "bfloat16"}),
    "ablation_masters": ("masters", {True, False}),
    "ablation_engine": ("masters", {True, False}),
}


def sweep_of(name: str) -> dict[str, str]:
    return OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{name}.yaml"))["hydra"]["sweeper"]["params"]


@cache
def jobs(name: str) -> list[TrainConfig]:
    """The configuration of every value of an ablation, for one seed."""
    overrides = OverridesParser.create().parse_overrides([f"variant={sweep_of(name)['variant']}"])
    (batch,) = BasicSweeper.split_arguments(overrides, None)
    register()
    found = []
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for (word,) in batch:
            words = word.removeprefix("variant=").strip("'").replace("null", "").split()
            found.append(OmegaConf.to_object(compose("train", [f"experiment={name}", *words])))
    return found


@pytest.mark.parametrize("name", ["ablation_staleness", "ablation_weight_prediction"])
def test_a_schedule_is_beside_the_paper_s_and_the_default(name):
    configs = [config.engine for config in jobs(name) if isinstance(config.engine, ZenFlowEngine)]
    tried = [
        (config.stagger, config.weight_prediction, config.visible_after)
        for config in configs
        if config.update_interval == 4 and config.overlap_step
    ]
    assert {(False, 0.0, "auto"), (True, 0.0, "auto"), (True, 1.0, "auto")} <= set(tried)


def test_there_is_a_file_for_each_and_each_file_is_known():
    assert [path.stem for path in FILES] == sorted(VARIED)


@pytest.mark.parametrize("name", VARIED)
def test_every_value_is_valid_distinct_and_beside_adamw(name):  # G8
    assert sweep_of(name)["seed"] == "0,1,2"
    configs = jobs(name)
    for config in configs:
        _check_values(config)
        check_masters(config.engine, config.model.dtype.name)
        if isinstance(config.engine, ZenFlowEngine):
            zenflow_config(config.engine, config.optimizer, steps_per_epoch=1)
    tried = [repr(plain(config)) for config in configs]
    assert len(set(tried)) == len(tried)
    assert configs[0].engine == AdamWEngine()
    assert AdamWEngine(masters=False) in [config.engine for config in configs]
    assert AdamWEngine(offload=True) in [config.engine for config in configs]
    assert {
        config.model.dtype for config in configs if config.engine in (AdamWEngine(), AdamWEngine(offload=True))
    } == {configs[0].model.dtype}
    assert any(isinstance(config.engine, ZenFlowEngine) and config.engine.topk_ratio == 0 for config in configs)
    field, wanted = VARIED[name]
    assert wanted <= {plain(config.engine)[field] for config in configs if hasattr(config.engine, field)}
    assert len({(config.model.path, config.data.kind, config.steps, config.optimizer.lr) for config in configs}) == 1


def test_every_other_sweep_is_beside_adamw_on_the_device_and_on_the_host():  # G8
    """But those of simulated rules, which have no times."""
    found = {path.stem: OmegaConf.load(path).get("hydra") for path in (CONF / "experiment").glob("*.yaml")}
    others = [name for name, given in found.items() if given and not name.startswith(("ablation_", "simulate_"))]
    assert {"rules_sweep", "rules_long", "rules_peers", "glue_sweep"} <= set(others)
    for name in others:
        params = sweep_of(name)
        engines = params["engine"].split(",") if "engine" in params else re.findall(r"'engine=(\w+)", params["variant"])
        assert {"adamw", "adamw_offload"} <= set(engines), name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_begins_with_the_command_that_runs_it(path):
    first, second, *_ = path.read_text(encoding="utf-8").splitlines()
    assert (first, second) == ("# @package _global_", f"# zenflow-train experiment={path.stem}")


def test_an_ablation_runs_by_one_command_and_is_told_apart_in_a_report(command):
    outcome = command("experiment=ablation_masters", *BRIEF, "seed=0,1")
    assert outcome.code == 0, outcome.err
    (study,) = studies([read(folder) for folder in find([outcome.folder])], [], {})
    of_zenflow = ["zenflow", "zenflow, selected_masters stochastic"]
    expected = ["adamw", "adamw_bf16", "adamw_offload", "zero_offload", *of_zenflow]
    assert [setting.name for setting in study.settings] == expected
    assert [setting.seeds for setting in study.settings] == [[0, 1]] * 6
    assert study.baseline.name == "adamw"
    losses = {setting.name: setting.mean("final_loss") for setting in study.settings}
    # The same course in another place: a bf16 copy may differ in its last bit.
    assert losses.pop("adamw_offload") == pytest.approx(losses["adamw"], rel=1e-3)
    assert losses["adamw_bf16"] != losses["adamw"] and len(set(losses.values())) == 5
    assert "adamw without masters" in outcome.out


def test_what_is_given_for_the_engine_is_not_for_its_baselines(command):
    outcome = command("experiment=ablation_engine", *BRIEF, "seed=0", "engine.update_interval=2")
    assert outcome.code == 0, outcome.err
    engines = [outcome.config(job)["engine"] for job in "01234"]
    assert [engine.get("update_interval") for engine in engines] == [None, None, None, 1, 2]
    assert [engine.get("masters") for engine in engines] == [True, False, True, None, None]
    assert [engine.get("offload") for engine in engines] == [False, False, True, None, None]
    assert outcome.config("1")["model"]["dtype"] == "bfloat16"


def test_a_variant_that_does_not_fit_fails_alone_and_says_why(command):
    outcome = command("-m", *BRIEF, "variant='engine=adamw','engine.topk_ration=1','engine.topk_ratio=1'")
    assert outcome.code == 1
    assert "variant is 'engine.topk_ration=1'" in outcome.err and "did you mean topk_ratio" in outcome.err
    assert "did you mean topk_ratio" in (outcome.folder / "1" / "train.log").read_text()
    assert [(outcome.folder / job / "summary.json").exists() for job in "012"] == [True, False, True]
    assert outcome.config("2")["variant"] is None and outcome.config("2")["engine"]["topk_ratio"] == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("variant='engine.topk_ration=1'", ["variant is 'engine.topk_ration=1'", "did you mean topk_ratio"]),
        ("variant=engine", ["variant is 'engine'"]),
        ("variant='engine=adamx'", ["variant is 'engine=adamx'", "adamx", "zero_offload"]),
        ("engine=adamw_bf16", ["engine.masters is false", "float32", "model.dtype=bfloat16"]),
        (
            "engine=adamw_offload engine.masters=false model.dtype=bfloat16",
            ["offload is true and engine.masters false"],
        ),
        ("engine.selected_masters=stochastic", ["selected_masters is stochastic", "float32", "model.dtype=bfloat16"]),
    ],
)
def test_a_bad_variant_or_engine_is_one_sentence_and_leaves_nothing(command, tmp_path, override, words):
    outcome = command(*BRIEF, *override.split())
    assert outcome.code == 1
    assert outcome.err.startswith("zenflow-train: ") and "\n" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "engine",
    [
        "engine=zero_offload",
        "engine=zenflow engine.topk_ratio=1",
        "engine=zenflow engine.update_interval=1 engine.overlap_step=false",
    ],
)
def test_without_delay_every_engine_follows_adamw_on_bf16_weights(command, tmp_path, engine):
    """G7: where a master's low bits differ by rounding, a few bf16 copies differ by a unit in their last place.

    That moves these losses by 5e-5 of their value; weights without masters by 4e-4, no decay by 2e-3.
    """
    settings = (*BRIEF, "steps=8", "model.dtype=bfloat16", "optimizer.weight_decay=1")
    reference = command(*settings, "engine=adamw", folder=tmp_path / "adamw")
    outcome = command(*settings, "engine.min_deferred_numel=64", *engine.split(), folder=tmp_path / "zenflow")
    losses = [[record["loss"] for record in run.metrics() if "loss" in record] for run in (outcome, reference)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-4)
    assert reference.summary()["validation_loss_after"] < reference.summary()["validation_loss_before"] - 0.3


@pytest.mark.parametrize("kind", [AdamW, OffloadedAdamW])
def test_adamw_is_torch_s_fused_one_on_every_device(kind):  # G8
    engine = kind([Parameter(torch.zeros(3, 5))], None, lr=1e-3)
    assert [group["fused"] for group in engine.optimizer.param_groups] == [True]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_adamw_on_the_host_is_adamw(device, dtype, max_grad_norm):  # G8
    """The same fused update of the same masters; where it clips, by a quotient that is rounded another way."""
    torch.manual_seed(0)
    start = [torch.randn(13, 7, device=device).to(dtype), torch.randn(5, device=device).to(dtype)]
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    there = [Parameter(weight.cpu().clone()) for weight in start]
    here = [Parameter(weight.clone()) for weight in start]
    reference = AdamW(there, max_grad_norm, **settings)
    engine = OffloadedAdamW(
        [*here, Parameter(torch.ones(3, device=device), requires_grad=False)], max_grad_norm, **settings
    )
    for step in range(5):
        for mine, other in zip(here, there, strict=True):
            other.grad = torch.randn_like(other)
            mine.grad = other.grad.to(device, copy=True)
        if step == 3:  # a parameter without a gradient takes no part
            here[1].grad = there[1].grad = None
        reference.step()
        engine.step()
        engine.zero_grad(), reference.zero_grad()
    exact = 0 if max_grad_norm is None else 1e-6
    for mine, other in zip(here, there, strict=True):
        torch.testing.assert_close(engine.master(mine), reference.master(other), rtol=exact, atol=exact)
        assert torch.equal(mine.cpu(), engine.master(mine).to(dtype)) and not torch.equal(
            mine, start[0 if mine is here[0] else 1]
        )
    assert all(value.device.type == "cpu" for state in engine.optimizer.state.values() for value in state.values())
    assert engine.report().grad_norm == pytest.approx(reference.report().grad_norm, rel=1e-5)


@pytest.mark.parametrize("max_grad_norm", [None, 0.5])
def test_adamw_without_masters_is_torch_s_own_on_bf16_weights(max_grad_norm):
    torch.manual_seed(0)
    start = torch.randn(13, 7).bfloat16()
    ours, theirs = Parameter(start.clone()), Parameter(start.clone())
    engine = AdamW([ours], max_grad_norm, masters=False, lr=1e-2, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-2, weight_decay=0.1, fused=True)
    for _ in range(5):
        ours.grad = torch.randn(13, 7).bfloat16()
        theirs.grad = ours.grad.clone()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([theirs], max_grad_norm)
        engine.step()
        reference.step()
        engine.zero_grad()
    assert torch.equal(ours, theirs) and not torch.equal(ours, start)
    (state,) = engine.optimizer.state.values()
    assert {state[name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}
    assert engine.master(ours).dtype == torch.float32 and torch.equal(engine.master(ours).bfloat16(), ours)


@pytest.mark.parametrize(("masters", "wanted"), [(True, 0.95), (False, 1.0)])
def test_what_masters_are_for(masters, wanted):
    """C9: steps of 5e-4 from a bf16 weight of 1.0 are rounded away one by one, and add up in a master."""
    weight = Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    engine = AdamW([weight], None, masters=masters, lr=5e-4, weight_decay=0.0)
    for _ in range(100):
        weight.grad = torch.ones_like(weight)
        engine.step()
    assert weight.float().mean().item() == pytest.approx(wanted, abs=2e-3)
