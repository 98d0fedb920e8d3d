"""Several observations of one segment at different sizes, as one segment with symbols. Imports no torch.

The observations differ in integers only: sizes, strides, offsets, and constants that follow them. A size of an input
that varies is a symbol; inputs with the same sizes in all observations share it. What an artifact compiled from that
is valid for is decided by its guards (:mod:`coexec.backends.guards`), not here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from coexec.backends.expressions import Expression, NotExpressibleError, express
from coexec.backends.spec import SegmentSpec, TensorInput
from coexec.backends.spec_json import canonical_text, from_json, to_json

Path = tuple[str | int, ...]
"""Where an integer stands in the JSON form of a segment."""

SMALLEST_SIZE = 2
"""Sizes 0 and 1 are special to every compiler: broadcasting, strides that do not count."""


@dataclass(frozen=True, slots=True)
class SymbolSource:
    """A symbol is the size of dimension `dimension` of tensor input `input`."""

    input: int
    dimension: int


@dataclass(frozen=True, slots=True)
class SymbolicSpec:
    """One segment for many sizes."""

    observed: tuple[SegmentSpec, ...]  # the first one gives the compiler its hints
    symbols: tuple[SymbolSource, ...]
    values: tuple[tuple[int, ...], ...]  # per symbol its value in each observation
    following: dict[Path, Expression]  # integers of the segment that follow the symbols

    @property
    def hints(self) -> tuple[int, ...]:
        """Values of the symbols in the first observation."""
        return tuple(values[0] for values in self.values)

    def at(self, symbols: Sequence[Any]) -> SegmentSpec:
        """The segment where the symbols have these values, which may be symbolic integers."""
        return self.replaced(lambda expression: expression.value(symbols))

    def replaced(self, of: Callable[[Expression], Any]) -> SegmentSpec:
        """The segment with `of(expression)` in place of every integer that follows the symbols."""
        form = to_json(self.observed[0])
        for path, expression in self.following.items():
            place = form
            for step in path[:-1]:
                place = place[step]
            place[path[-1]] = of(expression)
        return from_json(form)

    def text(self) -> str:
        """Canonical: the same for every set of observations that leads to the same symbols and expressions."""
        sources = [f"symbol s{k} = input {s.input} dimension {s.dimension}" for k, s in enumerate(self.symbols)]
        form = self.replaced(lambda expression: _Name(str(expression)))
        return "\n".join([*sources, canonical_text(form, with_bytes=False)])


class _Name(str):
    """An expression in a text where a number would stand."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<{self}>"


def unify(specs: Sequence[SegmentSpec]) -> SymbolicSpec:
    """One segment for all of `specs`.

    Raises:
        NotExpressibleError: they differ in something that no symbol explains; a size below 2 is never explained.
    """
    sources, values = _symbols(specs)
    following: dict[Path, Expression] = {}
    _unify([to_json(spec) for spec in specs], (), values, following)
    return SymbolicSpec(tuple(specs), tuple(sources), tuple(values), following)


def _symbols(specs: Sequence[SegmentSpec]) -> tuple[list[SymbolSource], list[tuple[int, ...]]]:
    """Sizes of inputs that vary: those that vary alike are one symbol."""
    sources: list[SymbolSource] = []
    values: list[tuple[int, ...]] = []
    if len({len(spec.inputs) for spec in specs}) != 1:
        raise NotExpressibleError("the segment has another number of inputs at other sizes")
    for position in range(len(specs[0].inputs)):
        sizes = [e.value.sizes for spec in specs if isinstance(e := spec.inputs[position], TensorInput)]
        if sizes and (len(sizes) != len(specs) or len({len(s) for s in sizes}) != 1):
            raise NotExpressibleError(f"input {position} has another number of dimensions at other sizes")
        for dimension, seen in enumerate(zip(*sizes, strict=True)):
            if len(set(seen)) > 1 and seen not in values:
                sources.append(SymbolSource(position, dimension))
                values.append(seen)
    if not values:
        raise NotExpressibleError("no size of an input differs")
    if any(min(seen) < SMALLEST_SIZE for seen in values):
        raise NotExpressibleError(f"a size below {SMALLEST_SIZE} is among those that were seen")
    return sources, values


def _unify(forms: list[Any], path: Path, symbols: list[tuple[int, ...]], following: dict[Path, Expression]) -> None:
    """Walks the JSON forms in parallel; notes integers that differ."""
    first = forms[0]
    if any(type(form) is not type(first) for form in forms):
        raise NotExpressibleError(f"{_name(path)} is another kind of value at other sizes")
    if isinstance(first, dict):
        if any(form.keys() != first.keys() for form in forms):
            raise NotExpressibleError(f"{_name(path)} differs at other sizes")
        for key in first:
            if key != "nbytes":  # how large the memory behind a tensor is, an artifact never sees
                _unify([form[key] for form in forms], (*path, key), symbols, following)
    elif isinstance(first, list):
        if any(len(form) != len(first) for form in forms):
            raise NotExpressibleError(f"{_name(path)} has another length at other sizes")
        for index in range(len(first)):
            _unify([form[index] for form in forms], (*path, index), symbols, following)
    elif any(form != first for form in forms):
        following[path] = expressed(forms, symbols, _name(path))


def expressed(values: Sequence[Any], symbols: Sequence[tuple[int, ...]], name: str) -> Expression:
    """The expression of an integer that differs. NotExpressibleError, with `name`, if there is none."""
    found = None
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        found = express(values, symbols)
    if found is None:
        raise NotExpressibleError(f"{name} was {', '.join(map(str, values))}, which follows from no size of an input")
    return found


def _name(path: Path) -> str:
    return "the segment's " + ".".join(map(str, path))
