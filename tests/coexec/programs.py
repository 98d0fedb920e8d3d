"""Small models and batches that the tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.coexec.harness import Program


def batch(i: int, rows: int = 6, width: int = 4) -> torch.Tensor:
    """Batch number `i`: the same in every run, without touching the global random stream. [rows, width]."""
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(1000 + i))


def labels(i: int, rows: int = 6, classes: int = 3) -> torch.Tensor:
    """Labels number `i`. [rows], int64."""
    return torch.randint(0, classes, (rows,), generator=torch.Generator().manual_seed(2000 + i))


def mlp(width: int = 4, hidden: int = 8, out: int = 3) -> nn.Sequential:
    """Two layers."""
    return nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, out))


def training(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[..., torch.Tensor] | None = None
) -> Callable[..., float]:
    """The step everybody writes: forward, backward, update, a number for the log."""
    measure = loss_of or nn.functional.cross_entropy

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = measure(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def function_program(function: Callable[..., Any], rows: int = 6) -> Program:
    """A step without state: called with batch after batch."""
    return Program(function, lambda i: (batch(i, rows),))


def weighted(body: Any, n_weights: int = 1) -> Program:
    """A program whose step is `body(x, *weights)` with weights that require grad."""
    weights = [torch.full((4, 4), 0.1 * (k + 1), requires_grad=True) for k in range(n_weights)]

    def step(x: torch.Tensor) -> Any:
        result = body(x, *weights)
        with torch.no_grad():
            for w in weights:
                if w.grad is not None:
                    w.sub_(0.05 * w.grad)
        return result

    return Program(step, lambda i: (batch(i),), lambda: weights)
