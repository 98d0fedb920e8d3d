"""What a compiled segment needs before it can start: memory that Python names late, and numbers that no graph takes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program
from tests.coexec.programs import batch
from tests.coexec.test_compiled import Pair, classifier, wide

pytestmark = pytest.mark.compile


def test_weights_that_are_named_behind_a_read_inside_the_segment() -> None:
    """The forward pass reads a weight transposed; the weight itself comes up behind `item()`, where Python waits."""

    def make() -> Program:
        model = classifier()
        seen: list[float] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            loss = nn.functional.cross_entropy(model(x), y)
            grads = torch.autograd.grad(loss, list(model.parameters()))
            seen.append(loss.item())
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return seen[-1]

        return Program(step, wide, lambda: (model, seen[-1:]))

    pair = Pair(make)
    pair.settle()
    before = pair.compiled_runs()
    pair.run(20)
    assert pair.compiled_runs() - before >= 8, pair.why()  # in a trial every second pass is replayed


def test_an_update_that_is_followed_by_a_write_that_numpy_sees() -> None:
    """Python waits at that write, so the update's segment must end there; it holds its argument meanwhile."""

    def make() -> Program:
        model = classifier()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        seen = np.zeros(model(wide(0)[0]).shape[1], np.float32)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out = model(x)
            loss = nn.functional.cross_entropy(out, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            torch.from_numpy(seen).add_(out.detach().mean(0))
            seen[0] *= 0.5
            return torch.from_numpy(seen.copy())

        return Program(step, wide, lambda: (model, torch.from_numpy(seen)))

    pair = Pair(make)
    pair.settle()
    pair.run(12)
    commits = [s for s in pair.step._runner.segments.segments if s.planned.kind == "commit" and s.planned.compile]
    assert commits
    assert all(version.native.runs for segment in commits for version in segment.versions), pair.why()
    assert not any(version.native.discards for segment in commits for version in segment.versions), pair.why()


def test_a_number_that_no_graph_can_take() -> None:
    """`eps` of a normalization is compiled as a constant and checked: another value is another artifact."""

    def make() -> Program:
        model = nn.Linear(16, 64)

        def step(x: torch.Tensor, eps: float) -> torch.Tensor:
            with torch.no_grad():
                h = nn.functional.layer_norm(model(x).tanh(), (64,), eps=eps)
                return (h * h.sigmoid()).exp().mean(1)

        return Program(step, lambda i: (batch(i, 32, 16), 1e-5 if i < 40 else 0.1 if i < 90 else 1e-5))

    pair = Pair(make)
    pair.settle(rounds=4)
    pair.run(max(41 - pair.iteration, 0))  # until it was seen to vary
    before = pair.compiled_runs()
    pair.settle(rounds=3)
    pair.run(12)
    assert pair.compiled_runs() > before, pair.why()
    pair.run(max(96 - pair.iteration, 0))  # not the value that was compiled: right, by replay


def test_a_segment_that_begins_with_a_view_of_what_two_branches_give() -> None:
    """It was taken for a value of an earlier segment, which was never there: such a segment ran no artifact."""

    def make() -> Program:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 10, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(x: torch.Tensor, y: torch.Tensor, pull: bool) -> float:
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
            total = loss + 0.01 * logits.logsumexp(-1).square().mean() if pull else loss
            optimizer.zero_grad()
            total.backward()
            optimizer.step()
            return loss.item()

        def arguments(i: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
            generator = torch.Generator().manual_seed(i)
            x = torch.randn(8, 16, 32, generator=generator)
            return x, torch.randint(10, (8, 16), generator=generator), i % 4 == 3

        return Program(step, arguments, lambda: model)

    pair = Pair(make)
    pair.settle()
    pair.run(20)
    for segment in pair.step._runner.segments.segments:
        assert segment.native.unserved < 5, (segment.native.last_misfit, pair.step.explain())


def test_inputs_of_a_call_that_failed_are_not_what_is_compiled_with() -> None:
    model = nn.Sequential(nn.Embedding(9, 6), nn.Tanh(), nn.Linear(6, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    never_seen = 1 + time.time_ns() % 10**9 * 1e-12  # nothing is captured for code that the cache has

    @coexec.compile
    def step(ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(ids), labels) * never_seen
        loss.backward()
        optimizer.step()
        return loss.detach()

    ids, labels, wrong = torch.tensor([0, 1, 2, 3]), torch.arange(4), 0
    for i in range(80):
        if step._runner.segments.captures.current is not None and wrong < 3:
            wrong += 1
            with pytest.raises(IndexError):
                step(torch.tensor([0, 1, 9, 3]), labels)
        step(ids, labels)
        if i % 20 == 19:
            assert step.wait_compiled(300)
    assert wrong == 3
    assert "compile error" not in step.explain()
    assert step._runner._native.stats()["compiled_runs"] > 0, step.explain()
