"""Errors: of kernels, of the user's code, of signals. State, type and text as eager, and training goes on."""

from __future__ import annotations

import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program, check, exact, run
from tests.coexec.programs import batch, function_program, labels, mlp

BAD = {4, 7, 11}  # calls in which the program meets its error


def test_index_error_of_an_embedding_caught_in_the_step() -> None:
    def make() -> Program:
        table = nn.Embedding(5, 4)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)

        def step(ids: torch.Tensor) -> Any:
            optimizer.zero_grad()
            try:
                h = table(ids)
                note = "fine"
            except IndexError as error:
                h, note = table(ids.clamp(max=4)), str(error)
            h.pow(2).sum().backward()
            optimizer.step()
            return note

        return Program(step, lambda i: (torch.tensor([0, 1, 9 if i in BAD else 2]),), lambda: (table, optimizer))

    check(make, n=14)


def test_index_error_of_an_embedding_that_leaves_the_step() -> None:
    def make() -> Program:
        table = nn.Embedding(5, 4)
        log: list[str] = []

        def step(ids: torch.Tensor) -> torch.Tensor:
            h = table(ids).sum()
            log.append("after")
            return h * 2

        return Program(step, lambda i: (torch.tensor([0, 9 if i in BAD else 2]),), lambda: table)

    check(make, n=14, raises=(IndexError,))


def test_cholesky_retried_with_jitter() -> None:
    def step(x: torch.Tensor) -> Any:
        k = x @ x.t() - torch.eye(6) * (0.0 if x[0, 0] > 0 else 5.0)
        jitter, tries = 1e-3, 0
        while True:
            try:
                factor = torch.linalg.cholesky(k + jitter * torch.eye(6))
                return factor.sum(), tries
            except torch.linalg.LinAlgError:
                jitter, tries = jitter * 10, tries + 1

    check(lambda: function_program(step), n=16, max_fallbacks=6)


def test_nll_target_out_of_range_caught_outside_the_function_that_ran_it() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x), y)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            try:
                loss = inner(x, y)
            except IndexError as error:
                return str(error)
            loss.backward()
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i) + (100 if i in BAD else 0)), lambda: (model, optimizer))

    check(make, n=14)


MASKED = torch.arange(24).view(6, 4)

CHECKED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "binary cross entropy": lambda x, n: nn.functional.binary_cross_entropy(x.sigmoid() + (n > 4), torch.zeros(6, 4)),
    "masked_scatter": lambda x, n: x.masked_scatter(n * 5 > MASKED, torch.zeros(20)),
    "masked_scatter_": lambda x, n: x.clone().masked_scatter_(n * 5 > MASKED, torch.zeros(20)),
    "index_reduce": lambda x, n: x.index_reduce(0, torch.arange(2) + n, x[:2] * 2, "amax"),
    "index_reduce_": lambda x, n: x.clone().index_reduce_(0, torch.arange(2) + n, x[:2] * 2, "amax"),
    "put": lambda x, n: x.put(n * 5, torch.ones(1)),
    "embedding_renorm_": lambda x, n: nn.functional.embedding(n, x * 9, max_norm=1.0),
    "max_unpool": lambda x, n: nn.functional.max_unpool2d(x[None, None, :2, :2], (n * 3).expand(1, 1, 2, 2), 2),
}
"""(float32[6, 4], int64[1]) to anything: kernels that raise where the number is above 4."""


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")  # it is said to be in beta
@pytest.mark.parametrize("kind", CHECKED)
def test_what_a_kernel_says_of_values_is_caught_where_it_is_used(kind: str) -> None:
    def make() -> Program:
        def step(x: torch.Tensor, number: torch.Tensor) -> Any:
            h = x * 2.0
            try:
                return CHECKED[kind](h, number), "fine"
            except (RuntimeError, IndexError) as error:
                return h, str(error).splitlines()[0]

        return Program(step, lambda i: (batch(i), torch.tensor([9 if i in BAD else 4])))

    check(make, n=14)


DIVISIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "number % tensor": lambda a, b: 7 % b,
    "fmod": torch.fmod,
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "in place": lambda a, b: a.clone().floor_divide_(b),
}


