"""Compiled segments at sizes that change: one artifact for many sizes, or several for one each, and right results."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from coexec.runtime.versions import MAX_SPECIALISED, State, Version
from tests.coexec.harness import Program
from tests.coexec.programs import batch, labels, training
from tests.coexec.test_compiled import Pair

pytestmark = pytest.mark.compile


def classifier(rows: list[int]) -> Program:
    """Trains on batches of the sizes `rows`, again and again."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    args = lambda i: (batch(i, rows[i % len(rows)], 16), labels(i, rows[i % len(rows)]))  # noqa: E731
    return Program(training(model, optimizer), args, lambda: (model, optimizer))


def versions(pair: Pair) -> list[Version]:
    """Of the segment that sees the batch."""
    segments = pair.step._runner.segments.segments
    return max((s.versions for s in segments if s.planned.kind == "functional"), key=len)


def any_rows() -> list[int]:
    return [random.Random(k).randint(2, 64) for k in range(200)]


def test_batches_of_any_size_run_one_artifact() -> None:
    pair = Pair(lambda: classifier(any_rows()))
    pair.settle()
    found = [v for v in versions(pair) if v.symbolic is not None]
    assert [v.state for v in found] == [State.COMPILED], pair.step.explain()
    before, runs = pair.compiled_runs(), found[0].native.runs
    pair.run(40)
    assert pair.step.stats().fallbacks == {}
    assert found[0].native.runs - runs >= 30, pair.step.explain()
    assert found[0].native.discards == 0, pair.step.explain()
    assert pair.compiled_runs() - before >= 60, pair.step.explain()  # the optimizer's segment, too
    assert "for any size of dimension 0" in pair.step.explain()


def test_inputs_that_are_parts_of_one_tensor_run_one_artifact() -> None:
    """Tokens, and the tokens after them, of texts of any length."""

    def make() -> Program:
        model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 7))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train = training(model, optimizer, lambda out, y: nn.functional.cross_entropy(out.flatten(0, 1), y.flatten()))
        lengths = [1 + rows for rows in any_rows()]  # a part of one token is replayed
        read: list[torch.Tensor] = []

        def step(text: torch.Tensor) -> float:
            read.append(text)  # the last one is there when the next step begins, and has another size
            return float(train(text[:, :-1], text[:, 1:]))

        args = lambda i: (labels(i, 4 * lengths[i], 7).view(4, lengths[i]),)  # noqa: E731
        return Program(step, args, lambda: (model, optimizer))

    pair = Pair(make)
    pair.settle()
    found = [v for v in versions(pair) if v.symbolic is not None]
    assert [v.state for v in found] == [State.COMPILED], pair.step.explain()
    pair.run(20)  # its trial, in which every second pass is replayed
    runs = found[0].native.runs
    pair.run(20)
    assert found[0].native.runs - runs >= 15, pair.step.explain()


def test_a_batch_of_one_is_replayed_and_right() -> None:
    rows = [1, 16, 1, 5, 1, 12, 1, 1, 9, 3]  # whatever is captured, one of them is next to it
    pair = Pair(lambda: classifier(rows))
    pair.settle()
    pair.run(30)
    found = [v for v in versions(pair) if v.symbolic is not None]
    assert [v.state for v in found] == [State.COMPILED], pair.step.explain()
    runs = found[0].native.runs
    pair.run(20)
    assert found[0].native.runs - runs >= 8, pair.step.explain()  # of ten passes with more than one row
    assert pair.step.stats().phase == "co-execution"


def test_without_symbolic_sizes_the_frequent_ones_have_artifacts() -> None:
    rows = [16, 16, 8, 16, 8, 24, 16, 8, 3, 4, 5, 24]
    pair = Pair(lambda: classifier(rows), dynamic=False)
    for _ in range(6):
        pair.run(24)
        assert pair.step.wait_compiled(300)
    assert all(v.symbolic is None for v in versions(pair))
    compiled = [v for v in versions(pair) if v.state is State.COMPILED]
    assert 2 <= len(compiled) <= MAX_SPECIALISED, pair.step.explain()
    before = {id(v): v.native.runs for v in compiled}
    pair.run(48)
    assert all(v.native.runs > before[id(v)] for v in compiled), pair.step.explain()


def test_a_growing_cache_runs_compiled() -> None:
    """Every size is met once only."""

    def make() -> Program:
        qkv, out = nn.Linear(8, 24), nn.Linear(8, 8)
        keys, values, x = torch.zeros(1, 2, 8), torch.zeros(1, 2, 8), torch.ones(1, 1, 8)

        @torch.no_grad()
        def step() -> torch.Tensor:
            nonlocal keys, values, x
            q, k, v = qkv(x).chunk(3, -1)
            keys, values = torch.cat([keys, k], 1), torch.cat([values, v], 1)
            x = torch.tanh(out((q @ keys.transpose(1, 2) / 8**0.5).softmax(-1) @ values))
            return x

        return Program(step)

    pair = Pair(make)
    pair.settle(12)
    before = pair.compiled_runs()
    pair.run(40)
    assert pair.step.stats().fallbacks == {}
    assert pair.compiled_runs() - before >= 30, pair.step.explain()
