"""GLUE's nine tasks from a folder: the distribution's own TSV files, or JSONL as Hugging Face's datasets export it.

TSV files have no quoting: a quotation mark is a character like any other. CoLA's have no header. A few rows of the real
files lack columns; they are left out and counted, and a file with more of them than `DAMAGED` is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zenflow.training.errors import InputError
from zenflow.training.files import json_records, read_lines, text_of, value_of
from zenflow.training.schema import DataConfig, DataKind, GlueTask

log = logging.getLogger(__name__)
DAMAGED = 0.001  # share of a file's rows that may lack columns
JSON_ENDINGS = (".jsonl", ".json")
MRPC_RAW, MRPC_DEV = "msr_paraphrase_train.txt", "dev_ids.tsv"

Text = str | tuple[str, str]
Sample = tuple[Text, int | float]


@dataclass(frozen=True)
class Task:
    """Where a task's columns are and what is measured on it.

    `folder` is its name in the distribution; `texts` one or two columns; `classes` are in the order of their numbers,
    none where the label is a number within `bounds`. `fields` are the JSON names of the texts where they differ.
    """

    folder: str
    texts: tuple[str, ...]
    label: str
    classes: tuple[str, ...]
    scores: tuple[str, ...] = ("accuracy",)
    fields: tuple[str, ...] = ()
    header: tuple[str, ...] = ()  # of files that have none
    bounds: tuple[float, float] = (0.0, 0.0)


_PAIR = ("sentence1", "sentence2")
_ENTAILED = ("entailment", "not_entailment")
TASKS: dict[GlueTask, Task] = {
    GlueTask.cola: Task(
        "CoLA",
        ("sentence",),
        "label",
        ("unacceptable", "acceptable"),
        ("accuracy", "matthews"),
        header=("source", "label", "mark", "sentence"),
    ),
    GlueTask.sst2: Task("SST-2", ("sentence",), "label", ("negative", "positive")),
    GlueTask.mrpc: Task(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        ("not_equivalent", "equivalent"),
        ("accuracy", "f1"),
        fields=_PAIR,
    ),
    GlueTask.qqp: Task(
        "QQP", ("question1", "question2"), "is_duplicate", ("not_duplicate", "duplicate"), ("accuracy", "f1")
    ),
    GlueTask.stsb: Task("STS-B", _PAIR, "score", (), ("pearson", "spearman"), bounds=(0.0, 5.0)),
    GlueTask.mnli: Task(
        "MNLI", _PAIR, "gold_label", ("entailment", "neutral", "contradiction"), fields=("premise", "hypothesis")
    ),
    GlueTask.qnli: Task("QNLI", ("question", "sentence"), "label", _ENTAILED),
    GlueTask.rte: Task("RTE", _PAIR, "label", _ENTAILED),
    GlueTask.wnli: Task("WNLI", _PAIR, "label", ("not_entailment", "entailment")),
}


def check_settings(config: DataConfig) -> None:
    """Errors: InputError where `task` or `mismatched` does not go with the rest."""
    if config.kind is not DataKind.glue:
        given = {"task": config.task and config.task.name, "mismatched": config.mismatched or None}
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InputError(
                f"data.{wrong[0]} is {given[wrong[0]]}; it is for data=glue alone, and data.kind is {config.kind.name}."
            )
    elif config.task is None:
        raise InputError(f"data=glue needs a data.task; allowed: {', '.join(task.name for task in GlueTask)}.")
    elif config.mismatched and config.task is not GlueTask.mnli:
        raise InputError(f"data.mismatched is true; allowed with data.task={config.task.name}: false.")


def find_files(path: Path, config: DataConfig) -> tuple[Path, Path]:
    """Training and held-out file of the task, in `path` or in its folder within it. Errors: InputError."""
    task, name = TASKS[config.task], config.task.name
    folder = next((path / part for part in (task.folder, name, name.upper()) if (path / part).is_dir()), path)
    ending = {True: "_mismatched", False: "_matched"}[config.mismatched] if config.task is GlueTask.mnli else ""
    held_out = [f"dev{ending}.tsv", *(f"{part}{ending}{end}" for part in ("validation", "dev") for end in JSON_ENDINGS)]
    wanted = (["train.tsv", *(f"train{end}" for end in JSON_ENDINGS)], held_out)
    found = [next((folder / name for name in names if (folder / name).is_file()), None) for names in wanted]
    if None not in found:
        return found[0], found[1]
    if config.task is GlueTask.mrpc and all((folder / part).is_file() for part in (MRPC_RAW, MRPC_DEV)):
        return folder / MRPC_RAW, folder / MRPC_DEV
    missing = wanted[found.index(None)]
    raise InputError(f"{folder} holds no {_alternatives(missing)} for data.task={name}{_hint(folder, config.task)}.")


def _alternatives(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"


def _hint(folder: Path, task: GlueTask) -> str:
    if any(folder.rglob("*.parquet")):
        return "; its parquet files must first be exported as JSON lines"
    if task is GlueTask.mrpc and (folder / MRPC_RAW).is_file():
        return f"; beside {MRPC_RAW} it needs {MRPC_DEV}, GLUE's list of the held-out pairs"
    return "; give a folder with the task's files, or the one with all tasks, as data.path"


def read(path: Path, config: DataConfig) -> tuple[list[Sample], list[Sample]]:
    """Training and held-out samples in the files' order. Errors: InputError with the file and the line."""
    task, (train, held_out) = TASKS[config.task], find_files(path, config)
    if held_out.name == MRPC_DEV:
        return _mrpc_raw(train, held_out)
    parts = []
    for file in (train, held_out):
        parts.append(_json(file, task) if file.suffix in JSON_ENDINGS else _table(file, task))
        if not parts[-1]:
            raise InputError(f"{file} holds no samples.")
    return parts[0], parts[1]


