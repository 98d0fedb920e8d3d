"""While its segments are compiled, a step that is slower on replay than plain eager waits in plain eager."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import coexec
from coexec.backends.cache import Failure
from coexec.backends.snapshot import delete_snapshot
from coexec.backends.worker import CompileWorker, Finished
from coexec.runtime import compile_jobs, segments, step_runner
from coexec.runtime.benefit import BLOCK
from coexec.runtime.versions import State
from coexec.runtime.waiting import (
    BLOCKS,
    COUNTED,
    FIRST_REST,
    LEAST_REST,
    LONGEST_REST,
    PRICE,
    UNDISTURBED,
    WAKING,
    Waiting,
)
from tests.coexec.test_benefit import Clock

TURNS = BLOCK * BLOCKS
VISIT = WAKING + COUNTED


# Decisions ------------------------------------------------------------------------------------------------------------


def iterate(waiting: Waiting, n: int, coexec_s: float, compiling: bool = True, ended: int = 0) -> list[bool]:
    """Runs `n` iterations, plain ones of a second; returns which ones were plain."""
    plain = []
    for _ in range(n):
        waiting.look(ended, running=1)
        plain.append(waiting.plain_next())
        waiting.ended(plain[-1], 1.0 if plain[-1] else coexec_s, compiling)
    return plain


def lengths(plain: list[bool]) -> list[tuple[bool, int]]:
    return [(kind, len(list(group))) for kind, group in itertools.groupby(plain)]


def lost(coexec_s: float = 1.1) -> Waiting:
    waiting = Waiting()
    iterate(waiting, UNDISTURBED + TURNS, coexec_s)
    assert waiting.resting
    return waiting


def test_it_takes_turns_after_a_few_undisturbed_iterations_and_then_rests() -> None:
    waiting = Waiting()
    plain = iterate(waiting, UNDISTURBED + TURNS, coexec_s=1.1)
    assert not any(plain[: UNDISTURBED + BLOCK])
    assert lengths(plain[UNDISTURBED:]) == [(False, BLOCK), (True, BLOCK)] * (BLOCKS // 2)
    assert waiting.left == FIRST_REST
    assert "co-execution took 1100.000 ms, plain eager 1000.000 ms" in str(waiting)


def test_rests_double_as_long_as_visits_lose() -> None:
    waiting = lost()
    rests = [count for kind, count in lengths(iterate(waiting, 8192, coexec_s=1.1)) if kind]
    assert rests[:6] == [FIRST_REST, 128, 256, 512, LONGEST_REST, LONGEST_REST]


def test_visits_are_short() -> None:
    visits = [count for kind, count in lengths(iterate(lost(), 8192, coexec_s=1.1)) if not kind]
    assert set(visits) == {VISIT}


def test_a_visit_that_wins_ends_the_rests() -> None:
    waiting = lost()
    iterate(waiting, FIRST_REST, coexec_s=1.1)
    assert not any(iterate(waiting, VISIT + UNDISTURBED + BLOCK, coexec_s=0.5))
    assert not waiting.lost
    assert waiting.next_rest == FIRST_REST
    iterate(waiting, TURNS - BLOCK, coexec_s=0.5)
    assert not waiting.resting


def test_turns_that_co_execution_wins_are_taken_less_and_less_often() -> None:
    plain = iterate(Waiting(), 10 * TURNS, coexec_s=0.5)
    distances = [count - BLOCK for kind, count in lengths(plain) if not kind and count > BLOCK]
    assert distances[:3] == [UNDISTURBED, 2 * UNDISTURBED, 4 * UNDISTURBED]


def test_what_is_within_the_margin_does_not_rest() -> None:
    waiting = Waiting()
    iterate(waiting, UNDISTURBED + TURNS, 1.02)
    assert not waiting.resting


def test_a_rest_ends_when_a_part_is_compiled_but_not_at_once() -> None:
    waiting = lost()
    plain = iterate(waiting, LEAST_REST + VISIT, coexec_s=1.1, ended=1)
    assert lengths(plain) == [(True, LEAST_REST), (False, VISIT)]


@pytest.mark.parametrize("coexec_s", [1.5, 2.0, 4.0])
def test_a_visit_costs_little_of_the_rest_before_it(coexec_s: float) -> None:
    waiting = lost(coexec_s)
    for _ in range(4):
        plain = iterate(waiting, LONGEST_REST, coexec_s, ended=1)
        assert 0.0 < plain.count(False) * (coexec_s - 1.0) <= PRICE * plain.count(True) + VISIT * (coexec_s - 1.0)


def test_visits_that_describe_and_capture_are_dear_and_have_long_rests() -> None:
    waiting = lost()
    waiting.left = 1
    iterate(waiting, 1, coexec_s=1.1)
    iterate(waiting, WAKING, coexec_s=21.0)
    iterate(waiting, COUNTED, coexec_s=1.1)
    assert str(waiting.latest).startswith("co-execution took 1100.000 ms")
    cost = WAKING * 20.0 + COUNTED * 0.1  # in plain iterations
    assert waiting.left == math.ceil(cost / PRICE)


def test_a_rest_ends_at_once_when_all_is_compiled() -> None:
    waiting = lost()
    waiting.look(ended=2, running=0)
    assert not waiting.resting


def test_a_step_of_which_nothing_is_compiled_is_not_compared() -> None:
    waiting = Waiting()
    assert not any(iterate(waiting, 10 * TURNS, coexec_s=1.1, compiling=False))
    assert iterate(waiting, TURNS, coexec_s=1.1).count(True) == TURNS // 2  # it was undisturbed meanwhile
    assert waiting.resting


def test_turns_end_with_the_compilation() -> None:
    waiting = Waiting()
    iterate(waiting, UNDISTURBED + BLOCK + 1, coexec_s=1.1)
    assert waiting.plain_next()
    waiting.ended(True, 1.0, compiling=False)
    assert not waiting.plain_next()


def test_one_that_has_lost_rests_as_soon_as_something_is_compiled_again() -> None:
    waiting = lost()
    waiting.look(ended=1, running=0)
    assert not any(iterate(waiting, 2 * VISIT, coexec_s=1.1, compiling=False))
    iterate(waiting, 1, coexec_s=1.1)
    assert waiting.resting


def test_a_trace_or_a_fallback_begins_anew() -> None:
    waiting = Waiting()
    for _ in range(20):
        assert not any(iterate(waiting, UNDISTURBED, coexec_s=1.1))
        waiting.disturbed()
    waiting = lost()
    waiting.disturbed()
    assert not any(iterate(waiting, UNDISTURBED + COUNTED, coexec_s=1.1))
    assert waiting.resting


# A step ---------------------------------------------------------------------------------------------------------------


class EmptyCache:
    """Knows nothing, so that each segment is handed to the worker."""

    def get(self, key: str) -> None:
        """As a cache that is empty."""

    def note_runs(self, key: str, run_s: float, runs: int) -> None:
        """As without a database."""


class HeldWorker:
    """A compile worker that answers when it is told to.

    Args:
        worker: compiles; None: nothing is compiled, and each answer is a failure.
    """

    def __init__(self, worker: CompileWorker | None = None) -> None:
        self.worker, self.cache, self.jobs, self.ready = worker, EmptyCache(), list[int](), list[Finished]()

    def submit(self, spec: Any, snapshot: Path, **options: Any) -> int:
        if self.worker is not None:
            self.jobs.append(self.worker.submit(spec, snapshot, **options))
        else:
            delete_snapshot(snapshot)
            self.jobs.append(len(self.jobs) + 1)
        return self.jobs[-1]

    def poll(self) -> list[Finished]:
        ready, self.ready = self.ready, []
        return ready

    def cancel(self, job: int) -> bool:
        return True

    def fail(self, job: int) -> None:
        self.ready.append(Finished(job, "", None, Failure("", "compile error", "on purpose"), None))

    def finish(self) -> None:
        assert self.worker is not None
        self.ready += self.worker.wait(600.0)


def held(monkeypatch: pytest.MonkeyPatch, worker: CompileWorker | None = None) -> HeldWorker:
    """Steps hand their segments to this worker, and are compared with plain eager."""
    monkeypatch.delenv("COEXEC_KEEP")
    monkeypatch.setattr(compile_jobs, "_worker", HeldWorker(worker))
    monkeypatch.setattr(segments, "POLL_INTERVAL_S", 0.0)
    return cast(HeldWorker, compile_jobs.compile_worker())


def work(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Operations that are worth a segment; none is so small that Python would do it by itself."""
    for _ in range(4):
        x = (x @ weight).tanh() * 2 + 1
    return x


