"""Tensors in a file without pickle: the safetensors layout, read by mapping the file.

Layout: 8 bytes little-endian length of the header, the header (JSON: name -> dtype, shape, data_offsets), raw bytes.
Strides lie in the header's `__metadata__`, since safetensors itself knows dense tensors only.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from coexec.backends.candidates.program import ProgramError

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
}
"""Codes of the dtypes in the header; the complex128 one is ours."""

DTYPES = {code: dtype for dtype, code in CODES.items()}

ALIGNMENT = 64  # bytes: vector loads and oneDNN like it, and so does a view as any dtype


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the values of `tensors` (CPU, strided) to `path`. Errors: ProgramError for another layout or dtype."""
    header: dict[str, Any] = {}
    strides: dict[str, str] = {}
    blobs: list[bytes] = []
    position = 0
    for name, tensor in tensors.items():
        data = raw_bytes(tensor)
        header[name] = {
            "dtype": _code(tensor),
            "shape": list(tensor.shape),
            "data_offsets": [position, position + len(data)],
        }
        strides[name] = json.dumps(list(tensor.stride()))
        blobs += [data, bytes(-len(data) % ALIGNMENT)]
        position += len(data) + len(blobs[-1])
    text = json.dumps({"__metadata__": strides, **header}).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.writelines([len(text).to_bytes(8, "little"), text, *blobs])


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of `path`, over its mapped pages: nothing is read before it is used; a write stays private.

    Errors: ProgramError for a file of another format or with offsets outside of it.
    """
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        length = int.from_bytes(memory[:8], "little")
        header = json.loads(memory[8 : 8 + length])
        strides = header.pop("__metadata__", {})
        return {
            name: _tensor(memory, 8 + length, entry, json.loads(strides.get(name, "null")))
            for name, entry in header.items()
        }
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ProgramError(f"{path} is no tensor file: {error!r:.200}") from error


def raw_bytes(tensor: torch.Tensor) -> bytes:
    """The values in row-major order. Errors: ProgramError for what has no plain memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or hasattr(tensor, "fake_mode"):
        raise ProgramError(f"a {type(tensor).__name__} of layout {tensor.layout} has no plain values to store")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return bytes(plain.view(torch.uint8).numpy().tobytes()) if plain.numel() else b""


def from_raw_bytes(data: bytearray | mmap.mmap, dtype: torch.dtype, sizes: list[int], offset: int = 0) -> torch.Tensor:
    """A tensor over `data`, which must be writable memory; row-major."""
    count = 1
    for size in sizes:
        count *= size
    if not count:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(sizes)


def _tensor(memory: mmap.mmap, base: int, entry: Mapping[str, Any], strides: list[int] | None) -> torch.Tensor:
    dense = from_raw_bytes(memory, DTYPES[entry["dtype"]], entry["shape"], base + entry["data_offsets"][0])
    if strides is None or list(dense.stride()) == strides:
        return dense
    return restride(dense, strides)


def restride(tensor: torch.Tensor, strides: list[int] | tuple[int, ...]) -> torch.Tensor:
    """A copy of `tensor` with `strides`, overlapping ones (an expanded tensor) included."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    base = torch.empty(extent if tensor.numel() else 0, dtype=tensor.dtype)
    result = base.as_strided(tensor.shape, strides)
    if tensor.numel():
        # Through single elements of an expanded dimension: copy_ refuses memory that overlaps itself.
        index = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
        result[index].copy_(tensor[index])
    return result


def _code(tensor: torch.Tensor) -> str:
    if tensor.dtype not in CODES:
        raise ProgramError(f"tensors of dtype {tensor.dtype} are not stored")
    return CODES[tensor.dtype]