@pytest.mark.parametrize("kind", DIVISIONS)
def test_an_integer_division_by_zero_is_caught_where_it_is(kind: str) -> None:
    def make() -> Program:
        def step(a: torch.Tensor, b: torch.Tensor) -> Any:
            a = a * 2
            try:
                return DIVISIONS[kind](a, b), "fine"
            except RuntimeError as error:
                return a, str(error)

        return Program(step, lambda i: (labels(i), labels(i) * 0 + (0 if i in BAD else 3)))

    check(make, n=14)


@pytest.mark.parametrize("kind", DIVISIONS)
def test_a_division_of_floats_behind_a_handler_does_not_keep_python_waiting(kind: str) -> None:
    def make() -> Program:
        def step(a: torch.Tensor, b: torch.Tensor, n: torch.Tensor) -> Any:
            try:
                return DIVISIONS[kind](a * 2.0, b), DIVISIONS[kind](a, n * 0.5), n // 3
            finally:
                b = b + 1

        return Program(step, lambda i: (batch(i), batch(i + 1), torch.ones(4, dtype=torch.int64)))

    out = check(make)
    assert out.compiled._runner.wait_counts().get("sync", 0) == 0


def test_dropout_behind_a_handler_does_not_keep_python_waiting() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, share: float) -> Any:
            try:
                h = nn.functional.dropout(x * 2.0, share)
            finally:
                y = x + 1.0
            return h, y

        return Program(step, lambda i: (batch(i), 0.1 + 0.01 * i))

    out = check(make)
    assert out.compiled._runner.wait_counts().get("sync", 0) == 0


def test_a_probability_that_is_none_is_caught_where_it_is_used() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, p: float) -> Any:
            h = x * 2.0
            try:
                mask = torch.empty_like(h).bernoulli_(p)
            except RuntimeError as error:
                return h, str(error).splitlines()[0]
            return h * mask, ""

        return Program(step, lambda i: (batch(i), 1.5 if i % 5 == 4 else 0.5 + 0.01 * i))

    check(make, n=14, max_fallbacks=6)


def test_shape_errors_come_at_once() -> None:
    def make() -> Program:
        log: list[str] = []

        def step(x: torch.Tensor, rows: int) -> Any:
            h = x.t() * 2
            try:
                return h @ x[:rows]
            except RuntimeError as error:
                log.append(str(error))
                return h.sum()
            finally:
                log.append("finally")

        return Program(step, lambda i: (batch(i), 3 if i in BAD else 6), lambda: log)

    check(make, n=14, max_fallbacks=3)


@pytest.mark.parametrize("where", ["before", "middle", "backward", "end"])
def test_user_exceptions_mid_step_leave_eagers_state(where: str) -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        log: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor, bad: bool) -> float:
            if bad and where == "before":
                raise KeyError("before any op")
            h = model(x)
            log.append(h.detach())
            if bad and where == "middle":
                raise KeyError("activations", 3)
            loss = nn.functional.cross_entropy(h, y)
            loss.backward()
            if bad and where == "backward":
                raise KeyError("gradients are there")
            optimizer.step()
            optimizer.zero_grad()
            if bad and where == "end":
                raise KeyError("updated already")
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i), i in BAD), lambda: (model, optimizer, log[-2:]))

    check(make, n=16, raises=(KeyError,), max_fallbacks=4)


def test_an_exception_in_a_hook_leaves_backward() -> None:
    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor, bad: bool) -> Any:
            h = x * w

            def hook(g: torch.Tensor) -> None:
                if bad:
                    raise ValueError("from a hook")

            h.register_hook(hook)
            h.exp().sum().backward()
            return w.grad.sum()

        return Program(step, lambda i: (batch(i), i in BAD), lambda: w)

    check(make, n=14, raises=(ValueError,), max_fallbacks=4)


def test_an_exception_in_a_custom_backward() -> None:
    class Picky(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, bad: bool) -> torch.Tensor:
            ctx.bad = bad
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            if ctx.bad:
                raise ArithmeticError("no gradient today")
            return g * 2, None

    def make() -> Program:
        w = torch.ones(4, requires_grad=True)

        def step(x: torch.Tensor, bad: bool) -> Any:
            w.grad = None
            Picky.apply(x * w, bad).sum().backward()
            return w.grad.clone()

        return Program(step, lambda i: (batch(i), i in BAD), lambda: w)

    check(make, n=14, raises=(ArithmeticError,), max_fallbacks=4)


