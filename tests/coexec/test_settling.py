"""Programs with many paths, or with sizes without end, settle: the last fallback comes, and co-execution stays."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.coexec.harness import Outcome, Program, check
from tests.coexec.programs import batch

DEPTH = 8


def last_fallback(out: Outcome) -> int:
    """Returns the number of the last call that fell back, 0 if none did."""
    return max((event.latest for event in out.compiled._runner.history.fallbacks), default=0)


def downsampled(seed: int) -> Program:
    """SDPoint in small: Python draws after which layer the rows are mixed."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(DEPTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = random.Random(seed)

    def step(x: torch.Tensor) -> float:
        place = draw.randrange(DEPTH + 1)
        optimizer.zero_grad()
        for number, layer in enumerate(model):
            x = layer(x).tanh()
            if number == place:
                x = x.cumsum(0)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(step, lambda i: (batch(i, rows=6),), lambda: list(model.parameters()))


def test_a_place_that_is_drawn_anew_in_each_step_is_seen_once_each() -> None:
    """One new path per place; none makes an op of the layers anew."""
    out = check(lambda: downsampled(3), n=60, max_fallbacks=DEPTH + 1)
    assert out.stats is not None
    assert out.stats.traced + out.fallbacks <= DEPTH + 4
    graph = out.compiled._runner.graph
    assert sum(node.op == "aten::addmm" for node in graph.nodes) == DEPTH


BUILTINS: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda x: sum([x, x * 2]),
    "list": lambda x: torch.stack(list(x)),
    "tuple": lambda x: torch.stack(tuple(x)),
    "abs": abs,
    "float": lambda x: float(x.detach().sum()) * x,
    "repr": lambda x: (repr(x.detach()), x)[1],
    "str": lambda x: (str(x.detach()), x)[1],
    "numpy": lambda x: (np.asarray(x.detach()), x)[1],
    "map": lambda x: torch.stack(list(map(torch.sin, [x]))),
}


@pytest.mark.parametrize("name", BUILTINS)
def test_a_builtin_function_that_calls_an_op_is_one_place(name: str) -> None:
    """CPython 3.11 makes such a call one instruction earlier once it has specialised the code, in the eighth call."""
    weight = nn.Parameter(torch.ones(4, 4))

    def step(x: torch.Tensor) -> torch.Tensor:
        out = BUILTINS[name](x @ weight)
        loss = (out * 1.5).sum()
        loss.backward()
        weight.grad = None
        return loss.detach()

    out = check(lambda: Program(step, lambda i: (batch(i),), lambda: weight), n=20, max_fallbacks=0)
    assert out.stats is not None
    assert out.stats.switches == 0


def drawn_twice(seed: int) -> Program:
    """Two places are drawn per step, and another op is done at each: 81 paths, and all parts of them are shared."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(DEPTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = random.Random(seed)

    def step(x: torch.Tensor) -> float:
        first, second = draw.randrange(DEPTH + 1), draw.randrange(DEPTH + 1)
        optimizer.zero_grad()
        for number, layer in enumerate(model):
            x = layer(x).tanh()
            if number == first:
                x = x.cumsum(0)
            if number == second:
                x = x.flip(0)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(step, lambda i: (batch(i, rows=6),), lambda: list(model.parameters()))


@pytest.mark.parametrize("seed", [3, 4])
def test_a_layer_is_told_from_the_next_one_whose_ops_are_on_the_same_lines(seed: int) -> None:
    """Their weights come from outside, so nothing but their turn tells them apart.

    Taken for one another, a step of eight layers ended after seven in the graph, and the loop, whose trip count seemed
    to vary, was folded: 13 and 8 of 60 calls were co-executed from end to end.
    """
    out = check(lambda: drawn_twice(seed), n=60, max_fallbacks=24, min_co_executed=28)
    assert out.compiled._runner.loops.foldings == 0


def drawn_in_each_pass(seed: int) -> Program:
    """What follows a layer is drawn, two ops each time."""
    model = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    draw = random.Random(seed)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        for layer in model:
            x = layer(x)
            match draw.randrange(3):
                case 0:
                    x = x.tanh().mul(2)
                case 1:
                    x = x.relu().add(1)
                case _:
                    x = x.sigmoid().cumsum(0)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    return Program(step, lambda i: (batch(i, rows=6),), lambda: list(model.parameters()))


def test_several_ops_that_are_drawn_in_each_pass_of_a_loop() -> None:
    out = check(lambda: drawn_in_each_pass(4), n=60, max_fallbacks=8, min_co_executed=32)
    assert last_fallback(out) <= 40


def test_sizes_without_end_of_an_op_that_nothing_tells_the_shape_of() -> None:
    """`fft_rfft` chooses its strides itself: from the fourth size on Python waits at it instead of falling back."""

    def make() -> Program:
        def step(x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x.tanh()).abs().sum() + x.sum()

        return Program(step, lambda i: (batch(i, rows=5 + i, width=6),))

    out = check(make, n=30, max_fallbacks=4)
    assert last_fallback(out) <= 8
    waits = out.compiled._runner.wait_counts()
    assert waits["sync"] >= 20


def test_shapes_that_come_to_an_end_stay_known() -> None:
    """Two sizes of such an op in turns are learned, and nothing waits."""

    def make() -> Program:
        def step(x: torch.Tensor) -> torch.Tensor:
            return torch.fft.rfft(x.tanh()).abs().sum()

        return Program(step, lambda i: (batch(i, rows=5 + i % 2, width=6),))

    out = check(make, n=20, max_fallbacks=1)
    assert out.compiled._runner.wait_counts().get("sync", 0) == 0
