"""From an Op of a segment to a call: finds the overload and turns boxed arguments into Python's.

The recorded form is the boxed one (enums are ints, every argument of the schema is there); torch's Python bindings want
`torch.dtype`, `torch.device` and keyword-only arguments by name. Only this file knows the difference.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

from coexec.backends.spec import (
    Arg,
    Const,
    FedNumber,
    FedWrapped,
    ListArg,
    Op,
    SpecError,
    TensorArg,
    TensorListArg,
    Undefined,
    WrappedNumber,
    used_values,
)

SCALAR_TYPES = {
    0: torch.uint8, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.int64, 5: torch.float16, 6: torch.float32,
    7: torch.float64, 8: torch.complex32, 9: torch.complex64, 10: torch.complex128, 11: torch.bool, 15: torch.bfloat16,
    23: torch.float8_e5m2, 24: torch.float8_e4m3fn, 25: torch.float8_e5m2fnuz, 26: torch.float8_e4m3fnuz,
    27: torch.uint16, 28: torch.uint32, 29: torch.uint64,
}  # fmt: skip
"""c10::ScalarType by number."""

MEMORY_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)
"""c10::MemoryFormat by number."""

AS_STRIDED = frozenset({"as_strided", "as_strided_", "as_strided_copy", "as_strided_scatter", "as_strided_scatter_"})
"""Ops whose `storage_offset` counts from the start of the storage, which an artifact never sees."""


class Fed:
    """Stands in decoded arguments for number input `input`; `wrapped` if it stands for a tensor."""

    __slots__ = ("dtype", "input", "wrapped")

    def __init__(self, input: int, wrapped: bool, dtype: str = "") -> None:
        self.input, self.wrapped, self.dtype = input, wrapped, dtype


@dataclass(frozen=True, slots=True)
class Parameter:
    """One argument of an overload's schema."""

    name: str
    kind: str  # "ScalarType", "Layout", "MemoryFormat", "Device", "Tensor", ... without Optional and List
    keyword_only: bool
    written: bool  # the op writes the memory of this argument


@dataclass(frozen=True, slots=True)
class Overload:
    """A resolved op."""

    target: OpOverload
    base: str  # name without namespace and overload, e.g. "add_"
    parameters: tuple[Parameter, ...]
    random: bool  # may draw from a generator


@functools.cache
def resolve(name: str) -> Overload:
    """The overload called `name` ("aten::add.Tensor"). SpecError if this torch has none."""
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    try:
        target = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError as error:
        raise SpecError(f"op {name!r} does not exist in torch {torch.__version__}; is its library loaded?") from error
    random = torch.Tag.nondeterministic_seeded in target.tags
    return Overload(target, base, tuple(_parameter(a) for a in target._schema.arguments), random)


def _parameter(argument: Any) -> Parameter:
    kind = str(argument.real_type)
    while kind.startswith(("Optional[", "List[")):
        kind = kind[kind.index("[") + 1 : -1]
    written = argument.alias_info is not None and argument.alias_info.is_write
    return Parameter(argument.name, kind, argument.kwarg_only, written)


def decode(op: Op, tensor: Callable[[int], torch.Tensor], offset: Callable[[int], int]) -> dict[str, Any]:
    """Arguments of `op` by name, as Python's: tensors, numbers, torch.dtype ..., and :class:`Fed` for fed numbers.

    Args:
        op: the recorded op.
        tensor: gives the tensor that stands for a value.
        offset: gives the storage offset that a value was recorded with.

    Raises:
        SpecError: the number of arguments is not the schema's.
    """
    overload = resolve(op.op)
    if len(op.args) != len(overload.parameters):
        raise SpecError(f"{op.op} has {len(overload.parameters)} arguments in its schema, {len(op.args)} were recorded")
    pairs = zip(overload.parameters, op.args, strict=True)
    named = {p.name: _decode_arg(p, arg, tensor) for p, arg in pairs}
    if overload.base in AS_STRIDED:
        _rebase_offset(op, named, offset)
    return named


