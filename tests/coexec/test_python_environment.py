"""The interpreter around a step: tracers, garbage collection, coroutines, warnings, introspection while it runs."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program, check, exact, run, seed_all
from tests.coexec.programs import batch, function_program, labels, mlp, training


def trained_twice(around: Any) -> None:
    """Trains eagerly and under coexec with `around()` entered for each call; losses and phase must be right."""
    losses: list[list[float]] = []
    for wrap in (lambda f: f, exact):
        seed_all(0)
        model = mlp()
        step = wrap(training(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
        losses.append([around(lambda i=i, step=step: step(batch(i), labels(i))) for i in range(10)])
    assert losses[0] == losses[1]
    assert step.stats().phase == "co-execution"


def test_under_a_python_tracer() -> None:
    events = [0]

    def tracer(frame: Any, event: str, arg: Any) -> Any:
        events[0] += 1
        return tracer

    def traced(call: Any) -> Any:
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            return call()
        finally:
            sys.settrace(before)

    trained_twice(traced)
    assert events[0] > 100


def test_under_a_python_profiler() -> None:
    def profiled(call: Any) -> Any:
        sys.setprofile(lambda *_: None)
        try:
            return call()
        finally:
            sys.setprofile(None)

    trained_twice(profiled)


def test_with_the_garbage_collector_at_work() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(5, 2, 2)
    try:
        trained_twice(lambda call: call())
    finally:
        gc.set_threshold(*threshold)


def test_gc_weakrefs_and_finalizers_inside_the_step() -> None:
    def make() -> Program:
        log: list[str] = []

        def step(x: torch.Tensor) -> Any:
            h = x * 2
            ref = weakref.ref(h, lambda _: log.append("gone"))
            cycle: list[Any] = [h + 1]
            cycle.append(cycle)
            alive = ref() is h
            count = sys.getrefcount(h)
            h = h + 1
            gc.collect()
            objects = sum(type(o) is torch.Tensor for o in gc.get_objects()) > 0
            return alive, count, ref() is None, objects, h, cycle[0]

        return Program(step, lambda i: (batch(i),), lambda: log)

    check(make)


def test_a_finalizer_that_computes() -> None:
    def make() -> Program:
        seen: list[float] = []

        class Holder:
            def __init__(self, t: torch.Tensor) -> None:
                self.t = t

            def __del__(self) -> None:
                seen.append((self.t * 2).sum().item())

        def step(x: torch.Tensor) -> torch.Tensor:
            holder = Holder(x + 1)
            y = holder.t.tanh()
            del holder
            return y

        return Program(step, lambda i: (batch(i),), lambda: seen)

    check(make)


def test_inside_a_coroutine() -> None:
    async def train(wrap: Any) -> list[float]:
        seed_all(0)
        model = mlp()
        step = wrap(training(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        losses = []
        for i in range(8):
            losses.append(step(batch(i), labels(i)))
            await asyncio.sleep(0)
        return losses

    async def both() -> Any:
        return await asyncio.gather(train(lambda f: f), train(exact))

    # seeds interleave, so each run is compared with itself alone
    assert asyncio.run(train(lambda f: f)) == asyncio.run(train(exact))
    assert len(asyncio.run(both())) == 2


def test_a_coroutine_that_awaits_inside_a_block_lets_others_compute() -> None:
    async def inside() -> list[float]:
        out = []
        for i in range(8):
            with coexec.step("awaiting", backend="replay", numerics="exact"):
                h = batch(i) * 2
                await asyncio.sleep(0)
                out.append(h.sum().item())
        return out

    async def beside() -> list[float]:
        out = []
        for i in range(8):
            out.append((batch(i) * 3).sum().item())
            await asyncio.sleep(0)
        return out

    async def both() -> Any:
        return await asyncio.gather(inside(), beside())

    first, second = asyncio.run(both())
    assert first == [(batch(i) * 2).sum().item() for i in range(8)]
    assert second == [(batch(i) * 3).sum().item() for i in range(8)]


def test_a_warning_of_a_kernel_comes_to_python() -> None:
    def make() -> Program:
        caught: list[str] = []

        def step(x: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                y = x[:1, :1].var()
                y.item()
            caught.extend(str(w.message)[:40] for w in seen)
            return y.isnan()

        return Program(step, lambda i: (batch(i),), lambda: caught)

    check(make)


def degrees_of_freedom(x: torch.Tensor) -> torch.Tensor:
    return x[:1, :1].var()  # warns


@pytest.mark.parametrize("action", ["default", "always", "ignore"])
def test_a_warning_of_a_kernel_is_at_its_line_and_filtered_as_in_eager(action: Any) -> None:
    def make() -> Program:
        def step(x: torch.Tensor) -> Any:
            y = degrees_of_freedom(x)
            return y.isnan().item()

        return function_program(step)

    seen = []
    for wrap in (None, exact):
        globals().pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            run(make, 10, wrap)
        seen.append([(w.category, str(w.message), w.filename, w.lineno) for w in caught])
    assert seen[0] == seen[1]
    assert len(seen[0]) == {"default": 1, "always": 10, "ignore": 0}[action]


def test_a_warning_of_a_kernel_that_is_an_error() -> None:
    def make() -> Program:
        def step(x: torch.Tensor, wait: bool) -> Any:
            h = x * 2
            y = degrees_of_freedom(x)
            return (h.sum() + y.isnan()).item() if wait else h

        return Program(step, lambda i: (batch(i), i % 2 == 0))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, got = run(make, 8, None), run(make, 8, exact)
    assert eager.records == got.records
    assert len(got.errors) == 8


def test_a_warning_of_a_kernel_comes_before_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    def make() -> Program:
        def step(x: torch.Tensor, bad: bool) -> Any:
            y = degrees_of_freedom(x)
            return y, x[torch.tensor([99 if bad else 0])]

        return Program(step, lambda i: (batch(i), i == 6))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = run(make, 9, exact)
    assert [type(e) for e in got.errors] == [IndexError]
    assert len(caught) == 9
    assert "degrees of freedom" not in capfd.readouterr().err


def test_recursion_error_is_the_users_to_catch() -> None:
    def step(x: torch.Tensor) -> Any:
        def down(t: torch.Tensor) -> torch.Tensor:
            return down(t + 1)

        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(len_of_stack() + 60)
        try:
            down(x)
        except RecursionError:
            return x * 2
        finally:
            sys.setrecursionlimit(limit)
        raise AssertionError("no end of the stack")

    check(lambda: function_program(step), phase=None, max_fallbacks=10, min_co_executed=0)


def len_of_stack() -> int:
    """How deep Python is now."""
    frame, n = sys._getframe(), 0
    while frame is not None:
        frame, n = frame.f_back, n + 1  # type: ignore[assignment]
    return n


def test_asking_while_the_step_runs() -> None:
    box: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        box[0].stats(), box[0].explain(), str(box[0].trace_graph), repr(box[0])
        return h + 1

    box.append(exact(step))
    for i in range(8):
        assert torch.equal(box[0](batch(i)), batch(i) * 2 + 1)
    assert box[0].stats().phase == "co-execution"


def test_asking_from_another_thread() -> None:
    step = exact(lambda x: (x * 2).tanh().sum().item())
    stop, errors = threading.Event(), []

    def ask() -> None:
        try:
            while not stop.is_set():
                step.stats(), step.explain(), str(step.trace_graph), step.wait_compiled(0.0)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    for i in range(100):
        step(batch(i % 5, 6 - i % 3))
    stop.set()
    thread.join()
    assert not errors


def test_reset_while_the_step_runs() -> None:
    def step(x: torch.Tensor, reset: bool) -> torch.Tensor:
        h = x * 2
        if reset:
            coexec.reset()
        return h + 1

    compiled = exact(step)
    for i in range(12):
        assert torch.equal(compiled(batch(i), i == 6), batch(i) * 2 + 1)
    assert compiled.stats().phase == "co-execution"


def test_the_step_object_deleted_while_it_runs() -> None:
    box: list[Any] = []

    def step(x: torch.Tensor, last: bool) -> torch.Tensor:
        h = x * 2
        if last:
            box.clear()
            gc.collect()
        return h + 1

    box.append(exact(step))
    for i in range(6):
        result = box[0](batch(i), i == 5)
    assert torch.equal(result, batch(5) * 2 + 1)
    assert not box


def test_steps_on_short_lived_threads() -> None:
    total = torch.zeros(3)

    @exact
    def step(x: torch.Tensor) -> None:
        total.add_(x * 2)

    for _ in range(12):
        thread = threading.Thread(target=step, args=(torch.ones(3),))
        thread.start()
        thread.join()
    assert total.tolist() == [24.0] * 3
    assert step.stats().phase == "co-execution"


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def in_child(step: Any, queue: Any) -> None:
    queue.put([step(torch.full((2,), float(i))).tolist() for i in range(5)])


def test_a_pickled_step_in_a_spawned_process() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=in_child, args=(exact(doubled), queue))
    process.start()
    values = queue.get(timeout=50)
    process.join(20)
    assert process.exitcode == 0
    assert values == [[2.0 * i] * 2 for i in range(5)]


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "vjp"])
def test_a_step_called_from_a_function_transform(transform: str) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x.tanh() * 2).sum()

    def apply(f: Any, x: torch.Tensor) -> Any:
        if transform == "vmap":
            return torch.vmap(f)(x)
        if transform == "grad":
            return torch.func.grad(f)(x)
        if transform == "jvp":
            return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]
        return torch.func.vjp(f, x)[1](torch.ones(()))[0]

    step = exact(body)
    for i in range(8):
        assert torch.equal(apply(step, batch(i)), apply(body, batch(i)))


def test_a_step_recomputed_by_a_checkpoint() -> None:
    def run_with(f: Any) -> Any:
        w = torch.ones(4, requires_grad=True)
        out = []
        for i in range(8):
            h = torch.utils.checkpoint.checkpoint(lambda x: f(x * w).sum(), batch(i), use_reentrant=False)
            (g,) = torch.autograd.grad(h, w)
            out.append(g)
        return torch.stack(out)

    body = lambda x: (x.tanh() * 2).exp()  # noqa: E731
    assert torch.equal(run_with(body), run_with(exact(body)))


def test_a_step_under_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    step = exact(lambda x: (x * 2).sum(0))
    for i in range(5):
        step(batch(i))
    with FakeTensorMode() as mode:
        assert step(mode.from_tensor(batch(0))).shape == (4,)
    assert torch.equal(step(batch(1)), (batch(1) * 2).sum(0))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_step_called_by_compiled_code() -> None:
    torch._dynamo.reset()
    step = exact(lambda x: x.tanh() * 2)
    outer = torch.compile(lambda x: step(x + 1) + 1, backend="aot_eager")
    for i in range(6):
        assert torch.equal(outer(batch(i)), (batch(i) + 1).tanh() * 2 + 1)


def test_two_steps_that_share_a_model() -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train = training(model, optimizer)

        @torch.no_grad()
        def evaluate(x: torch.Tensor, y: torch.Tensor) -> float:
            model.eval()
            accuracy = model(x).argmax(1).eq(y).float().mean().item()
            model.train()
            return accuracy

        steps = {"train": train, "evaluate": evaluate}
        return Program(
            lambda x, y: (steps["train"](x, y), steps["evaluate"](x, y)),
            lambda i: (batch(i), labels(i)),
            lambda: (model, optimizer),
        )

    check(make)
    seed_all(0)
    eager = make()
    expected = [eager.step(batch(i), labels(i)) for i in range(8)]
    seed_all(0)
    apart = make()
    steps = apart.step.__closure__[0].cell_contents  # type: ignore[attr-defined]
    train, evaluate = exact(steps["train"]), exact(steps["evaluate"])
    assert [(train(batch(i), labels(i)), evaluate(batch(i), labels(i))) for i in range(8)] == expected
    assert train.stats().phase == evaluate.stats().phase == "co-execution"


def test_denormal_numbers_are_flushed_where_the_caller_wants_it() -> None:
    """A mode of the processor, of each thread."""
    step = exact(lambda x: x * 0.5)
    x = torch.full((4,), 1.5e-38)
    for _ in range(6):
        step(x)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert step(x)[0].item() == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert step(x)[0].item() > 0.0
    assert step.stats().co_executed >= 6


def test_kernels_run_under_the_flags_of_their_place() -> None:
    """oneDNN's convolution rounds otherwise than PyTorch's own."""

    def make() -> Program:
        torch.manual_seed(0)
        convolution = torch.nn.Conv2d(8, 8, 3)

        def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            torch._C._set_mkldnn_enabled(False)  # as torch.backends.mkldnn.flags does, which warns of another flag
            try:
                plain = convolution(x)
            finally:
                torch._C._set_mkldnn_enabled(True)
            return plain, convolution(x)

        return Program(step, lambda i: (torch.randn(4, 8, 16, 16),))

    check(make)
