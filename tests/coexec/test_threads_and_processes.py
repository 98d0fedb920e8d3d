"""Other threads and other processes, beside a step and inside it."""

from __future__ import annotations

import copy
import os
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, function_program, labels, mlp, training


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
