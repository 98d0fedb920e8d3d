"""Values that a kernel refuses: compiled code, whose formulas would take them, raises eager's error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = pytest.mark.compile
LENGTH, SET = 4099, 100

KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "probability": lambda p, e: F.binary_cross_entropy(p + e, torch.ones(LENGTH)),
    "each probability": lambda p, e: F.binary_cross_entropy(p + e, torch.zeros(LENGTH), reduction="none").sum(),
    "weighted": lambda p, e: F.binary_cross_entropy(p + e, torch.zeros(LENGTH), torch.arange(LENGTH) / LENGTH),
    "target": lambda p, e: F.binary_cross_entropy(p, e),
    "mask": lambda p, e: p.masked_scatter((torch.arange(LENGTH) < SET) | (e != 0), torch.ones(SET)).mean(),
    "mask in place": lambda p, e: (
        (p * 2).masked_scatter_((torch.arange(LENGTH) < SET) | (e != 0), torch.ones(SET)).mean()
    ),
}
"""(float32[LENGTH] between 0 and 1, zeros[LENGTH]) to a loss."""


def test_what_a_kernel_would_refuse_is_refused_in_compiled_code() -> None:
    """Nobody uses the losses: only their gradients."""

    def make() -> Program:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(LENGTH))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: Tensor, *extras: Tensor) -> Tensor:
            optimizer.zero_grad()
            p = (weight * x).sigmoid() * 0.5 + 0.25
            sum(kind(p, extra) for kind, extra in zip(KINDS.values(), extras, strict=True)).backward()
            optimizer.step()
            return p.detach()

        return Program(step, arguments, lambda: weight)

    def arguments(i: int) -> list[Tensor]:
        zeros = [torch.zeros(LENGTH) for _ in KINDS]
        return [torch.randn(LENGTH, generator=torch.Generator().manual_seed(i)), *zeros]

    pair = Pair(make)
    pair.settle()
    pair.to_compiled_turn()
    for k, kind in enumerate(KINDS):
        for wrong in (5.0, float("nan")):
            given, before, texts = arguments(pair.iteration), pair.discards(), []
            given[1 + k][777] = wrong
            for step in (pair.eager.step, pair.step):
                with pytest.raises(RuntimeError) as caught:
                    step(*given)
                texts.append(str(caught.value))
            assert texts[0] == texts[1], kind
            assert pair.discards() == before + 1, f"{kind}: {pair.why()}"
    pair.run(3)


def test_a_loss_that_may_raise_in_a_segment_that_writes_in_place() -> None:
    """It is compiled all the same: nothing that depends on the loss has been written when it raises."""

    def make() -> Program:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(300, 300) * 0.1)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.binary_cross_entropy((x @ weight).sigmoid(), target)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (torch.randn(8, 300), torch.rand(8, 300)), lambda: {"weight": weight})

    pair = Pair(make)
    pair.settle()
    before = pair.compiled_runs()
    pair.run(3)
    assert pair.compiled_runs() > before, pair.why()
    assert "commit: inductor" in pair.why()
    x, target = torch.randn(8, 300), torch.rand(8, 300)
    x[3] = float("nan")
    for step in (pair.eager.step, pair.step):
        with pytest.raises(RuntimeError):
            step(x, target)
    pair.run(3)
