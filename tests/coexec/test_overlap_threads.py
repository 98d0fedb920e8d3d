"""`overlap=True`: calls that returned early, beside other threads, forks and the interpreter's end."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.coexec.gate import Gate, gated
from tests.coexec.overlapping import Trained, eager_twin, overlapping, pending
from tests.coexec.snapshot import snapshot


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
