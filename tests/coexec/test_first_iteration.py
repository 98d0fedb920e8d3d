"""What only the first iteration does (optimizer state, missing gradients) costs the later ones nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, labels, mlp, training

LAYERS = 6


def trained(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Program:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(LAYERS)), nn.Linear(8, 3))
    step = training(model, make_optimizer(model))
    return Program(step, lambda i: (batch(i, width=8), labels(i)), lambda: list(model.parameters()))


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.9, foreach=False),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_made_in_the_first_iteration_makes_no_branches(kind: str) -> None:
    """SGD's momentum buffers are clones in the first iteration, and updated in place in all others."""
    stats = check(lambda: trained(OPTIMIZERS[kind]), n=12, max_fallbacks=0).stats
    plain = check(lambda: trained(OPTIMIZERS["plain"]), n=12, max_fallbacks=0).stats
    assert stats is not None
    assert plain is not None
    assert stats.switches == 0
    assert sum(stats.segments.values()) == sum(plain.segments.values()) <= 3


def test_a_first_path_that_comes_back_is_planned_from_then_on() -> None:
    """It is known: no fallback. From the second time on it is a branch like others."""

    def make() -> Program:
        model = mlp()
        calls = [0]

        def step(x: torch.Tensor) -> float:
            calls[0] += 1
            y = model(x)
            if calls[0] in (1, 9, 12):
                y = y.tanh() * 2
            return y.sum().item()

        return Program(step, lambda i: (batch(i),))

    early = check(make, n=7, max_fallbacks=0).stats
    late = check(make, n=16, max_fallbacks=0).stats
    assert early is not None
    assert late is not None
    assert (early.switches, late.switches) == (0, 1)
    assert late.co_executed == 16 - 3


def test_buffers_that_are_made_anew_are_followed() -> None:
    """The optimizer's state is cleared in the middle of training: the first iteration's path again, with its values."""

    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

        def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            if i in (8, 13):
                optimizer.state.clear()
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: list(model.parameters()))

    check(make, n=18, max_fallbacks=0)
