"""Which inputs of a segment are indices, and what they may be; of the graphs of `torch.compile`: `graph_indices.py`.

Eager raises an IndexError for an index that is out of range. A compiled loop finds it in the middle of its work, when a
segment that writes in place has written already. So the native core looks at such inputs before a run, and replays
where one is out of range. Indices that a segment computes are for `index_errors.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from coexec.backends.ops import written_values
from coexec.backends.spec import (
    Arg,
    Const,
    Op,
    SegmentSpec,
    TensorArg,
    TensorInput,
    TensorListArg,
    Value,
    fed_inputs,
    used_values,
)

SAME_ELEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "alias", "detach", "unsqueeze", "squeeze", "squeeze.dim", "expand",
        "permute", "transpose.int", "t", "slice.Tensor", "select.int", "as_strided", "clone", "contiguous", "_to_copy",
        "cat", "stack", "flatten.using_ints", "repeat", "split.Tensor", "split_with_sizes", "unbind.int", "flip",
    )
)  # fmt: skip
"""Ops of whose results every element is an element of an argument."""

CREATORS = ("aten::arange", "aten::full", "aten::ones", "aten::randperm", "aten::scalar_tensor", "aten::zeros")
"""Beginnings of the names of ops that make a tensor from numbers alone: the same ones each time, in any order."""

INDEX_DTYPES = ("int64", "int32")
GIVEN_DTYPES = (*INDEX_DTYPES, "int16", "int8", "uint8", "bool", "float32", "float64")
"""Of inputs that can become indices by a cast; csrc/run_segment.cpp looks at the same."""


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Elements of tensor input `input` must lie in [0, size), or in [-size, size) if they may count `from_end`.

    All of them, also where the segment uses a part: what is out of range in the rest costs the compiled run, not more.
    One that is `ignored` may be anything.
    """

    input: int
    size: int
    from_end: bool = False
    ignored: int | None = None


def index_ranges(spec: SegmentSpec) -> list[IndexRange]:
    """Every range that an input must keep, in the order of the ops. Indices that the segment computes have none."""
    origins, values = _origins(spec), spec.values()
    return list(
        dict.fromkeys(
            IndexRange(position, size, from_end, ignored)
            for op in spec.ops
            for value, size, from_end, ignored in indices(op, values)
            for position in sorted(origins.get(value, ()))
        )
    )


def _origins(spec: SegmentSpec) -> dict[int, frozenset[int]]:
    """Per value of numbers that may be indices, the inputs that all its elements are from."""
    values = {v.id: v for v in spec.values().values() if v.dtype in GIVEN_DTYPES}
    origins = {
        entry.value.id: frozenset({position})
        for position, entry in enumerate(spec.inputs)
        if isinstance(entry, TensorInput) and entry.value.id in values
    }
    storages = {v.id: v.storage for v in spec.values().values()}
    for op in spec.ops:
        used = [value for arg in op.args for value in used_values(arg)]
        taken = used[1:] if op.op == "aten::copy_" else used if op.op in SAME_ELEMENTS else []
        elements = frozenset[int]().union(*(origins.get(value, ()) for value in taken))
        kept = [
            out for out in op.outs if out is not None and out.id in values and _all_from(taken, origins, values, out)
        ]
        written = {storages[value] for value in written_values(op)}
        origins = {value: of for value, of in origins.items() if storages[value] not in written}
        origins.update((out.id, elements) for out in kept)
    return origins


def _all_from(taken: list[int], origins: dict[int, frozenset[int]], values: dict[int, Value], out: Value) -> bool:
    """Whether every element of `out` is an index of an input, as it was there."""
    return bool(taken) and all(value in origins and keeps_indices(values[value], out) for value in taken)


def computed_index(spec: SegmentSpec, any_size: bool = False) -> Op | None:
    """The first op with an index that no input and no constant is: nobody knows before the run whether it is in range.

    Args:
        spec: the segment.
        any_size: its constants may be sizes, which are others in other runs.
    """
    known, values = {*_origins(spec), *(() if any_size else constants(spec))}, spec.values()
    return next((op for op in spec.ops if any(found[0] not in known for found in indices(op, values))), None)


