"""Reads that no value of the graph decides, and writes into memory that the caller gave: Python waits for neither."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Outcome, Program, check
from tests.coexec.programs import batch, mlp


def waits(outcome: Outcome) -> dict[str, int]:
    """What Python waited for inside the step."""
    counts: dict[str, int] = outcome.compiled._runner.wait_counts()
    return {why: n for why, n in counts.items() if n and why != "step end"}


def test_a_mask_among_the_arguments_is_read_without_waiting() -> None:
    def make() -> Program:
        model = mlp()

        def step(x: torch.Tensor, mask: torch.Tensor) -> Any:
            h = model(x)
            if (mask.clone() > 0.5).any() and not torch.equal(mask, mask.t()):
                h = h * 2
            return h.sum(), mask.nonzero(), mask.tolist()

        return Program(step, lambda i: (batch(i), (batch(i, 4) > 0).float()), lambda: model)

    assert waits(check(make, n=14)) == {}


def test_the_norm_of_a_parameter_is_read_before_the_graph_writes_it() -> None:
    def make() -> Program:
        model = mlp()

        def step(x: torch.Tensor) -> Any:
            model(x).pow(2).mean().backward()
            scales = []
            with torch.no_grad():
                for p in model.parameters():
                    scales.append(1.0 / (1.0 + p.norm(2).item()))
                    p.sub_(p.grad, alpha=0.01 * scales[-1])
                    p.grad = None
            return scales

        return Program(step, lambda i: (batch(i),), lambda: model)

    assert waits(check(make, n=14)) == {}


def test_a_value_that_was_read_is_used_and_written_by_the_graph() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            big = torch.tanh(x @ x.t()).mean()
            light = y * 2 + 1
            view = light[1:]
            n = light.sum().item()
            light.add_(big)  # from here on it is what the graph makes of it
            return light, view, n, light.sum().item(), light * big

        return Program(step, lambda i: (batch(i), batch(i + 50, 3)))

    got = waits(check(make, n=14))
    assert list(got) == ["fetch"]  # the second read


def test_memory_that_the_graph_has_written_on_this_path_is_waited_for() -> None:
    def make() -> Program:
        state, calls = torch.zeros(4), [0]

        def step(x: torch.Tensor) -> Any:
            calls[0] += 1
            if calls[0] % 3 == 0:
                state.add_(torch.tanh(x @ x.t() @ x).mean(0))
            return (state * 2).sum().item()

        return Program(step, lambda i: (batch(i),), lambda: state)

    check(make, n=20)


def test_a_read_that_only_some_calls_do() -> None:
    def make() -> Program:
        calls = [0]

        def step(x: torch.Tensor) -> Any:
            calls[0] += 1
            y = x * 3 + 1
            n = y.sum().item() if calls[0] % 4 == 0 else 0.0
            return torch.tanh(y) * 2, n

        return Program(step, lambda i: (batch(i),))

    check(make, n=24)


def test_what_a_matrix_product_makes_is_the_graphs() -> None:
    """A whole network hangs on memory from outside: it is not the PythonRunner's work."""

    def make() -> Program:
        model = mlp()
        return Program(lambda x: model(x).mean().item(), lambda i: (batch(i),))

    assert list(waits(check(make))) == ["fetch"]


def test_a_learning_rate_in_a_tensor() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), foreach=False)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

        return Program(step, lambda i: (batch(i),), lambda: (model, optimizer))

    assert waits(check(make)) == {}


@pytest.mark.parametrize("kind", ["whole", "slice", "argument", "list"])
def test_out_arguments_are_written_by_the_graph(kind: str) -> None:
    def make() -> Program:
        kept = torch.zeros(6, 4)

        def step(x: torch.Tensor) -> Any:
            h = torch.tanh(x)
            if kind == "whole":
                return torch.mul(h, 2, out=kept), h
            if kind == "slice":
                return torch.amax(h, dim=1, out=kept[:, 1]), h
            if kind == "argument":
                return torch.maximum(h, x, out=h), h + 1
            parts = [torch.empty(3, 4), torch.empty(3, 4)]
            torch.split_copy(h, 3, out=parts)
            return parts

        return Program(step, lambda i: (batch(i),), lambda: kept)

    assert waits(check(make)) == {}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_arguments_that_are_resized() -> None:
    """Some calls fit, others make the memory larger, which only eager can do."""

    def make() -> Program:
        kept = torch.zeros(24)

        def step(x: torch.Tensor) -> Any:
            h = torch.tanh(x)
            room = kept[: 4 * 4].view(4, 4)
            torch.mul(h, 2, out=room)
            fresh = torch.empty(0)
            torch.add(h, 1, out=fresh)
            return room, fresh

        return Program(step, lambda i: (batch(i, 4 if i < 6 or i % 3 else 2 + i % 5),), lambda: kept)

    check(make, n=20, max_fallbacks=12, phase=None)


@pytest.mark.parametrize("name", ["Adam", "Adamax"])
def test_optimizers_that_write_into_out_arguments(name: str) -> None:
    def make() -> Program:
        model = mlp()
        options = {"amsgrad": True} if name == "Adam" else {}
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=False, **options)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return Program(step, lambda i: (batch(i),), lambda: (model, optimizer))

    assert waits(check(make)) == {}


def test_an_op_that_is_python_code_of_pytorch() -> None:
    """Its ops are the step's."""

    def make() -> Program:
        head = nn.Linear(4, 5)

        def step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.linear_cross_entropy(torch.tanh(x), head.weight, target, linear_bias=head.bias)
            loss.backward()
            with torch.no_grad():
                for p in head.parameters():
                    p.sub_(p.grad, alpha=0.1)
                    p.grad = None
            return loss.detach()

        return Program(step, lambda i: (batch(i), torch.arange(6) % 5), lambda: head)

    assert waits(check(make)) == {}
