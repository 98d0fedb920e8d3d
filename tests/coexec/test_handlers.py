"""What covers an op: a `try` gets its error in place, and torch's own context managers do not keep Python waiting."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch

MANAGERS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "enable_grad": torch.enable_grad,
    "record_function": lambda: torch.profiler.record_function("forward"),
    "set_grad_enabled": lambda: torch.set_grad_enabled(True),
}


def classifier(run: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], last: int = 100) -> Program:
    """Trains on labels that `run` hands to the loss; those of call `last` are out of range."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step(x: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        classes = labels * 1  # computed: it cannot be looked at before
        loss = run(lambda y: nn.functional.cross_entropy(layer(x), y), classes)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def arguments(i: int) -> tuple[Tensor, Tensor]:
        return batch(i), torch.arange(6) % 3 + (7 if i == last else 0)

    return Program(step, arguments, lambda: layer)


@pytest.mark.parametrize("name", MANAGERS)
def test_torchs_own_managers_do_not_keep_python_waiting(name: str) -> None:
    def run(loss: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
        with MANAGERS[name](), torch.enable_grad():
            return loss(labels)

    out = check(lambda: classifier(run), n=12, max_fallbacks=0)
    assert "needs real tensors" not in out.compiled.explain(), out.compiled.explain()


def in_a_try(loss: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(labels)
    except (IndexError, RuntimeError):
        return loss(labels.clamp(max=2)) * 2


def in_a_handler(loss: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    """An op in the body of an `except`, which the compiler's own clean-up covers first."""
    try:
        try:
            raise KeyError("always")
        except KeyError as error:
            return loss(labels) * len(error.args)
    except (IndexError, RuntimeError):
        return loss(labels.clamp(max=2)) * 2


def suppressed(loss: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
    result = loss(labels.clamp(max=2)) * 2
    with contextlib.suppress(IndexError, RuntimeError), torch.autocast("cpu", dtype=torch.bfloat16):
        result = loss(labels)
    return result


@pytest.mark.parametrize("run", [in_a_try, in_a_handler, suppressed])
def test_what_swallows_an_error_gets_it_in_place(run: Callable[..., Tensor]) -> None:
    out = check(lambda: classifier(run, last=9), n=12)
    assert out.stats is not None
    assert "kernel error" not in out.stats.fallbacks


def test_an_error_under_autocast_leaves_the_step_as_eagers_does() -> None:
    def run(loss: Callable[[Tensor], Tensor], labels: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss(labels)

    check(lambda: classifier(run, last=9), n=12, raises=(IndexError,))