def two_segments(monkeypatch: pytest.MonkeyPatch, coexec_s: float = 1.1, **options: Any) -> Any:
    """A step whose iterations take `coexec_s` in co-execution, and a second in plain eager."""
    clock = Clock(coexec_s)
    monkeypatch.setattr(step_runner, "time", clock)
    weight = torch.eye(4)

    @coexec.compile(**options)
    def step(x: torch.Tensor) -> float:
        clock.pass_time()
        h = work(x, weight)
        rows = h.nonzero()  # Python waits: the first segment ends here
        return work(h * rows.shape[0], weight).sum().item()

    return step


def call_until(step: Any, condition: Callable[[], bool], limit: int = 200) -> int:
    """Calls the step until the condition holds; returns how often."""
    x = torch.linspace(0.1, 1.0, 12).reshape(3, 4)
    for n in range(limit):
        if condition():
            return n
        step(x)
    raise AssertionError(step.explain())


def resting(step: Any) -> Callable[[], bool]:
    return lambda: step._runner.rests()


def awake(step: Any) -> Callable[[], bool]:
    return lambda: not step._runner.rests()


def states(step: Any) -> list[State]:
    return [version.state for segment in step._runner.segments.segments for version in segment.versions]


def test_a_step_that_is_slower_on_replay_rests_while_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, step = held(monkeypatch), two_segments(monkeypatch)
    calls = call_until(step, resting(step))
    assert calls >= UNDISTURBED + TURNS
    assert len(worker.jobs) == 2
    before = step.stats()
    assert (before.phase, before.fallbacks) == ("eager", {})
    assert (
        "eager: it runs plain eager until its segments are compiled: co-execution took 1100.000 ms, "
        "plain eager 1000.000 ms; co-execution is tried again after 64 calls at the latest"
    ) in step.explain()
    assert call_until(step, awake(step)) == FIRST_REST
    after = step.stats()
    assert (after.phase, after.co_executed - before.co_executed) == ("co-execution", 0)
    assert f"{FIRST_REST + TURNS // 2} plain eager" in step.explain()
    assert call_until(step, resting(step)) == VISIT
    assert call_until(step, awake(step)) == 2 * FIRST_REST
    assert step.stats().fallbacks == {}


