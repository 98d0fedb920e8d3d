"""When a step traces, co-executes, gives up and tries again; what its counters say."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from coexec.runtime.policy import Phase, PhasePolicy
from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, function_program, labels, mlp, training


def test_a_plain_program_co_executes_from_the_third_call() -> None:
    out = check(lambda: function_program(lambda x: x.tanh() * 2), n=10, max_fallbacks=0)
    assert out.stats is not None
    assert (out.stats.traced, out.stats.co_executed) == (2, 8)


def test_counters_of_fetches_and_times() -> None:
    def make() -> Program:
        state = torch.zeros(4)

        def step(x: torch.Tensor) -> float:
            y = (x + state.add_(1)).exp()  # of memory that the graph writes: Python cannot know it without waiting
            return y.sum().item() + y.mean().item()

        return Program(step, lambda i: (batch(i),), lambda: state)

    out = check(make, n=10, max_fallbacks=0)
    stats = out.stats
    assert stats is not None
    assert stats.fetches == 2 * stats.co_executed
    assert stats.python_exec_s > 0
    assert stats.graph_exec_s > 0
    assert stats.python_stall_s >= 0
    assert stats.graph_stall_s >= 0


def test_feeds_are_counted() -> None:
    def make() -> Program:
        import numpy as np

        array = np.ones(4, np.float32)
        t = torch.from_numpy(array)
        return Program(lambda x: (x * t).sum(), lambda i: (batch(i),))

    out = check(make)
    assert out.stats is not None
    assert out.stats.feeds == out.stats.co_executed


def new_path_every_call() -> Program:
    ops = [torch.tanh, torch.exp, torch.sin, torch.cos, torch.abs, torch.neg, torch.relu, torch.sigmoid]

    def step(x: torch.Tensor) -> torch.Tensor:
        for k in random.sample(range(8), 8):
            x = ops[k](x)
        for k in random.sample(range(8), 8):
            x = ops[k](x) + 1
        return x

    return function_program(step)


def test_a_program_whose_every_iteration_is_new_ends_eager() -> None:
    check(new_path_every_call, n=36, phase="eager", max_fallbacks=20, min_co_executed=0)


def test_back_to_co_execution_when_it_calms_down() -> None:
    def make() -> Program:
        calls = [0]
        ops = [torch.tanh, torch.exp, torch.sin, torch.cos, torch.abs, torch.neg, torch.relu, torch.sigmoid]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            order = random.sample(range(8), 8) if calls[0] < 20 else range(8)
            for k in order:
                x = ops[k](x)
            return x

        return function_program(step)

    check(make, n=90, max_fallbacks=20)


def test_a_fallback_every_time_is_not_for_ever() -> None:
    """Whatever makes a known path impossible to follow, the step ends up left alone."""

    def make() -> Program:
        calls = [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            return eval(compile("x * 2 + 1", f"file {calls[0]}", "eval"), {"x": x})  # type: ignore[no-any-return]

        return function_program(step)

    check(make, n=60, phase="eager", max_fallbacks=20, min_co_executed=0)


def test_code_compiled_anew_in_each_call_is_the_same_place() -> None:
    source = "def helper(x):\n    def inner(y):\n        return y.tanh()\n    return inner(x) * 2, [1, 2.5, 'text']\n"

    def step(x: torch.Tensor) -> Any:
        names: dict[str, Any] = {"x": x}
        exec(source, names)
        h = eval("helper(x)[0].exp()", names)
        np_view = eval("h.sum().tolist()", {"h": h})  # a barrier
        return h.sum() + eval("sum(h for _ in range(3))", {"h": h}), np_view

    got = check(lambda: function_program(step), n=20)
    assert got.stats is not None
    assert got.stats.co_executed >= 16


def test_code_compiled_anew_is_not_kept() -> None:
    codes: list[weakref.ref[Any]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        code = compile("x * 2 + 1", "same", "eval")
        codes.append(weakref.ref(code))
        return eval(code, {"x": x})  # type: ignore[no-any-return]

    check(lambda: function_program(step), n=20)
    gc.collect()
    assert sum(code() is not None for code in codes) <= 2


NUMBERS = ("full", "scalar_tensor", "linspace", "arange", "tensor", "normal", "fill", "eye")


@pytest.mark.parametrize("make_value", NUMBERS)
def test_a_changing_number_is_no_new_path(make_value: str) -> None:
    def make() -> Program:
        def step(x: torch.Tensor, v: float) -> torch.Tensor:
            t = {
                "full": lambda: torch.full((4,), v),
                "scalar_tensor": lambda: torch.scalar_tensor(v),
                "linspace": lambda: torch.linspace(0, v, 4),
                "arange": lambda: torch.arange(0, 4) * v,
                "tensor": lambda: torch.tensor(v),
                "normal": lambda: torch.normal(v, 1.0, (4,)),
                "fill": lambda: torch.empty(4).fill_(v),
                "eye": lambda: torch.eye(4)[0] * v,
            }[make_value]()
            return x * t

        return Program(step, lambda i: (batch(i), 1.0 + i * 0.37))

    check(make, n=14)


def test_numbers_of_every_type_that_change() -> None:
    def step(x: torch.Tensor, i: int) -> Any:
        return (
            x * i,
            x + 0.1 * i,
            x ** (1 + i % 2),
            x.clamp(-i, i + 0.5),
            torch.add(x, x, alpha=i),
            x.roll(i % 4, 0),
            x.abs().pow(0.1 * i + 1),
            x / (i + 1),
            i - x,
            x > i * 0.1,
            x.masked_fill(x > 0, float(i)),
            nn.functional.leaky_relu(x, 0.01 * i),
            x.index_fill(0, torch.tensor([0]), float(i)),
        )

    check(lambda: Program(step, lambda i: (batch(i), i + 1)), n=14, max_fallbacks=4)


def test_numbers_whose_type_changes() -> None:
    def step(x: torch.Tensor, v: Any) -> torch.Tensor:
        return x.long() * v

    check(lambda: Program(step, lambda i: (batch(i) * 10, [2, 2.5, True, 3][i % 4])), n=20, max_fallbacks=4)


def test_nan_infinity_and_minus_zero_as_numbers() -> None:
    values = [0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-320]
    check(lambda: Program(lambda x, v: (x * v, x + v, torch.full((2,), v)), lambda i: (batch(i), values[i % 6])), n=20)


def test_slices_that_move() -> None:
    def step(x: torch.Tensor, k: int) -> Any:
        return x[k], x[: k + 1].sum(0), x[k:].mean(0), x.narrow(0, k, 1), x.select(1, k % 4)

    check(lambda: Program(step, lambda i: (batch(i), i % 6)), n=24, max_fallbacks=8)


def test_co_execution_costs_no_answer_when_graph_and_python_race() -> None:
    """Slow Python against a fast graph and the other way round."""

    def step(x: torch.Tensor, slow: bool) -> Any:
        h = x
        for k in range(6):
            h = torch.tanh(h @ h.t() @ x)
            if slow and k == 2:
                time.sleep(0.002)
        return h.sum().item(), h

    check(lambda: Program(step, lambda i: (batch(i), i % 2 == 0)), n=16)


def test_hundreds_of_random_programs_of_one_shape() -> None:
    """Random straight-line programs with random rejoining branches, from one interpreter function."""
    ops = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: torch.tanh(a),
        lambda a, b: a.clone().mul_(0.5).add_(b),
        lambda a, b: a.t().contiguous().t(),
        lambda a, b: a[:, :2].repeat(1, 2),
        lambda a, b: a - a.mean(),
        lambda a, b: torch.where(a > 0, a, b),
    ]

    def make() -> Program:
        program = [random.choice(range(8)) for _ in range(12)]

        def step(x: torch.Tensor) -> Any:
            values = [x, x * 2]
            for at, k in enumerate(program):
                if at % 4 == 3 and random.random() < 0.3:
                    continue
                values.append(ops[k](values[-1], values[-2]))
            return values[-1], values[len(values) // 2].sum().item()

        return function_program(step)

    check(make, n=40, phase=None, max_fallbacks=14)


def test_lazy_mode_gives_the_same_results() -> None:
    def make() -> Program:
        model = nn.Sequential(mlp(), nn.Dropout(0.3))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        return Program(training(model, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))

    check(make, wrap=lambda step: exact(step, mode="lazy"))


def test_many_steps_share_one_process() -> None:
    steps = [exact(lambda x, k=k: (x * k).sum().item()) for k in range(12)]
    for _i in range(6):
        for k, step in enumerate(steps):
            assert step(torch.ones(3)) == 3.0 * k
    assert {step.stats().phase for step in steps} == {"co-execution"}


def iterations_of(policy: PhasePolicy, n: int, new_s: float) -> tuple[int, float]:
    """Runs `n` iterations of a program that is new each time; returns how many were tried, and their seconds."""
    tried = 0
    for _ in range(n):
        if policy.start_iteration() is Phase.EAGER:
            policy.rested(1.0)
        else:
            tried += 1
            policy.learned(True, True, new_s)
    return tried, tried * (new_s - 1.0)


@pytest.mark.parametrize("new_s", [1.5, 3.0, 10.0, 40.0])
def test_what_retries_cost_a_program_that_never_settles_is_bounded(new_s: float) -> None:
    policy = PhasePolicy()
    iterations_of(policy, 50, new_s)
    previous, total = 0.0, 0
    for n in (250, 250, 500, 1000, 3000, 10_000):
        tried, cost_s = iterations_of(policy, n, new_s)
        total += tried
        # A window can begin with a retry that its rest pays for later.
        assert cost_s <= policy.PRICE * (n + previous) + policy.RETRIES * (new_s - 1.0)
        previous = n
    assert total >= policy.RETRIES  # it is still tried


def test_a_cheap_retry_comes_back_as_soon_as_ever() -> None:
    policy = PhasePolicy()
    tried = [iterations_of(policy, 1, 1.05)[0] for _ in range(250)]
    retries = [i for i in range(1, 250) if tried[i] and not tried[i - 1]]
    rests = [b - a for a, b in itertools.pairwise(retries)]
    assert retries[0] == policy.PATIENCE + policy.FIRST_REST - 1
    assert rests == [policy.RETRIES - 1 + policy.FIRST_REST * 2, policy.RETRIES - 1 + policy.FIRST_REST * 4]