def _rebase_offset(op: Op, named: dict[str, Any], offset: Callable[[int], int]) -> None:
    """Make an absolute offset relative to where the tensor lies now."""
    source = op.args[0]
    if isinstance(source, TensorArg) and isinstance(named.get("storage_offset"), int):
        named["storage_offset"] += named["self"].storage_offset() - offset(source.value)


def _decode_arg(parameter: Parameter, arg: Arg, tensor: Callable[[int], torch.Tensor]) -> Any:
    match arg:
        case TensorArg(value):
            return tensor(value)
        case TensorListArg(values, _):
            return [None if v is None else tensor(v) for v in values]
        case Const(value, "device"):
            return torch.device(str(value))
        case Const(value, _):
            return _decode_const(parameter.kind, value)
        case FedNumber(position):
            return Fed(position, wrapped=False)
        case FedWrapped(position, dtype):
            return Fed(position, wrapped=True, dtype=dtype)
        case ListArg(items):
            return [_decode_arg(parameter, i, tensor) for i in items]
        case WrappedNumber(value, _):
            return value  # the bindings wrap a Python number that is given for a Tensor: the same 0-dim weak tensor
        case Undefined():
            return None


def _decode_const(kind: str, value: Any) -> Any:
    if value is None:
        return None
    if kind == "ScalarType":
        return SCALAR_TYPES[value]
    if kind == "Layout":
        if value != 0:
            raise SpecError(f"layout number {value}: only strided (0) tensors can be in a segment")
        return torch.strided
    if kind == "MemoryFormat":
        return MEMORY_FORMATS[value]
    return list(value) if isinstance(value, tuple) else value


def call(overload: Overload, named: dict[str, Any]) -> list[torch.Tensor | None]:
    """Run the op; return its tensor results in order, lists flattened, as Op.outs has them."""
    positional = [named[p.name] for p in overload.parameters if not p.keyword_only]
    keywords = {p.name: named[p.name] for p in overload.parameters if p.keyword_only}
    return tensor_results(overload.target, overload.target(*positional, **keywords))


def tensor_results(target: OpOverload, result: Any) -> list[torch.Tensor | None]:
    """What `target` returned, as Op.outs has it: nothing if its schema returns nothing (in-place foreach ops)."""
    return flatten_results(result) if target._schema.returns else []


def flatten_results(result: Any) -> list[torch.Tensor | None]:
    """Tensor results in order, lists flattened."""
    if isinstance(result, (list, tuple)):
        return [tensor for entry in result for tensor in flatten_results(entry)]
    return [result] if result is None or isinstance(result, torch.Tensor) else []


UNDECLARED_WRITES = {
    "aten::native_batch_norm": ("running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("running_mean", "running_var"),
    "aten::miopen_batch_norm": ("running_mean", "running_var"),
}
"""Arguments that an op writes in training although its schema does not say so (seen: torch 2.13)."""


def draws(op: Op) -> bool:
    """The op draws random numbers, with these arguments: attention and dropout may be told not to."""
    overload = resolve(op.op)
    if not overload.random:
        return False
    constants = {p.name: a for p, a in zip(overload.parameters, op.args, strict=True)}
    off = [constants.get(name) for name in ("dropout_p", "train", "training")]
    return Const(0.0) not in off and Const(False) not in off


def written_values(op: Op) -> list[int]:
    """Values whose memory the op writes."""
    overload = resolve(op.op)
    undeclared = UNDECLARED_WRITES.get(op.op, ()) if _is_training(op) else ()
    written: list[int] = []
    for parameter, arg in zip(overload.parameters, op.args, strict=True):
        if parameter.written or parameter.name in undeclared:
            written.extend(used_values(arg))
    return written


def _is_training(op: Op) -> bool:
    return any(
        p.name == "training" and a == Const(True) for p, a in zip(resolve(op.op).parameters, op.args, strict=True)
    )


def torch_dtype(name: str) -> torch.dtype:
    """torch.float32 for "float32"."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
