"""Folded loops beside what else changes: sizes, compiled segments, ops that Python does at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from coexec.records import OpKind
from coexec.runtime.versions import State, Version
from tests.coexec.harness import Program
from tests.coexec.programs import batch, labels
from tests.coexec.test_compiled import Pair, classifier
from tests.coexec.test_loops import check_loops, trips


@pytest.fixture(autouse=True)
def small(one_thread: Iterator[None]) -> None:
    """Tensors are tiny."""


def kinds_in_loops(step: Any) -> set[OpKind]:
    """Of the ops in folded loops."""
    return {node.kind for node in step._runner.graph.nodes if node.folded}


def test_training_with_a_cache_that_grows_in_every_pass_and_batches_of_any_size() -> None:
    def make() -> Program:
        qkv, out = nn.Linear(4, 12), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*qkv.parameters(), *out.parameters()], lr=0.1, momentum=0.9)

        def step(x: torch.Tensor, n: int) -> float:
            keys, values = x.unsqueeze(1), torch.tanh(x).unsqueeze(1)
            for _ in range(n):
                q, k, v = qkv(x).chunk(3, -1)
                keys, values = torch.cat([keys, k.unsqueeze(1)], 1), torch.cat([values, v.unsqueeze(1)], 1)
                weights = torch.softmax((keys * q.unsqueeze(1)).sum(-1), 1)
                x = torch.tanh(out((values * weights.unsqueeze(-1)).sum(1)))
            loss = x.pow(2).mean() + keys.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i, trips(i + 9, 2, 6)), trips(i, 1, 8)), lambda: (qkv, out, optimizer))

    out = check_loops(make, n=50, loops=2)
    assert out.compiled._runner._native.stats()["inferred_shapes"] > 0


def test_python_reads_what_was_given_in_every_pass() -> None:
    """Whether a time step counts is asked of a mask among the arguments: nothing is read from the graph."""

    def make() -> Program:
        cell = nn.RNNCell(4, 5)

        def step(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(x.shape[0], 5)
            for t in range(x.shape[1]):
                if mask[:, t].any():
                    h = torch.where(mask[:, t : t + 1], cell(x[:, t], h), h)
            return h.sum(0)

        def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
            length, generator = trips(i, 2, 9), torch.Generator().manual_seed(i)
            mask = torch.rand(2, length, generator=generator) < 0.5
            mask[:, 0] = True
            return torch.randn(2, length, 4, generator=generator), mask

        return Program(step, args, lambda: cell)

    out = check_loops(make, n=60, loops=1)
    assert out.stats is not None
    assert out.stats.fetches == 0
    assert {OpKind.HOST, OpKind.COMPUTE} <= kinds_in_loops(out.compiled)


def test_a_counter_that_python_keeps_and_the_graph_reads_in_every_pass() -> None:
    """An op of the graph gets the counter as it was when the pass was there, though Python counts on at once."""

    def make() -> Program:
        count = torch.zeros(())

        def step(x: torch.Tensor, n: int) -> tuple[torch.Tensor, float]:
            h, last = x @ torch.eye(4), 0.0
            for _ in range(n):
                h = torch.tanh(h + count / 10)
                count.add_(1)
                last = count.item()
            return h, last

        return Program(step, lambda i: (batch(i), trips(i)), lambda: count)

    out = check_loops(make)
    assert {OpKind.HOST, OpKind.COMPUTE} <= kinds_in_loops(out.compiled)


def test_memory_that_is_python_s_in_the_first_pass_and_the_graph_s_in_later_ones() -> None:
    def make() -> Program:
        peak = torch.full((), 2.0)

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            h = x @ torch.eye(4)
            for _ in range(n):
                if peak.item() > 1.5:
                    h = h * 0.25
                h = h + torch.sin(h)
                peak.copy_(h.abs().max())
            return h

        return Program(step, lambda i: (batch(i), trips(i)), lambda: peak)

    check_loops(make, n=60)


def test_outputs_given_by_the_caller_are_written_in_every_pass() -> None:
    def make() -> Program:
        rows = torch.zeros(9, 4)

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            h = x
            for k in range(n):
                torch.mul(h[0], k + 0.5, out=rows[k])
                h = torch.tanh(h + rows[k])
            return h

        return Program(step, lambda i: (batch(i), trips(i)), lambda: rows)

    check_loops(make)


# ---------------------------------------------------------------------------------------------------- compiled segments


def training_rnn(length: Any, rows: Any, scale: list[float]) -> Program:
    """What is behind the loop reads values that its first, its last and another pass made."""
    cell, head = nn.RNNCell(4, 16), classifier()
    optimizer = torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.05, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        h, states = torch.zeros(x.shape[0], 16), []
        for t in range(x.shape[1]):
            h = cell(x[:, t], h)
            states.append(h)
        loss = nn.functional.cross_entropy(head(h + states[0] * states[-2]) * scale[0], y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return batch(i, rows(i), 4 * length(i)).view(rows(i), length(i), 4), labels(i, rows(i))

    return Program(step, args, lambda: (cell, head, optimizer))


def behind_the_loop(pair: Pair) -> list[Version]:
    """Versions of the segment that computes values behind the loop."""
    segments = pair.step._runner.segments.segments
    return max((s for s in segments if s.planned.kind == "functional"), key=lambda s: len(s.nodes)).versions


@pytest.mark.compile
def test_a_segment_behind_a_loop_serves_any_trip_count_and_any_size() -> None:
    """No two calls in a row have the same count: what is compiled is compared between passes that differ in both."""
    scale = [1.0]

    def make() -> Program:
        return training_rnn(lambda i: 3 + 4 * i % 11, lambda i: trips(3 * i + 1, 2, 24), scale)

    pair = Pair(make)
    pair.settle()
    fallbacks, before = pair.step.stats().fallbacks, pair.compiled_runs()
    pair.run(40)
    assert pair.step.stats().fallbacks == fallbacks
    assert pair.step.stats().loops >= 2
    versions = behind_the_loop(pair)
    assert [v.state for v in versions if v.symbolic is not None] == [State.COMPILED], pair.step.explain()
    assert sum(v.native.discards for v in versions) == 0, pair.step.explain()
    # All but replay's turns, as long as the two are weighed.
    assert pair.compiled_runs() - before >= 30, pair.step.explain()
    scale[0] = 2.0  # a constant of the artifact until now
    pair.run(6)
    pair.settle()
    before = pair.compiled_runs()
    pair.run(12)
    assert pair.compiled_runs() - before >= 6, pair.step.explain()


@pytest.mark.compile
def test_a_loop_folds_long_after_its_unrolled_form_was_compiled() -> None:
    late: list[bool] = []

    def make() -> Program:
        return training_rnn(lambda i: trips(i, 3, 7) if late else 4, lambda i: 8, [1.0])

    pair = Pair(make)
    pair.settle()
    assert pair.step.stats().loops == 0
    late.append(True)
    pair.run(12)
    assert pair.step.stats().loops >= 2
    pair.settle()
    before = pair.compiled_runs()
    pair.run(12)
    assert pair.step.stats().phase == "co-execution"
    assert pair.compiled_runs() > before, pair.step.explain()


@pytest.mark.compile
def test_a_loop_folds_while_live_inputs_are_captured_and_compiled() -> None:
    """Plan, captures and jobs of the old graph are given up at any moment."""

    def folding_after(calm: int) -> Callable[[], Program]:
        return lambda: training_rnn(lambda i: 4 if i < calm else trips(i, 3, 6), lambda i: 8, [1.0])

    for calm in range(5, 11):
        pair = Pair(folding_after(calm))
        pair.run(calm + 12)
        assert pair.step.stats().loops >= 2, pair.step.explain()
        assert pair.step.wait_compiled(300)
        pair.run(4)
