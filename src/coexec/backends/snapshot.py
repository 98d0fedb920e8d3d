"""Live inputs of a segment in two files, so that the worker can check an artifact on them.

`NAME.bin` holds bytes of memory, `NAME.json` says what lies where::

    {"storages": [{"start": byte in NAME.bin, "nbytes": 4096}, ...],
     "tensors": [{"storage": 0, "dtype": "float32", "sizes": [2, 3], "strides": [3, 1], "offset": 0}, ...],
     "generator": {"start": ..., "nbytes": 5056} | null}

Tensors are those of `spec.inputs`, in order (fed numbers are 0-dim). A storage holds only the bytes that its tensors
touch, and offsets count from there, so a batch that is a slice of a data set costs the batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch

from coexec.backends.ops import torch_dtype

ALIGNMENT_BYTES = 64


def write_snapshot(path: Path, tensors: Sequence[torch.Tensor], generator_state: torch.Tensor | None) -> None:
    """Write `path` (the .json) and its .bin.

    Args:
        path: ends in ".json"; both files are written under temporary names and renamed, the .json last.
        tensors: the inputs; tensors that share memory share it in the snapshot.
        generator_state: of the default CPU generator (`torch.get_rng_state()`), or None if nothing is drawn.
    """
    groups: dict[int, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(position)
    described: list[Any] = [None] * len(tensors)
    storages, temporary = [], path.with_suffix(".bin.part")
    with temporary.open("wb") as file:
        for index, positions in enumerate(groups.values()):
            low, memory = _touched([tensors[p] for p in positions])
            storages.append(_append(file, memory))
            for position in positions:
                described[position] = _describe(tensors[position], index, low)
        generator = None if generator_state is None else _append(file, generator_state)
    temporary.rename(path.with_suffix(".bin"))
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps({"storages": storages, "tensors": described, "generator": generator}))
    part.rename(path)


def read_snapshot(path: Path) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The tensors and the generator state that :func:`write_snapshot` or the native side wrote."""
    index = json.loads(path.read_text())
    with path.with_suffix(".bin").open("rb") as file:
        storages = [_read(file, entry) for entry in index["storages"]]
        generator = None if index["generator"] is None else _read(file, index["generator"])
    return [_tensor(entry, storages) for entry in index["tensors"]], generator


def delete_snapshot(path: Path) -> None:
    """Remove both files; missing ones are fine."""
    for suffix in (".json", ".bin", ".json.part", ".bin.part"):
        path.with_suffix(suffix).unlink(missing_ok=True)


def _touched(tensors: list[torch.Tensor]) -> tuple[int, torch.Tensor]:
    """First byte that the tensors of one storage touch, and all bytes from there to the last."""
    ranges = [_byte_range(t) for t in tensors if t.numel()]
    storage = tensors[0].untyped_storage()
    if not ranges:
        return 0, torch.empty(0, dtype=torch.uint8)
    # Rounded down, so that offsets stay whole numbers of elements for every dtype.
    low = min(r[0] for r in ranges) // 16 * 16
    high = max(r[1] for r in ranges)
    return low, torch.empty(0, dtype=torch.uint8).set_(storage, low, (high - low,), (1,))


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + (last + 1) * tensor.element_size()


def _describe(tensor: torch.Tensor, storage: int, low: int) -> dict[str, Any]:
    offset = tensor.storage_offset() - low // tensor.element_size() if tensor.numel() else 0
    return {
        "storage": storage,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()),
        "offset": offset,
    }


def _append(file: BinaryIO, memory: torch.Tensor) -> dict[str, int]:
    file.write(b"\0" * (-file.tell() % ALIGNMENT_BYTES))
    start = file.tell()
    file.write(memory.contiguous().numpy().data)
    return {"start": start, "nbytes": memory.numel()}


def _read(file: BinaryIO, entry: dict[str, int]) -> torch.Tensor:
    memory = torch.empty(entry["nbytes"], dtype=torch.uint8)
    file.seek(entry["start"])
    if file.readinto(memory.numpy().data) != entry["nbytes"]:  # type: ignore[attr-defined]
        raise EOFError(f"snapshot ends before byte {entry['start'] + entry['nbytes']}")
    return memory


def _tensor(entry: dict[str, Any], storages: list[torch.Tensor]) -> torch.Tensor:
    memory = storages[entry["storage"]].untyped_storage()
    empty = torch.empty(0, dtype=torch_dtype(entry["dtype"]))
    return empty.set_(memory, entry["offset"], entry["sizes"], entry["strides"])
