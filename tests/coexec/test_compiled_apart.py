"""An op that no backend compiles is replayed alone: what is around it is compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program
from tests.coexec.programs import training
from tests.coexec.test_compiled import Pair, wide

pytestmark = pytest.mark.compile


class DrawnMask(nn.Module):
    """A mask with probabilities of its own per element, as in DropBlock: Inductor has no code that draws as eager."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.linspace(-1.0, 1.0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.bernoulli(self.logits.detach().sigmoid())


def test_what_cannot_be_compiled_costs_only_itself() -> None:
    def make() -> Program:
        half = [nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)]
        model = nn.Sequential(*half, DrawnMask(16), nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        return Program(training(model, optimizer), wide, lambda: (model, optimizer))

    pair = Pair(make)
    pair.settle()
    pair.run(20)
    segments = pair.step._runner.segments
    apart = [segment for segment in segments.segments if segments._apart & set(segment.nodes)]
    assert [len(segment.nodes) for segment in apart] == [1], pair.why()
    assert pair.step._runner.graph.nodes[apart[0].nodes[0]].op == "aten::bernoulli"
    assert pair.step.stats().segments["inductor"] >= 2, pair.step.explain()
