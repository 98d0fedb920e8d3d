"""An integer division by zero in compiled code: eager's error, and training goes on.

A bare division would end the process, and torch's kernels note the zero for `floor_divide` and `remainder` only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("two_threads")]

LENGTH = 4099  # no multiple of a vector's length

BY_TENSORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "trunc in place": lambda a, b: a.clone().div_(b, rounding_mode="trunc"),
    "trunc into": lambda a, b: torch.div(a, b, rounding_mode="trunc", out=torch.empty_like(a)),
    "trunc of another dtype": lambda a, b: torch.div(a.short(), b, rounding_mode="trunc"),
    "trunc of a number": lambda a, b: torch.div(torch.tensor(100), b, rounding_mode="trunc"),
    "trunc across strides": lambda a, b: torch.div(a.view(-1, 1).expand(-1, 2).t(), b, rounding_mode="trunc").sum(0),
    "trunc by one number": lambda a, b: torch.div(a, b.max(), rounding_mode="trunc"),
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "floor in place": lambda a, b: a.clone().div_(b, rounding_mode="floor"),
    "//": lambda a, b: a // b,
    "number // tensor": lambda a, b: 100 // b,
    "%": lambda a, b: a % b,
    "number % tensor": lambda a, b: 100 % b,
    "remainder in place": lambda a, b: a.clone().remainder_(b),
    "fmod": lambda a, b: torch.fmod(a, b),
    "fmod in place": lambda a, b: a.clone().fmod_(b),
}
"""(integers[LENGTH], divisors[LENGTH]) to integers."""

BY_NUMBERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "trunc": lambda a, n: torch.div(a, n, rounding_mode="trunc"),
    "trunc in place": lambda a, n: a.clone().div_(n, rounding_mode="trunc"),
    "floor": lambda a, n: torch.div(a, n, rounding_mode="floor"),
    "%": lambda a, n: a % n,
    "fmod": lambda a, n: torch.fmod(a, n),
}
"""(integers[LENGTH], a number that changes) to integers."""


def integers(i: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(i)
    return torch.randint(0 if dtype is torch.uint8 else -99, 100, (LENGTH,), generator=generator).to(dtype)


def divisors(i: int, dtype: torch.dtype) -> Tensor:
    """None is zero, and half of them are negative where there are such."""
    generator = torch.Generator().manual_seed(1000 + i)
    positive = torch.randint(1, 9, (LENGTH,), generator=generator)
    return torch.where(torch.arange(LENGTH) % 2 == 0, positive, -positive if dtype is not torch.uint8 else 3).to(dtype)


def both_raise(pair: Pair, arguments: list[object]) -> None:
    before, texts = pair.discards(), []
    for step in (pair.eager.step, pair.step):
        with pytest.raises(RuntimeError, match="ZeroDivisionError") as caught:
            step(*arguments)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert pair.discards() == before + 1, pair.why()


def training(divisions: dict[str, Callable[..., Tensor]], arguments: Callable[[int], tuple[Any, ...]]) -> Program:
    """A step that trains on all quotients of its first argument by the others."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(LENGTH))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(a: Tensor, *by: Any) -> tuple[Tensor, Tensor]:
        optimizer.zero_grad()
        total = torch.stack([divide(a, b).long() for divide, b in zip(divisions.values(), by, strict=True)])
        loss = ((weight.tanh() + 1) * total.sum(0).tanh()).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), total

    return Program(step, arguments, lambda: weight)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.uint8], ids=str)
def test_an_integer_division_by_a_tensor_with_a_zero(dtype: torch.dtype) -> None:
    def arguments(i: int) -> tuple[Tensor, ...]:
        return integers(i, dtype), *(divisors(100 * i + k, dtype) for k in range(len(BY_TENSORS)))

    pair = Pair(lambda: training(BY_TENSORS, arguments))
    pair.settle()
    pair.to_compiled_turn()
    for k, kind in enumerate(BY_TENSORS):
        for place in (0, LENGTH - 1):
            given = list(arguments(pair.iteration))
            given[1 + k] = given[1 + k].clone()
            given[1 + k][place] = 0
            if kind == "trunc by one number":
                given[1 + k] = given[1 + k].clamp(max=0) if dtype is not torch.uint8 else given[1 + k] * 0
            both_raise(pair, given)
    pair.run(3)


@pytest.mark.parametrize("dtype", [torch.int32], ids=str)
def test_an_integer_division_by_a_number_that_becomes_zero(dtype: torch.dtype) -> None:
    def arguments(i: int) -> tuple[object, ...]:
        return integers(i, dtype), *(1 + (i + k) % 7 for k in range(len(BY_NUMBERS)))

    pair = Pair(lambda: training(BY_NUMBERS, arguments))
    pair.settle()
    pair.to_compiled_turn()
    for k in range(len(BY_NUMBERS)):
        given = list(arguments(pair.iteration))
        given[1 + k] = 0
        both_raise(pair, given)
    pair.run(3)
