"""Symbolic sizes of a program: read from its annotations, and put back as fake tensors in another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy  # has neither stubs nor py.typed
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._sympy.numbers import int_oo

from coexec.backends.candidates.program import Program, ProgramError

Size = int | str
"""A size, or an expression in symbols: 4, "s0", "2*s0 + 1"."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The symbolic side of a program's inputs; empty for a static program."""

    symbols: dict[str, tuple[int, int | None]]  # name -> smallest and largest value the graph was traced for
    inputs: tuple[tuple[Size, ...] | Size | None, ...]  # per input: sizes of a tensor, value of a number, or unknown

    def symbolic_dims(self, position: int) -> dict[int, str]:
        """dimension -> expression, of one tensor input."""
        entry = self.inputs[position] if self.inputs else None
        if not isinstance(entry, tuple):
            return {}
        return {dim: size for dim, size in enumerate(entry) if isinstance(size, str)}


def read_sizes(program: Program) -> Sizes:
    """From the placeholders' `meta["val"]`; without symbols where tracing fixed every size.

    Symbols are called s0, s1 ... by first appearance: tracing the same graph again gives other names.
    """
    reader = _SizeReader()
    entries: list[tuple[Size, ...] | Size | None] = []
    for node in program.placeholders():
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor):
            entries.append(tuple(reader.size(s) for s in value.shape))
        else:
            entries.append(reader.size(value) if isinstance(value, torch.SymInt | int) else None)
    return Sizes(reader.ranges, tuple(entries))


class _SizeReader:
    """Renames symbols while reading."""

    def __init__(self) -> None:
        self.ranges: dict[str, tuple[int, int | None]] = {}
        self._renamed: dict[Any, Any] = {}

    def size(self, value: torch.SymInt | int) -> Size:
        if not isinstance(value, torch.SymInt):
            return int(value)
        expression = value.node.expr
        if not isinstance(expression, sympy.Basic) or expression.is_number:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            self._admit(symbol, value.node.shape_env.var_to_range.get(symbol))
        return str(expression.xreplace(self._renamed))

    def _admit(self, symbol: Any, bounds: Any) -> None:
        if symbol in self._renamed:
            return
        name = f"s{len(self._renamed)}"
        self._renamed[symbol] = sympy.Symbol(name, integer=True, positive=True)
        self.ranges[name] = (2, None) if bounds is None else (_bound(bounds.lower, 2), _bound(bounds.upper, None))


def _bound(value: Any, unlimited: Any) -> Any:
    # torch writes "no limit" as int_oo (which calls itself finite) or a number close to the largest one.
    if value in (int_oo, -int_oo) or not (value.is_finite and value.is_integer and int(value) < 1 << 60):
        return unlimited
    return int(value)


def annotate(program: Program, sizes: Sizes) -> FakeTensorMode:
    """Give every node its `meta["val"]` over fake tensors; returns their mode.

    Errors: ProgramError if the graph does not run on inputs of these sizes.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv() if program.dynamic else None, allow_non_fake_inputs=True)
    try:
        fakes = _symbolic(program, sizes, mode) if program.dynamic else [_fake(v, mode) for v in program.inputs]
        for node, value in zip(program.placeholders(), fakes, strict=True):
            node.meta["val"] = value
        with torch.no_grad():
            FakeTensorProp(program.module, mode).propagate_dont_convert_inputs(*fakes)
    except ProgramError:
        raise
    except Exception as error:
        raise ProgramError(f"the graph does not run on its inputs: {type(error).__name__}: {error!s:.300}") from error
    return mode


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value, static_shapes=True) if isinstance(value, torch.Tensor) else value


def _symbolic(program: Program, sizes: Sizes, mode: FakeTensorMode) -> list[Any]:
    """Fake inputs whose sizes are the program's symbols, at the example inputs' values."""
    known = _symbols(program, sizes, mode.shape_env)
    fakes: list[Any] = []
    for position, value in enumerate(program.inputs):
        entry = sizes.inputs[position]
        if isinstance(value, torch.Tensor) and isinstance(entry, tuple):
            shape = [known(size, actual) for size, actual in zip(entry, value.shape, strict=True)]
            with mode:
                fakes.append(torch.empty_strided(shape, _strides(value, shape), dtype=value.dtype))
        else:
            fakes.append(known(entry, value) if entry is not None else _fake(value, mode))
    return fakes


def _symbols(program: Program, sizes: Sizes, shape_env: Any) -> Any:
    """A function (size, its value) -> SymInt or int; one symbol per name."""
    from torch._dynamo.source import ConstantSource

    table: dict[str, Any] = {}
    values = _values(program, sizes)
    for name, hint in values.items():
        source = ConstantSource(f"coexec_{name}")
        table[name] = shape_env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)

    def size(entry: Size, value: int) -> Any:
        if not isinstance(entry, str):
            return entry
        expression = sympy.sympify(entry, locals=dict(table))
        return shape_env.create_symintnode(expression, hint=value)

    return size


def _values(program: Program, sizes: Sizes) -> dict[str, int]:
    """symbol -> its value in the example inputs, from the inputs where it stands alone."""
    values: dict[str, int] = {}
    for entry, value in zip(sizes.inputs, program.inputs, strict=True):
        pairs = zip(entry, value.shape, strict=True) if isinstance(entry, tuple) else [(entry, value)]
        for size, actual in pairs:
            if isinstance(size, str) and size in sizes.symbols:
                values.setdefault(size, int(actual))
    missing = sorted(sizes.symbols.keys() - values.keys())
    if missing:
        raise ProgramError(f"no input has the size {missing[0]} alone, so its value cannot be told from the inputs")
    return values


def _strides(value: torch.Tensor, shape: list[Any]) -> list[Any]:
    """Strides of `value` with its sizes replaced by symbols, where it is dense; its own otherwise."""
    order = sorted(range(value.dim()), key=lambda d: (value.stride(d), value.size(d)))
    strides: list[Any] = list(value.stride())
    expected, symbolic = 1, 1
    for dim in order:
        if value.stride(dim) != expected:
            return list(value.stride())
        strides[dim] = symbolic
        expected, symbolic = expected * value.size(dim), symbolic * shape[dim]
    return strides