def constants(spec: SegmentSpec) -> set[int]:
    """The values that are made of constants alone."""
    found: dict[int, int] = {}  # value: its storage
    storages = {v.id: v.storage for v in spec.values().values()}
    for op in spec.ops:
        used = [value for arg in op.args for value in used_values(arg)]
        fed = any(fed_inputs(arg) for arg in op.args)
        constant = not fed and (op.op.startswith(CREATORS) if not used else all(value in found for value in used))
        if constant:
            found.update((out.id, out.storage) for out in op.outs if out is not None)
        else:
            written = {storages[value] for value in written_values(op)}
            found = {value: storage for value, storage in found.items() if storage not in written}
    return set(found)


def keeps_indices(source: Value, copy: Value) -> bool:
    """Whether an index that is in range is the same number in the copy: a cast to a small dtype may wrap around."""
    return copy.dtype == source.dtype or copy.dtype in INDEX_DTYPES


Found = tuple[int, int, bool, int | None]
"""(value, size, from_end, ignored), as in IndexRange."""


def takes_indices(op: str) -> bool:
    """Whether the op called so ("aten::index.Tensor") has arguments that are indices."""
    return _base_name(op) in _FINDERS


def indices(op: Op, values: dict[int, Value]) -> Iterator[Found]:
    """The index arguments of an op that are tensors, each with what it may be."""
    if (find := _FINDERS.get(_base_name(op.op))) is not None:
        yield from find(op.args, values)


def _base_name(op: str) -> str:
    return op.removeprefix("aten::").partition(".")[0].removesuffix("_")


def _embedding(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
    """(weight, indices, ..)"""
    if isinstance(args[0], TensorArg) and isinstance(args[1], TensorArg):
        yield args[1].value, values[args[0].value].sizes[0], False, None


def _embedding_backward(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
    """(grad, indices, num_weights, ..)"""
    if isinstance(args[1], TensorArg) and (rows := _integer(args[2])) is not None:
        yield args[1].value, rows, False, None


def _along_dimension(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
    """(self, dim, index, ..)"""
    dim = _integer(args[1])
    if isinstance(args[0], TensorArg) and isinstance(args[2], TensorArg) and dim is not None:
        sizes = values[args[0].value].sizes or (1,)
        yield args[2].value, sizes[dim], False, None


def _by_position(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
    """(self, indices, ..): one per dimension, a mask for as many as it has."""
    if not (isinstance(args[0], TensorArg) and isinstance(args[1], TensorListArg)):
        return
    sizes, dim = values[args[0].value].sizes, 0
    for index in args[1].values:
        if index is not None and values[index].dtype not in ("bool", "uint8"):
            yield index, sizes[dim], True, None
        dim += len(values[index].sizes) if index is not None and values[index].dtype in ("bool", "uint8") else 1


def _take(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
    """(self, index, ..): positions in the flattened tensor."""
    if isinstance(args[0], TensorArg) and isinstance(args[1], TensorArg):
        yield args[1].value, math.prod(values[args[0].value].sizes), True, None


def _class_of(scores: int) -> Callable[[tuple[Arg, ...], dict[int, Value]], Iterator[Found]]:
    """(.., scores, target, weight, reduction, ignore_index, ..)"""

    def find(args: tuple[Arg, ...], values: dict[int, Value]) -> Iterator[Found]:
        given, target, ignored = args[scores], args[scores + 1], _integer(args[scores + 4])
        if isinstance(given, TensorArg) and isinstance(target, TensorArg) and ignored is not None:
            sizes = values[given.value].sizes
            yield target.value, sizes[1] if len(sizes) > 1 else sizes[0], False, ignored

    return find


def _integer(arg: Arg) -> int | None:
    return arg.value if isinstance(arg, Const) and isinstance(arg.value, int) else None


_FINDERS: dict[str, Callable[[tuple[Arg, ...], dict[int, Value]], Iterator[Found]]] = {
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _embedding),
    "embedding_dense_backward": _embedding_backward,
    **dict.fromkeys(("gather", "scatter", "scatter_add", "scatter_reduce"), _along_dimension),
    **dict.fromkeys(("index_select", "index_add", "index_copy", "index_fill", "index_reduce"), _along_dimension),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _by_position),
    **dict.fromkeys(("take", "put"), _take),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _class_of(0)),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward"), _class_of(1)),
}
"""By the op's name without its overload and the underscore of what works in place."""
