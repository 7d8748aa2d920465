"""Tensors as a safetensors file: eight bytes with the header's length, the header in JSON, the tensors' bytes.

Written here, because the bytes are hashed on their way and a full disk must be told from other faults; read by the
`safetensors` package, which maps the file and copies nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
ALIGNMENT = 8
METADATA = {"format": "pt"}  # what Hugging Face's own files say


def check_dtypes(tensors: Mapping[str, Tensor]) -> None:
    """ValueError naming the first tensor of a dtype that such a file cannot hold."""
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            allowed = ", ".join(str(dtype) for dtype in DTYPE_NAMES)
            raise ValueError(f"{name} is {tensor.dtype}; allowed are {allowed}")


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """The file's first bytes, and the names in the order in which the tensors follow: large elements first, so that
    each tensor starts at a multiple of its element's size."""
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in order:
        tensor = tensors[name]
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, order


def file_bytes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> int:
    """How large the file will be."""
    return len(header_of(tensors, metadata)[0]) + sum(tensor.nbytes for tensor in tensors.values())


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Write the new file `path` down to the disk; returns its SHA-256 in hexadecimal.

    Tensors are copied to the host one at a time. FileExistsError if there is such a file; OSError (ENOSPC) on a full
    disk, which leaves a part of it behind.
    """
    head, order = header_of(tensors, metadata)
    digest = hashlib.sha256(head)
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), memoryview(head))
        for name in order:
            content = content_of(tensors[name])
            digest.update(content)
            _write_all(file.fileno(), content)
        os.fsync(file.fileno())
    return digest.hexdigest()


def content_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements in their order, however it lies in memory; without a copy where that can be."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    # Of one element any stride is contiguous, but only stride 1 can be seen as bytes.
    return memoryview(plain.as_strided((plain.numel(),), (1,)).view(torch.uint8).numpy())


def _write_all(descriptor: int, content: memoryview) -> None:
    while len(content):
        content = content[os.write(descriptor, content) :]
