"""The public wrappers: with-blocks, methods, modules, decorators, options, errors, reset."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from coexec import choose
from coexec.errors import (
    CoexecError,
    ConflictingOptionsError,
    NotAStepError,
    NotCallableError,
    OptionValueError,
    ReentrantStepError,
)
from tests.coexec.harness import Program, check, exact, seed_all
from tests.coexec.programs import batch, function_program, labels, mlp, training


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


def test_a_decorated_method_can_be_asked_through_an_instance() -> None:
    class Trainer:
        @coexec.compile(backend="replay", numerics="exact")
        def step(self, x: torch.Tensor) -> torch.Tensor:
            """Doubles."""
            return x * 2

    a, b = Trainer(), Trainer()
    for i in range(4):
        a.step(batch(i))
        b.step(batch(i))
    assert a.step.stats() == Trainer.step.stats() == b.step.stats()
    assert a.step.stats().iterations == 8
    assert "co-execution" in a.step.explain()
    assert a.step.wait_compiled(1.0)
    assert "aten::mul" in str(a.step.trace_graph)
    assert (a.step.__self__, a.step.__name__, a.step.__doc__) == (a, "step", "Doubles.")
    assert list(inspect.signature(a.step).parameters) == ["x"]
    assert a.step == a.step
    assert a.step != b.step
    assert coexec.compile(a.step) == a.step  # it is compiled already


def test_a_compiled_step_keeps_its_options() -> None:
    step = coexec.compile(lambda x: x * 2, backend="replay", numerics="exact")
    module = coexec.compile(torch.nn.Linear(2, 2), backend="replay")
    assert coexec.compile(step) is step
    assert coexec.compile(step, backend="replay", numerics="exact") is step
    assert coexec.compile(module) is module
    for compiled in (step, module):
        with pytest.raises(ConflictingOptionsError, match=r"is compiled already, with .*overlap=False, not True"):
            coexec.compile(compiled, overlap=True)


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


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.to(torch.float64), lambda m: m.float(), lambda m: m.double(), lambda m: m.half(),
        lambda m: m.bfloat16(), lambda m: m.cpu(), lambda m: m.type(torch.float64), lambda m: m.requires_grad_(False),
        lambda m: m.apply(lambda part: None), lambda m: m.share_memory(), lambda m: m.to_empty(device="cpu"),
        lambda m: m.train(), lambda m: m.eval(), lambda m: m.train(mode=False),
    ],
)  # fmt: skip
def test_a_module_wrapper_is_what_methods_return_that_return_the_module(change: Callable[[Any], Any]) -> None:
    model, reference = mlp(), mlp()
    wrapped = exact(model)
    assert change(wrapped) is wrapped
    change(reference)
    expected, got = ([(p.dtype, p.requires_grad) for p in m.parameters()] for m in (reference, model))
    assert expected == got
    assert wrapped.training == reference.training


def test_a_module_wrapper_returns_what_a_method_of_that_name_returns() -> None:
    class Odd(nn.Linear):
        type = "linear"

        def cpu(self) -> Any:
            return self.weight

    wrapped = exact(Odd(2, 2))
    assert wrapped.type == "linear"
    assert wrapped.cpu() is wrapped.weight


def test_a_module_wrapper_is_as_true_as_the_module() -> None:
    class Switch(nn.Module):
        on = False

        def __bool__(self) -> bool:
            return self.on

    assert exact(nn.Linear(2, 2))
    assert exact(mlp())
    assert not exact(nn.Sequential())
    assert not exact(Switch())


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

    @coexec.compile(backend="replay", numerics="exact", mode="lazy", dynamic=False)
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


@pytest.mark.parametrize("bad", [3, "text", [1]])
def test_what_cannot_be_called(bad: Any) -> None:
    with pytest.raises(NotCallableError):
        coexec.compile(bad)


async def coroutine(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def generator(x: torch.Tensor) -> Any:
    yield x * 2


async def async_generator(x: torch.Tensor) -> Any:
    yield x * 2


class Awaited:
    async def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def produce(self, x: torch.Tensor) -> Any:
        yield x * 2


@pytest.mark.parametrize(
    ("bad", "kind", "advice"),
    [
        (coroutine, "async function 'coroutine'", "with coexec.step"),
        (async_generator, "async function 'async_generator'", "with coexec.step"),
        (Awaited(), "async function", "with coexec.step"),
        (generator, "generator function 'generator'", "with coexec.step"),
        (Awaited().produce, "generator function 'Awaited.produce'", "with coexec.step"),
        (functools.partial(generator), "generator function", "with coexec.step"),
        (nn.Linear, "class 'Linear'", "coexec.compile\\(Model"),
    ],
)
def test_what_does_its_work_after_the_call_is_no_step(bad: Any, kind: str, advice: str) -> None:
    with pytest.raises(NotAStepError, match=f"{kind}.*{advice}"):
        coexec.compile(bad)
    with pytest.raises(TypeError, match=kind):
        coexec.compile(backend="replay")(bad)


def test_unknown_and_wrong_options() -> None:
    with pytest.raises(CoexecError, match="bakend"):
        coexec.compile(lambda x: x, bakend="replay")
    with pytest.raises(CoexecError, match="quick"):
        coexec.compile(lambda x: x, numerics="quick")


def test_misuse_of_the_helpers_is_named() -> None:
    with pytest.raises(CoexecError, match=r"@coexec\.compile"):
        coexec.step(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(CoexecError, match="got int: 3"):
        coexec.materialize(3)  # type: ignore[arg-type]
    step = coexec.compile(lambda x: x, numerics="exact")
    with pytest.raises(CoexecError, match="with numerics='exact', not 'fast': give all"):
        coexec.compile(step, numerics="fast")


def test_the_backend_is_turned_off_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DISABLE", "1")
    torch._dynamo.reset()
    before = dict(choose.counters())
    model = torch.nn.Linear(4, 4)
    assert torch.equal(torch.compile(model, backend="coexec")(batch(0)), model(batch(0)))
    assert dict(choose.counters()) == before


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DISABLE", "1")
    step = exact(lambda x: x * 2)
    for i in range(5):
        step(batch(i))
        with coexec.step("disabled"):
            batch(i).sum()
    assert step.stats().co_executed == 0
    assert step.stats().phase == "eager"
    assert "COEXEC_DISABLE" in step.explain()
    monkeypatch.setenv("COEXEC_DISABLE", "0")
    for i in range(5):
        step(batch(i))
    assert step.stats().phase == "co-execution"


def test_a_variable_without_meaning_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_DEBUG", "9")
    with pytest.raises(OptionValueError, match=r"COEXEC_DEBUG=9 is not valid\. Valid: 0, 1, 2\."):
        coexec.compile(module_level_step)
    with pytest.raises(OptionValueError, match="COEXEC_DEBUG"):
        coexec.step()
    monkeypatch.setenv("COEXEC_DEBUG", "0")
    assert torch.equal(coexec.compile(module_level_step)(batch(0)), batch(0) * 2)


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


def test_reset_forgets_what_a_block_has_learned() -> None:
    def block() -> Any:
        return coexec.step("to be reset", backend="replay", numerics="exact")

    held = block()
    for i in range(5):
        with held:
            batch(i).mul(2)
    assert held.stats().phase == "co-execution"
    coexec.reset()
    assert held.stats().phase == "tracing"
    assert held.stats().iterations == 0
    with block():
        batch(0).mul(2)
    assert held.stats().iterations == 1


def test_reset_inside_a_block() -> None:
    block = coexec.step("reset inside", backend="replay", numerics="exact")
    for i in range(5):
        with block:
            doubled = batch(i).mul(2)
            if i == 3:
                coexec.reset()
        assert torch.equal(doubled, batch(i) * 2)
    assert block.stats().iterations == 1


def test_a_block_that_is_made_anew_in_each_pass_has_one_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Counting(coexec.api.StepRunner):
        def __init__(self, name: str, *args: Any) -> None:
            made.append(name)
            super().__init__(name, *args)

    monkeypatch.setattr(coexec.api, "StepRunner", Counting)
    for i in range(5):
        with coexec.step("made once", backend="replay"):
            batch(i).mul(2)
    assert made == ["made once"]


def test_the_graph_prints_itself() -> None:
    step = exact(lambda x: (x * 2).relu())
    for i in range(5):
        step(batch(i))
    text, dot = str(step.trace_graph), step.trace_graph.to_dot()
    assert "aten::relu" in text
    assert dot.startswith("digraph")
    assert "co-execution" in step.explain()


def test_the_graph_of_a_block_prints_itself() -> None:
    for i in range(4):
        with coexec.step("printed", backend="replay") as block:
            batch(i).relu().sum()
    assert "aten::relu" in str(block.trace_graph)


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
