"""`with coexec.step():` around a loop body: its own lines, loops and handlers are seen as a function's are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.programs import batch
from tests.coexec.test_asking import line_in


def line_of(marker: str) -> str:
    """ "file:line" of the line of this file that ends with `# marker`."""
    return line_in(__file__, marker)


def block_of(name: str) -> Any:
    return coexec.step(name, backend="replay", numerics="exact")


def test_a_block_names_its_own_lines() -> None:
    taken = False
    for i in range(20):
        with block_of("lines") as block:
            x = batch(i) @ batch(i, 4, 4)
            for _ in range(2 + i % 3):
                x = x.sin()
            chosen = x.nonzero()  # the wait of a block
            taken = i == 15
            if taken:
                x.cos()  # the branch of a block
    assert len(chosen)
    stats, text = block.stats(), block.explain()
    assert stats.loops == 1, text
    assert stats.fallbacks == {"new path": 1}, text
    assert f"aten::cos at {line_of('the branch of a block')}" in text
    assert f"{line_of('the wait of a block')} in test_a_block_names_its_own_lines needs real tensors" in text
    assert "unknown place" not in text


def test_a_kernel_error_in_a_block_names_its_line() -> None:
    table, layer = nn.Embedding(5, 4), nn.Linear(4, 3)

    def train(word: int) -> None:
        with block_of("a late error"):
            loss = layer(table(torch.tensor([word]))).square().sum()  # the culprit in a block
            loss.backward()
            (loss * 2).item()

    for _ in range(12):
        train(1)
    with pytest.raises(IndexError) as caught:
        train(30)
    assert f"aten::embedding at {line_of('the culprit in a block')}" in caught.value.__notes__[0]


def test_a_handler_in_a_block_gets_the_error_in_place() -> None:
    table, layer = nn.Embedding(5, 4), nn.Linear(4, 3)
    good, bad = torch.tensor([1]), torch.tensor([30])

    def train(words: torch.Tensor) -> tuple[str, float]:
        with block_of("handlers") as block:
            said = "fine"
            try:
                rows = table(words)
            except IndexError:
                said, rows = "caught", table(good) * 2
            loss = layer(rows).square().sum()
            loss.backward()
            layer.zero_grad()
            table.zero_grad()
            out = loss.item()
        assert block.stats().fallbacks.get("kernel error", 0) == 0
        return said, out

    for _ in range(8):
        assert train(good)[0] == "fine"
    assert train(bad)[0] == "caught"
    assert train(bad) == train(bad)


def test_the_blocks_own_with_is_no_handler() -> None:
    """What may raise is not waited for in it, also where the block stands in a `try`."""
    table, layer = nn.Embedding(5, 4), nn.Linear(4, 3)
    words = torch.tensor([1])
    try:
        for _ in range(10):
            with block_of("no handler") as block:
                loss = layer(table(words)).square().sum()
                loss.backward()
    except IndexError:
        raise AssertionError from None
    assert "needs real tensors" not in block.explain(), block.explain()


def test_a_block_in_a_generator_and_one_that_a_stack_enters() -> None:
    """Who resumes the generator changes; a stack calls `__enter__` from a frame that is gone when the block runs."""

    def losses(n: int) -> Iterator[float]:
        for i in range(n):
            with block_of("in a generator"):
                x = batch(i).sin()
                yield x.sum().item()
                x = x * 2
                yield x.sum().item()

    values: list[float] = []
    produced = losses(12)
    while True:
        try:
            values.append(next(produced))
            values.append((lambda: next(produced))())
        except StopIteration:
            break
    assert values == [v for i in range(12) for v in (batch(i).sin().sum().item(), (batch(i).sin() * 2).sum().item())]
    for i in range(12):
        with contextlib.ExitStack() as stack:
            block = stack.enter_context(block_of("by a stack"))
            assert (batch(i) * 2).sum().item() == (batch(i) * 2).sum().item()
    assert block.stats().phase == "co-execution"
