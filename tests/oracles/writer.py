"""Writes random step programs: a tree of statements from a seed, and its text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tests.oracles import phrases as P

T = TypeVar("T")

CONTINUING = ("else", "elif", "except", "finally")  # they belong to the statement before them

MAX_DEPTH = 4  # of nested blocks


@dataclass
class Block:
    """A statement; with a body, if `head` ends in a colon. The shrinker takes statements out of bodies."""

    head: str
    body: list[Block] = field(default_factory=list)


def render(program: Block, depth: int = 0) -> str:
    """The text of a program. A body that the shrinker emptied becomes `pass`."""
    pad = "    " * depth
    lines = [pad + program.head]
    if program.head.endswith(":"):
        lines += [render(s, depth + 1) for s in program.body] or [pad + "    pass"]
    return "\n".join(lines)


def _gaps(body: list[Block]) -> list[int]:
    """Positions where a statement may be put: not between `if` and `else`, or `try` and `except`."""
    heads = [statement.head.split(" ")[0].rstrip(":") for statement in body]
    return [k for k in range(len(body) + 1) if k == len(body) or heads[k] not in CONTINUING]


class Writer:
    """Writes one random program; `program()` is the result."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made = 0  # names so far

    def program(self) -> Block:
        """`def step(x, y)`, which uses the names of `programs.scope`."""
        step = Block("def step(x, y):")
        for line in ("calls[0] += 1", "n = 1.0", "rows = x.shape[0]", "d = torch.zeros(rows, 4)", "x = slow(x)"):
            step.body.append(Block(line))
        values = self._block(step, ["x", "y"], 1, self._random.randint(5, 15))
        if self._chance(0.7):
            self._train(step, values)
        step.body.append(Block("while handles: handles.pop().remove()"))
        step.body.append(Block(f"return {self._result(values)}"))
        return step

    def _train(self, step: Block, values: list[str]) -> None:
        if self._chance(0.2):
            step.body.append(Block(self._fill(self._pick(P.HOOKS), values)))
        step.body.append(Block(f"loss = ({values[-1]} * w + c).pow(2).mean()"))
        step.body += [Block(line) for line in self._pick(P.BACKWARD)]

    def _result(self, values: list[str]) -> str:
        keep = [v for v in values[2:] if self._chance(0.3)][-3:] + values[2:][-1:]
        if self._chance(0.2):
            return "{" + "".join(f"'{v}': {v}, " for v in keep) + "'n': n}"
        return f"[{', '.join(keep)}], n"

    def _block(self, to: Block, values: list[str], depth: int, length: int) -> list[str]:
        """Appends `length` statements; returns the names that exist after them on every path."""
        values = list(values)
        for _ in range(length):
            self._statement(to, values, depth)
        return values

    def _statement(self, to: Block, values: list[str], depth: int) -> None:
        kind = self._random.random()
        if kind < 0.5:
            table = self._pick((P.PURE, P.PURE, P.PURE, P.CONTAINERS, P.SPECIAL))
            values.append(self._say_new(to, self._fill(self._pick(table), values)))
        elif kind < 0.66:
            to.body.append(Block(self._fill(self._pick(P.IN_PLACE), values)))
        elif kind < 0.77:
            to.body.append(Block(self._fill(self._pick(P.READS), values)))
        elif kind < 0.8:
            to.body.append(Block(f"d = {self._value(values)}.detach().clone()"))
        elif kind < 0.82:
            to.body.append(Block(self._fill(self._pick(P.HOOKS), values)))
        elif depth < MAX_DEPTH:
            self._compound(to, values, depth)

    def _compound(self, to: Block, values: list[str], depth: int) -> None:
        kinds = (self._branch, self._branch, self._loop, self._while, self._mode, self._attempt, self._function)
        self._pick(kinds)(to, values, depth)

    def _branch(self, to: Block, values: list[str], depth: int) -> None:
        to.body.append(Block(f"if {self._fill(self._pick(P.CONDITIONS), values)}:"))
        self._inner(to, values, depth)
        if self._chance(0.2):
            to.body.append(Block(f"elif {self._fill(self._pick(P.CONDITIONS), values)}:"))
            self._inner(to, values, depth)
        if self._chance(0.5):
            to.body.append(Block("else:"))
            self._inner(to, values, depth)

    def _loop(self, to: Block, values: list[str], depth: int) -> None:
        head = f"for k in range({self._pick(P.TRIPS)}):"
        if self._chance(0.2):
            head = f"for k, row in enumerate({self._value(values)}.detach()):"
        to.body.append(Block(head))
        self._inner(to, values, depth)
        if self._chance(0.3):
            escape = self._pick(("break", "continue"))
            where = self._pick(_gaps(to.body[-1].body))
            to.body[-1].body.insert(where, Block(f"if {self._fill(self._pick(P.CONDITIONS), values)}: {escape}"))
        if self._chance(0.15):
            to.body.append(Block("else:"))
            self._inner(to, values, depth)

    def _while(self, to: Block, values: list[str], depth: int) -> None:
        counter = self._name("i")
        to.body.append(Block(f"{counter} = 0"))
        condition = self._fill(self._pick(P.CONDITIONS), values)
        to.body.append(Block(f"while {counter} < {self._random.randint(1, 4)} and ({condition}):"))
        to.body[-1].body.append(Block(f"{counter} += 1"))
        self._inner(to, values, depth)

    def _mode(self, to: Block, values: list[str], depth: int) -> None:
        to.body.append(Block(f"with {self._pick(P.MODES)}:"))
        self._inner(to, values, depth)

    def _attempt(self, to: Block, values: list[str], depth: int) -> None:
        to.body.append(Block("try:"))
        self._inner(to, values, depth)
        fails = self._fill(self._pick(P.FAILING), values)
        if self._chance(0.6):
            to.body[-1].body.append(Block(f"if {self._pick(P.QUIET)}: {fails}"))
        to.body.append(Block("except (KeyError, RuntimeError, IndexError, NameError) as error:"))
        to.body[-1].body.append(Block("n = len(str(error))"))
        self._inner(to, values, depth)
        if self._chance(0.3):
            to.body.append(Block("finally:"))
            self._inner(to, values, depth)

    def _function(self, to: Block, values: list[str], depth: int) -> None:
        """A local function, recursive or a generator, and its call."""
        name, argument = self._name("f"), self._name("v")
        generator = self._chance(0.4)
        head = Block(f"def {name}({argument}, n, level=2):")
        to.body.append(head)
        head.body.append(Block("nonlocal d"))
        inner = self._block(head, [argument, argument], depth + 1, self._random.randint(1, 3))
        if generator:
            head.body += [Block(f"yield {inner[-1]}"), Block(f"yield {argument} * 0.5")]
            call = self._pick((f"list({name}({{a}}, n))[-1]", f"sum({name}({{a}}, n))", f"next({name}({{a}}, n))"))
        else:
            recursive = f"if level and {self._pick(P.QUIET)}: return {name}({inner[-1]}, n, level - 1)"
            head.body += [Block(recursive)] if self._chance(0.5) else []
            head.body.append(Block(f"return {inner[-1]}"))
            call = self._pick((f"{name}({{a}}, n)", f"{name}({{a}}, n) + {name}({{b}}, 2)"))
        values.append(self._say_new(to, self._fill(call, values)))

    def _inner(self, to: Block, values: list[str], depth: int) -> None:
        """Fills the body of the last statement; what it made lives on under a name that exists on every path."""
        body = to.body[-1]
        inner = self._block(body, values, depth + 1, self._random.randint(1, 4))
        if len(inner) > len(values) > 2:
            body.body.append(Block(f"{values[-1]} = {inner[-1]}"))

    def _say_new(self, to: Block, expression: str) -> str:
        name = self._name("t")
        to.body.append(Block(f"{name} = {expression}"))
        return name

    def _name(self, letter: str) -> str:
        self._made += 1
        return f"{letter}{self._made}"

    def _chance(self, p: float) -> bool:
        return self._random.random() < p

    def _pick(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)

    def _value(self, values: list[str]) -> str:
        return self._pick(values[-4:])

    def _fill(self, text: str, values: list[str]) -> str:
        number = self._pick(["0.3", "n * 0.01", "calls[0] * 0.1", "0.5"])
        destination = self._pick(["d", "d", "scratch[:rows]"])
        return text.format(a=self._value(values), b=self._value(values), d=destination, s=number)
