"""`overlap=True`: a call returns while its graph still runs; what needs one of its results waits."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from coexec.intercept.native import native_if_ready
from tests.coexec.gate import Gate, gated
from tests.coexec.harness import seed_all
from tests.coexec.programs import batch, labels, mlp
from tests.coexec.snapshot import snapshot
from tests.coexec.test_materialize import READS

WARM_UP = 4  # calls until the step co-executes


@pytest.fixture(scope="module")
def the_gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.remove()


@pytest.fixture
def gate(the_gate: Gate) -> Iterator[Gate]:
    the_gate.delay_s = 0.0
    the_gate.open()
    yield the_gate
    the_gate.open()


def overlapping(step: Any, **options: Any) -> Any:
    return coexec.compile(step, backend="replay", numerics="exact", overlap=True, **options)


def pending(step: Any) -> bool:
    """Whether the latest call of `step` returned and its end has not been noted yet."""
    return bool(step._runner._native.pending)


def unresolved(tensor: torch.Tensor) -> bool:
    native: Any = native_if_ready()
    return bool(native.is_placeholder(tensor))


def waits(step: Any) -> int:
    step.stats()
    return int(step._runner.wait_counts()["overlap"])


class Trained:
    """A small model, and a step whose graph begins at the gate."""

    def __init__(self, gate: Gate, wrap: Callable[..., Any] = overlapping, draws: bool = False) -> None:
        torch.manual_seed(0)
        self.gate = gate
        self.model = mlp()
        self.model.register_buffer("seen", torch.zeros(()))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.noise = 0.1 if draws else 0.0
        self.x, self.y = batch(0), labels(0)
        self.step = wrap(self._step)

    def _step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = gated(x)
        if self.noise:
            x = x + torch.randn_like(x) * self.noise
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.model.seen.add_(1)  # type: ignore[operator, union-attr]
        return loss.detach()

    def warm_up(self) -> Trained:
        for i in range(WARM_UP):
            self.step(batch(i), labels(i))
        return self

    def leave_pending(self) -> torch.Tensor:
        """A call that returned although its graph has not begun."""
        self.step.stats()  # the call before is over
        self.gate.close()
        loss: torch.Tensor = self.step(self.x, self.y)
        assert pending(self.step)
        assert unresolved(loss)
        return loss

    def state(self) -> Any:
        return snapshot((self.model, self.optimizer, [p.grad for p in self.model.parameters()], torch.get_rng_state()))


def eager_twin(gate: Gate, draws: bool = False) -> tuple[Trained, torch.Tensor]:
    """The same model after the same calls, one more than the warm-up, in eager; and the last loss."""
    gate.open()
    twin = Trained(gate, lambda step: step, draws).warm_up()
    return twin, twin.step(twin.x, twin.y)


# ------------------------------------------------------------------------------------------------------ the mechanism


def test_the_call_returns_before_its_graph_has_begun(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    before = waits(t.step)
    loss = t.leave_pending()
    value, was_open = gate.waited_for(loss.item)
    assert was_open
    assert not unresolved(loss)
    twin, expected = eager_twin(gate)
    assert value == expected.item()
    assert t.state() == twin.state()
    stats = t.step.stats()
    assert stats.phase == "co-execution"
    assert stats.fallbacks == {}
    assert stats.returned_early >= 1
    assert waits(t.step) == before + 1
    assert "after a call that had returned early" in t.step.explain()


def test_what_needs_nothing_of_the_call_runs_on(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    t.leave_pending()
    fresh = torch.randn(6, 4).mul_(2).clamp_(min=0)  # this graph draws nothing
    assert np.isfinite(fresh.numpy()).all()
    assert torch.tensor([[1.0, 2.0], [3.0, 4.0]]).sum().item() == 10
    assert torch.stack([fresh, fresh]).shape == (2, 6, 4)
    assert copy.deepcopy(fresh).tolist() == fresh.tolist()
    frozen = nn.Linear(4, 2)
    frozen(fresh).sum().backward()
    assert frozen.weight.grad is not None
    t.x.sum().item()  # the graph only reads it
    with torch.inference_mode():
        frozen(fresh)
    assert pending(t.step)
    assert t.gate._open.is_set() is False
    gate.open()
    assert coexec.materialize(t.model[0].weight) is t.model[0].weight
    assert snapshot(t.model) == snapshot(eager_twin(gate)[0].model)


def test_other_memory_for_a_parameter_waits_for_nothing(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    t.leave_pending()
    t.model[0].bias.data = torch.zeros(8)
    assert pending(t.step)
    gate.open()
    twin, _ = eager_twin(gate)
    twin.model[0].bias.data = torch.zeros(8)
    for _ in range(4):
        assert t.step(t.x, t.y).item() == twin.step(t.x, t.y).item()
    assert t.state() == twin.state()


def test_views_of_values_in_flight_wait_for_nothing(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    kept = loss.detach().view(1)
    weights = t.model.state_dict()
    first, second = t.model[0].weight.detach().split([4, 4])
    assert pending(t.step)
    gate.open()
    twin, expected = eager_twin(gate)
    assert kept.tolist() == [expected.item()]
    assert snapshot(weights) == snapshot(twin.model.state_dict())
    assert torch.equal(torch.cat([first, second]), twin.model[0].weight)


def test_the_state_is_eagers_with_and_without_draws(gate: Gate) -> None:
    for draws in (False, True):
        gate.delay_s = 0.002
        t = Trained(gate, draws=draws).warm_up()
        t.step(t.x, t.y)
        got = t.state()
        assert t.step.stats().returned_early > 0
        gate.delay_s = 0.0
        assert got == eager_twin(gate, draws)[0].state()


def test_a_traced_iteration_and_a_fallback_return_as_ever(gate: Gate) -> None:
    @overlapping
    def step(x: torch.Tensor, more: bool) -> torch.Tensor:
        h = gated(x)
        return h * 2 if more else h

    with_delay = [step(torch.ones(3), False) for _ in range(WARM_UP)]
    assert [h.tolist() for h in with_delay] == [[1.0] * 3] * WARM_UP
    gate.delay_s = 0.002
    result = step(torch.ones(3), True)  # a path never seen
    assert not pending(step)
    assert not unresolved(result)
    assert step.stats().fallbacks == {"new path": 1}


# ------------------------------------------------------------------------------------------ who waits, and what it sees

TOUCHES: dict[str, Callable[[Trained, torch.Tensor], Any]] = {
    "op on the result": lambda t, loss: (loss * 2).item(),
    "comparison": lambda t, loss: bool(loss > 0),
    "in-place op on the result": lambda t, loss: loss.add_(1).item(),
    "op on a parameter": lambda t, loss: t.model[0].weight.sum().item(),
    "numpy of a parameter": lambda t, loss: t.model[0].weight.detach().numpy().copy(),
    "numpy of a gradient": lambda t, loss: t.model[2].bias.grad.numpy().copy(),  # type: ignore[union-attr]
    "pointer of a parameter": lambda t, loss: bool(t.model[0].bias.data_ptr()) and t.model[0].bias.tolist(),
    "buffer": lambda t, loss: t.model.seen.item(),  # type: ignore[operator, union-attr]
    "optimizer state": lambda t, loss: copy.deepcopy(t.optimizer.state_dict()),
    "deepcopy of the model": lambda t, loss: snapshot(copy.deepcopy(t.model)),
    "pickle of the model": lambda t, loss: snapshot(pickle.loads(pickle.dumps(t.model.state_dict()))),
    "nested list": lambda t, loss: torch.tensor([loss, 1.0]).tolist(),
    "write to the input": lambda t, loss: t.x.zero_().sum().item(),
    "numpy of the input": lambda t, loss: t.x.numpy().fill(0),
    "apply_ on the input": lambda t, loss: t.x.apply_(lambda v: 0.0).sum().item(),
    "state_dict loaded": lambda t, loss: t.model.load_state_dict({k: v * 0 for k, v in t.model.state_dict().items()}),
    "data of the result": lambda t, loss: setattr(nn.Parameter(torch.zeros(())), "data", loss),
    "zero_grad in place": lambda t, loss: t.optimizer.zero_grad(set_to_none=False),
    "moving average": lambda t, loss: torch._foreach_lerp(
        [torch.zeros_like(p) for p in t.model.parameters()], list(t.model.parameters()), 0.1
    ),
    "clipping": lambda t, loss: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1).item(),
    "optimizer outside": lambda t, loss: t.optimizer.step(),
    "evaluation": lambda t, loss: t.model(t.x).tolist(),
    "seed": lambda t, loss: torch.manual_seed(3).initial_seed(),
    "rng state": lambda t, loss: torch.get_rng_state().tolist(),
    "threads": lambda t, loss: torch.set_num_threads(1),
    "materialize": lambda t, loss: coexec.materialize(loss).tolist(),
}


@pytest.mark.parametrize("name", TOUCHES)
def test_what_needs_the_call_waits_for_its_end(gate: Gate, name: str) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    got, was_open = gate.waited_for(lambda: snapshot(TOUCHES[name](t, loss)))
    assert was_open, f"{name} did not wait"
    twin, expected_loss = eager_twin(gate)
    assert got == snapshot(TOUCHES[name](twin, expected_loss))
    native: Any = native_if_ready()
    native.settle_overlaps()
    assert (t.state(), snapshot(loss)) == (twin.state(), snapshot(expected_loss))
    for i in range(3):  # and it goes on as if nothing had been
        assert t.step(batch(i), labels(i)).item() == twin.step(batch(i), labels(i)).item()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("name", READS)
def test_every_read_of_a_returned_value(gate: Gate, name: str) -> None:
    gate.delay_s = 0.003
    function: Callable[..., Any] = lambda x: torch.tanh(gated(x)) * 3  # noqa: E731
    step = overlapping(function)
    for i in range(WARM_UP):
        expected = snapshot(READS[name](function(batch(i))))
        result = step(batch(i))
        assert snapshot(READS[name](result)) == expected
    assert step.stats().returned_early > 0


def test_draws_wait_only_if_the_graph_draws(gate: Gate) -> None:
    t = Trained(gate, draws=True).warm_up()
    t.leave_pending()
    drawn, was_open = gate.waited_for(lambda: torch.rand(3).tolist())
    assert was_open
    twin, _ = eager_twin(gate, draws=True)
    assert drawn == torch.rand(3).tolist()
    assert t.state() == twin.state()


def test_another_tensor_over_the_same_memory(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    alias = t.model[0].weight.detach()  # made before the call: it does not carry the key
    t.leave_pending()
    got, was_open = gate.waited_for(lambda: alias.sum().item())
    assert was_open
    assert got == eager_twin(gate)[0].model[0].weight.sum().item()


def test_backward_of_a_returned_loss(gate: Gate) -> None:
    def make(wrap: Callable[..., Any]) -> list[Any]:
        weight = torch.full((4,), 0.5, requires_grad=True)
        step = wrap(lambda x: (torch.tanh(gated(x) * weight)).sum())
        seen = []
        for i in range(8):
            loss = step(batch(i))
            loss.backward()
            assert weight.grad is not None
            with torch.no_grad():
                weight.sub_(0.1 * weight.grad)
            seen.append((loss.item(), weight.tolist(), weight.grad.tolist()))
            weight.grad = None
        return seen

    gate.delay_s = 0.002
    assert make(overlapping) == make(lambda step: step)


def test_inference_mode_around_and_after_the_call(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    weight = nn.Parameter(torch.ones(4, 4))
    infer = overlapping(lambda x: gated(x) @ weight)
    for i in range(WARM_UP):
        with torch.inference_mode():
            infer(batch(i))
    infer.stats()
    gate.close()
    x = batch(7)
    with torch.inference_mode():
        out = infer(x)
    assert pending(infer)
    _, was_open = gate.waited_for(lambda: x.zero_())  # carries no key: only the thread's own one stops it
    assert was_open
    assert torch.equal(out, batch(7) @ weight)
    t.leave_pending()
    with torch.inference_mode():
        got, was_open = gate.waited_for(lambda: t.model(t.x).tolist())
    assert was_open
    native: Any = native_if_ready()
    assert got == eager_twin(gate)[0].model(t.x).tolist()
    assert native.active_step() is None


def test_results_that_are_dropped(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    del loss
    gc.collect()
    gate.open()
    assert t.state() == eager_twin(gate)[0].state()


# ------------------------------------------------------------------------------------------------------- later calls


def test_the_next_call_waits_first(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    first = t.leave_pending()
    second, was_open = gate.waited_for(lambda: t.step(t.x, t.y))
    assert was_open
    assert not unresolved(first)
    twin, expected = eager_twin(gate)
    assert [first.item(), second.item()] == [expected.item(), twin.step(t.x, t.y).item()]
    assert t.state() == twin.state()


@pytest.mark.parametrize("ask", ["stats", "explain", "wait_compiled", "reset"])
def test_questions_wait_for_the_end(gate: Gate, ask: str) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    runner = t.step._runner
    action = coexec.reset if ask == "reset" else getattr(t.step, ask)
    answer, was_open = gate.waited_for(action)
    assert was_open
    assert not unresolved(loss)
    assert runner.counters.co_executed == WARM_UP + 1 - runner.counters.traced
    if ask == "stats":
        assert answer.iterations == WARM_UP + 1


def test_two_steps_by_turns_on_one_model(gate: Gate) -> None:
    def run(wrap: Callable[..., Any]) -> Any:
        seed_all(1)
        generator, critic = mlp(4, 8, 4), mlp(4, 8, 1)
        of_generator = torch.optim.Adam(generator.parameters(), lr=0.05)
        of_critic = torch.optim.SGD(critic.parameters(), lr=0.05)

        def improve_critic(x: torch.Tensor) -> torch.Tensor:
            loss = critic(generator(torch.randn_like(x)).detach()).mean() - critic(gated(x)).mean()
            of_critic.zero_grad()
            loss.backward()
            of_critic.step()
            return loss.detach()

        def improve_generator(x: torch.Tensor) -> torch.Tensor:
            loss = -critic(generator(gated(x) + torch.randn_like(x))).mean()
            of_generator.zero_grad()
            loss.backward()
            of_generator.step()
            return loss.detach()

        first, second, losses = wrap(improve_critic), wrap(improve_generator), []
        for i in range(8):
            losses += [first(batch(i)), second(batch(i))]
        early = first.stats().returned_early + second.stats().returned_early if wrap is overlapping else 1
        assert early
        return snapshot((generator, critic, of_generator, losses, torch.get_rng_state()))

    gate.delay_s = 0.002
    assert run(overlapping) == run(lambda step: step)


def test_a_loop_as_people_write_them(gate: Gate) -> None:
    """Scheduler, moving average, clipping, logging, evaluation and a checkpoint outside the step."""

    def run(wrap: Callable[..., Any]) -> Any:
        seed_all(2)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.ReLU(), nn.Linear(8, 3))
        average = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)

        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            optimizer.zero_grad()
            logits = model(gated(x))
            loss = nn.functional.cross_entropy(logits, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return {"loss": loss, "logits": logits.detach()}

        compiled, log, saved = wrap(step), [], []
        for i in range(12):
            out = compiled(batch(i), labels(i))
            scheduler.step()
            log.append(out["loss"].detach())
            if i % 2:
                with torch.no_grad():
                    for a, p in zip(average.parameters(), model.parameters(), strict=True):
                        a.lerp_(p, 0.1)
            if i % 3 == 2:
                log.append(out["logits"].argmax(1).eq(labels(i)).float().mean())
                saved.append(pickle.dumps(model.state_dict()))
            if i % 4 == 3:
                model.eval()
                with torch.inference_mode():
                    log.append(model(batch(50)).sum())
                model.train()
        early = compiled.stats().returned_early if wrap is overlapping else 1
        assert early
        return snapshot((model, average, optimizer, log, [pickle.loads(s) for s in saved], torch.get_rng_state()))

    gate.delay_s = 0.002
    assert run(overlapping) == run(lambda step: step)


def test_a_block_returns_early_too(gate: Gate) -> None:
    weight = torch.zeros(4)
    seen = []
    for i in range(8):
        gate.delay_s = 0.002
        with coexec.step("block", backend="replay", numerics="exact", overlap=True) as block:
            h = gated(torch.full((4,), float(i)))
            weight.add_(h)
        seen.append(h.sum().item())
    assert seen == [4.0 * i for i in range(8)]
    assert weight.tolist() == [28.0] * 4
    assert block.stats().returned_early > 0


# --------------------------------------------------------------------------------------------- threads and processes


@pytest.mark.parametrize(
    "read",
    [
        lambda t, loss: loss.item(),
        lambda t, loss: loss.tolist(),
        lambda t, loss: repr(loss),
        lambda t, loss: (loss * 2).tolist(),
        lambda t, loss: t.model[0].weight.sum().item(),
        lambda t, loss: t.model[0].weight.detach().numpy().copy(),
        lambda t, loss: t.model[0].bias.tolist(),
        lambda t, loss: loss.add_(1).item(),
    ],
)
def test_another_thread_waits_too(gate: Gate, read: Callable[[Trained, torch.Tensor], Any]) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    out: list[Any] = []
    thread = threading.Thread(target=lambda: out.append(snapshot(read(t, loss))))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()  # so it waits, and the call's own thread does not
    assert pending(t.step)
    gate.open()
    thread.join(10)
    twin, expected = eager_twin(gate)
    assert out == [snapshot(read(twin, expected))]
    assert t.state() == twin.state()
    assert snapshot(loss) == snapshot(expected)


def test_the_next_call_comes_from_another_thread(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(t.step(t.x, t.y)))
    thread.start()
    thread.join(0.05)
    assert not out
    gate.open()
    thread.join(10)
    twin, expected = eager_twin(gate)
    assert loss.item() == expected.item()
    assert out[0].item() == twin.step(t.x, t.y).item()
    assert t.state() == twin.state()


def test_a_step_of_another_thread_takes_the_results(gate: Gate) -> None:
    """A pipeline: values in flight go through a queue into another thread's step, in the middle of an iteration."""
    gate.delay_s = 0.002
    queue: list[torch.Tensor] = []
    arrived, taken = threading.Semaphore(0), threading.Semaphore(0)
    make = overlapping(lambda x: gated(x) * 2)

    @overlapping
    def take(x: torch.Tensor) -> torch.Tensor:
        before = x + 1
        assert arrived.acquire(timeout=10)
        return before + queue.pop() * 10

    out: list[list[float]] = []

    def consume() -> None:
        for i in range(12):
            out.append(take(torch.full((2,), float(i))).tolist())
            taken.release()

    thread = threading.Thread(target=consume)
    thread.start()
    for i in range(12):
        queue.append(make(torch.full((2,), float(i))))
        arrived.release()
        assert taken.acquire(timeout=10)
    thread.join(10)
    assert out == [[i + 1 + 20.0 * i] * 2 for i in range(12)]
    assert make.stats().returned_early > 0


