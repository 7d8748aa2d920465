"""GLUE's files: each task's own columns and quirks, JSON lines, and what cannot be used."""

from __future__ import annotations

import json
import logging

import pytest

from zenflow.training.data import load_data
from zenflow.training.errors import InputError
from zenflow.training.glue import DAMAGED, TASKS
from zenflow.training.schema import DataConfig, DataKind, GlueTask
from zenflow.training.sources import Labelled, is_classification, locate, read
from zenflow.training.tokenizer import ByteTokenizer

MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse"
MNLI_TRAIN = (*MNLI.split(), "sentence1", "sentence2", "label1", "gold_label")
MNLI_DEV = (*MNLI.split(), "sentence1", "sentence2", *(f"label{n}" for n in range(1, 6)), "gold_label")
MRPC = ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")
PARSES = ("( a b )",) * 4


def tsv(*rows: tuple) -> str:
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


# Files as they are distributed, and the samples in them. Quotation marks are plain characters, and often single ones.
FILES = {
    "cola": (
        "CoLA",
        {
            "train.tsv": tsv(("gj04", 1, "", 'The "box".'), ("gj04", 0, "*", "Box the.")),
            "dev.tsv": tsv(("c-05", 0, "*", 'They "drank.')),
        },
        [('The "box".', 1), ("Box the.", 0)],
        [('They "drank.', 0)],
    ),
    "sst2": (
        "SST-2",
        {
            "train.tsv": tsv(("sentence", "label"), ("hide new secretions ", 0), ('a "gem ', 1)),
            "dev.tsv": tsv(("sentence", "label"), ("fine", 1)),
        },
        [("hide new secretions ", 0), ('a "gem ', 1)],
        [("fine", 1)],
    ),
    "mrpc": (
        "MRPC",
        {
            "train.tsv": "\ufeff" + tsv(MRPC, (1, 7, 8, '"He" said', 'He " said'), (0, 9, 6, "A", "B")),
            "dev.tsv": tsv(MRPC, (1, 1, 2, "C", "D")),
        },
        [(('"He" said', 'He " said'), 1), (("A", "B"), 0)],
        [(("C", "D"), 1)],
    ),
    "qqp": (
        "QQP",
        {
            name: tsv(
                ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
                (133273, 213221, 213222, f'How "is {name}?', "What\u2028is\x85it?", 1),
            )
            for name in ("train.tsv", "dev.tsv")
        },
        [(('How "is train.tsv?', "What\u2028is\x85it?"), 1)],
        [(('How "is dev.tsv?', "What\u2028is\x85it?"), 1)],
    ),
    "stsb": (
        "STS-B",
        {
            name: tsv(
                ("index", "genre", "filename", "year", "old_index", "source1", "source2", *("sentence1", "sentence2"))
                + ("score",),
                (0, "main-captions", "MSRvid", "2012test", "0001", "none", "none", "A plane.", "An air plane.", score),
            )
            for name, score in (("train.tsv", "5.000"), ("dev.tsv", "0.25"))
        },
        [(("A plane.", "An air plane."), 5.0)],
        [(("A plane.", "An air plane."), 0.25)],
    ),
    "mnli": (
        "MNLI",
        {
            "train.tsv": tsv(MNLI_TRAIN, (0, "31n", "31n", "fiction", *PARSES, "Yes.", "No.", *["contradiction"] * 2)),
            "dev_matched.tsv": tsv(MNLI_DEV, (0, 1, 2, "slate", *PARSES, "p", "h", *["entailment"] * 5, "neutral")),
            "dev_mismatched.tsv": tsv(MNLI_DEV, (0, 1, 2, "oup", *PARSES, "q", "i", *["neutral"] * 5, "entailment")),
        },
        [(("Yes.", "No."), 2)],
        [(("p", "h"), 1)],
    ),
    "qnli": (
        "QNLI",
        {
            "train.tsv": tsv(("index", "question", "sentence", "label"), (0, "When?", '"Then', "entailment")),
            "dev.tsv": tsv(("index", "question", "sentence", "label"), (0, "Who?", "It", "not_entailment")),
        },
        [(("When?", '"Then'), 0)],
        [(("Who?", "It"), 1)],
    ),
    "rte": (
        "RTE",
        {
            "train.tsv": tsv(("index", "sentence1", "sentence2", "label"), (0, "a", "b", "not_entailment")),
            "dev.tsv": tsv(("index", "sentence1", "sentence2", "label"), (0, "c", "d", "entailment")),
        },
        [(("a", "b"), 1)],
        [(("c", "d"), 0)],
    ),
    "wnli": (
        "WNLI",
        {
            "train.tsv": tsv(("index", "sentence1", "sentence2", "label"), (0, "a", "b", 1)),
            "dev.tsv": tsv(("index", "sentence1", "sentence2", "label"), (0, "c", "d", 0)),
        },
        [(("a", "b"), 1)],
        [(("c", "d"), 0)],
    ),
}


