"""Threads that look at what a running step works on, one step called from many threads, many steps at once."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import exact
from tests.coexec.programs import batch, labels, mlp, training

STEPS = 40


class Tiny(nn.Module):
    """One weight of one number, so that a reader sees the value before an update or after it, nothing in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros(()))
        # The gradient, for other threads: `weight.grad` itself is no place to look at while a backward pass runs, since
        # PyTorch assigns it without the GIL, and crashes readers in plain eager too.
        self.shown: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        h = x * self.weight
        for _ in range(12):
            h = torch.tanh(h) + self.weight * 0.1
        return h.mean()


def tiny_training() -> tuple[Tiny, Callable[[int], float]]:
    """A model and its step, with momentum."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = model(batch(i % 5))
        loss.backward()
        model.shown = model.weight.grad
        optimizer.step()
        return loss.item()

    return model, step


def saved(model: nn.Module) -> Any:
    """Through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer)["weight"].item()


READS: dict[str, Callable[[Tiny], Any]] = {
    "item": lambda m: m.weight.item(),
    "detach": lambda m: m.weight.detach().clone().item(),
    "numpy": lambda m: float(m.weight.detach().numpy()),
    "array": lambda m: float(np.asarray(m.weight.detach())),
    "tolist": lambda m: m.weight.tolist(),
    "data": lambda m: m.weight.data.item(),
    "state_dict": lambda m: m.state_dict()["weight"].item(),
    "save": saved,
    "deepcopy": lambda m: copy.deepcopy(m).weight.item(),
    "pickle": lambda m: pickle.loads(pickle.dumps(m)).weight.item(),
    "arithmetic": lambda m: (m.weight * 1).item(),
    "format": lambda m: float(f"{m.weight.item()!r}"),
    "grad": lambda m: None if (g := m.shown) is None else g.item(),
    "grad tolist": lambda m: None if (g := m.shown) is None else g.tolist(),
    "grad numpy": lambda m: None if (g := m.shown) is None else float(g.numpy()),
    "grad clone": lambda m: None if (g := m.shown) is None else g.clone().item(),
    "grad repr": lambda m: None if (g := m.shown) is None else float(repr(g)[7:-1]) * 0,
    "grad deepcopy": lambda m: None if (g := m.shown) is None else copy.deepcopy(g).item(),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("overlap", [False, True])
def test_a_thread_sees_values_that_eager_has_between_two_writes(what: str, overlap: bool) -> None:
    read = READS[what]
    reference, plain = tiny_training()
    allowed: set[Any] = {None, 0.0, reference.weight.item()} if "grad" in what else {reference.weight.item()}
    expected = []
    for i in range(STEPS):
        expected.append(plain(i))
        allowed.add(reference.weight.grad.item() if "grad" in what else reference.weight.item())
    model, step = tiny_training()
    step = exact(step, overlap=overlap)
    stop, seen, errors = threading.Event(), [], []

    def watch() -> None:
        try:
            while not stop.is_set():
                seen.append(read(model))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        losses = [step(i) for i in range(STEPS)]
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert losses == expected
    assert torch.equal(model.weight, reference.weight)
    assert seen
    assert set(seen) <= allowed
    assert step.stats().phase == "co-execution", step.explain()


def test_a_thread_that_is_told_of_an_update_sees_it() -> None:
    """Whoever hears from the step's own thread that a line has run finds what the line wrote, however it reads."""
    model, told, answered = Tiny(), threading.Semaphore(0), threading.Semaphore(0)
    answers: list[list[float]] = []

    def step(x: torch.Tensor) -> None:
        h = x
        for _ in range(40):
            h = torch.tanh(h @ x)
        with torch.no_grad():
            model.weight.add_(1)
        told.release()
        assert answered.acquire(timeout=20)

    def reader() -> None:
        for _ in range(12):
            assert told.acquire(timeout=20)
            w = model.weight
            answers.append([w.item(), w.tolist(), float(w.detach().numpy()), copy.deepcopy(w).item(), saved(model)])
            answered.release()

    compiled = exact(step)
    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(12):
        compiled(torch.eye(32))
    thread.join(30)
    assert not thread.is_alive()
    assert answers == [[float(i)] * 5 for i in range(2, 14)]
    assert compiled.stats().phase == "co-execution"


def test_one_step_called_from_many_threads_runs_one_call_after_the_other() -> None:
    reference, plain = tiny_training()
    expected = sorted(plain(0) for _ in range(STEPS))
    model, step = tiny_training()
    compiled = exact(step)
    with ThreadPoolExecutor(4) as pool:
        losses = sorted(pool.map(compiled, [0] * STEPS))
    assert losses == expected
    assert torch.equal(model.weight, reference.weight)
    stats = compiled.stats()
    assert (stats.iterations, stats.phase) == (STEPS, "co-execution")
    assert stats.co_executed >= STEPS - 4


def test_threads_that_serve_one_model_in_steps_of_their_own() -> None:
    """Reading shared parameters; each thread has its own grad mode, and its own dropout switched off."""
    model = mlp().eval()
    inputs = [batch(i) for i in range(60)]
    with torch.no_grad():
        expected = [model(x) for x in inputs]

    def serve(k: int) -> tuple[list[torch.Tensor], str]:
        @exact
        @torch.inference_mode(k % 2 == 0)
        @torch.no_grad()
        def infer(x: torch.Tensor) -> torch.Tensor:
            return model(x)

        return [infer(x) for x in inputs], infer.stats().phase

    with ThreadPoolExecutor(4) as pool:
        served = list(pool.map(serve, range(4)))
    for results, phase in served:
        assert phase == "co-execution"
        for got, want in zip(results, expected, strict=True):
            assert torch.equal(got, want)


def test_threads_that_train_models_of_their_own() -> None:
    def train(k: int, wrap: Callable[[Any], Any]) -> tuple[list[float], list[Any], Any]:
        generator = torch.Generator().manual_seed(k)
        model = mlp()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (k + 1))
        step = wrap(training(model, optimizer))
        losses = [step(batch(i + k), labels(i + k)) for i in range(STEPS)]
        return losses, [p.tolist() for p in model.parameters()], step

    with ThreadPoolExecutor(4) as pool:
        trained = list(pool.map(lambda k: train(k, exact), range(4)))
    for k, (losses, parameters, step) in enumerate(trained):
        assert (losses, parameters) == train(k, lambda f: f)[:2], k
        assert step.stats().phase == "co-execution"


