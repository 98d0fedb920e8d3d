"""Loops whose trip count varies: one stretch of the TraceGraph, however often they run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from coexec.records import OpKind
from tests.coexec.harness import Outcome, Program, check, exact
from tests.coexec.programs import batch, function_program

SETTLED = 14
"""Calls after which a step of this file makes no new path."""


def trips(i: int, least: int = 1, most: int = 9) -> int:
    """A trip count for call `i`, without a pattern; the first calls differ."""
    return random.Random(7 * i + 1).randint(least, most)


def sequence(i: int, least: int = 5, most: int = 12, width: int = 3, rows: int = 2) -> torch.Tensor:
    """A batch of sequences of a length drawn per call. [rows, length, width]."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(rows, trips(i, least, most), width, generator=generator)


def check_loops(
    make: Callable[[], Program], n: int = 40, *, loops: int = 1, max_fallbacks: int = 3, **options: Any
) -> Outcome:
    """As `check`, and: after SETTLED calls nothing falls back and nothing is traced, and there are While nodes."""
    out = check(make, n=n, max_fallbacks=max_fallbacks, min_co_executed=n - SETTLED, **options)
    assert out.stats is not None
    assert out.stats.loops >= loops, out.explanation
    events = out.compiled._runner.history.fallbacks
    assert all(event.iteration <= SETTLED for event in events), out.explanation
    return out


def nodes_of(out: Outcome) -> int:
    return len(out.compiled.trace_graph)


