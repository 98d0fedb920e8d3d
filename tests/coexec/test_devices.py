"""Tensors that are not on the CPU: a step that computes on another device is left to eager; meta tensors are no reason.

The other device of these tests is `lazy`, which every build of PyTorch has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import coexec
from tests.coexec.harness import Program, check, exact
from tests.coexec.programs import batch, function_program


@pytest.fixture(scope="module", autouse=True)
def lazy_device() -> None:
    from torch._lazy import ts_backend

    ts_backend.init()


def lazy_module() -> Callable[[torch.Tensor], torch.Tensor]:
    model = nn.Linear(4, 3).to("lazy")
    return lambda x: model(x.to("lazy")).tanh().cpu()


def lazy_argument() -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: (x * 2).cpu()


def lazy_factory() -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x + torch.ones(4, device="lazy").cpu()


@pytest.mark.parametrize("make_body", [lazy_module, lazy_argument, lazy_factory])
def test_a_step_on_another_device_runs_eagerly_and_says_so_once(make_body: Any) -> None:
    def make() -> Program:
        body = make_body()
        return Program(body, lambda i: (batch(i).to("lazy") if make_body is lazy_argument else batch(i),))

    with pytest.warns(UserWarning, match="lazy tensors") as said:
        got = check(make, phase="eager", min_co_executed=0)
    assert len(said) == 1
    assert said[0].filename.endswith("harness.py")  # the caller of the step
    assert got.stats is not None
    assert got.stats.fallbacks == {"device lazy": 1}
    assert got.stats.traced == 1
    assert "device lazy" in got.explanation


def test_another_device_met_in_co_execution() -> None:
    def make() -> Program:
        calls = [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            h = x * 2
            return h.to("lazy").exp().cpu() if calls[0] > 6 else h.exp()

        return function_program(step)

    with pytest.warns(UserWarning, match="lazy tensors"):
        got = check(make, n=40, phase="eager")
    assert got.stats is not None
    assert got.stats.fallbacks == {"new path": 1, "device lazy": 1}


def test_a_filter_that_makes_it_an_error_raises_once_and_leaves_the_step_eager() -> None:
    step = exact(lambda x: x.to("lazy").exp().cpu())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="lazy tensors"):
            step(batch(0))
        for i in range(4):
            assert torch.equal(step(batch(i)), batch(i).to("lazy").exp().cpu())
    assert step.stats().phase == "eager"


def test_meta_tensors_in_passing_are_no_reason() -> None:
    def make() -> Program:
        shadow = nn.Linear(4, 3, device="meta")

        def step(x: torch.Tensor) -> Any:
            y = shadow(x.to("meta"))
            return x.new_ones(y.shape) * x.sum(), y.shape

        return function_program(step)

    check(make)


def test_a_block_on_another_device() -> None:
    def block(x: torch.Tensor) -> torch.Tensor:
        with coexec.step("on another device", backend="replay", numerics="exact"):
            return x.to("lazy").exp().cpu()

    with pytest.warns(UserWarning, match="lazy tensors") as said:
        got = [block(batch(i)) for i in range(4)]
    assert said[0].filename == __file__
    assert all(torch.equal(got[i], block(batch(i))) for i in range(4))
