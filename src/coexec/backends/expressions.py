"""Integers that follow sizes: expressions over symbols, found from what was observed. Imports no torch.

A symbol is a size of an input that varies. Every other integer that varies is either one expression of the symbols in
all observations, or cannot be said. With few observations a wrong expression may fit: whoever uses an artifact checks
the integers of each run against the expressions (`Pattern` in csrc/expression.h), so that costs only speed.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coexec.errors import CoexecError


class NotExpressibleError(CoexecError):
    """Observations of a segment that do not differ in sizes only; the message says in what."""


class Token(enum.IntEnum):
    """One step of an expression in postfix order. Same numbers as in csrc/expression.h."""

    CONSTANT = 0
    SYMBOL = 1
    ADD = 2
    MULTIPLY = 3
    FLOOR_DIVIDE = 4
    MODULO = 5
    MAXIMUM = 6
    MINIMUM = 7
    EQUAL = 8
    NOT_EQUAL = 9
    LESS = 10
    LESS_EQUAL = 11
    AND = 12
    OR = 13
    NOT = 14


Tokens = tuple[tuple[int, int], ...]
"""(token, value): the value counts for CONSTANT and SYMBOL."""

MAX_DIVISOR = 4
MAX_SHIFT = 8


@dataclass(frozen=True, slots=True)
class Expression:
    """`(factor * product of symbols + sum of symbols + shift) // divisor`."""

    factor: int = 0
    product: tuple[int, ...] = ()  # symbols, by number
    shift: int = 0
    divisor: int = 1

    def value(self, symbols: Sequence[Any]) -> Any:
        """Its value where the symbols have these; symbolic integers give a symbolic integer."""
        total: Any = math.prod((symbols[k] for k in self.product), start=self.factor) if self.factor != 1 else None
        if total is None:
            total = symbols[self.product[0]]
            for k in self.product[1:]:
                total = total * symbols[k]
        total = total + self.shift if self.shift else total
        return total // self.divisor if self.divisor != 1 else total

    def tokens(self) -> Tokens:
        """As the native core evaluates it."""
        steps: list[tuple[int, int]] = [(Token.CONSTANT, self.factor)]
        for symbol in self.product:
            steps += [(Token.SYMBOL, symbol), (Token.MULTIPLY, 0)]
        steps += [(Token.CONSTANT, self.shift), (Token.ADD, 0), (Token.CONSTANT, self.divisor), (Token.FLOOR_DIVIDE, 0)]
        return tuple((int(token), value) for token, value in steps)

    def __str__(self) -> str:
        text = "*".join([*([str(self.factor)] if self.factor != 1 else []), *(f"s{k}" for k in self.product)])
        text = f"{text}{self.shift:+d}" if self.shift else text
        return f"({text})//{self.divisor}" if self.divisor != 1 else text


def express(values: Sequence[int], symbols: Sequence[Sequence[int]]) -> Expression | None:
    """The simplest expression that gives `values`, or None.

    Args:
        values: of one integer, in every observation.
        symbols: per symbol its value in every observation.
    """
    columns = list(zip(*symbols, strict=True))
    for candidate in _candidates(values, symbols):
        if all(candidate.value(at) == value for at, value in zip(columns, values, strict=True)):
            return candidate
    return None


def _candidates(values: Sequence[int], symbols: Sequence[Sequence[int]]) -> Iterator[Expression]:
    """Simplest first: a symbol, multiples of products, a shifted symbol, a line, a quotient."""
    numbers = range(len(symbols))
    products = [p for n in (1, 2, 3) for p in itertools.combinations_with_replacement(numbers, n)]
    for product in products:
        first = math.prod(symbols[k][0] for k in product)
        if first and values[0] % first == 0:
            yield Expression(values[0] // first, product)
    for k in numbers:
        yield Expression(1, (k,), values[0] - symbols[k][0])
    for product in products:
        at = [math.prod(symbols[k][i] for k in product) for i in (0, 1)]
        run, rise = at[1] - at[0], values[1] - values[0]
        if run and rise % run == 0 and rise:
            yield Expression(rise // run, product, values[0] - rise // run * at[0])
    for divisor, shift in itertools.product(range(2, MAX_DIVISOR + 1), _shifts()):
        for k in numbers:
            yield Expression(1, (k,), shift, divisor)


def _shifts() -> Iterator[int]:
    """0, 1, -1, 2, -2 ..."""
    yield 0
    for shift in range(1, MAX_SHIFT + 1):
        yield shift
        yield -shift
