"""A settled step that plain eager runs faster is left to plain eager; one that gains stays."""

from __future__ import annotations

import itertools
import time

import pytest
import torch

import coexec
from coexec.runtime import step_runner
from coexec.runtime.benefit import BLOCK, BLOCKS, SETTLED_ITERATIONS, BenefitTrial


def run_trial(trial: BenefitTrial, eager_s: float, coexec_s: float) -> bool:
    while trial.settled < trial.wait:
        assert not trial.plain_next()
        assert not trial.ended(False, coexec_s)
    plain = []
    for _ in range(BLOCK * BLOCKS):
        plain.append(trial.plain_next())
        slower = trial.ended(plain[-1], eager_s if plain[-1] else coexec_s)
    assert [kind for kind, _ in itertools.groupby(plain)] == [False, True] * (BLOCKS // 2)
    return slower


def test_the_faster_one_stays() -> None:
    trial = BenefitTrial()
    assert not run_trial(trial, eager_s=0.010, coexec_s=0.005)
    assert "2.00x" in trial.verdict
    assert not run_trial(trial, eager_s=0.0100, coexec_s=0.0102)  # within the margin
    assert trial.wait == 4 * SETTLED_ITERATIONS  # asked less and less often
    assert run_trial(trial, eager_s=0.010, coexec_s=0.011)


def test_a_change_starts_the_trial_again() -> None:
    trial = BenefitTrial()
    for _ in range(SETTLED_ITERATIONS + BLOCK + 1):
        trial.ended(trial.plain_next(), 1.0)
    assert trial.plain_next()
    trial.changed()
    assert not trial.plain_next()
    assert run_trial(trial, eager_s=0.010, coexec_s=0.020)


class Clock:
    """Time as `StepRunner` sees it: co-executed calls take `coexec_s`, plain ones a second."""

    def __init__(self, coexec_s: float) -> None:
        self.coexec_s, self.now_s = coexec_s, 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def pass_time(self) -> None:
        self.now_s += 1.0 if torch._C._dispatch_tls_is_dispatch_key_included("Fake") is False else self.coexec_s

    def __getattr__(self, name: str) -> object:
        return getattr(time, name)


@pytest.mark.parametrize(("coexec_s", "phase"), [(2.0, "eager"), (0.5, "co-execution")])
def test_a_step_ends_in_the_faster_phase(monkeypatch: pytest.MonkeyPatch, coexec_s: float, phase: str) -> None:
    monkeypatch.delenv("COEXEC_KEEP")
    clock = Clock(coexec_s)
    monkeypatch.setattr(step_runner, "time", clock)

    @coexec.compile(numerics="exact")
    def step(x: torch.Tensor) -> float:
        clock.pass_time()
        return (x * 2 + 1).sum().item()

    x = torch.ones(3)
    for _ in range(SETTLED_ITERATIONS + BLOCK * BLOCKS + 6):
        assert step(x) == 9.0
    assert step.stats().phase == phase
    assert "by turns in this step" in step.explain()
    assert step.stats().fallbacks == {}


def test_a_block_has_its_trial_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COEXEC_KEEP")
    clock = Clock(2.0)
    monkeypatch.setattr(step_runner, "time", clock)
    x = torch.ones(3)
    for _ in range(SETTLED_ITERATIONS + BLOCK * BLOCKS + 6):
        with coexec.step(name="trial of a block", numerics="exact") as block:
            clock.pass_time()
            assert (x * 2 + 1).sum().item() == 9.0
    assert block.stats().phase == "eager"
    assert block.stats().co_executed == SETTLED_ITERATIONS + BLOCK * BLOCKS // 2 + 1  # the first made the plan


def test_a_plain_iteration_may_call_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COEXEC_KEEP")

    @coexec.compile(numerics="exact")
    def step(x: torch.Tensor, depth: int) -> torch.Tensor:
        if depth:
            return step(x + 1, depth - 1)
        return x * 2

    x = torch.ones(3)
    for _ in range(SETTLED_ITERATIONS + 4):
        step(x, 0)
    while not step._runner.benefit.plain_next():
        step(x, 0)
    assert step(x, 2).tolist() == [6.0, 6.0, 6.0]  # as eager; co-executed it raises ReentrantStepError
