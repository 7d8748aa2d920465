"""Instructions and responses: prompts, what is learned of a sample, what is dropped, and files that cannot be used."""

from __future__ import annotations

import json
import logging
from importlib.util import find_spec

import pytest
import torch

from tests.experiments.folders import bpe_tokenizer
from zenflow.training import alpaca
from zenflow.training.data import IGNORED, ResponseSamples, load_data
from zenflow.training.errors import InputError
from zenflow.training.schema import DataConfig, DataKind
from zenflow.training.sources import is_classification, read
from zenflow.training.tokenizer import ByteTokenizer, PretrainedTokenizer

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
SAMPLES = [
    {"instruction": "Name a cat.", "input": "", "output": "Tom"},
    {"instruction": "Add.", "input": "2 and 3", "output": "5\nThat is {five}."},
    {"instruction": "Say ###.", "output": "### Response:"},
    {"instruction": "Wait.", "input": "", "output": "the cat sat on the mat", "text": "unused"},
]


def config_of(path, **settings) -> DataConfig:
    return DataConfig(kind=DataKind.alpaca, path=str(path), **({"max_length": 400, "held_out": 0.25} | settings))


def write(path, samples: list[dict]) -> None:
    lines = path.suffix == ".jsonl"
    path.write_text("".join(json.dumps(s) + "\n" for s in samples) if lines else json.dumps(samples, indent=1))


def test_a_prompt_is_alpaca_s_to_the_letter():
    assert alpaca.prompt("Add {1}.", "2\n3") == (
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\nAdd {1}.\n\n### Input:\n2\n3\n\n"
        "### Response:"
    )
    assert alpaca.prompt("Wait.", "") == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        "### Instruction:\nWait.\n\n### Response:"
    )


@pytest.mark.parametrize("name", ["data.json", "data.jsonl", "lines.json"])
def test_a_list_and_lines_give_the_same_split_every_time(tmp_path, name):
    path = tmp_path / name
    write(path, SAMPLES)
    if name == "lines.json":
        path.write_text("".join(json.dumps(sample) + "\n" for sample in SAMPLES))
    source = read(config_of(path))
    assert read(config_of(path)) == source and not is_classification(config_of(path))
    assert (len(source.train), len(source.held_out)) == (3, 1)
    assert sorted(source.train + source.held_out) == sorted(
        (alpaca.prompt(sample["instruction"], sample.get("input", "")), sample["output"]) for sample in SAMPLES
    )
    order = [sample["output"] for sample in SAMPLES]
    assert [response for _, response in source.train + source.held_out] != order, "the split takes no file's end"


def test_the_response_alone_is_learned_and_ends(tmp_path):
    write(tmp_path / "data.json", SAMPLES)
    source = read(config_of(tmp_path / "data.json"))
    data = load_data(config_of(tmp_path / "data.json"), ByteTokenizer())
    assert data.classes is None and data.scores == ()
    batch = data.train.batch([0, 1, 2])
    for row, (prompt, response) in enumerate(source.train):
        whole = [*(prompt + response).encode(), 0]
        length = len(whole) - 1
        assert batch.input_ids[row, :length].tolist() == whole[:-1]
        labels = batch.labels[row].tolist()
        assert labels[: len(prompt.encode()) - 1] == [IGNORED] * (len(prompt.encode()) - 1)
        assert labels[len(prompt.encode()) - 1 : length] == [*response.encode(), 0]
        assert set(labels[length:]) <= {IGNORED} and batch.input_ids[row, length:].sum() == 0
        assert batch.attention_mask[row].tolist() == [1] * length + [0] * (batch.input_ids.shape[1] - length)
    assert batch.targets == sum(len(response.encode()) + 1 for _, response in source.train)
    assert batch.tokens == int(batch.attention_mask.sum()) and batch.input_ids.shape[1] % 8 == 0


def test_the_token_that_ends_a_response_is_learned_where_it_pads_too():
    """Masking padding by its number would keep a model without a padding token from ever ending."""
    batch = ResponseSamples([[3, 4, 5, 1], [3, 4, 5, 6, 7, 8, 1]], [2, 3], pad=1).batch([0, 1])
    assert batch.labels.tolist() == [[-100, 5, 1, *[-100] * 5], [-100, -100, 6, 7, 8, 1, -100, -100]]
    assert batch.input_ids.tolist() == [[3, 4, 5, *[1] * 5], [3, 4, 5, 6, 7, 8, 1, 1]]
    assert batch.attention_mask.sum(dim=1).tolist() == [3, 6] and (batch.tokens, batch.targets) == (9, 6)
    assert all(part.dtype == torch.int64 for part in (batch.input_ids, batch.attention_mask, batch.labels))


PROMPT = len(alpaca.prompt("a", "").encode())


@pytest.mark.parametrize(("room", "learned"), [(1, "r"), (3, "res"), (4, "resp"), (5, "resp\0")])
def test_a_long_response_is_cut_and_has_no_end(tmp_path, room, learned):
    write(tmp_path / "data.json", [{"instruction": "a", "output": "resp"}] * 2)
    data = load_data(config_of(tmp_path / "data.json", max_length=PROMPT + room), ByteTokenizer())
    labels = data.train.batch([0]).labels[0]
    assert bytes(labels[labels != IGNORED].tolist()).decode() == learned
    assert labels.numel() <= PROMPT + room + 7


