"""Values that a kernel refuses: the error comes where eager's does, and what did not run never runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program, check

Numbered = Callable[[float], torch.Tensor]


def ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, dtype=dtype)


def in_place_backward(function: Callable[[torch.Tensor, float], torch.Tensor], p: float) -> torch.Tensor:
    x = ones().sub(2).requires_grad_()
    function(x * 1, p).sum().backward()
    assert x.grad is not None
    return x.grad


REFUSED: dict[str, tuple[Numbered, list[float], float]] = {  # op, numbers that it takes, one that it does not
    "uniform_": (lambda p: ones().uniform_(0.5, p), [0.6, 0.7, 0.8], 0.1),
    "exponential_": (lambda p: ones().exponential_(p), [0.6, 0.7, 0.8], -0.5),
    "geometric_": (lambda p: ones().geometric_(p), [0.6, 0.7, 0.8], 1.5),
    "cauchy_": (lambda p: ones().cauchy_(0, p), [0.6, 0.7, 0.8], -0.5),
    "log_normal_": (lambda p: ones().log_normal_(0, p), [0.6, 0.7, 0.8], -0.5),
    "random_": (lambda p: ones().random_(0, int(p)), [1, 2, 3], 0),
    "native_dropout": (lambda p: torch.native_dropout(ones(), p, True)[0], [0.1, 0.2, 0.3], 1.5),
    "softshrink": (lambda p: nn.functional.softshrink(ones(), p), [0.1, 0.2, 0.3], -0.1),
    "leaky_relu_ backward": (lambda p: in_place_backward(nn.functional.leaky_relu_, p), [0.1, 0.2, 0.3], -1.0),
    "elu_ backward": (lambda p: in_place_backward(nn.functional.elu_, p), [1.0, 2.0, 3.0], -1.0),
    "fill_ of bytes": (lambda p: ones(torch.int8).fill_(p), [1, 2, 3], 300),
    "fill_ of halves": (lambda p: ones(torch.half).fill_(p), [1.0, 2.0, 3.0], 1e9),
    "added multiple": (lambda p: torch.add(ones(), ones(), alpha=p), [1.0, 2.0, 3.0], 1e300),
    "zero division": (lambda p: torch.arange(3).floor_divide(int(p)), [1, 2, 3], 0),
    "negative power": (lambda p: torch.arange(1, 4).pow(int(p)), [1, 2, 3], -1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_changing_number_that_is_refused_is_caught_where_it_is_used(name: str) -> None:
    op, numbers, refused = REFUSED[name]

    def make() -> Program:
        total = torch.zeros(())

        def step(i: int) -> Any:
            try:
                h = op(refused if i in (9, 13) else numbers[i % 3])
            except (RuntimeError, ZeroDivisionError) as error:
                total.sub_(1)
                return str(error)
            total.add_(1)
            return h

        return Program(step, lambda i: (i,), lambda: total)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check(make, n=18, max_fallbacks=6)  # an op that changing numbers reach is waited for: one new path each


def test_arithmetic_with_changing_numbers_behind_a_handler_keeps_nobody_waiting() -> None:
    @coexec.compile(backend="replay", numerics="exact")
    def step(x: torch.Tensor, rate: float) -> torch.Tensor:
        try:
            return torch.add(x.mul(rate), x, alpha=rate).clamp_(max=rate)
        except RuntimeError:
            return x

    for i in range(12):
        assert step(ones(), 0.5**i).tolist() == [0.5**i] * 3
    stats = step.stats()
    assert (stats.phase, stats.fallbacks) == ("co-execution", {})
    assert step._runner.wait_counts()["sync"] == 0


def test_ops_behind_a_failed_one_are_forgotten() -> None:
    """The next call goes another way, on which the log has nothing to execute where they were."""

    def make() -> Program:
        counts, calls = torch.zeros(50, dtype=torch.long), torch.zeros((), dtype=torch.long)
        more, weight = torch.ones(4, dtype=torch.long), torch.ones(4)

        def step(ids: torch.Tensor, log: bool) -> Any:
            h = weight * 2
            if log:
                calls.add_(1)
                return h, calls.item()
            counts.index_add_(0, ids, more)
            ids.add_(more)  # never happens in the call that fails
            return h, 0

        def arguments(i: int) -> tuple[torch.Tensor, bool]:
            given[i] = torch.tensor([1, 2, 3, 50 if i in (10, 14) else 4])
            return given[i], i % 2 == 1

        given: dict[int, torch.Tensor] = {}
        return Program(step, arguments, lambda: (counts, calls, weight, list(given.values())))

    check(make, n=20, raises=(IndexError,))


@pytest.mark.parametrize("kind", ["view", "unfold", "slice", "item", "mask"])
def test_another_way_after_a_failed_call(kind: str) -> None:
    def make() -> Program:
        table = torch.randn(6, 4)
        ways: dict[str, Callable[[torch.Tensor], Any]] = {
            "view": lambda h: h.view(-1),
            "unfold": lambda h: h.unfold(0, 2, 1),
            "slice": lambda h: h[1:],
            "item": lambda h: h.sum().item(),
            "mask": lambda h: h[h > 0],
        }

        def step(ids: torch.Tensor, other: bool) -> Any:
            h = table * 2
            if other:
                return ways[kind](h)
            rows = nn.functional.embedding(ids, table)
            return (rows + 1).tanh().sum()

        return Program(step, lambda i: (torch.tensor([0, 9 if i in (8, 12, 13) else 2]), i % 3 == 0), lambda: table)

    check(make, n=20, raises=(IndexError,))
