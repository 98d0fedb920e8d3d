"""Integer division by zero: what compiled code can raise, and what must not be compiled since it cannot be undone.

Inductor's `floor_divide`, `remainder` and `fmod` of integers note a zero, and their kernel raises behind its loops. Its
division towards zero is a bare one, which ends the process, so it is made of the other (seen: torch 2.13). The segment
is then replayed, and an op of it raises eager's error.
"""

from __future__ import annotations

from typing import Any

import torch

from coexec.backends.index_ranges import constants
from coexec.backends.ops import Overload
from coexec.backends.spec import (
    Arg,
    Const,
    FedNumber,
    FedWrapped,
    NumberInput,
    Op,
    SegmentSpec,
    TensorArg,
    Value,
    WrappedNumber,
    used_values,
)

INTEGERS = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")

ROUNDING = frozenset(
    f"aten::{base}{in_place}.{overload}".removesuffix(".")
    for in_place in ("", "_")
    for base, overloads in {
        "div": ("Tensor_mode", "Scalar_mode", "out_mode"),
        "floor_divide": ("", "Scalar", "out"),
        "remainder": ("Tensor", "Scalar", "Scalar_Tensor", "Tensor_out", "Scalar_out"),
        "fmod": ("Tensor", "Scalar", "Tensor_out", "Scalar_out"),
    }.items()
    for overload in overloads
)
"""Ops whose second argument may not be zero where all are integers."""


def divides_toward_zero(overload: Overload, named: dict[str, Any]) -> bool:
    """Whether an op is an integer division that cuts off the fraction."""
    if overload.base not in ("div", "div_") or named.get("rounding_mode") != "trunc":
        return False
    return not torch.result_type(named["self"], named["other"]).is_floating_point


def call_division(overload: Overload, named: dict[str, Any]) -> torch.Tensor:
    """Run an op of which :func:`divides_toward_zero` is true."""
    dtype = torch.result_type(named["self"], named["other"])
    result = toward_zero(*(_of(dtype, named[name]) for name in ("self", "other")))
    target: torch.Tensor | None = next((named[p.name] for p in overload.parameters if p.written), None)
    return result if target is None else target.copy_(result)


def toward_zero(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Quotients of integers of one dtype without their fraction, by a division that notes a zero."""
    quotient = torch.div(a, b, rounding_mode="floor")
    if not quotient.dtype.is_signed:
        return quotient
    rounded_away = ((a < 0) != (b < 0)) & (quotient * b != a)
    return quotient + rounded_away.to(quotient.dtype)


def _of(dtype: torch.dtype, operand: Any) -> torch.Tensor:
    return operand.to(dtype) if isinstance(operand, torch.Tensor) else torch.full((), operand, dtype=dtype)


def unknown_divisor(spec: SegmentSpec, any_size: bool = False) -> Op | None:
    """The first integer division by what no constant is: nobody knows before the run whether it is zero.

    Args:
        spec: the segment.
        any_size: its constants may be sizes, which are others in other runs.
    """
    known, values = set() if any_size else constants(spec), spec.values()
    return next((op for op in spec.ops if op.op in ROUNDING and _may_be_zero(op, spec, values, known)), None)


def _may_be_zero(op: Op, spec: SegmentSpec, values: dict[int, Value], known: set[int]) -> bool:
    divisor, mode = op.args[1], op.args[2] if op.op.startswith("aten::div") else Const("floor")
    if not (isinstance(mode, Const) and mode.value):
        return False
    if isinstance(divisor, (Const, WrappedNumber)) or not known.isdisjoint(used_values(divisor)):
        return False
    return all(_dtype(arg, spec, values) in INTEGERS for arg in op.args[:2])


def _dtype(operand: Arg, spec: SegmentSpec, values: dict[int, Value]) -> str:
    match operand:
        case TensorArg(value):
            return values[value].dtype
        case FedNumber(position) | FedWrapped(position, _):
            entry = spec.inputs[position]
            return entry.dtype if isinstance(entry, NumberInput) else ""
        case WrappedNumber(number, _) | Const(number, _):
            return "int64" if isinstance(number, int) else "float64"
    return ""