def test_a_thread_ends_with_its_call_pending(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    out: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: out.append(t.leave_pending()))
    thread.start()
    thread.join(10)
    value, was_open = gate.waited_for(out[0].item)
    assert was_open
    assert value == eager_twin(gate)[1].item()


def test_fork_waits_and_the_child_trains_on(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    pid, was_open = gate.waited_for(lambda: os.fork() or _child(t, loss))
    assert was_open
    assert os.waitpid(pid, 0)[1] == 0
    twin, expected = eager_twin(gate)
    assert loss.item() == expected.item()
    assert t.state() == twin.state()


def _child(t: Trained, loss: torch.Tensor) -> None:
    try:
        before = loss.item()
        after = [t.step(t.x, t.y).item() for _ in range(6)][-1]
        os._exit(0 if after < before else 3)
    finally:
        os._exit(4)


PROGRAM = """
import sys, torch, coexec
from tests.coexec.gate import Gate, gated
from coexec.intercept.build import build
build(verbose=False)
gate = Gate()
table = torch.eye(4)
total = torch.zeros(4)

@coexec.compile(backend="replay", numerics="exact", overlap=True)
def step(ids):
    total.add_(torch.nn.functional.embedding(gated(ids), table).sum(0))

import atexit
for i in range(6):
    step(torch.tensor([0, i % 4]))
gate.delay_s = 0.2
"""


def _run(text: str) -> subprocess.CompletedProcess[str]:
    source = PROGRAM + textwrap.dedent(text)
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)


