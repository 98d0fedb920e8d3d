"""What the compiler assumed about symbolic sizes, in a form that the native core checks before each run.

The compiler notes every decision that depends on a size as a guard of its ShapeEnv. A guard that cannot be written in
the tokens of :mod:`coexec.backends.expressions` is an error: an artifact whose limits are unknown is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as torch_functions
from torch.utils._sympy.numbers import int_oo

from coexec.backends.expressions import NotExpressibleError, Token, Tokens
from coexec.backends.symbolic import SMALLEST_SIZE

MAX_TOKENS = 60
"""The native core evaluates on a stack of 64."""

FOLDED: dict[Any, Token] = {
    sympy.Add: Token.ADD, sympy.Mul: Token.MULTIPLY, sympy.And: Token.AND, sympy.Or: Token.OR,
    torch_functions.Max: Token.MAXIMUM, torch_functions.Min: Token.MINIMUM,
}  # fmt: skip
"""Functions of any number of arguments, from the left."""

BINARY: dict[Any, Token] = {
    sympy.Eq: Token.EQUAL, sympy.Ne: Token.NOT_EQUAL, sympy.Lt: Token.LESS, sympy.Le: Token.LESS_EQUAL,
    torch_functions.FloorDiv: Token.FLOOR_DIVIDE, torch_functions.CleanDiv: Token.FLOOR_DIVIDE,
    torch_functions.Mod: Token.MODULO, torch_functions.PythonMod: Token.MODULO,
}  # fmt: skip

SWAPPED: dict[Any, Token] = {sympy.Gt: Token.LESS, sympy.Ge: Token.LESS_EQUAL}
"""a > b is b < a."""

MAX_POWER = 6


def guards_of(shape_env: ShapeEnv, symbols: Mapping[Any, int]) -> list[Tokens]:
    """Everything that must hold for an artifact to be valid.

    Args:
        shape_env: of the finished compilation.
        symbols: its symbols by our number.

    Raises:
        NotExpressibleError: a guard that the native core could not check.
    """
    if shape_env.deferred_runtime_asserts:
        raise NotExpressibleError("the compiler left assertions about sizes for the run")
    found = [tokens_of(guard.expr, symbols) for guard in shape_env.guards]
    for symbol, number in symbols.items():
        known = shape_env.var_to_range.get(symbol)
        lower = SMALLEST_SIZE if known is None else max(SMALLEST_SIZE, int(known.lower))
        found.append(((Token.CONSTANT, lower), (Token.SYMBOL, number), (Token.LESS_EQUAL, 0)))
        if known is not None and known.upper not in (int_oo, sympy.oo) and int(known.upper) < 1 << 62:
            found.append(((Token.SYMBOL, number), (Token.CONSTANT, int(known.upper)), (Token.LESS_EQUAL, 0)))
    return [tuple((int(token), value) for token, value in guard) for guard in dict.fromkeys(found)]


def tokens_of(expression: Any, symbols: Mapping[Any, int]) -> Tokens:
    """A sympy expression in postfix order. NotExpressibleError names what has no token."""
    tokens = tuple(_tokens(expression, symbols))
    if len(tokens) > MAX_TOKENS:
        raise NotExpressibleError(f"a guard of {len(tokens)} steps is too long: {expression}")
    return tokens


def _tokens(e: Any, symbols: Mapping[Any, int]) -> list[tuple[int, int]]:
    if e in symbols:
        return [(Token.SYMBOL, symbols[e])]
    if e is sympy.true or e is sympy.false or e.is_Integer:
        return [(Token.CONSTANT, int(bool(e)) if e.is_Boolean else int(e))]
    if e.func in FOLDED:
        return _fold(FOLDED[e.func], e.args, symbols)
    if e.func in BINARY:
        return [*_tokens(e.args[0], symbols), *_tokens(e.args[1], symbols), (BINARY[e.func], 0)]
    if e.func in SWAPPED:
        return [*_tokens(e.args[1], symbols), *_tokens(e.args[0], symbols), (SWAPPED[e.func], 0)]
    if e.func is sympy.Not:
        return [*_tokens(e.args[0], symbols), (Token.NOT, 0)]
    if e.is_Pow and e.exp.is_Integer and 1 <= int(e.exp) <= MAX_POWER:
        return _fold(Token.MULTIPLY, (e.base,) * int(e.exp), symbols)
    raise NotExpressibleError(f"the compiler guards on {e}, which has {e.func.__name__} in it")


def _fold(token: Token, operands: tuple[Any, ...], symbols: Mapping[Any, int]) -> list[tuple[int, int]]:
    tokens = _tokens(operands[0], symbols)
    for operand in operands[1:]:
        tokens += [*_tokens(operand, symbols), (token, 0)]
    return tokens


def holds(guards: list[Tokens], symbols: tuple[int, ...]) -> bool:
    """Whether all guards are true for these values: the native core's arithmetic, in Python."""
    return all(evaluate(guard, symbols) for guard in guards)


def evaluate(tokens: Tokens, symbols: tuple[int, ...]) -> int | None:
    """The value of an expression; None where the native core says that it has none."""
    stack: list[int] = []
    for token, value in tokens:
        if token in (Token.CONSTANT, Token.SYMBOL):
            stack.append(value if token == Token.CONSTANT else symbols[value])
        elif token == Token.NOT:
            stack.append(int(not stack.pop()))
        else:
            b, a = stack.pop(), stack.pop()
            if token in (Token.FLOOR_DIVIDE, Token.MODULO) and b == 0:
                return None
            stack.append(int(_OPERATORS[token](a, b)))
    return stack[0]


_OPERATORS: dict[int, Any] = {
    Token.ADD: lambda a, b: a + b,
    Token.MULTIPLY: lambda a, b: a * b,
    Token.FLOOR_DIVIDE: lambda a, b: a // b,
    Token.MODULO: lambda a, b: a % b,
    Token.MAXIMUM: max,
    Token.MINIMUM: min,
    Token.EQUAL: lambda a, b: a == b,
    Token.NOT_EQUAL: lambda a, b: a != b,
    Token.LESS: lambda a, b: a < b,
    Token.LESS_EQUAL: lambda a, b: a <= b,
    Token.AND: lambda a, b: a and b,
    Token.OR: lambda a, b: a or b,
}
