"""The gate in front of a module under `torch.compile`: whatever is faster on its own calls serves."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coexec import choose, serving
from coexec.dynamo_backend import coexec_backend
from coexec.serving import CLEAR, COUNTED_S, FIRST_LOOK, LEAD_IN_S, ROUNDS, SETTLED_CALLS, Gate, Trial, signature_of
from coexec.subgraphs.store import Store
from tests.choose.decided import decide
from tests.choose.test_dynamo_backend import Climb, climb

PLAIN, COMPILED, NOTHING = "eager.faster than compiled", "compiled is faster", "eager.nothing compiled"
CALLS = 50_000  # of microseconds: each turn of a trial begins with some that only take time


class Steps(torch.nn.Module):
    """No weights, which a planted candidate would not know of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return climb(x)


@pytest.fixture(autouse=True)
def without_grad(monkeypatch: pytest.MonkeyPatch) -> Any:
    """As one serves, and with trials: the other tests leave them out."""
    monkeypatch.delenv("COEXEC_KEEP", raising=False)
    with torch.no_grad():
        yield


# The trial ------------------------------------------------------------------------------------------------------------


def verdict_of(seconds: Callable[[bool, int], float]) -> tuple[bool, Trial]:
    """The verdict of a trial whose calls take `seconds(plain, number of the call)`, and the trial."""
    trial = Trial()
    for number in range(100_000):
        verdict = trial.ended(seconds(trial.plain, number))
        if verdict is not None:
            return verdict, trial
    raise AssertionError("no verdict")


@pytest.mark.parametrize(("plain_s", "compiled_s", "plain_serves", "rounds"), [
    (40e-6, 57e-6, True, FIRST_LOOK),
    (300e-6, 100e-6, False, FIRST_LOOK),
    (1.00e-3, 1.03e-3, True, ROUNDS),
    (1.05e-3, 1.00e-3, False, ROUNDS),
    (1.00e-3, 1.00e-3, True, ROUNDS),
    (50e-3, 60e-3, True, FIRST_LOOK),
])  # fmt: skip
def test_the_faster_one_serves_and_eager_on_a_tie(
    plain_s: float, compiled_s: float, plain_serves: bool, rounds: int
) -> None:
    verdict, trial = verdict_of(lambda plain, number: plain_s if plain else compiled_s)
    assert (verdict, len(trial.plain_s), len(trial.compiled_s)) == (plain_serves, rounds, rounds)


def test_neither_slow_calls_of_other_processes_nor_the_begin_of_a_turn_decide() -> None:
    def seconds(plain: bool, number: int) -> float:
        return (1e-3 if plain else 0.8e-3) * (5.0 if number % 7 == 0 else 1.0)

    assert not verdict_of(seconds)[0]
    trial = Trial(settled=SETTLED_CALLS)
    assert trial.ended(10 * LEAD_IN_S) is None
    assert trial.counted == []
    trial.ended(COUNTED_S)
    assert trial.counted == [COUNTED_S]


def test_what_was_measured_before_something_was_compiled_does_not_count() -> None:
    trial = Trial()
    for _ in range(2 * SETTLED_CALLS + 40):
        trial.ended(1e-3)
    assert trial.compiled_s
    trial.unsettled()
    assert (trial.settled, trial.plain, trial.compiled_s, trial.plain_s, trial.counted) == (0, False, [], [], [])


def test_a_big_winner_costs_few_plain_calls() -> None:
    plain_calls = 0

    def seconds(plain: bool, number: int) -> float:
        nonlocal plain_calls
        plain_calls += plain
        return 0.3 if plain else 0.1

    assert not verdict_of(seconds)[0]
    assert plain_calls <= 3 * FIRST_LOOK
    assert CLEAR < 3.0


@pytest.mark.parametrize(("args", "kwargs", "gated"), [
    ((torch.zeros(2), None, 3, "mode"), {}, True),
    ((), {"x": [torch.zeros(2), torch.zeros(3)]}, True),
    ((torch.zeros(2), object()), {}, False),
    ((torch.zeros(2, device="meta"),), {}, False),
    ((torch.zeros(2).to_sparse(),), {}, True),
])  # fmt: skip
def test_a_verdict_is_for_sizes_and_types(args: tuple[Any, ...], kwargs: dict[str, Any], gated: bool) -> None:
    signature = signature_of(args, kwargs)
    assert (signature is not None) == gated
    hash(signature)
    assert signature_of((torch.zeros(2), 1), {}) == signature_of((torch.ones(2), 2), {})
    others = [
        signature_of(*given)
        for given in (
            ((torch.zeros(2),), {}),
            ((torch.zeros(3),), {}),
            ((torch.zeros(2).double(),), {}),
            ((), {"x": torch.zeros(2)}),
            ((True,), {}),
            ((1,), {}),
        )
    ]
    assert len(set(others)) == len(others)


