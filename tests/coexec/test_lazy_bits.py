"""Conjugated and negated views: memory that is read as something else than it holds, and never a reason to wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.coexec.harness import Outcome, Program, check
from tests.coexec.programs import batch

BODIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "product": lambda z: z @ z.conj().t(),
    "elementwise": lambda z: z * z.conj() + 1,
    "returned": lambda z: z.conj(),
    "returned view": lambda z: z.conj()[1:].t(),
    "conjugated twice": lambda z: (z.conj().conj(), z.conj().clone()),
    "imaginary part": lambda z: (z.conj().imag, z.conj().imag * 2),
    "written through": lambda z: z.conj().mul_(2j).add_(z),
    "written imaginary part": lambda z: z.conj().imag.add_(1),
    "real view": lambda z: torch.view_as_real(z.conj().resolve_conj()),
    "mH": lambda z: torch.linalg.inv(z.mH @ z + torch.eye(2)),
    "in a list": lambda z: torch.cat([z.conj(), z]).sum(0),
}


def waits(outcome: Outcome) -> dict[str, int]:
    return {why: n for why, n in outcome.compiled._runner.wait_counts().items() if n and why != "step end"}


@pytest.mark.parametrize("name", BODIES)
def test_lazy_views_of_values_in_flight(name: str) -> None:
    def step(x: torch.Tensor) -> Any:
        z = torch.view_as_complex(x.view(6, 2, 2)) * 1j
        return BODIES[name](z), z

    outcome = check(lambda: Program(step, lambda i: (batch(i),)))
    assert waits(outcome) == {}


@pytest.mark.parametrize("name", BODIES)
def test_lazy_views_of_memory_from_outside(name: str) -> None:
    def args(i: int) -> tuple[torch.Tensor]:
        return (torch.view_as_complex(batch(i).view(6, 2, 2)),)

    check(lambda: Program(lambda z: (BODIES[name](z), z), args))


def test_a_lazy_view_of_memory_that_numpy_owns() -> None:
    array = np.zeros((3, 3), np.complex64)

    def args(i: int) -> tuple[torch.Tensor]:
        array[:] = np.arange(9).reshape(3, 3) * (1 + 2j) + i
        return (torch.from_numpy(array).conj(),)

    check(lambda: Program(lambda z: (z @ z, z + 1), args))


def test_a_plain_tensor_where_a_lazy_view_was() -> None:
    def step(x: torch.Tensor, flip: bool) -> torch.Tensor:
        z = torch.view_as_complex(x.view(6, 2, 2))
        return (z.conj() if flip else z.clone()) @ z.t()

    check(lambda: Program(step, lambda i: (batch(i), i % 3 == 2)), n=12, max_fallbacks=4)


def test_a_backward_pass_through_complex_values_waits_for_nothing() -> None:
    def make() -> Program:
        w = torch.full((4, 4), 0.3 + 0.1j, requires_grad=True)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (torch.fft.fft(x) @ w).abs().pow(2).mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(0.01 * w.grad)  # type: ignore[operator]
            w.grad = None
            return loss

        return Program(step, lambda i: (batch(i),), lambda: w)

    assert waits(check(make)) == {}