def test_a_with_block_of_one_line_entered_by_many_threads() -> None:
    def work(k: int) -> list[float]:
        sums = []
        for i in range(20):
            with coexec.step("shared by threads", backend="replay", numerics="exact"):
                h = torch.tanh(batch(i) * (k + 1))
                sums.append(h.sum().item())
        return sums

    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(work, range(3)))
    assert got == [[torch.tanh(batch(i) * (k + 1)).sum().item() for i in range(20)] for k in range(3)]


def test_an_exception_on_one_thread_does_not_stop_the_others() -> None:
    total = torch.zeros(3)

    @exact
    def step(x: torch.Tensor, bad: bool) -> None:
        total.add_(x)
        if bad:
            raise KeyError("this thread only")
        total.add_(x)

    def work(k: int) -> int:
        failed = 0
        for i in range(15):
            try:
                step(torch.ones(3), (i + k) % 5 == 0)
            except KeyError:
                failed += 1
        return failed

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(work, range(3))) == [3, 3, 3]
    assert total.tolist() == [81.0] * 3


def test_thread_local_modes_of_the_calling_thread_count() -> None:
    weight = torch.ones(4, requires_grad=True)

    @exact
    def step(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t()) @ (x * weight)

    def work(mode: str) -> list[Any]:
        seen = []
        for i in range(10):
            if mode == "no_grad":
                with torch.no_grad():
                    y = step(batch(i))
            elif mode == "autocast":
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    y = step(batch(i))
            else:
                y = step(batch(i))
            seen.append((y.requires_grad, y.dtype))
        return seen

    with ThreadPoolExecutor(3) as pool:
        grad, no_grad, autocast = pool.map(work, ("grad", "no_grad", "autocast"))
    assert set(grad) == {(True, torch.float32)}
    assert set(no_grad) == {(False, torch.float32)}
    assert set(autocast) == {(True, torch.bfloat16)}
