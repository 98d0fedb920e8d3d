"""`overlap=True`: an error of a call that returned early comes where its end is waited for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.gate import Gate, gated
from tests.coexec.overlapping import WARM_UP, Trained, eager_twin, overlapping, pending


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