def rnn(lengths: Callable[[int], int], cell: Callable[[], nn.Module]) -> Program:
    """Trains an RNN that is a Python loop over time steps."""
    rnn_cell, head = cell(), nn.Linear(5, 2)
    optimizer = torch.optim.SGD([*rnn_cell.parameters(), *head.parameters()], lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        h = torch.zeros(x.shape[0], 5)
        for t in range(x.shape[1]):
            h = rnn_cell(x[:, t], h)
        loss = nn.functional.cross_entropy(head(h), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    def args(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(2, lengths(i), 3, generator=generator)
        return x, torch.randint(0, 2, (2,), generator=generator)

    return Program(step, args, lambda: (rnn_cell, head, optimizer))


def test_an_rnn_settles_and_never_falls_back_whatever_the_length() -> None:
    def make() -> Program:
        return rnn(lambda i: trips(i, 5, 50), lambda: nn.RNNCell(3, 5))

    out = check_loops(make, n=150, loops=2)  # forward and backward
    events = out.compiled._runner.history.fallbacks
    assert all(event.iteration <= 30 for event in events)
    short = check_loops(lambda: rnn(lambda i: trips(i, 5, 12), lambda: nn.RNNCell(3, 5)), n=40, loops=2)
    assert nodes_of(out) == nodes_of(short)
    assert "While" not in out.explanation
    assert "loop 0 at" in out.explanation
    assert "the graph waited: loop cond" in out.explanation


@pytest.mark.parametrize("cell", [nn.GRUCell, nn.LSTMCell])
def test_gated_cells(cell: type[nn.Module]) -> None:
    def make() -> Program:
        inner = cell(3, 5)

        class Cell(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
                return inner(x, (h, h))[0] if cell is nn.LSTMCell else inner(x, h)

        return rnn(lambda i: trips(i, 2, 9), Cell)

    check_loops(make, loops=2)


def test_a_sequence_that_is_computed_and_collected_in_lists() -> None:
    """Elements of a placeholder, and outputs stacked: lists as long as the loop."""

    def make() -> Program:
        embed, cell, head = nn.Embedding(10, 4), nn.Linear(4 + 4, 4), nn.Linear(4, 10)
        optimizer = torch.optim.Adam([*embed.parameters(), *cell.parameters(), *head.parameters()], lr=0.01)

        def step(tokens: torch.Tensor) -> float:
            h, outputs = torch.zeros(tokens.shape[0], 4), []
            for x in embed(tokens).unbind(1):
                h = torch.tanh(cell(torch.cat([x, h], 1)))
                outputs.append(h)
            logits = head(torch.stack(outputs, 1))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        def args(i: int) -> tuple[torch.Tensor]:
            return (torch.randint(0, 10, (3, trips(i, 3, 12)), generator=torch.Generator().manual_seed(i)),)

        return Program(step, args, lambda: (embed, cell, head, optimizer))

    out = check_loops(make, n=50)
    assert nodes_of(out) < 120


def test_joining_lists_of_any_length() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = x * 2
        rows = list(h)
        flat = torch.cat(rows)
        again = torch.cat([flat[:3], *[row * 0.5 for row in rows]])
        return torch.stack(rows[::-1], -1), flat, again, torch.cat([h, *[h[:1] for _ in rows]])

    check_loops(lambda: Program(step, lambda i: (batch(i, rows=trips(i, 2, 8)),)), n=40)


def test_iterating_over_a_batch_from_outside() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        h = torch.zeros(4)
        for row in x:
            h = torch.tanh(h + row)
        return h

    check_loops(lambda: Program(step, lambda i: (batch(i, rows=trips(i, 2, 12)),)))


def test_nested_loops() -> None:
    def make() -> Program:
        w = torch.full((4, 4), 0.2, requires_grad=True)

        def step(x: torch.Tensor, n: int, m: int) -> float:
            h = x
            for _ in range(n):
                h = h + x
                for _ in range(m):
                    h = torch.tanh(h @ w)
            loss = h.pow(2).mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
            w.grad = None
            return loss.item()

        return Program(step, lambda i: (batch(i), trips(i, 1, 4), trips(i + 100, 2, 5)), lambda: w)

    out = check_loops(make, n=50, loops=3)
    plan = out.compiled._runner.segments.plan
    assert any(loop.parent >= 0 for loop in plan.loops)


def test_a_constant_loop_around_a_varying_one_stays_unrolled() -> None:
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        h = x
        for _ in range(3):
            h = h.sigmoid()
            for _ in range(n):
                h = h * 1.5
        return h

    out = check_loops(lambda: Program(step, lambda i: (batch(i), trips(i, 1, 6))))
    ops = [node for node in out.compiled._runner.graph.nodes if node.op == "aten::sigmoid"]
    assert [node.folded for node in ops] == [False] * 3


def test_a_loop_whose_count_never_varies_is_unrolled() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(x)
        return x

    out = check(lambda: function_program(step))
    assert out.stats is not None
    assert out.stats.loops == 0
    assert sum(node.op == "aten::tanh" for node in out.compiled._runner.graph.nodes) == 4


@pytest.mark.parametrize("who", ["graph", "Python"])
def test_while_on_a_value(who: str) -> None:
    """The graph makes it; or Python at once, since it depends on memory from outside alone."""

    def make() -> Program:
        def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
            x = x @ torch.eye(4) if who == "graph" else x
            h, n = x.abs().sum() * 7, 0
            while h.item() > 1:
                h = h / 1.7
                n += 1
            return h, n

        return Program(step, lambda i: (batch(i) * 3 ** (i % 5),))

    out = check_loops(make)
    assert out.stats is not None
    assert (out.stats.fetches > 0) == (who == "graph")
    kinds = {node.kind for node in out.compiled._runner.graph.nodes if node.folded}
    assert (OpKind.HOST in kinds) == (who == "Python")


def test_break_continue_and_else() -> None:
    def make() -> Program:
        seen: list[str] = []

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            h = (x @ torch.eye(4)).sum()
            for k in range(n):
                if k % 3 == 2:
                    continue
                h = torch.sin(h * 3)
                if h > 0.95:
                    seen.append("break")
                    break
                h = h + 0.1
            else:
                seen.append("else")
                h = h * 2
            return h

        return Program(step, lambda i: (batch(i), trips(i, 1, 12)), lambda: seen)

    out = check_loops(make, n=60)
    assert {"break", "else"} == set(out.program.watch())  # type: ignore[union-attr]


def test_a_body_that_branches_and_calls_functions() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def even(h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(h * w)

        def odd(h: torch.Tensor) -> torch.Tensor:
            return h.sigmoid() - w * 0.5

        def step(x: torch.Tensor, n: int) -> float:
            h = x
            for k in range(n):
                h = even(h) if (k * k + n) % 3 else odd(h)
            loss = h.pow(2).sum()
            loss.backward()
            with torch.no_grad():
                w.add_(w.grad, alpha=-0.01)
            w.grad = None
            return loss.item()

        return Program(step, lambda i: (batch(i), trips(i, 1, 8)), lambda: w)

    check_loops(make, n=60, loops=2)


def test_generators_and_comprehensions() -> None:
    def make() -> Program:
        def halves(x: torch.Tensor, n: int) -> Iterator[torch.Tensor]:
            for k in range(n):
                yield x / (k + 2)

        def step(x: torch.Tensor, n: int, m: int) -> Any:
            parts = [part.relu() for part in halves(x, n)]
            total = sum(torch.exp(x[0] / (k + 1)) for k in range(m))
            return parts, total, {k: (x * k).mean() for k in range(n)}

        return Program(step, lambda i: (batch(i), trips(i, 1, 7), trips(i + 50, 2, 8)))

    check_loops(make, loops=3)


def test_two_loops_in_a_row_one_of_which_sometimes_never_runs() -> None:
    def step(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
        h = x
        for _ in range(n):
            h = torch.tanh(h) * 1.1
        for _ in range(m):
            h = torch.sigmoid(h)
        return h.sum(0)

    def make() -> Program:
        return Program(step, lambda i: (batch(i), trips(i, 0, 5), trips(i + 30, 1, 6)))

    check_loops(make, n=50, loops=2)


def test_recursion_inside_a_loop() -> None:
    def halve(x: torch.Tensor, depth: int) -> torch.Tensor:
        return torch.tanh(x) if depth == 0 else halve(x * 0.5, depth - 1) + x

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        for k in range(n):
            x = halve(x, k % 3)
        return x

    check_loops(lambda: Program(step, lambda i: (batch(i), trips(i, 1, 9))))


def test_an_exception_in_any_pass() -> None:
    def make() -> Program:
        state = {"h": torch.zeros(4)}

        def step(x: torch.Tensor, n: int, fail: int) -> torch.Tensor:
            state["h"] = x[0]
            for k in range(n):
                state["h"] = torch.tanh(state["h"] + x[k % 6])
                if k == fail:
                    raise KeyError(f"pass {k}")
            return state["h"]

        def args(i: int) -> tuple[torch.Tensor, int, int]:
            return batch(i), trips(i, 4, 9), trips(i, 0, 3) if i % 5 == 4 else -1

        return Program(step, args, lambda: state)

    check(make, n=50, max_fallbacks=13, raises=(KeyError,), min_co_executed=25)


def test_a_new_branch_in_a_late_pass_falls_back_with_all_values_of_all_passes() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, n: int, odd: int) -> list[torch.Tensor]:
            kept, h = [], x
            for k in range(n):
                h = torch.tanh(h + k)
                kept.append(h)
                if k == odd:
                    kept.append(kept[k // 2] * h[0] + kept[0])
            return kept

        return Program(step, lambda i: (batch(i), trips(i, 5, 9), 4 if i >= 20 else -1))

    out = check(make, n=40, max_fallbacks=4, min_co_executed=25)
    late = [event for event in out.compiled._runner.history.fallbacks if event.iteration > SETTLED]
    assert (late[0].iteration, late[0].reason) == (21, "new path"), out.explanation


def test_in_place_accumulation_and_views_in_a_loop() -> None:
    def make() -> Program:
        total = torch.zeros(4)

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            h, buffer = x.clone(), torch.zeros(9, 4)
            for k in range(n):
                h.mul_(0.9).add_(x[k % 6], alpha=0.1 * k)
                buffer[k] = h.mean(0)
                buffer[k, 1:3].neg_()
                total.add_(h[0])
            return buffer * 2

        return Program(step, lambda i: (batch(i), trips(i, 2, 9)), lambda: total)

    check_loops(make)


def test_random_numbers_in_a_loop() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, n: int) -> tuple[torch.Tensor, float]:
            h = x
            for _ in range(n):
                h = nn.functional.dropout(h, 0.3) + torch.rand(4)
            return h, random.random()

        return Program(step, lambda i: (batch(i), trips(i, 1, 9)))

    check_loops(make)


def test_an_optimizer_over_a_number_of_parameters_that_varies() -> None:
    def make() -> Program:
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(7))
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.5)

        def step(x: torch.Tensor, n: int) -> float:
            h = x
            for layer in layers[:n]:
                h = torch.tanh(layer(h))
            loss = h.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i), trips(i, 1, 7)), lambda: (layers, optimizer))

    check_loops(make, n=60, loops=2)


def test_shapes_that_change_from_pass_to_pass() -> None:
    """A cache that grows, as in the decoding of a language model."""

    def make() -> Program:
        query = nn.Linear(4, 4)

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            with torch.no_grad():
                cache = x.unsqueeze(0)
                for _ in range(n):
                    scores = torch.softmax(cache.sum(-1), 0)
                    cache = torch.cat([cache, query(cache * scores.unsqueeze(-1))[-1:]])
            return cache

        return Program(step, lambda i: (batch(i), trips(i, 1, 8)))

    check_loops(make)


def test_an_lstm_whose_loop_is_in_c_plus_plus() -> None:
    def make() -> Program:
        lstm = nn.LSTM(3, 4, batch_first=True)
        optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> float:
            out, _ = lstm(x)
            loss = out.pow(2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (sequence(i),), lambda: (lstm, optimizer))

    check(make, n=40, phase=None, max_fallbacks=12, min_co_executed=0)


def test_values_of_older_passes_read_late() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, n: int) -> list[torch.Tensor]:
            states = [x]
            for k in range(n):
                states.append(torch.tanh(states[-1] + states[k // 2]))
            return [states[n // 2] - states[-1], states[0] + states[n // 3]]

        return Program(step, lambda i: (batch(i), trips(i, 1, 9)))

    check_loops(make)


def test_a_step_that_folds_keeps_its_counters_and_says_where_the_loop_is() -> None:
    shrink = torch.eye(4) * 0.7

    def step(x: torch.Tensor) -> int:
        n = 0
        while x.norm() > 1:
            x = x @ shrink
            n += 1
        return n

    compiled = exact(step)
    expected = [step(batch(i) * 2 ** (i % 6)) for i in range(30)]
    assert [compiled(batch(i) * 2 ** (i % 6)) for i in range(30)] == expected
    stats = compiled.stats()
    assert stats.loops == 1
    assert stats.iterations == 30
    assert stats.fetches >= sum(expected[-stats.co_executed :])
    assert "1 loop;" in compiled.explain()


@pytest.mark.slow
def test_a_call_with_more_ops_than_the_log_holds_ends_as_in_eager() -> None:
    """A folded loop is a small graph, however long its calls are."""

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = x + 1.0
        return x

    compiled = exact(step)
    for n in (5, 7, 9, 11, 6, 8, 12, 10):
        assert torch.equal(compiled(torch.zeros(2), n), torch.full((2,), float(n)))
    assert compiled.stats().loops == 1
    assert compiled(torch.zeros(2), 1_100_000)[0] == 1_100_000.0
    assert compiled.stats().fallbacks["too long"] == 1
    assert compiled.stats().phase == "eager"