def config_of(path, task: str, **settings) -> DataConfig:
    return DataConfig(kind=DataKind.glue, path=str(path), task=GlueTask[task], **settings)


def write(folder, files: dict[str, str], ending: str = "\n") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_bytes(text.replace("\n", ending).encode())


@pytest.mark.parametrize("ending", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("within", [True, False], ids=["all tasks", "one task"])
@pytest.mark.parametrize("task", FILES)
def test_a_task_s_own_files_are_read(tmp_path, task, within, ending):
    folder, files, train, held_out = FILES[task]
    write(tmp_path / folder, files, ending)
    config = config_of(tmp_path if within else tmp_path / folder, task)
    source = read(config)
    assert (source.train, source.held_out) == (train, held_out)
    assert is_classification(config) and source.classes == {"mnli": 3, "stsb": 1}.get(task, 2)
    data = load_data(config, ByteTokenizer())
    batch = data.held_out.batch([0])
    assert batch.labels.tolist() == [held_out[0][1]] and batch.labels.is_floating_point() == (task == "stsb")
    texts = held_out[0][0]
    assert bytes(batch.input_ids[0, : batch.tokens].tolist()).decode() == (
        texts if isinstance(texts, str) else "\0".join(texts)
    )


def test_every_task_is_tried_and_measured_as_glue_says():
    assert list(FILES) == [task.name for task in GlueTask] and set(TASKS) == set(GlueTask)
    scores = {name: TASKS[GlueTask[name]].scores for name in FILES}
    assert scores.pop("cola") == ("accuracy", "matthews")
    assert scores.pop("mrpc") == scores.pop("qqp") == ("accuracy", "f1")
    assert scores.pop("stsb") == ("pearson", "spearman")
    assert set(scores.values()) == {("accuracy",)}


def test_mnli_s_other_genres_are_a_setting(tmp_path):
    write(tmp_path, FILES["mnli"][1])
    assert read(config_of(tmp_path, "mnli", mismatched=True)).held_out == [(("q", "i"), 0)]


RAW = {
    "msr_paraphrase_train.txt": "\ufeff"
    + tsv(MRPC, (1, 10, 11, "a", "b"), (0, 12, 13, 'c "', "d"), (1, 11, 10, "e", "f"), (0, 14, 15, "g", "h")),
    "dev_ids.tsv": tsv((12, 13), (11, 10)),
}


def test_mrpc_as_it_was_published_is_split_by_glue_s_list(tmp_path):
    write(tmp_path / "MRPC", RAW)
    source = read(config_of(tmp_path, "mrpc"))
    assert source.train == [(("a", "b"), 1), (("g", "h"), 0)]
    assert source.held_out == [(('c "', "d"), 0), (("e", "f"), 1)]  # a pair in the other order is another pair
    (tmp_path / "MRPC" / "dev_ids.tsv").unlink()
    with pytest.raises(InputError, match=r"dev_ids.tsv, GLUE's list"):
        locate(config_of(tmp_path, "mrpc"))


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
@pytest.mark.parametrize("task", FILES)
def test_json_lines_as_datasets_export_them_are_read(tmp_path, task, ending):
    """Fields are GLUE's names in Hugging Face's datasets, labels numbers; the raw U+2028 ends no line."""
    _, _, train, held_out = FILES[task]
    fields = TASKS[GlueTask[task]].fields or TASKS[GlueTask[task]].texts
    matched = "_matched" if task == "mnli" else ""
    files = {}
    for name, samples in (("train", train), (f"validation{matched}", held_out)):
        rows = [(text if isinstance(text, tuple) else (text,), label) for text, label in samples]
        records = [dict(zip(fields, texts, strict=True)) | {"label": label, "idx": 0} for texts, label in rows]
        files[name + ending] = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
    write(tmp_path, files)
    source = read(config_of(tmp_path, task))
    assert (source.train, source.held_out) == (train, held_out)


def test_names_of_classes_are_labels_too(tmp_path):
    lines = '{"sentence1": "a", "sentence2": "b", "label": "not_entailment"}\n'
    write(tmp_path, {"train.jsonl": lines, "validation.jsonl": lines})
    assert read(config_of(tmp_path, "rte")).train == [(("a", "b"), 1)]


def test_a_few_rows_without_all_columns_are_left_out_and_told(tmp_path, caplog):
    """QQP's training file has such rows among its 363,849."""
    header, row = FILES["qqp"][1]["train.tsv"].split("\n")[:2]
    count = round(1 / DAMAGED)
    lines = [header, *[row] * count, "7\t8\t9\tonly one question"]
    write(tmp_path, {"train.tsv": "\n".join(lines) + "\n", "dev.tsv": FILES["qqp"][1]["dev.tsv"]})
    with caplog.at_level(logging.WARNING):
        assert len(read(config_of(tmp_path, "qqp")).train) == count
    assert f"line {count + 2} lacks columns" in caplog.text and "1 such lines" in caplog.text
    lines.append("x\ty\tz\tq1\tq2\t")
    (tmp_path / "train.tsv").write_text("\n".join(lines))
    with pytest.raises(InputError, match=rf"line {count + 2} lacks columns: 6 .*\(2 of {count + 3} lines"):
        read(config_of(tmp_path, "qqp"))


COLA, RTE, STSB = (FILES[task][1]["train.tsv"] for task in ("cola", "rte", "stsb"))


def refused(path, task: str) -> str:
    with pytest.raises(InputError) as caught:
        load_data(config_of(path, task), ByteTokenizer())
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "files", "words"),
    [
        ("rte", {}, ["holds no train.tsv, train.jsonl or train.json", "data.task=rte", "data.path"]),
        ("rte", {"train.tsv": RTE}, ["holds no dev.tsv, validation.jsonl", "data.task=rte"]),
        ("mnli", {"train.tsv": RTE, "dev.tsv": RTE}, ["holds no dev_matched.tsv", "validation_matched.jsonl"]),
        ("rte", {"train-00000-of-00001.parquet": ""}, ["parquet", "JSON lines"]),
        ("rte", {"train.tsv": RTE, "dev.tsv": ""}, ["dev.tsv", "line 1", "'sentence1'", "none"]),
        ("rte", {"train.tsv": RTE, "dev.tsv": RTE.split("\n")[0]}, ["dev.tsv", "no samples"]),
        ("cola", {"train.tsv": COLA, "dev.tsv": ""}, ["dev.tsv", "no samples"]),
    ],
)
def test_a_folder_that_cannot_be_used_is_one_sentence(tmp_path, task, files, words):
    write(tmp_path, files)
    sentence = refused(tmp_path, task)
    assert [word for word in words if word not in sentence] == []