def test_the_traceback_names_the_users_line() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([99])]

    def step(x: torch.Tensor, bad: bool) -> Any:
        h = x * 2
        return fails(h) if bad else h.sum()

    lines = []
    for f in (step, exact(step)):
        for i in range(8):
            try:
                f(batch(i), i == 6)
            except IndexError as error:
                lines.append([entry.name for entry in traceback.extract_tb(error.__traceback__)][-2:])
    assert lines[0] == lines[1]


def test_exception_objects_hold_real_tensors() -> None:
    def make() -> Program:
        seen: list[Any] = []

        def step(x: torch.Tensor, bad: bool) -> Any:
            h = x.tanh()
            if bad:
                error = RuntimeError("with a tensor")
                error.value = h * 2  # type: ignore[attr-defined]
                seen.append(error.value)  # type: ignore[attr-defined]
                raise error
            return h

        return Program(step, lambda i: (batch(i), i in BAD), lambda: seen)

    check(make, n=14, raises=(RuntimeError,), max_fallbacks=4)


def test_stop_iteration_and_base_exceptions() -> None:
    class Stop(BaseException):
        pass

    state = torch.zeros(4)
    compiled = exact(lambda x, bad: _stopping(x, bad, state, Stop))
    reference = torch.zeros(4)
    for i in range(12):
        for function, _memory in ((compiled, state), (lambda x, bad: _stopping(x, bad, reference, Stop), reference)):
            if i in BAD:
                with pytest.raises(Stop, match="now"):
                    function(batch(i), True)
            else:
                function(batch(i), False)
        assert torch.equal(state, reference), i
    assert compiled.stats().phase == "co-execution"


def _stopping(x: torch.Tensor, bad: bool, memory: torch.Tensor, kind: type[BaseException]) -> None:
    memory.add_(x.sum(0))
    if bad:
        raise kind("now")
    memory.mul_(0.5)


def test_warnings_of_kernels_and_of_the_user() -> None:
    def make() -> Program:
        def step(x: torch.Tensor) -> Any:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                y = x * 2
                warnings.warn("from the step", stacklevel=1)
                z = torch.nn.functional.mse_loss(y, y[0])  # broadcasting is warned about
            return [str(w.message)[:30] for w in caught], z

        return function_program(step)

    check(make)


@pytest.mark.parametrize("delay_s", [0.0005, 0.002, 0.005, 0.01])
def test_keyboard_interrupt_in_the_middle(delay_s: float) -> None:
    """After Ctrl-C the state is one that eager could have: every update of parameter `b` has one of `a` before it."""
    a, b = torch.zeros(64), torch.zeros(64)

    @exact
    def step(x: torch.Tensor) -> float:
        h = x
        for _ in range(60):
            h = torch.tanh(h @ x)
        a.add_(1)
        for _ in range(60):
            h = torch.tanh(h @ x)
        b.add_(1)
        return h.sum().item()

    x = torch.eye(64)
    for _ in range(4):
        step(x)
    interrupted = 0
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(6):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
            try:
                step(x)
                time.sleep(delay_s + 0.001)
            except KeyboardInterrupt:
                interrupted += 1
            assert 0 <= (a[0] - b[0]).item() <= interrupted
            assert bool((a == a[0]).all())
            assert bool((b == b[0]).all())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert interrupted > 0
    before = (a[0] - b[0]).item()
    step(x)
    assert (a[0] - b[0]).item() == before


