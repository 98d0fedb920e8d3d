"""What happens around a step: other threads, processes, replaced modules, compiled models, wrappers."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import pickle
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import coexec
from coexec.errors import CoexecError, NotCallableError, ReentrantStepError
from tests.coexec.harness import Program, check, exact, seed_all
from tests.coexec.programs import batch, function_program, labels, mlp, training

# ---------------------------------------------------------------------------------------------------------- threads


def test_a_thread_that_reads_parameters_while_the_step_trains() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    reference_optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step, plain = exact(training(model, optimizer)), training(reference, reference_optimizer)
    stop, errors, sums = threading.Event(), [], []

    def monitor() -> None:
        while not stop.is_set():
            try:
                sums.append(sum(p.detach().sum().item() for p in model.parameters()))
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=monitor)
    thread.start()
    try:
        for i in range(60):
            assert step(batch(i), labels(i)) == plain(batch(i), labels(i))
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert sums
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_thread_that_reads_a_metric_of_a_running_step() -> None:
    shared: dict[str, torch.Tensor] = {}
    ready, errors, seen = threading.Event(), [], []

    def reader() -> None:
        try:
            for _ in range(20):
                ready.wait(5)
                ready.clear()
                seen.append(shared["loss"].item())
        except BaseException as error:
            errors.append(error)

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * 2).sum()
        shared["loss"] = loss
        ready.set()  # the reader may touch a value in flight
        for _ in range(30):
            x = torch.tanh(x)
        return x

    thread = threading.Thread(target=reader)
    thread.start()
    for i in range(20):
        step(torch.full((3,), float(i)))
        time.sleep(0.002)
    thread.join(10)
    assert not thread.is_alive()
    assert not errors
    assert all(value % 6 == 0 for value in seen)


def test_two_threads_take_turns_in_one_step() -> None:
    total = torch.zeros(4)

    @exact
    def step(x: torch.Tensor) -> float:
        before = total.sum()
        total.add_(x)
        return (total.sum() - before).item()

    results: list[float] = []

    def work() -> None:
        results.extend(step(torch.ones(4)) for _ in range(25))

    threads = [threading.Thread(target=work) for _ in range(2)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert results == [4.0] * 50
    assert total.tolist() == [50.0] * 4


def test_two_steps_on_two_threads_at_once() -> None:
    def work(k: int, out: dict[int, Any]) -> None:
        generator = torch.Generator().manual_seed(k)
        w = torch.randn(8, 8, generator=generator)
        step = exact(lambda x: torch.tanh(x @ w).sum().item())
        plain = [torch.tanh(torch.full((3, 8), i * 0.1) @ w).sum().item() for i in range(30)]
        out[k] = ([step(torch.full((3, 8), i * 0.1)) for i in range(30)], plain, step.stats().phase)

    out: dict[int, Any] = {}
    threads = [threading.Thread(target=work, args=(k, out)) for k in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for got, plain, phase in out.values():
        assert got == plain
        assert phase == "co-execution"


def test_threads_started_inside_the_step() -> None:
    def step(x: torch.Tensor) -> Any:
        h = x.tanh()
        out: list[Any] = [None, None]

        def work(k: int) -> None:
            out[k] = (h * (k + 1)).sum().item()

        threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return out, h + 1

    check(lambda: function_program(step))


def test_a_thread_pool_preprocesses_the_next_batch() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:

        def make() -> Program:
            pending = [pool.submit(batch, 0)]

            def step(i: int) -> torch.Tensor:
                x = pending[0].result()
                pending[0] = pool.submit(lambda: batch(i + 1) * 2)
                return (x @ x.t()).sum()

            return Program(step, lambda i: (i,))

        check(make)


# -------------------------------------------------------------------------------------------------------- processes


def test_fork_in_the_middle_of_a_step() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        codes: list[int] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> float:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            expected = model[0].weight.grad.sum()
            if len(codes) % 3 == 2:
                pid = os.fork()
                if pid == 0:
                    try:
                        good = bool(torch.isfinite(model[0].weight.grad).all()) and expected.item() < 1e9
                        good &= float(loss.detach() * 2) > 0
                        os._exit(0 if good else 3)
                    finally:
                        os._exit(4)
                codes.append(os.waitpid(pid, 0)[1])
            else:
                codes.append(0)
            optimizer.step()
            return loss.item()

        return Program(step, lambda i: (batch(i), labels(i)), lambda: (model, codes))

    out = check(make, n=14)
    assert out.program is not None
    assert set(out.program.watch()[1]) == {0}


def test_fork_between_steps_and_step_in_the_child() -> None:
    model = mlp()
    step = exact(training(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    for i in range(5):
        step(batch(i), labels(i))
    pid = os.fork()
    if pid == 0:
        try:
            value = [step(batch(i), labels(i)) for i in range(5, 10)][-1]
            os._exit(0 if 0 < value < 10 else 3)
        finally:
            os._exit(4)
    assert os.waitpid(pid, 0)[1] == 0
    assert step(batch(6), labels(6)) > 0


class Squares(Dataset[torch.Tensor]):
    """Numbers and their squares."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i), float(i * i)])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_data_loader_workers(workers: int) -> None:
    @exact
    def step(x: torch.Tensor) -> float:
        return (x * 2).sum().item()

    for _ in range(2):
        total = 0.0
        for x in DataLoader(Squares(), batch_size=4, num_workers=workers):
            total += step(x)
        assert total == 2 * sum(i + i * i for i in range(24))
    assert step.stats().phase == "co-execution"


