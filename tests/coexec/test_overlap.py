"""`overlap=True`: a call returns while its graph still runs; what needs one of its results waits."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from coexec.intercept.native import native_if_ready
from tests.coexec.gate import Gate, gated
from tests.coexec.harness import seed_all
from tests.coexec.overlapping import WARM_UP, Trained, eager_twin, overlapping, pending, unresolved, waits
from tests.coexec.programs import batch, labels, mlp
from tests.coexec.snapshot import snapshot
from tests.coexec.test_materialize import READS

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