def test_samples_of_which_nothing_is_left_are_counted_and_dropped(tmp_path, caplog):
    long = {"instruction": "a" * 50, "output": "x"}
    kept = {"instruction": "a", "output": "resp"}
    write(tmp_path / "data.json", [kept] * 20 + [long] * 9 + [{"instruction": "b", "output": ""}] * 7)
    with caplog.at_level(logging.WARNING):
        data = load_data(config_of(tmp_path / "data.json", max_length=PROMPT + 5, held_out=0.5), ByteTokenizer())
    assert len(data.train) + len(data.held_out) == 20
    told = [record.getMessage() for record in caplog.records]
    counts = [[int(word) for word in text.replace("=", " ").split() if word.isdigit()] for text in told]
    assert len(counts) == 2 and [len(data.train), len(data.held_out)] == [18 - count[0] for count in counts]
    assert [sum(count[place] for count in counts) for place in (0, 2, 3)] == [16, 7, 9]


@needs_transformers
@pytest.mark.parametrize("settings", [{}, {"ends": True}, {"pad": "</s>"}], ids=["llama", "ends texts", "eos pads"])
def test_a_llama_s_tokenizer_begins_the_prompt_and_ends_the_response(tmp_path, settings):
    bpe_tokenizer(tmp_path, **settings)
    tokenizer = PretrainedTokenizer(tmp_path)
    assert (tokenizer.begin, tokenizer.end, tokenizer.pad) == ([0], 1, 1)
    write(tmp_path / "data.jsonl", SAMPLES)
    source, data = read(config_of(tmp_path / "data.jsonl")), load_data(config_of(tmp_path / "data.jsonl"), tokenizer)
    batch = data.train.batch([0, 1, 2])
    for row, (prompt, response) in enumerate(source.train):
        ids, labels = batch.input_ids[row], batch.labels[row]
        real = ids[batch.attention_mask[row] == 1].tolist()
        learned = labels[labels != IGNORED].tolist()
        assert real.count(0) == 1 and real[0] == 0 and 1 not in real
        assert learned[-1] == 1 and 1 not in learned[:-1]
        decode = tokenizer._tokenizer.decode
        assert decode(real[1:]) == prompt + response and decode(learned[:-1]) == response
        # The prompt's tokens are those of the prompt alone, as it is given to the model later.
        assert real[: len(real) - len(learned) + 1] == [0, *tokenizer.encode_bare([prompt])[0]]


@needs_transformers
def test_documents_end_once_whatever_the_tokenizer_adds(tmp_path):
    for ends in (False, True):
        bpe_tokenizer(tmp_path, ends=ends)
        (row,) = PretrainedTokenizer(tmp_path).encode(["the cat"])
        assert row[0] == 0 and row.count(1) == 1 and row[-1] == 1


@needs_transformers
def test_a_padding_token_that_the_model_does_not_know_is_not_used(tmp_path):
    """A tokenizer with an added <pad> in a folder whose embedding has no row for it."""
    bpe_tokenizer(tmp_path, pad="<pad>")
    alone = PretrainedTokenizer(tmp_path)
    size = len(alone._tokenizer)
    assert alone.pad == size - 1
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": size - 1}))
    tokenizer = PretrainedTokenizer(tmp_path)
    assert tokenizer.pad == tokenizer.end == 1
    assert tokenizer.encode(["the cat"], 9) == alone.encode(["the cat"], 9)
    with pytest.raises(InputError, match=rf"gives token {size - 1} \('<pad>'\); the model knows 0 to {size - 2}"):
        tokenizer.encode_bare(["a <pad>"])


@needs_transformers
def test_a_tokenizer_without_an_end_is_one_sentence(tmp_path):
    bpe_tokenizer(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
    write(tmp_path / "data.json", SAMPLES)
    with pytest.raises(InputError, match="no end-of-text token .*data.kind=alpaca"):
        load_data(config_of(tmp_path / "data.json"), PretrainedTokenizer(tmp_path))


GOOD = json.dumps(SAMPLES[0])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "", ["holds no lines"]),
        ("a.json", "[]", ["holds no lines"]),
        ("a.json", f"[{GOOD},\n {GOOD},\n oops]", ["line 3 is not JSON", "column 2"]),
        ("a.json", f"[{GOOD}, 7]", ["sample 2", "object", "7"]),
        ("a.json", f'[{GOOD}, {{"instruction": "x"}}]', ["sample 2", "'output'", "instruction"]),
        ("a.json", f'[{GOOD}, {{"instruction": "x", "input": 5, "output": "y"}}]', ["sample 2", "input", "5"]),
        ("a.json", f'[{GOOD}, {{"instruction": null, "output": "y"}}]', ["sample 2", "instruction", "null"]),
        ("a.jsonl", f"{GOOD}\n{GOOD[:-1]}\n", ["line 2 is not JSON"]),
        ("a.jsonl", f"{GOOD}\n\n[1]\n", ["line 3", "object"]),
        ("a.json", f"[{GOOD}]", ["1 sample", "at least 2"]),
        ("a.json", f"[{GOOD}, {GOOD}]", ["data.held_out=0.9", "2 samples"]),
        ("a.json", json.dumps([SAMPLES[0], SAMPLES[0] | {"output": ""}]), ["None of the 1", "data.max_length=400"]),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    held_out = 0.9 if "held_out" in words[0] else 0.05
    with pytest.raises(InputError) as caught:
        load_data(config_of(tmp_path / name, held_out=held_out), ByteTokenizer())
    assert "\n" not in str(caught.value)
    assert [word for word in words if word not in str(caught.value)] == []
