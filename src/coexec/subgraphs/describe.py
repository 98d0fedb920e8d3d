"""Canonical words for the leaves of a graph: literals, tensors, symbols, callables. Equal meaning, equal words."""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable
from typing import Any

import sympy  # has neither stubs nor py.typed
import torch

from coexec.subgraphs.code_hash import callable_hash
from coexec.subgraphs.errors import UnkeyableGraphError
from coexec.subgraphs.key import shape_class

TRUSTED_MODULES = ("torch", "operator", "_operator", "math", "builtins")
"""Callables of these modules are covered by the versions in the environment; all others bring a hash of their code."""

_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Symbols:
    """Renames the symbols of one graph by first appearance, so that `s77` and `s33` give equal text."""

    def __init__(self) -> None:
        self._renamed: dict[sympy.Symbol, sympy.Symbol] = {}
        self._hints: dict[str, int | None] = {}
        self._ranges: dict[str, str] = {}

    def text(self, value: torch.SymInt | torch.SymFloat | torch.SymBool) -> str:
        """The expression of `value` in canonical symbols."""
        expression = value.node.expr
        if not isinstance(expression, sympy.Basic):
            return repr(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            self._admit(symbol, value.node.shape_env)
        return str(expression.xreplace(self._renamed))

    def entries(self) -> list[str]:
        """One `name: range` line per symbol: artifacts are compiled under the range, so it is part of the key."""
        return [f"symbol {name}: {bounds}" for name, bounds in sorted(self._ranges.items())]

    def shape_class(self) -> str:
        """Size bucket of every symbol at the hint the graph was seen with, for example `s0<=8 s1<=512`."""
        return shape_class({name: hint for name, hint in self._hints.items() if hint is not None})

    def _admit(self, symbol: sympy.Symbol, shape_env: Any) -> None:
        if symbol in self._renamed:
            return
        prefix = symbol.name[0] if symbol.name[:1] in ("u", "z") else "s"
        name = f"{prefix}{len(self._renamed)}"
        # The assumptions travel along: sympy simplifies by them, and equal graphs must simplify alike.
        self._renamed[symbol] = sympy.Symbol(name, **_assumptions(symbol))
        bounds = shape_env.var_to_range.get(symbol)
        self._ranges[name] = "any" if bounds is None else f"[{bounds.lower}, {bounds.upper}]"
        self._hints[name] = _hint(symbol, shape_env)


def _assumptions(symbol: sympy.Symbol) -> dict[str, bool]:
    return {name: value for name, value in symbol._assumptions_orig.items() if value is not None}


def _hint(symbol: sympy.Symbol, shape_env: Any) -> int | None:
    """The size the symbol had when traced. Its table was renamed between torch releases: absent means no hint."""
    table = getattr(shape_env, "backed_var_to_val", None) or getattr(shape_env, "var_to_val", {})
    value = table.get(symbol)
    return int(value) if value is not None and getattr(value, "is_integer", False) else None


def tensor_text(tensor: torch.Tensor, symbols: Symbols, *, with_grad: bool) -> str:
    """dtype, shape, strides, device and what else decides how a kernel may read the tensor. No values, no offset.

    Errors: UnkeyableGraphError for a tensor that cannot say (some wrapper subclasses).
    """
    try:
        return " ".join(_tensor_parts(tensor, symbols, with_grad))
    except (RuntimeError, NotImplementedError, TypeError) as error:
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise UnkeyableGraphError(f"cannot describe a tensor of type {kind}: {error!r:.200}") from error


def _tensor_parts(tensor: torch.Tensor, symbols: Symbols, with_grad: bool) -> list[str]:
    parts = [str(tensor.dtype).removeprefix("torch."), sizes_text(tensor.shape, symbols)]
    if tensor.layout is torch.strided:
        parts.append(f"stride={sizes_text(tensor.stride(), symbols)}")
    else:
        parts.append(str(tensor.layout))
    parts.append(str(tensor.device))
    return parts + [name for name, present in _flags(tensor, with_grad) if present]


def _flags(tensor: torch.Tensor, with_grad: bool) -> list[tuple[str, bool]]:
    return [
        ("requires_grad", with_grad and tensor.requires_grad),
        ("conj", tensor.is_conj()),
        ("neg", tensor.is_neg()),
        (f"subclass={type(tensor).__qualname__}", _is_subclass(tensor)),
    ]


def _is_subclass(tensor: torch.Tensor) -> bool:
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and not hasattr(tensor, "fake_mode")


def sizes_text(sizes: Any, symbols: Symbols) -> str:
    """`[2, s0]`"""
    return "[" + ", ".join(symbols.text(s) if isinstance(s, _SYMBOLIC) else str(s) for s in sizes) + "]"


def literal_text(value: object, symbols: Symbols) -> str:
    """The one spelling of a constant.

    Errors: UnkeyableGraphError for objects without a value that survives the process (address in the repr, script
    objects, generators).
    """
    if isinstance(value, _SYMBOLIC):
        return symbols.text(value)
    if value is None or isinstance(value, bool | int | float | complex):
        return _number_text(value)
    if isinstance(value, str | bytes):
        return repr(value).replace("|", "\\x7c")
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if value is Ellipsis:
        return "..."
    raise UnkeyableGraphError(
        f"cannot key a graph that holds {value!r:.120} of type {type(value).__module__}.{type(value).__qualname__}; "
        "pass it as a tensor or a plain number, or keep this part out of the graph"
    )


def _number_text(value: object) -> str:
    # The sign and payload of a nan select no code path; one spelling keeps equal graphs equal.
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return repr(value)


def callable_text(target: Callable[..., Any]) -> str:
    """Qualified name, with a hash of the code where no version in the environment covers it."""
    if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return str(target)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return _higher_order_text(target)
    module = getattr(target, "__module__", None) or _owner_module(target)
    name = f"{module}.{getattr(target, '__qualname__', type(target).__qualname__)}"
    if module.split(".")[0] in TRUSTED_MODULES:
        return name
    return f"{name}#{callable_hash(target)[:16]}"


def _owner_module(target: Callable[..., Any]) -> str:
    """Builtins such as `torch.sin` carry no module: find them by identity among the modules we trust."""
    name = getattr(target, "__name__", "")
    for module in (torch, torch.nn.functional, torch.Tensor, operator, math):
        if getattr(module, name, None) is target:
            return str(getattr(module, "__name__", "torch"))
    raise UnkeyableGraphError(f"cannot name the code of {target!r:.120}; wrap it in a torch.library.custom_op")


def _higher_order_text(target: Any) -> str:
    name = str(target.name() if callable(target.name) else target.name)
    if name.startswith("triton_kernel_wrapper"):
        raise UnkeyableGraphError(f"cannot key {name}: its kernel is an index into a table of this process")
    return f"higher_order.{name}"
