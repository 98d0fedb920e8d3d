"""Compiled segments that ran ahead of Python, which then went another way than all but its first call."""

from __future__ import annotations

import time

import pytest
import torch

from tests.coexec.harness import Program
from tests.coexec.test_compiled import Pair

pytestmark = pytest.mark.compile


def test_a_seed_in_place_of_what_a_segment_ran_ahead_for() -> None:
    """Only the first call seeds: no plan knows that, and the segment behind it has drawn already when Python does."""

    def make() -> Program:
        def step(x: torch.Tensor, reseed: bool) -> tuple[torch.Tensor, torch.Tensor]:
            if reseed:
                time.sleep(0.02)  # a segment that runs ahead has the time to
                torch.manual_seed(0)
            drawn = torch.rand(256, 256)
            return (x + drawn).sin().exp().tanh().sum(0), drawn

        return Program(step, lambda i: (torch.randn(256, 256), i in (0, 60)))

    pair = Pair(make)
    pair.run(1)
    pair.settle()
    pair.run(64 - pair.iteration)


def test_another_value_is_read_where_one_was_handed_out_early() -> None:
    def make() -> Program:
        weight = torch.linspace(-1, 1, 64 * 64).view(64, 64)

        def step(x: torch.Tensor, first: bool) -> float:
            hidden = ((x @ weight).relu() + 1).tanh() * 2
            total, mean = hidden.sum(), hidden.mean()
            time.sleep(0.01)  # the graph runs ahead
            return total.item() if first else mean.item()

        return Program(step, lambda i: (torch.randn(64, 64), i in (0, 60)))

    pair = Pair(make)
    pair.run(1)
    pair.settle()
    pair.run(64 - pair.iteration)


def test_a_segment_behind_a_branch_that_the_graph_waits_for() -> None:
    """Which segment comes is known only when Python has gone there: it runs compiled all the same."""

    def make() -> Program:
        weight = torch.linspace(-1, 1, 64 * 64).view(64, 64)

        def step(x: torch.Tensor, down: bool) -> torch.Tensor:
            hidden = x @ weight
            time.sleep(0.005)  # the graph comes to the branch first
            if down:
                return (((hidden.sin() + 1).exp() * 0.5).tanh() - 2).sigmoid()
            return (((hidden.cos() - 1).exp() * 1.5).tanh() + 2).sigmoid()

        return Program(step, lambda i: (torch.randn(64, 64), i % 3 == 1))

    pair = Pair(make)
    pair.settle()
    pair.run(24)  # compiled code and replay have taken their turns in both
    for _ in range(3):
        before = pair.compiled_runs()
        pair.run(2)
        assert pair.compiled_runs() > before, pair.step.explain()
