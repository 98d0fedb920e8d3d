"""Branches, loops, generators, recursion: what Python decides, also from values of the graph."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.coexec.harness import Program, check
from tests.coexec.programs import batch, function_program, labels, mlp, training


def test_random_branches_that_rejoin() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> float:
            h = x * w
            if random.random() < 0.5:
                h = h.relu()
            elif random.random() < 0.5:
                h = h.sigmoid() + 1
            loss = h.pow(2).mean()
            loss.backward()
            with torch.no_grad():
                w.sub_(0.1 * w.grad)
            w.grad = None
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: w)

    out = check(make, n=24)
    assert out.stats is not None
    assert out.stats.switches >= 1


def test_branch_on_a_value_of_the_graph() -> None:
    def make() -> Program:
        taken: list[str] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            h = x.tanh()
            if h.sum() > 0:
                taken.append("up")
                h = h * 2
            else:
                taken.append("down")
                h = h - 1
            return h.sum(0)

        return Program(step, lambda i: (batch(i),), lambda: taken)

    check(make, n=14)


def test_nested_branches_with_different_depths() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        a = x.sum().item()
        h = x
        if a > 0:
            h = h * 2
            if h.max().item() > 3:
                h = h.clamp(max=3)
                h = h.sqrt().nan_to_num()
        elif a < -2:
            for _ in range(3):
                h = h + 1
        return h @ h.t()

    check(lambda: function_program(step), n=24, max_fallbacks=6)


def test_a_loop_whose_trip_count_varies() -> None:
    def make() -> Program:
        w = torch.ones(4, 4) * 0.1

        def step(x: torch.Tensor, n: int) -> torch.Tensor:
            h = x
            for _ in range(n):
                h = torch.tanh(h @ w + x)
            return h.sum(0)

        return Program(step, lambda i: (batch(i), 1 + (i * 7) % 4), lambda: w)

    check(make, n=20, max_fallbacks=4)


def test_while_on_a_tensor_value() -> None:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        h, n = x.abs().sum() + 1, 0
        while h > 1:
            h = h / 3
            n += 1
        return h, n

    check(lambda: function_program(step), n=14, max_fallbacks=4)


def test_newton_iterations_to_a_tolerance() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        target = x.abs().sum()
        guess = target.clone()
        for _ in range(50):
            new = 0.5 * (guess + target / guess)
            if (new - guess).abs().item() < 1e-5:
                break
            guess = new
        else:
            raise AssertionError("did not converge")
        return guess

    check(lambda: function_program(step), n=16, max_fallbacks=6)


def test_break_continue_and_else() -> None:
    def step(x: torch.Tensor) -> Any:
        seen = []
        for row in x:
            if row[0] < -0.5:
                continue
            if row.sum() > 2.5:
                break
            seen.append(row * 2)
        else:
            seen.append(torch.zeros(4))
        return seen

    check(lambda: function_program(step), n=24, phase=None, max_fallbacks=24, min_co_executed=0)


def test_generators_send_and_return() -> None:
    def search(x: torch.Tensor) -> Iterator[torch.Tensor]:
        scale = 1.0
        while scale > 0.1:
            answer = yield x * scale  # type: ignore[misc]
            scale *= 0.5 if answer else 0.25
        return x.sum()  # type: ignore[return-value]

    def step(x: torch.Tensor) -> Any:
        gen = search(x)
        seen, value = [], next(gen)
        try:
            while True:
                seen.append(value.norm().item())
                value = gen.send(seen[-1] > 2)  # type: ignore[attr-defined]
        except StopIteration as stop:
            return seen, stop.value

    check(lambda: function_program(step), n=16, max_fallbacks=6)


def test_a_generator_that_lives_across_calls() -> None:
    def make() -> Program:
        def produce() -> Iterator[torch.Tensor]:
            h = torch.zeros(4)
            while True:
                h = torch.tanh(h + 0.1)
                yield h

        source = produce()

        def step(x: torch.Tensor) -> torch.Tensor:
            return next(source) * x

        return Program(step, lambda i: (batch(i),))

    check(make)


def test_recursion() -> None:
    def tree(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth == 0 or x.shape[0] == 1:
            return x.sum(0)
        half = x.shape[0] // 2
        return torch.tanh(tree(x[:half], depth - 1) - tree(x[half:], depth - 1))

    def make() -> Program:
        return Program(lambda x, d: tree(x, d), lambda i: (batch(i), 1 + i % 3))

    check(make, n=18, max_fallbacks=4)


def test_closures_lambdas_partials_and_comprehensions() -> None:
    def step(x: torch.Tensor) -> Any:
        scale = 2.0

        def inner(t: torch.Tensor) -> torch.Tensor:
            return t * scale

        functions = [inner, lambda t: t + 1, functools.partial(torch.mul, other=3), torch.relu]
        values = {k: f(x).mean() for k, f in enumerate(functions)}
        total = functools.reduce(lambda a, b: a + b, values.values())
        return sorted(v.item() for v in values.values()), total

    check(lambda: function_program(step))


def test_a_list_of_layers_chosen_at_random() -> None:
    def make() -> Program:
        experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> float:
            optimizer.zero_grad()
            h = x
            for _ in range(2):
                h = experts[random.randrange(3)](h)
            loss = h.pow(2).mean()
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i),), lambda: (experts, optimizer))

    check(make, n=40, phase=None, max_fallbacks=12, min_co_executed=2)


def test_early_return() -> None:
    def step(x: torch.Tensor) -> Any:
        h = x.tanh()
        if h.sum().item() < 0:
            return None
        return h.sum()

    check(lambda: function_program(step), n=14)


def test_an_iteration_without_any_op() -> None:
    calls = [0]

    def step(x: torch.Tensor) -> Any:
        calls[0] += 1
        return x * 2 if calls[0] % 3 else "skipped"

    check(lambda: function_program(step), n=12)


def test_a_step_without_tensors() -> None:
    check(lambda: Program(lambda i: i + 1, lambda i: (i,)))


def test_python_state_machine_and_globals() -> None:
    def make() -> Program:
        state = {"mode": "warm", "n": 0, "names": set()}
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor) -> float:
            state["n"] += 1
            state["mode"] = {"warm": "hot", "hot": "cold", "cold": "warm"}[state["mode"]]
            state["names"].add(state["mode"])
            h = x * w * {"warm": 1.0, "hot": 2.0, "cold": 0.5}[state["mode"]]
            return h.sum().item()

        return Program(step, lambda i: (batch(i),), lambda: state)

    check(make)


def test_with_blocks_run_their_exits() -> None:
    def make() -> Program:
        log: list[str] = []

        @contextlib.contextmanager
        def span(name: str) -> Iterator[None]:
            log.append(f"enter {name}")
            try:
                yield
            finally:
                log.append(f"exit {name}")

        def step(x: torch.Tensor) -> torch.Tensor:
            with span("outer"), torch.no_grad():
                y = x * 2
                with span("inner"), contextlib.suppress(ZeroDivisionError):
                    y = y + 1
                    if y.sum() > 0:
                        raise ZeroDivisionError
                    y = y - 1
            return y

        return Program(step, lambda i: (batch(i),), lambda: log)

    check(make, n=14)


def test_dynamic_code_and_monkey_patches() -> None:
    def make() -> Program:
        model = mlp()
        model[1].forward = lambda x: x.clamp(min=0.1)  # type: ignore[method-assign]
        scope: dict[str, Any] = {}
        exec("def extra(t):\n    return (t * 2).sum()\n", scope)

        def step(x: torch.Tensor) -> Any:
            return model(x).sum().item(), scope["extra"](x)

        return Program(step, lambda i: (batch(i),), lambda: model)

    check(make)


def test_functions_defined_anew_in_every_call() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        class Layer(nn.Module):
            def forward(self, t: torch.Tensor) -> torch.Tensor:
                return t.tanh() * 2

        def local(t: torch.Tensor) -> torch.Tensor:
            return t + 1

        return local(Layer()(x))

    check(lambda: function_program(step))


def test_code_of_another_text_in_every_call_is_new_code() -> None:
    def make() -> Program:
        calls = [0]

        def step(x: torch.Tensor) -> Any:
            calls[0] += 1
            return eval(f"(x * 2, 'call {calls[0]}')[0].sum()", {"x": x})

        return function_program(step)

    check(make, n=30, phase="eager", max_fallbacks=30, min_co_executed=0)


def test_the_schedule_flips_a_branch_late() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        plain, calls = training(model, optimizer), [0]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            calls[0] += 1
            loss = plain(x, y)
            if calls[0] % 10 == 0:
                with torch.no_grad():
                    return loss, model(x).argmax(1).eq(y).float().mean().item()
            return loss

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make, n=34, max_fallbacks=2)


@pytest.mark.parametrize("depth", [40, 200])
def test_deep_python_stacks(depth: int) -> None:
    def down(x: torch.Tensor, n: int) -> torch.Tensor:
        return x.tanh() + 1 if n == 0 else down(x, n - 1)

    check(lambda: function_program(lambda x: down(x, depth)))