def test_the_interpreter_ends_with_a_call_pending() -> None:
    done = _run(
        """
        import ctypes
        from coexec.intercept import native
        memory = (ctypes.c_float * 4).from_address(total.data_ptr())
        atexit.unregister(native._stop_all)
        atexit.register(lambda: print(list(memory)))
        atexit.register(native._stop_all)
        step(torch.tensor([0, 3]))
        assert step._runner._native.pending
        assert list(memory) == [8.0, 2.0, 1.0, 1.0]
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[9.0, 2.0, 1.0, 2.0]\n"


def test_an_error_of_a_call_pending_at_the_end_is_printed() -> None:
    done = _run("step(torch.tensor([0, 9]))")
    assert "IndexError: index out of range in self" in done.stderr
    assert "coexec: raised by aten::embedding at <string>:12 in step" in done.stderr


# ------------------------------------------------------------------------------------------------------------- errors


class Lookup:
    """A step that fails in its middle if an index is too large."""

    def __init__(self, wrap: Callable[..., Any] = overlapping) -> None:
        self.before, self.after = torch.zeros(3), torch.zeros(3)
        self.table = torch.eye(3)
        self.step = wrap(self._step)

    def _step(self, ids: torch.Tensor) -> torch.Tensor:
        self.before.add_(1)
        rows = nn.functional.embedding(gated(ids), self.table)
        self.after.add_(rows.sum(0))
        return rows

    def warm_up(self) -> Lookup:
        for _ in range(WARM_UP):
            self.step(torch.tensor([0, 1]))
        return self

    def state(self) -> Any:
        return self.before.tolist(), self.after.tolist()


BAD_IDS = torch.tensor([0, 7])

LATE: dict[str, Callable[[Lookup, torch.Tensor], Any]] = {
    "op": lambda p, rows: rows + 1,
    "read": lambda p, rows: rows.tolist(),
    "other memory of the step": lambda p, rows: p.after.sum(),
    "next call": lambda p, rows: p.step(torch.tensor([0, 1])),
    "another step": lambda p, rows: coexec.compile(lambda x: x + 1, backend="replay")(torch.ones(2)),
    "stats": lambda p, rows: p.step.stats(),
    "reset": lambda p, rows: p.step.reset(),
}


@pytest.mark.parametrize("name", LATE)
def test_an_error_surfaces_where_the_end_is_waited_for(gate: Gate, name: str) -> None:
    eager = Lookup(lambda step: step).warm_up()
    with pytest.raises(IndexError) as expected:
        eager.step(BAD_IDS)
    program = Lookup().warm_up()
    program.step.stats()
    gate.close()
    rows = program.step(BAD_IDS)
    assert pending(program.step)
    with pytest.raises(IndexError) as raised:
        gate.waited_for(lambda: LATE[name](program, rows))
    assert str(raised.value) == str(expected.value)
    assert [note.split(" at ")[0] for note in raised.value.__notes__] == ["coexec: raised by aten::embedding"]
    assert program.state() == eager.state()  # and the error comes once
    with pytest.raises(RuntimeError, match="never computed"):
        rows.tolist()
    for k in range(4):
        assert torch.equal(program.step(torch.tensor([k % 3, 1])), eager.step(torch.tensor([k % 3, 1])))
    assert program.state() == eager.state()
    if name != "reset":
        assert program.step.stats().fallbacks["kernel error"] == 1


def test_an_error_met_in_backward(gate: Gate) -> None:
    weight = torch.ones(3, 2, requires_grad=True)
    step = overlapping(lambda ids: (nn.functional.embedding(gated(ids), weight) ** 2).sum())
    for _ in range(WARM_UP):
        step(torch.tensor([0, 1])).backward()
    step.stats()
    gate.close()
    loss = step(BAD_IDS)
    with pytest.raises(IndexError, match="out of range"):
        gate.waited_for(loss.backward)
    assert step(torch.tensor([1, 1])).item() == 4


def test_another_thread_does_not_take_the_error_away(gate: Gate) -> None:
    program = Lookup().warm_up()
    program.step.stats()
    gate.close()
    rows = program.step(BAD_IDS)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            program.before.tolist()
            rows.tolist()
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    gate.open()
    thread.join(10)
    assert "never computed" in str(errors[0])
    with pytest.raises(IndexError):
        torch.ones(2) + 1  # any op of the call's own thread


def test_an_exception_inside_the_step_does_not_return_early(gate: Gate) -> None:
    total = torch.zeros(2)

    @overlapping
    def step(x: torch.Tensor, fail: bool) -> None:
        total.add_(gated(x))
        if fail:
            raise ValueError("the user's")

    for _ in range(WARM_UP):
        step(torch.ones(2), False)
    gate.delay_s = 0.003
    with pytest.raises(ValueError, match="the user's"):
        step(torch.ones(2), True)
    assert not pending(step)
    assert total.tolist() == [WARM_UP + 1.0] * 2


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """A shell's background job inherits an ignored SIGINT, and then Python installs no handler."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_while_the_end_is_waited_for(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    loss = t.leave_pending()
    killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        loss.item()
    killer.join()
    assert pending(t.step)  # nothing is lost: the next one waits again
    killer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    killer.start()
    with pytest.raises(KeyboardInterrupt):
        t.step(t.x, t.y)
    killer.join()
    value, was_open = gate.waited_for(loss.item)
    assert was_open
    twin, expected = eager_twin(gate)
    assert value == expected.item()
    assert t.state() == twin.state()


# ------------------------------------------------------------------------------------------------- beside torch.compile


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_code_under_torch_compile_waits(gate: Gate) -> None:
    t = Trained(gate).warm_up()
    evaluate = torch.compile(lambda x: t.model(x).sum(), backend="eager")
    evaluate(t.x)
    t.leave_pending()
    t.optimizer.param_groups[0]["lr"] = 0.1  # Dynamo is asked for more than compiled code: that waits for nothing
    torch.compiler.is_compiling()
    assert pending(t.step)
    got, was_open = gate.waited_for(lambda: evaluate(t.x).item())
    assert was_open
    assert got == eager_twin(gate)[0].model(t.x).sum().item()


# ------------------------------------------------------------------------------------------------- compiled segments


@pytest.mark.compile
def test_compiled_segments_overlap_too() -> None:
    def run(wrap: Callable[..., Any]) -> tuple[list[float], Any]:
        seed_all(4)
        model = mlp(64, 512, 3)  # the graph takes longer than its Python
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        compiled, losses = wrap(step), []
        for i in range(60):
            if i == 20 and wrap is not plain:
                assert compiled.wait_compiled(300)
            losses.append(compiled(batch(i % 7, 512, 64), labels(i % 7, 512)))
            fresh = torch.ones(3).sum()  # beside the graph
            assert fresh.item() == 3
        return [float(x) for x in losses], compiled

    def plain(step: Any) -> Any:
        return step

    expected, _ = run(plain)
    got, step = run(lambda f: coexec.compile(f, overlap=True))
    assert np.allclose(got, expected, rtol=1e-4, atol=1e-5)
    stats = step.stats()
    assert step._runner._native.stats()["compiled_runs"] > 0, step.explain()  # whichever executor won its trial
    assert stats.returned_early > 10
    assert step._runner._native.stats()["compiled_runs"] > 0