# The gate -------------------------------------------------------------------------------------------------------------


def compiled(module: torch.nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(module, backend=coexec_backend)


def tuned(store: Store, candidate: str) -> None:
    """As if the tuner had chosen this candidate for :class:`Steps`."""
    torch._dynamo.reset()
    torch.compile(Steps(), backend=coexec_backend, options={"mode": "collect"})(torch.randn(16, 16))
    for info in store.subgraphs():
        decide(store, info.digest, candidate)
    choose.reset_counters()


def as_if_faster(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision for a backend that is slower than eager, as guards make of one that is a little faster."""
    monkeypatch.setattr("tests.choose.decided.timing_of", lambda eager, candidate: made_up(eager, [0.5] * 3))
    tuned(store, "planted-slow")


def made_up(eager: list[float], candidate: list[float]) -> Any:
    from coexec.tuning.turns import timing_of

    return timing_of(eager, candidate)


def until_decided(run: Any, *inputs: Any, **named: Any) -> int:
    """Calls until a verdict is there."""
    expected = climb(*inputs, *named.values())
    before = verdicts()
    for number in range(CALLS):
        assert torch.equal(run(*inputs, **named), expected)
        if verdicts() > before:
            return number
    raise AssertionError(f"no verdict in {CALLS} calls: {choose.counters()}")


def verdicts() -> int:
    return sum(choose.counters().get(name, 0) for name in (PLAIN, COMPILED, NOTHING))


def gate_of(run: Any, name: str = "forward") -> Gate | None:
    return getattr(run.__dict__.get(name), "_coexec_gate", None)


def calls_of_dynamo(run: Any, *inputs: Any) -> int:
    """How many of three calls go to Dynamo's wrapper."""
    calls = 0
    gate = gate_of(run)
    assert gate is not None
    original = gate.compiled

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **kwargs)

    function = run.__dict__["forward"]
    cell = next(c for c in function.__closure__ if c.cell_contents is original)
    cell.cell_contents = gate.compiled = counting
    try:
        for _ in range(3):
            run(*inputs)
    finally:
        cell.cell_contents = gate.compiled = original
    return calls


def test_a_module_that_its_compiled_form_slows_down_is_served_by_plain_eager(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_if_faster(store, monkeypatch)
    run, x = compiled(Steps()), torch.randn(16, 16)
    until_decided(run, x)
    assert choose.counters()["serve.planted-slow"] == 1
    assert choose.counters()[PLAIN] == 1
    assert "plain eager took" in choose.explain()
    assert calls_of_dynamo(run, x) == 0
    other = torch.randn(8, 16)  # has a verdict of its own
    run(other)
    assert calls_of_dynamo(run, other) == 3
    front, run.forward = run.forward, torch.zeros_like
    assert torch.equal(run(x), torch.zeros(16, 16)), "the user's own"
    run.forward = front
    with torch.enable_grad():
        assert calls_of_dynamo(run, x) == 3, "a forward alone says nothing of a training step"


def test_where_nothing_is_tuned_plain_eager_serves_and_no_speed_is_claimed(store: Store) -> None:
    run, x = compiled(Steps()), torch.randn(16, 16)
    calls = until_decided(run, x)
    assert choose.counters() == {"stored": 1, "eager.not tuned": 1, NOTHING: 1}
    assert calls <= SETTLED_CALLS + 2
    assert " ms" not in choose.explain()
    assert calls_of_dynamo(run, x) == 0
    decide(store, store.subgraphs()[0].digest, "planted-fast")
    torch._dynamo.reset()
    gc.collect()
    until_decided(run, torch.zeros(16, 16))
    assert choose.counters()["serve.planted-fast"] == 1, "it is open for what is tuned later"
    assert choose.counters()[COMPILED] == 1


def test_a_module_behind_a_gate_is_freed_with_its_last_reference(store: Store) -> None:
    def used_once() -> weakref.ref[torch.nn.Module]:
        module = Climb()
        run = compiled(module)
        run(torch.randn(16, 16))
        assert gate_of(run) is not None
        return weakref.ref(module)

    gc.collect()
    gc.disable()
    try:
        assert used_once()() is None
    finally:
        gc.enable()


def test_what_is_faster_goes_on_serving(store: Store) -> None:
    tuned(store, "planted-fast")
    run, x = compiled(Steps()), torch.zeros(16, 16)
    until_decided(run, x)
    assert choose.counters()["serve.planted-fast"] == 1
    assert (choose.counters()[COMPILED], choose.counters().get(PLAIN)) == (1, None)
    assert calls_of_dynamo(run, x) == 3


def test_a_module_compiled_in_place_has_a_gate_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_faster(store, monkeypatch)
    torch._dynamo.reset()
    module = Steps()
    module.compile(backend=coexec_backend)
    until_decided(module, x=torch.randn(16, 16))
    assert gate_of(module, "_compiled_call_impl") is not None
    assert choose.counters()[PLAIN] == 1
    x = torch.randn(16, 16)
    assert torch.equal(copy.deepcopy(module)(x), climb(x))


def test_hooks_of_the_module_run_either_way(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_faster(store, monkeypatch)
    module, x, seen = Steps(), torch.randn(16, 16), []
    module.register_forward_hook(lambda module, args, result: seen.append(len(seen)))
    run = compiled(module)
    calls = until_decided(run, x) + 1
    run(x)
    assert len(seen) == calls + 1
    outer: list[int] = []
    run.register_forward_pre_hook(lambda module, args: outer.append(1))
    assert torch.equal(run(x), climb(x))
    assert (len(outer), len(seen)) == (1, calls + 2)


def test_a_verdict_ends_with_what_was_compiled(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_faster(store, monkeypatch)
    run, x = compiled(Steps()), torch.randn(16, 16)
    until_decided(run, x)
    assert calls_of_dynamo(run, x) == 0
    torch._dynamo.reset()
    gc.collect()
    assert calls_of_dynamo(run, x) == 3


def test_another_stance_is_no_trial(store: Store) -> None:
    """Under "force_eager", as in a co-executed step, Dynamo's wrapper runs plain Python: both would be the same."""
    tuned(store, "planted-fast")
    run, x = compiled(Steps()), torch.zeros(16, 16)
    run(x)
    with torch.compiler.set_stance("force_eager"):
        for _ in range(50):
            run(x)
    gate = gate_of(run)
    assert gate is not None
    assert sum(trial.settled for trial in gate.trials.values()) <= 1
    until_decided(run, x)
    assert choose.counters()[COMPILED] == 1


def test_the_gate_is_traced_through_by_another_compilation(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    as_if_faster(store, monkeypatch)
    run, x = compiled(Steps()), torch.randn(16, 16)
    until_decided(run, x)
    around = torch.compile(lambda x: run(x) * 2.0, backend="eager", fullgraph=True)
    assert torch.equal(around(x), climb(x) * 2.0)


def test_compiled_code_may_call_a_gate(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a graph break, where Dynamo looks at every frame."""
    as_if_faster(store, monkeypatch)
    run = compiled(Steps())
    graphs: list[Any] = []

    def counting(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Steps()
            self.inner.compile(backend=coexec_backend)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inner(x) + 1.0
            torch._dynamo.graph_break()
            return run_hidden(y) * 2.0  # type: ignore[no-any-return]

    @torch._dynamo.disable(recursive=False)  # type: ignore[untyped-decorator]
    def run_hidden(y: torch.Tensor) -> Any:
        return run(y)

    outer, x = torch.compile(Outer(), backend=counting), torch.randn(16, 16)
    for _ in range(200):
        assert torch.equal(outer(x), climb(climb(x) + 1.0) * 2.0)
    assert len(graphs) <= 3, [graph.code for graph in graphs]
    assert gate_of(outer) is None


def test_too_many_sizes_have_no_trials(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_SIGNATURES", 2)
    run = compiled(Steps())
    for rows in (2, 3, 4, 2, 3, 4):
        x = torch.randn(rows, 4)
        assert torch.equal(run(x), climb(x))
    gate = gate_of(run)
    assert gate is not None
    assert len(gate.trials) == 2
    until_decided(run, torch.randn(3, 4))


def test_no_gate_where_the_user_holds_the_wrapper_itself(store: Store) -> None:
    """Also not in front of a module around it, which is under another backend."""
    inner = torch.compile(climb, backend=coexec_backend)

    class Outer(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return inner(x)  # type: ignore[no-any-return]

    outer, x = torch.compile(Outer(), backend="eager"), torch.randn(16, 16)
    assert torch.equal(outer(x), climb(x))
    assert gate_of(outer) is None
    assert "no gate" not in choose.counters()


def test_a_training_step_is_left_alone(store: Store) -> None:
    module = Climb()
    run, x = compiled(module), torch.randn(16, 16)
    with torch.enable_grad():
        for _ in range(20):
            run(x).sum().backward()
    gate = gate_of(run)
    assert gate is not None
    assert gate.trials == {}
    assert module.weight.grad is not None


def test_keep_leaves_the_gate_out(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COEXEC_KEEP", "1")
    run = compiled(Steps())
    run(torch.randn(16, 16))
    assert gate_of(run) is None