def _table(path: Path, task: Task, keep: Callable[[dict[str, str]], bool] = lambda row: True) -> list[Sample]:
    lines = read_lines(path)
    header = list(task.header) or (lines[0].split("\t") if lines else [])
    for column in (*task.texts, task.label):
        if column not in header:
            raise InputError(
                f"{path}, line 1 has no column {column!r}; it has {', '.join(map(repr, header)) or 'none'}."
            )
    needed = 1 + max(header.index(column) for column in (*task.texts, task.label))
    samples, damaged = [], []
    first = 1 if task.header else 2
    for number, line in enumerate(lines[first - 1 :], start=first):
        values = line.split("\t")
        row = dict(zip(header, values, strict=False))
        if len(values) < needed or not row[task.label]:
            damaged.append(number)
        elif keep(row):
            label = _label(row[task.label], task, f"{path}, line {number}: {task.label}")
            samples.append((_text([row[column] for column in task.texts]), label))
    if damaged:
        told = f"{path}, line {damaged[0]} lacks columns: {needed} tab-separated ones are needed, the label not empty"
        if len(damaged) > DAMAGED * len(lines):
            raise InputError(f"{told} ({len(damaged)} of {len(lines)} lines are so).")
        log.warning("%s; %d such lines are left out", told, len(damaged))
    return samples


def _json(path: Path, task: Task) -> list[Sample]:
    samples = []
    for place, record in json_records(path):
        texts = [text_of(record, name, path, place) for name in task.fields or task.texts]
        label = _label(value_of(record, "label", path, place), task, f"{path}, {place}: label")
        samples.append((_text(texts), label))
    return samples


def _text(columns: list[str]) -> Text:
    return columns[0] if len(columns) == 1 else (columns[0], columns[1])


def _mrpc_raw(path: Path, dev_ids: Path) -> tuple[list[Sample], list[Sample]]:
    """The corpus as it was published, of which GLUE holds out the pairs in its list."""
    held_out = {tuple(line.split("\t")[:2]) for line in read_lines(dev_ids)}
    task = TASKS[GlueTask.mrpc]
    parts = [
        _table(path, task, lambda row, wanted=wanted: ((row["#1 ID"], row["#2 ID"]) in held_out) == wanted)
        for wanted in (False, True)
    ]
    for part, file in zip(parts, (path, dev_ids), strict=True):
        if not part:
            raise InputError(f"{file} leaves no samples to {'train on' if file == path else 'hold out'}.")
    return parts[0], parts[1]


def _label(value: str | int | float, task: Task, where: str) -> int | float:
    """A class's number from its number or name, or a number within the task's bounds."""
    if not task.classes:
        low, high = task.bounds
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = high + 1
        if not low <= number <= high:
            raise InputError(f"{where} is {value!r}; allowed: a number from {low:g} to {high:g}.")
        return number
    text = str(value)
    if text in task.classes:
        return task.classes.index(text)
    if text.isascii() and text.isdigit() and int(text) < len(task.classes):
        return int(text)
    names = ", ".join(f"{number} or {name}" for number, name in enumerate(task.classes))
    unlabelled = " (-1 marks the samples of a test split, which have no labels)" if text == "-1" else ""
    raise InputError(f"{where} is {value!r}{unlabelled}; allowed: {names}.")
