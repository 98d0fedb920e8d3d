"""What is under way for a step that nobody wants to go on with: no file stays, no compiler works, no result is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import coexec
from coexec.backends.leftovers import own_prefix
from coexec.config import private_cache_dir
from coexec.runtime.compile_jobs import compile_worker, mailbox
from coexec.runtime.step_runner import StepRunner
from tests.coexec.programs import batch

DROPS: dict[str, Callable[[Any, StepRunner], None]] = {
    "reset": lambda step, runner: step.reset(),
    "reset of all": lambda step, runner: coexec.reset(),
    "forgotten after an interrupt": lambda step, runner: runner._forget(),
}


def compiled_step() -> Any:
    @coexec.compile(dynamic=True)
    def step(x: torch.Tensor, twice: bool = False) -> torch.Tensor:
        h = (x.tanh() + 1).sigmoid() * 2 + x.square()
        if twice:
            h = h * 2
        return ((h.cos() + x).tanh() * 3).sum()

    return step


def call_until(step: Any, reached: Callable[[StepRunner], object]) -> StepRunner:
    """Calls with batches of changing sizes."""
    for i in range(200):
        step(batch(i, rows=64 + i % 5))
        if reached(step._runner):
            runner: StepRunner = step._runner
            return runner
    raise AssertionError(step.explain())


def live_files() -> list[str]:
    return [path.name for path in private_cache_dir("compile").glob(f"{own_prefix('live')}*")]


def jobs_of(runner: StepRunner) -> set[int]:
    return runner.segments._jobs()


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of the step's segments."""
    monkeypatch.setattr(compile_worker().cache, "get", lambda key: None)


@pytest.mark.parametrize("drop", DROPS)
def test_no_captured_input_stays(drop: str) -> None:
    before = live_files()
    step = compiled_step()
    runner = call_until(step, lambda r: (capturing := r.segments.captures.current) is not None and capturing.done)
    assert len(live_files()) > len(before)
    DROPS[drop](step, runner)
    assert live_files() == before
    assert torch.equal(step(batch(0)), step._function(batch(0)))


@pytest.mark.parametrize("drop", DROPS)
def test_no_compiler_works_for_nobody(drop: str) -> None:
    step = compiled_step()
    runner = call_until(step, jobs_of)
    jobs = jobs_of(runner)
    DROPS[drop](step, runner)
    assert not any(compile_worker().cancel(job) for job in jobs)
    assert not any(mailbox.has(job) for job in jobs)


def test_what_another_plan_does_not_want_is_not_compiled() -> None:
    step = compiled_step()
    runner = call_until(step, jobs_of)
    jobs = jobs_of(runner)
    for i in itertools.takewhile(lambda i: i < 12 and jobs & jobs_of(runner), itertools.count()):
        step(batch(i, rows=64 + i % 5), True)
    assert not jobs & jobs_of(runner)
    assert not any(compile_worker().cancel(job) for job in jobs)
    assert not any(mailbox.has(job) for job in jobs)


@pytest.mark.compile
def test_what_was_compiled_for_a_step_that_is_reset_is_not_kept() -> None:
    step = compiled_step()
    runner = call_until(step, jobs_of)
    jobs = jobs_of(runner)
    assert step.wait_compiled(300)
    assert all(mailbox.has(job) for job in jobs)
    step.reset()
    assert not any(mailbox.has(job) for job in jobs)