def test_a_step_that_gains_on_replay_never_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, step = held(monkeypatch), two_segments(monkeypatch, coexec_s=0.5)
    call_until(step, lambda: step.stats().iterations == 150)
    assert len(worker.jobs) == 2
    assert not step._runner.waiting.rested


@pytest.mark.parametrize("options", [{"overlap": True}, {"mode": "lazy"}])
def test_what_is_yours_to_measure_never_rests(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    worker, step = held(monkeypatch), two_segments(monkeypatch, **options)
    call_until(step, lambda: step.stats().iterations == 150)
    assert len(worker.jobs) == 2
    assert not step._runner.waiting.rested


def test_a_kept_step_never_rests_and_leaves_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    held(monkeypatch)
    step = two_segments(monkeypatch)
    call_until(step, resting(step))
    monkeypatch.setenv("COEXEC_KEEP", "1")
    assert call_until(step, awake(step)) == 1
    before = step.stats()
    call_until(step, lambda: step.stats().iterations == before.iterations + 100)
    assert step.stats().co_executed == before.co_executed + 100


def test_what_was_compiled_first_is_adopted_while_the_rest_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, step = held(monkeypatch), two_segments(monkeypatch)
    call_until(step, resting(step))
    worker.fail(worker.jobs[0])
    assert call_until(step, awake(step)) == LEAST_REST + 1  # the last call looked, and was co-executed
    assert sorted(state.name for state in states(step)) == ["COMPILING", "REPLAY"]
    assert call_until(step, resting(step)) == VISIT - 1


def test_the_settled_trial_decides_once_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, step = held(monkeypatch), two_segments(monkeypatch)
    call_until(step, resting(step))
    for job in worker.jobs:
        worker.fail(job)
    assert call_until(step, awake(step)) == 1
    assert states(step) == [State.REPLAY, State.REPLAY]
    call_until(step, lambda: step.stats().phase == "eager")
    assert "because plain eager is faster" in step.explain()


def test_a_block_rests_too(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = held(monkeypatch)
    clock = Clock(1.1)
    monkeypatch.setattr(step_runner, "time", clock)
    x, phases = torch.linspace(0.1, 1.0, 16).reshape(4, 4), list[bool]()
    for _ in range(3 * TURNS + FIRST_REST):
        with coexec.step(name="a block that rests") as block:
            clock.pass_time()
            assert work(x, x).sum().item() != 0.0
        phases.append(block.stats().phase == "eager")
    assert worker.jobs
    assert (True, FIRST_REST) in lengths(phases)
    assert block.stats().fallbacks == {}


@pytest.fixture
def compiler() -> Iterator[CompileWorker]:
    worker = CompileWorker()
    yield worker
    worker.close()


@pytest.mark.compile
def test_wait_compiled_ends_a_rest(monkeypatch: pytest.MonkeyPatch, compiler: CompileWorker) -> None:
    worker, step = held(monkeypatch, compiler), two_segments(monkeypatch)
    call_until(step, resting(step))
    assert not step.wait_compiled(0.0)
    call_until(step, lambda: step.stats().iterations % 3 == 0)
    assert step.stats().phase == "eager"
    worker.finish()
    assert step.wait_compiled(0.0)
    assert call_until(step, awake(step)) == 1
    assert states(step) == [State.COMPILED, State.COMPILED]
    runs = [version.native for segment in step._runner.segments.segments for version in segment.versions]
    call_until(step, lambda: all(native.runs for native in runs), limit=8)
    assert step.stats().fallbacks == {}
