"""Makes a program smaller for as long as it still shows what it showed: delta debugging on a tree of statements."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

from tests.oracles.writer import Block

Path = tuple[int, ...]  # positions from the root to a statement


def shrink(program: Block, still: Callable[[Block], bool], attempts: int = 300) -> Block:
    """Returns a smaller program for which `still` holds, after at most `attempts` questions.

    Statements go first by halves of a body, then one by one; then a compound statement is replaced by its body.
    """
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(program):
            attempts -= 1
            if attempts < 0:
                return program
            if still(candidate):
                program, progress = candidate, True
                break
    return program


def _smaller(program: Block) -> Iterator[Block]:
    """Candidates, those that take out most first."""
    paths = sorted(_bodies(program), key=lambda p: len(p))
    for size in (8, 4, 2, 1):
        for path in paths:
            length = len(_at(program, path).body)
            for start in range(max(0, length - size), -1, -size) if length >= size else ():
                yield _edited(program, path, start, start + size, keep_inner=False)
    for path in paths:
        for k, statement in enumerate(_at(program, path).body):
            if statement.body:
                yield _edited(program, path, k, k + 1, keep_inner=True)


def _bodies(block: Block, path: Path = ()) -> Iterator[Path]:
    if block.body:
        yield path
    for k, statement in enumerate(block.body):
        yield from _bodies(statement, (*path, k))


def _at(program: Block, path: Path) -> Block:
    for k in path:
        program = program.body[k]
    return program


def _edited(program: Block, path: Path, start: int, stop: int, keep_inner: bool) -> Block:
    """A copy in which the statements [start, stop) of a body are gone, or replaced by what was inside them."""
    result = copy.deepcopy(program)
    block = _at(result, path)
    inner = [s for statement in block.body[start:stop] for s in statement.body] if keep_inner else []
    block.body[start:stop] = inner
    return result