def test_keyboard_interrupt_while_python_waits_for_the_graph() -> None:
    @exact
    def step(x: torch.Tensor) -> float:
        h = x
        for _ in range(40):
            h = h @ x
        return h.sum().item()  # the signal arrives here

    x = torch.eye(300)
    for _ in range(3):
        step(x)
    previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.005)
        with pytest.raises(KeyboardInterrupt):
            step(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert step(x) == 300.0


def test_a_signal_handler_that_runs_tensor_ops() -> None:
    seen: list[float] = []
    w = torch.ones(32, 32)

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(100):
            h = torch.tanh(h @ w)
        return h.sum()

    x = torch.eye(32)
    expected = step(x)
    for _ in range(3):
        step(x)
    previous = signal.signal(signal.SIGALRM, lambda *_: seen.append((w * 2).sum().item()))
    try:
        for _ in range(4):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            assert torch.equal(step(x), expected)
            time.sleep(0.003)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert seen == [2048.0] * 4


def test_errors_inside_a_called_compiled_step_with_threads_alive() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        if x[0, 0].item() > 1e9:
            raise OverflowError
        return x * 2

    compiled = exact(step)
    for i in range(5):
        compiled(batch(i))
    with pytest.raises(OverflowError):
        compiled(batch(0) + 1e10)
    assert torch.equal(compiled(batch(1)), batch(1) * 2)
    assert threading.active_count() >= 1


def test_materialize_makes_a_value_ordinary_at_once() -> None:
    def step(x: torch.Tensor) -> Any:
        h = coexec.materialize(x * 2)
        pointer = h.data_ptr() != 0
        return pointer, h + 1

    check(lambda: function_program(step))


def test_anomaly_mode_names_the_forward_line() -> None:
    def make() -> Program:
        w = torch.zeros(4, requires_grad=True)

        def step(x: torch.Tensor, bad: bool) -> Any:
            w.grad = None
            with torch.autograd.detect_anomaly(check_nan=True):
                y = (x.abs() * w).sqrt() if bad else x * w
                y.sum().backward()
            return w.grad

        return Program(step, lambda i: (batch(i) * 0, i in BAD), lambda: w)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        eager, got = run(make, 10, None), run(make, 10, exact)
    assert [type(e) for e in eager.errors] == [type(e) for e in got.errors] == [RuntimeError] * 2
    assert [str(e) for e in eager.errors] == [str(e) for e in got.errors]


def test_after_a_kernels_error_gradients_and_counters_are_eagers() -> None:
    """Python came through backward and the optimizer before it heard of the error."""

    def make() -> Program:
        table, head = nn.Embedding(5, 4), nn.Linear(4, 2)
        optimizer = torch.optim.Adam([*table.parameters(), *head.parameters()], lr=0.1)
        raised = [0]

        def step(ids: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = head(table(ids)).pow(2).sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        def watch() -> Any:
            grads = [p.grad for p in (*table.parameters(), *head.parameters())]
            return table, head, optimizer, grads, raised

        return Program(step, lambda i: (torch.tensor([0, 9 if i in BAD else 2]),), watch)

    got = check(make, n=14, raises=(IndexError,), max_fallbacks=3)
    assert got.stats is not None
    assert got.stats.fallbacks == {"kernel error": 3}


def test_after_a_kernels_error_accumulated_gradients_stay() -> None:
    def make() -> Program:
        w, ids_of = torch.ones(5, 4, requires_grad=True), [0]
        w.grad = torch.full((5, 4), 0.5)

        def step(ids: torch.Tensor) -> torch.Tensor:
            ids_of[0] += 1
            (w * 2)[ids].sum().backward()
            w.grad.mul_(0.5)
            return w.sum().detach()

        return Program(step, lambda i: (torch.tensor([0, 9 if i in BAD else 2]),), lambda: (w, w.grad, ids_of))

    check(make, n=14, raises=(IndexError,), max_fallbacks=3)


def test_a_late_error_that_a_later_handler_swallows() -> None:
    """Eager would not have come to that handler: the error leaves the step."""

    def make() -> Program:
        table = torch.randn(5, 4)

        def step(x: torch.Tensor, ids: torch.Tensor, new: bool) -> torch.Tensor:
            doubled = x * 2
            nn.functional.embedding(ids, table)
            part = doubled[1:]
            try:
                if new:
                    torch.cos(x)
            except IndexError:
                pass
            return part + 1

        return Program(step, lambda i: (batch(i), torch.tensor([9 if i in BAD else 1]), i in BAD))

    check(make, n=14, raises=(IndexError,))
