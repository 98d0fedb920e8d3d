"""Which integer divisions nobody can vouch for before a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coexec.backends.divisions import unknown_divisor
from coexec.backends.fed import NotLowerableError
from coexec.backends.inductor import compile_segment
from tests.backends.recording import feed_differences, record

A, B = torch.tensor([5, -7, 3]), torch.tensor([2, 1, -1])

UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "number // tensor": lambda a, b: 7 // b,
    "number % tensor": lambda a, b: 7 % b,
    "fmod in place": lambda a, b: a.clone().fmod_(b),
    "div trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "div floor in place": lambda a, b: a.clone().div_(b, rounding_mode="floor"),
    "div into": lambda a, b: torch.div(a, b, rounding_mode="trunc", out=torch.empty_like(a)),
    "by truth values": lambda a, b: a // (b > -2),
}

HARMLESS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "true": lambda a, b: a / b,
    "by a constant": lambda a, b: a // 3,
    "by constants": lambda a, b: a // torch.full((3,), 3),
    "by floats": lambda a, b: a // b.float(),
    "of floats": lambda a, b: torch.div(a.float(), b, rounding_mode="trunc"),
    "of a float": lambda a, b: 0.5 % b,
    "no rounding": lambda a, b: torch.div(a, b, rounding_mode=None),
    "shift": lambda a, b: a >> b.abs(),
}


@pytest.mark.parametrize("name", [*UNKNOWN, *HARMLESS])
def test_an_integer_division_by_what_may_be_zero_is_named(name: str) -> None:
    spec = record(lambda recorder: [{**UNKNOWN, **HARMLESS}[name](A, B)]).spec
    assert (unknown_divisor(spec) is not None) == (name in UNKNOWN)


@pytest.mark.parametrize(("first", "second", "unknown"), [(3, 4, True), (3.5, 4.5, False)])
def test_a_division_by_a_number_that_changes(first: float, second: float, unknown: bool) -> None:
    def divide(number: float) -> Callable[[object], list[Tensor]]:
        return lambda recorder: [A % number]

    spec = feed_differences(record(divide(first)), record(divide(second))).spec
    assert (unknown_divisor(spec) is not None) == unknown


def test_a_constant_divisor_may_be_a_size() -> None:
    spec = record(lambda recorder: [A // torch.full((3,), 3)]).spec
    assert unknown_divisor(spec, any_size=True) is not None


def test_what_writes_in_place_is_not_compiled_with_an_unknown_divisor(tmp_path: Path) -> None:
    spec = record(lambda recorder: [A // B]).spec
    with pytest.raises(NotLowerableError, match="aten::floor_divide cannot be compiled: its integer divisor may be"):
        compile_segment(replace(spec, mode="commit"), tmp_path)
