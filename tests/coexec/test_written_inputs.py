"""Memory of the user that compiled code writes: which memory, where in it, and what Python still holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = pytest.mark.compile


def settled(pair: Pair) -> None:
    """As Pair.settle, for a segment that may be left to replay."""
    for _ in range(3):
        pair.run(8)
        assert pair.step.wait_compiled(300)
    pair.run(8)


def test_a_row_that_moves_in_memory_that_is_also_read_as_a_whole() -> None:
    """A memory bank, a ring buffer: compiled code would see the row where it was."""

    def make() -> Program:
        torch.manual_seed(0)
        weight, bank = torch.randn(16, 16), torch.zeros(8, 16)

        def step(x: Tensor, row: int) -> Tensor:
            bank[row].copy_((x @ weight).tanh().mean(0))
            return (bank * 2).tanh().sum(0) + x.sigmoid().mean(0)

        return Program(step, lambda i: (torch.randn(32, 16), i % 8), lambda: {"bank": bank})

    settled(Pair(make))


def test_a_row_that_stays_is_compiled() -> None:
    def make() -> Program:
        torch.manual_seed(0)
        weight, bank = torch.randn(16, 16), torch.zeros(8, 16)

        def step(x: Tensor) -> Tensor:
            bank[3].copy_((x @ weight).tanh().mean(0))
            return (bank * 2).tanh().sum(0) + x.sigmoid().mean(0)

        return Program(step, lambda i: (torch.randn(32, 16),), lambda: {"bank": bank})

    pair = Pair(make)
    pair.settle()
    before = pair.compiled_runs()
    pair.run(4)
    assert pair.compiled_runs() > before, pair.why()


def test_rows_that_begin_to_be_one() -> None:
    """Written and read apart when the code was compiled."""

    def make() -> Program:
        torch.manual_seed(0)
        bank = torch.zeros(8, 64)

        def step(x: Tensor, written: int, read: int) -> Tensor:
            bank[written].copy_(x.tanh())
            return (bank[read].sigmoid() + x).exp().sum()

        rows = [(2, 5)] * 32 + [(4, 4)] * 8
        return Program(step, lambda i: (torch.randn(64), *rows[i]), lambda: {"bank": bank})

    settled(Pair(make))
    pair = Pair(make)
    pair.run(40)


def test_two_tensors_that_were_views_of_one() -> None:
    """Tied weights that are not tied any more."""

    def make() -> Program:
        torch.manual_seed(0)
        state = {"weight": torch.randn(64, 64)}
        state["tied"] = state["weight"]

        def step(x: Tensor) -> Tensor:
            state["weight"].mul_(0.9)
            return (x @ state["tied"].t()).tanh().exp().sum(1)

        def args(i: int) -> tuple[Tensor]:
            if i == 24:
                state["tied"] = state["weight"].clone()
            return (torch.randn(8, 64),)

        return Program(step, args, lambda: dict(state))

    settled(Pair(make))


def test_a_written_buffer_is_replaced_by_an_equal_copy() -> None:
    """The old one lives on, and must stay as it is."""

    def make() -> Program:
        torch.manual_seed(0)
        state, kept = {"mean": torch.zeros(256)}, []

        def step(x: Tensor) -> Tensor:
            state["mean"].mul_(0.9).add_(x.mean(0), alpha=0.1)
            return ((x * state["mean"]).tanh() + 1).exp().sum(1)

        def args(i: int) -> tuple[Tensor]:
            kept.append(state["mean"])
            state["mean"] = state["mean"].clone()
            return (torch.randn(64, 256),)

        return Program(step, args, lambda: {"mean": state["mean"], "kept": list(kept)})

    settled(Pair(make))


def test_a_temporary_that_python_keeps_for_once() -> None:
    """The segment writes in place, so that it cannot be run once more when that is noticed."""

    def make() -> Program:
        torch.manual_seed(0)
        weight, kept = torch.randn(300, 300), []

        def step(x: Tensor, keep: bool) -> Tensor:
            update = (x.t() @ x).tanh().sigmoid().sin() * 0.01
            weight.sub_(update)
            if keep:
                kept.append(update)
            return weight.sum()

        return Program(step, lambda i: (torch.randn(64, 300), i == 28), lambda: {"weight": weight, "kept": list(kept)})

    pair = Pair(make)
    pair.settle()
    assert pair.iteration < 28
    pair.run(34 - pair.iteration)


def test_bounds_that_change_in_clamps_of_lists() -> None:
    def make() -> Program:
        weights = [torch.zeros(64, 64) for _ in range(3)]

        def step(x: Tensor, limit: float) -> Tensor:
            for weight in weights:
                weight.copy_(x.tanh() * x)
            torch._foreach_clamp_min_(weights, -limit)
            torch._foreach_clamp_max_(weights, limit)
            return torch.stack([w.sum() for w in torch._foreach_clamp_max(weights, limit / 2)])

        def args(i: int) -> tuple[Tensor, float]:
            return torch.randn(64, 64) * (0.1 if i < 20 else 100), 1.0 + 0.01 * i

        return Program(step, args, lambda: {"weights": weights})

    pair = Pair(make)
    pair.settle()
    pair.run(max(4, 24 - pair.iteration))