@pytest.mark.parametrize(
    ("task", "text", "words"),
    [
        ("rte", COLA, ["line 1", "'sentence1'", "'gj04'"]),
        ("cola", RTE, ["line 1", "'sentence1'", "0 or unacceptable"]),
        ("rte", RTE + "1\ta\n", ["line 3 lacks columns", "4 tab-separated"]),
        ("rte", RTE + "1\ta\tb\tmaybe\n", ["line 3", "'maybe'", "0 or entailment, 1 or not_entailment"]),
        ("wnli", RTE.replace("not_entailment", "2"), ["line 2", "'2'", "0 or not_entailment"]),
        ("stsb", STSB.replace("5.000", "5.1"), ["line 2", "'5.1'", "from 0 to 5"]),
        ("stsb", STSB.replace("5.000", "nan"), ["line 2", "'nan'", "from 0 to 5"]),
        ("stsb", STSB.replace("5.000", "high"), ["line 2", "'high'", "from 0 to 5"]),
        ("sst2", '{"sentence": "a", "label": -1}\n', ["line 1", "-1", "test split", "1 or positive"]),
        ("sst2", '{"sentence": "a", "label": true}\n', ["line 1", "True", "1 or positive"]),
        ("sst2", '{"sentence": "a", "label": 1}\n{"sentence": \n', ["line 2", "not JSON"]),
        ("sst2", '{"sentence": 3, "label": 1}\n', ["line 1", "sentence", "string"]),
        ("sst2", '{"text": "a", "label": 1}\n', ["line 1", "'sentence'", "text, label"]),
        ("sst2", '{"sentence": "a"}\n', ["line 1", "'label'"]),
        ("sst2", "\n", ["no lines"]),
    ],
)
def test_a_training_file_that_cannot_be_used_is_one_sentence(tmp_path, task, text, words):
    name = "train.jsonl" if task == "sst2" else "train.tsv"
    write(tmp_path, {name: text, "dev.tsv": FILES[task][1]["dev.tsv"]})
    sentence = refused(tmp_path, task)
    assert [word for word in [name, *words] if word not in sentence] == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": DataKind.glue}, ["data.task", "cola", "wnli"]),
        ({"kind": DataKind.glue, "task": GlueTask.cola}, ["data.path", "glue_data"]),
        ({"kind": DataKind.glue, "task": GlueTask.cola, "path": "missing"}, ["data.path=missing", "does not exist"]),
        ({"kind": DataKind.glue, "task": GlueTask.cola, "path": __file__}, ["is a file", "needs a folder"]),
        ({"kind": DataKind.glue, "task": GlueTask.qqp, "mismatched": True}, ["data.mismatched", "data.task=qqp"]),
        ({"kind": DataKind.stdlib, "task": GlueTask.qqp}, ["data.task is qqp", "data=glue", "data.kind is stdlib"]),
        ({"kind": DataKind.stdlib, "mismatched": True}, ["data.mismatched is True", "data.kind is stdlib"]),
    ],
)
def test_settings_that_do_not_go_together_are_one_sentence(settings, words):
    with pytest.raises(InputError) as caught:
        locate(DataConfig(**settings))
    assert [word for word in words if word not in str(caught.value)] == []


def test_labelled_text_says_what_is_measured():
    assert Labelled([], [], 2).scores == ("accuracy", "matthews")
