"""The shrinker and the writer: small programs that still show it, the same program for a seed, valid Python."""

from __future__ import annotations

import ast

from tests.oracles.shrink import shrink
from tests.oracles.writer import Block, Writer, render


def test_a_seed_always_writes_the_same_valid_program() -> None:
    for seed in range(500):
        text = render(Writer(seed).program())
        assert text == render(Writer(seed).program())
        ast.parse(text)


def test_programs_have_all_kinds_of_statements() -> None:
    text = "\n".join(render(Writer(seed).program()) for seed in range(300))
    for word in ("for ", "while ", "try:", "yield", "return f", "elif ", "with torch.no_grad()", "break", "hook("):
        assert word in text, word


def test_shrinking_leaves_only_what_is_needed() -> None:
    def still(program: Block) -> bool:
        text = render(program)
        return "buf" in text and "return" in text

    program = next(p for p in (Writer(seed).program() for seed in range(100)) if still(p) and len(render(p)) > 900)
    small = shrink(program, still, attempts=2000)
    assert len(small.body) <= 3
    assert still(small)


def test_shrinking_takes_a_statement_out_of_its_block() -> None:
    needed = Block("needed = 1")
    program = Block("def step(x, y):", [Block("if x:", [Block("with y:", [needed, Block("other = 2")])])])
    small = shrink(program, lambda p: "needed" in render(p))
    assert render(small) == "def step(x, y):\n    needed = 1"


def test_shrinking_stops_after_its_attempts() -> None:
    asked: list[Block] = []

    def never(program: Block) -> bool:
        asked.append(program)
        return False

    shrink(Block("def step(x, y):", [Block(f"a{k} = {k}") for k in range(50)]), never, attempts=7)
    assert len(asked) == 7