def test_data_loader_iterated_inside_the_step() -> None:
    @exact
    def epoch() -> float:
        return sum((x * 2).sum().item() for x in DataLoader(Squares(), batch_size=8))

    assert [epoch() for _ in range(6)] == [2.0 * sum(i + i * i for i in range(24))] * 6


# ------------------------------------------------------------------------------------------- things that are replaced


def test_modules_replaced_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def args(i: int) -> tuple[Any, ...]:
            if i == 5:
                model[1] = nn.GELU()
            if i == 8:
                model[0] = nn.Linear(4, 8)
            if i == 10:
                model.eval()
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=16, max_fallbacks=4)


def test_load_state_dict_between_steps() -> None:
    def make() -> Program:
        model = mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        saved: list[Any] = []

        def args(i: int) -> tuple[Any, ...]:
            if i == 4:
                saved[:] = [copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())]
            if i in (7, 10):
                model.load_state_dict(saved[0], assign=i == 10)
                optimizer.load_state_dict(saved[1])
            return batch(i), labels(i)

        return Program(training(model, optimizer), args, lambda: (model, optimizer))

    check(make, n=16)


@pytest.mark.parametrize("how", ["data", "setattr", "tied", "storage", "copy"])
def test_a_parameter_is_replaced(how: str) -> None:
    def make() -> Program:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) - x).pow(2).mean()
            grads = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, g in zip(model.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return loss.detach()

        def args(i: int) -> tuple[Any, ...]:
            if i == 6 and how == "data":
                model[0].weight.data = torch.ones(4, 4) * 0.1
            elif i == 6 and how == "setattr":
                model[0].weight = nn.Parameter(torch.ones(4, 4) * 0.1)
            elif i == 6 and how == "tied":
                model[2].weight = model[0].weight
            elif i == 6 and how == "storage":
                model[2].weight.data = model[0].weight.data.view(4, 4)
            elif i == 6 and how == "copy":
                model[0].weight.data.copy_(torch.eye(4))
            return (batch(i),)

        return Program(step, args, lambda: model)

    check(make, n=12)


def test_a_buffer_is_reassigned_inside_the_step() -> None:
    def make() -> Program:
        layer = nn.Module()
        layer.register_buffer("cache", torch.zeros(4))

        def step(x: torch.Tensor) -> torch.Tensor:
            layer.cache = layer.cache * 0.9 + x.mean(0)
            layer.cache[0] = 1.0
            return layer.cache.sum()

        return Program(step, lambda i: (batch(i),), lambda: layer)

    check(make)


def test_a_parameter_that_moves_to_another_thread_count() -> None:
    def make() -> Program:
        def args(i: int) -> tuple[Any, ...]:
            torch.set_num_threads(2 if i >= 5 else 1)
            return (batch(i, 64, 64),)

        return Program(lambda x: (x @ x).sum(0), args)

    check(make)


# ------------------------------------------------------------------------------------------------- compiled elsewhere


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_a_model_under_torch_compile_inside_the_step(backend: str) -> None:
    def make() -> Program:
        torch._dynamo.reset()
        model = mlp()
        compiled = torch.compile(model, backend=backend)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Program(training(compiled, optimizer), lambda i: (batch(i), labels(i)), lambda: (model, optimizer))  # type: ignore[arg-type]

    check(make)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_compile_still_compiles_outside_of_steps() -> None:
    from torch._dynamo.testing import CompileCounter

    torch.compiler.set_stance("default")  # whatever earlier tests left
    torch._dynamo.reset()
    counter = CompileCounter()
    outside = torch.compile(lambda x: torch.relu(x) + 1, backend=counter)
    step = exact(lambda x: x * 2)
    for i in range(5):
        step(batch(i))
        outside(batch(i))
    assert counter.frame_count == 1


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_steps_on_several_threads_leave_torch_compile_switched_on() -> None:
    import torch._dynamo.eval_frame as frames

    def work() -> None:
        step = exact(lambda x: torch.tanh(x @ x).sum().item())
        for _ in range(100):
            step(torch.ones(8, 8))

    threads = [threading.Thread(target=work) for _ in range(3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    stance, frames._stance = frames._stance.stance, frames.DynamoStance()
    assert stance == "default"


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_torch_compile_called_for_the_first_time_inside_a_step() -> None:
    def make() -> Program:
        model, box, calls = mlp(), [], [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            if calls[0] == 6:
                box.append(torch.compile(model, backend="aot_eager"))
            h = x * 2
            return (box[0] if box else model)(h).sum()

        return Program(step, lambda i: (batch(i),))

    check(make, n=14)


def test_scripted_and_traced_modules() -> None:
    def make() -> Program:
        model = torch.jit.trace(mlp(), batch(0))

        def step(x: torch.Tensor) -> Any:
            return model(x).sum().item(), model(x * 2)

        return Program(step, lambda i: (batch(i),))

    check(make, phase=None, max_fallbacks=10, min_co_executed=0)


def test_fx_and_export_inside_a_step() -> None:
    def make() -> Program:
        graph = torch.fx.symbolic_trace(mlp())
        return Program(lambda x: graph(x).sum(0), lambda i: (batch(i),), lambda: graph)

    check(make)


def test_profiler_annotations_are_present() -> None:
    model = mlp()
    step = exact(training(_annotated(model), torch.optim.SGD(model.parameters(), lr=0.1)))
    for i in range(4):
        step(batch(i), labels(i))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for i in range(3):
            step(batch(i), labels(i))
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["my forward"] == 3


def _annotated(model: nn.Module) -> Any:
    def forward(x: torch.Tensor) -> Any:
        with torch.profiler.record_function("my forward"):
            return model(x)

    return forward


# ------------------------------------------------------------------------------------------------ the public wrappers


def test_with_block_around_a_loop_body() -> None:
    def loop(wrapped: bool) -> tuple[list[float], list[torch.Tensor], Any]:
        seed_all(0)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        block: Any = None
        losses = []
        for i in range(12):
            block = coexec.step("loop", backend="replay", numerics="exact") if wrapped else None
            with block if block is not None else torch.enable_grad():
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(batch(i)), labels(i))
                loss.backward()
                optimizer.step()
                if i == 7:
                    continue
                losses.append(loss.item())
        return losses, [p.detach() for p in model.parameters()], block

    eager, got = loop(False), loop(True)
    assert eager[0] == got[0]
    assert all(torch.equal(a, b) for a, b in zip(eager[1], got[1], strict=True))
    stats = got[2].stats()
    assert stats.phase == "co-execution"
    assert stats.iterations == 12


def test_with_block_that_raises() -> None:
    w, raised = torch.zeros(2), []
    for i in range(8):
        try:
            with coexec.step("raising", backend="replay", numerics="exact") as block:
                w.add_(1)
                if i == 5:
                    raise ValueError("in the block")
                w.mul_(1)
        except ValueError as error:
            raised.append((i, str(error)))
    assert raised == [(5, "in the block")]
    assert w.tolist() == [8.0, 8.0]
    assert block.stats().phase == "co-execution"


def test_with_block_left_by_return_and_break() -> None:
    def once(i: int) -> torch.Tensor | None:
        while True:
            with coexec.step("leaving", backend="replay", numerics="exact"):
                x = torch.ones(3) * i
                if i % 2:
                    return x + 1
                break
        return None

    for i in range(10):
        value = once(i)
        assert value is None if i % 2 == 0 else value is not None and value.tolist() == [i + 1.0] * 3


def test_bound_methods_and_methods_under_the_decorator() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
            return training(self.model, self.optimizer)(x, y)

        decorated = coexec.compile(backend="replay", numerics="exact")(step)

    def make(kind: str) -> Program:
        trainer = Trainer()
        step = trainer.step if kind == "bound" else lambda x, y: Trainer.step(trainer, x, y)
        return Program(step, lambda i: (batch(i), labels(i)), lambda: trainer.model)

    check(lambda: make("bound"))
    seed_all(0)
    a = Trainer()
    b = copy.deepcopy(a)
    for i in range(8):
        assert a.decorated(batch(i), labels(i)) == b.step(batch(i), labels(i))
    assert Trainer.decorated.stats().phase == "co-execution"


def test_static_and_class_methods() -> None:
    class Maths:
        factor = 2.0

        @staticmethod
        @coexec.compile(backend="replay", numerics="exact")
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @classmethod
        def scale(cls, x: torch.Tensor) -> torch.Tensor:
            return x * cls.factor

    scale = exact(Maths.scale)
    for i in range(6):
        assert torch.equal(Maths.double(batch(i)), batch(i) * 2)
        assert torch.equal(scale(batch(i)), batch(i) * 2)


def test_a_module_wrapper_is_the_module() -> None:
    seed_all(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    wrapped = exact(model)
    reference = copy.deepcopy(model)
    for i in range(8):
        assert torch.equal(wrapped(batch(i)), reference(batch(i)))
    assert wrapped.stats().phase == "co-execution"
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert [id(p) for p in wrapped.parameters()] == [id(p) for p in model.parameters()]
    assert isinstance(wrapped, nn.Module)
    assert repr(wrapped) == repr(model)
    assert wrapped.eval().training is False
    assert model.training is False
    assert wrapped.train() is wrapped
    assert [name for name, _ in wrapped.named_children()] == ["0", "1", "2"]
    wrapped.extra = 3
    assert model.extra == 3
    del wrapped.extra
    assert not hasattr(model, "extra")
    wrapped.load_state_dict(reference.state_dict())
    assert wrapped.double() is not None
    assert next(model.parameters()).dtype == torch.float64


def test_a_module_wrapper_of_a_container_is_a_container() -> None:
    model = mlp()
    wrapped = exact(model)
    assert len(wrapped) == 3
    assert wrapped[0] is model[0]
    assert list(wrapped) == list(model)


def test_a_module_wrapper_survives_copy_and_pickle() -> None:
    seed_all(0)
    wrapped = exact(mlp())
    for i in range(4):
        wrapped(batch(i))
    for twin in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped)), copy.copy(wrapped)):
        for i in range(5):
            assert torch.equal(twin(batch(i)), wrapped(batch(i)))
        assert list(twin.state_dict()) == list(wrapped.state_dict())
    assert next(copy.deepcopy(wrapped).parameters()) is not next(wrapped.parameters())


def test_a_module_wrapper_inside_another_module() -> None:
    def make() -> Program:
        inner = mlp(4, 8, 4)
        outer = nn.Sequential(exact(inner), nn.Linear(4, 3))
        optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
        return Program(training(outer, optimizer), lambda i: (batch(i), labels(i)), lambda: (inner, optimizer))

    program = make()
    assert len(list(program.watch()[0].parameters())) == 4
    check(make)


def module_level_step(x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Doubles."""
    return x * scale


def test_a_compiled_function_keeps_name_signature_and_can_be_pickled() -> None:
    step = exact(module_level_step)
    assert step.__name__ == "module_level_step"
    assert step.__doc__ == "Doubles."
    assert inspect.signature(step) == inspect.signature(module_level_step)
    assert step.__wrapped__ is module_level_step
    assert "module_level_step" in repr(step)
    for twin in (pickle.loads(pickle.dumps(step)), copy.deepcopy(step), copy.copy(step), functools.partial(step)):
        for i in range(4):
            assert torch.equal(twin(batch(i), scale=3.0), batch(i) * 3)


def test_decorators_with_and_without_arguments() -> None:
    @coexec.compile
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @coexec.compile()
    def called(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @coexec.compile(backend="replay", numerics="exact", mode="lazy", dynamic=True)
    def optioned(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    for i in range(5):
        for f in (plain, called, optioned):
            assert torch.equal(f(batch(i)), batch(i) + 1)
    assert coexec.compile(plain) is plain


def test_nesting_inlines_the_inner_step() -> None:
    inner = exact(lambda x: x.tanh() * 2)

    def make() -> Program:
        return function_program(lambda x: inner(x).sum() + inner(x + 1).mean())

    out = check(make)
    assert out.stats is not None
    assert out.stats.phase == "co-execution"


def test_a_step_called_from_itself_is_an_error_that_names_it() -> None:
    depth = [0]

    def again(x: torch.Tensor) -> torch.Tensor:
        depth[0] += 1
        return step(x - 1) if depth[0] % 2 else x

    step = exact(again)
    for _ in range(3):
        with pytest.raises(ReentrantStepError, match="again"):
            step(torch.ones(2))
        depth[0] = 0
    depth[0] = 1
    assert step(torch.ones(2)).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("bad", [3, None.__class__, "text", [1]])
def test_what_cannot_be_called(bad: Any) -> None:
    if callable(bad):
        assert coexec.compile(bad) is not None
    else:
        with pytest.raises(NotCallableError):
            coexec.compile(bad)


def test_unknown_and_wrong_options() -> None:
    with pytest.raises(CoexecError, match="bakend"):
        coexec.compile(lambda x: x, bakend="replay")
    with pytest.raises(CoexecError, match="quick"):
        coexec.compile(lambda x: x, numerics="quick")


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DISABLE", "1")
    step = exact(lambda x: x * 2)
    for i in range(5):
        step(batch(i))
        with coexec.step("disabled"):
            batch(i).sum()
    assert step.stats().co_executed == 0
    monkeypatch.setenv("COEXEC_DISABLE", "0")
    for i in range(5):
        step(batch(i))
    assert step.stats().phase == "co-execution"


def test_eager_mode_runs_the_plain_function() -> None:
    step = exact(lambda x: x * 2, mode="eager")
    for i in range(5):
        assert torch.equal(step(batch(i)), batch(i) * 2)
    assert step.stats().phase == "eager"
    assert step.stats().iterations == 5
    assert step.stats().traced == 0


def test_reset_forgets_and_learns_again() -> None:
    step = exact(lambda x: x * 2)
    for i in range(5):
        step(batch(i))
    step.reset()
    assert step.stats().phase == "tracing"
    assert step.stats().iterations == 0
    for i in range(5):
        step(batch(i))
    coexec.reset()
    assert step.stats().iterations == 0
    assert torch.equal(step(batch(0)), batch(0) * 2)


def test_the_graph_prints_itself() -> None:
    step = exact(lambda x: (x * 2).relu())
    for i in range(5):
        step(batch(i))
    text, dot = str(step.trace_graph), step.trace_graph.to_dot()
    assert "aten::relu" in text
    assert dot.startswith("digraph")
    assert "co-execution" in step.explain()


def test_an_async_function_and_a_generator_function_run_plainly() -> None:
    @exact
    def produce(x: torch.Tensor) -> Any:
        yield x * 2
        yield x * 3

    for i in range(5):
        assert [t.sum().item() for t in produce(batch(i))] == [(batch(i) * k).sum().item() for k in (2, 3)]


def test_keyword_arguments_and_nested_containers() -> None:
    @exact
    def step(data: Any, *more: Any, flag: bool = False, **named: Any) -> Any:
        total = data["x"][0] + sum(more) + named["y"]
        return {"out": total * (2 if flag else 1), "in": data}

    for i in range(10):
        data = {"x": [batch(i), "text"]}
        result = step(data, batch(i + 1), 2, flag=i % 2 == 0, y=torch.ones(4))
        assert result["in"] is data
        assert torch.equal(
            result["out"], (batch(i) + (0 + batch(i + 1) + 2) + torch.ones(4)) * (2 if i % 2 == 0 else 1)
        )
    assert step.stats().phase == "co-execution"
