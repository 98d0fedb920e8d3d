"""A small model whose step can be left with its call pending, and its eager twin: for the tests of `overlap=True`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import coexec
from coexec.intercept.native import native_if_ready
from tests.coexec.gate import Gate, gated
from tests.coexec.programs import batch, labels, mlp
from tests.coexec.snapshot import snapshot

WARM_UP = 4  # calls until the step co-executes


def overlapping(step: Any, **options: Any) -> Any:
    return coexec.compile(step, backend="replay", numerics="exact", overlap=True, **options)


def pending(step: Any) -> bool:
    """Whether the latest call of `step` returned and its end has not been noted yet."""
    return bool(step._runner._native.pending)


def unresolved(tensor: torch.Tensor) -> bool:
    native: Any = native_if_ready()
    return bool(native.is_placeholder(tensor))


def waits(step: Any) -> int:
    step.stats()
    return int(step._runner.wait_counts()["overlap"])


class Trained:
    """A small model, and a step whose graph begins at the gate."""

    def __init__(self, gate: Gate, wrap: Callable[..., Any] = overlapping, draws: bool = False) -> None:
        torch.manual_seed(0)
        self.gate = gate
        self.model = mlp()
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.noise = 0.1 if draws else 0.0
        self.x, self.y = batch(0), labels(0)
        self.step = wrap(self._step)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = gated(x)
        if self.noise:
            x = x + torch.randn_like(x) * self.noise
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.seen.add_(1)  # type: ignore[operator, union-attr]
        return loss.detach()

    def warm_up(self) -> Trained:
        for i in range(WARM_UP):
            self.step(batch(i), labels(i))
        return self

    def leave_pending(self) -> torch.Tensor:
        """A call that returned although its graph has not begun."""
        self.step.stats()  # the call before is over
        self.gate.close()
        loss: torch.Tensor = self.step(self.x, self.y)
        assert pending(self.step)
        assert unresolved(loss)
        return loss

    def state(self) -> Any:
        return snapshot((self.model, self.optimizer, [p.grad for p in self.model.parameters()], torch.get_rng_state()))


def eager_twin(gate: Gate, draws: bool = False) -> tuple[Trained, torch.Tensor]:
    """The same model after the same calls, one more than the warm-up, in eager; and the last loss."""
    gate.open()
    twin = Trained(gate, lambda step: step, draws).warm_up()
    return twin, twin.step(twin.x, twin.y)
