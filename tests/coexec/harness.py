"""Runs a small step eagerly and under coexec from the same seed, and compares everything that a user can see.

A test builds its program in a function `make()` that returns a :class:`Program`; it is called once per run, so that
both runs have models, optimizers and logs of their own. What is compared after every call: the returned value (deeply:
type, dtype, strides, bits, which tensors share memory), the exception if one came, the watched state, the RNG, and the
modes that a step may have left on. Every third return value is kept and looked at only at the end: a placeholder
must stay right however late it is read.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import coexec
from coexec.intercept.native import native_if_ready
from coexec.runtime.stats import StepStats
from tests.coexec.snapshot import snapshot

ITERATIONS = 10


@dataclass
class Program:
    """One run's step and everything that belongs to it."""

    step: Callable[..., Any]
    args: Callable[[int], tuple[Any, ...]] = (
        lambda i: ()
    )  # called in order, just before call `i`: user code lives here too
    watch: Callable[[], Any] = lambda: None  # state compared after every call
    after: Callable[[int, Any], None] = lambda i, result: None  # what the caller does with the result of call `i`


@dataclass(frozen=True)
class Raised:
    """Stands for the result of a call that raised."""

    kind: str
    text: str


@dataclass
class Outcome:
    """What one run showed."""

    records: list[Any] = field(default_factory=list)  # per call
    late: list[Any] = field(default_factory=list)  # return values looked at only at the end
    errors: list[Exception] = field(default_factory=list)
    stats: StepStats | None = None
    explanation: str = ""
    program: Program | None = None
    compiled: Any = None

    @property
    def fallbacks(self) -> int:
        """How many iterations fell back."""
        assert self.stats is not None
        return sum(self.stats.fallbacks.values())


def modes() -> tuple[Any, ...]:
    """What a step may have left switched on, and the random streams."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        hash(torch.get_rng_state().numpy().tobytes()),
        hash(random.getstate()),
        hash(np.random.get_state()[1].tobytes()),  # type: ignore[union-attr, index]
    )


def seed_all(seed: int) -> None:
    """Seeds every stream that a program of a test may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def run(make: Callable[[], Program], n: int, wrap: Callable[[Any], Any] | None, seed: int = 0) -> Outcome:
    """Runs `n` calls; `wrap` is None for eager."""
    seed_all(seed)
    program = make()
    step = wrap(program.step) if wrap else program.step
    out, kept = Outcome(program=program, compiled=step), []
    for i in range(n):
        args = program.args(i)
        try:
            result: Any = step(*args)
        except Exception as error:
            result = Raised(type(error).__name__, str(error))
            out.errors.append(error.with_traceback(None))
        else:
            program.after(i, result)
        if i % 3 == 2 and type(result) is not Raised:
            kept.append(result)
            seen: Any = "kept"
        else:
            seen = snapshot(result)
        del result, args
        out.records.append((seen, snapshot(program.watch()), modes()))
        gc.collect(0)
    out.late = [snapshot(result) for result in kept]
    if wrap:
        out.stats, out.explanation = step.stats(), step.explain()
    return out


def exact(step: Any, **options: Any) -> Any:
    """The replay executor: no compilation, bit-identical."""
    return coexec.compile(step, backend="replay", numerics="exact", **options)


def check(
    make: Callable[[], Program],
    n: int = ITERATIONS,
    *,
    phase: str | None = "co-execution",
    max_fallbacks: int = 3,
    min_co_executed: int = 2,
    raises: tuple[type[BaseException], ...] = (),
    wrap: Callable[[Any], Any] = exact,
) -> Outcome:
    """Runs `make` both ways and asserts that nothing differs, then that co-execution really took place.

    Args:
        phase: the phase at the end; None if the test asserts it itself.
        max_fallbacks: of all iterations; a step that keeps falling back is right but pointless.
        min_co_executed: iterations that must have run wholly in co-execution.
        raises: what the eager program raises in some call; anything else is a mistake of the test.
    """
    eager = run(make, n, None)
    assert {type(error) for error in eager.errors} == set(raises), eager.errors
    got = run(make, n, wrap)
    for i, (expected, actual) in enumerate(zip(eager.records, got.records, strict=True)):
        for what, a, b in zip(("result", "state", "modes and random streams"), expected, actual, strict=True):
            assert b == a, f"call {i}: {what}: {difference(a, b)}"
    assert got.late == eager.late, f"read late: {difference(eager.late, got.late)}"
    native = native_if_ready()
    assert native is not None
    assert native.active_step() is None
    stats = got.stats
    assert stats is not None
    assert stats.iterations == n
    if phase is not None:
        assert stats.phase == phase, got.explanation
    assert got.fallbacks <= max_fallbacks, got.explanation
    assert stats.co_executed >= min_co_executed, got.explanation
    return got


def difference(a: Any, b: Any, path: str = "") -> str:
    """Where two snapshots differ first."""
    if type(a) is type(b) and isinstance(a, tuple | list) and len(a) == len(b):
        for k, (x, y) in enumerate(zip(a, b, strict=True)):
            if x != y:
                return difference(x, y, f"{path}.{k}")
    return f"at {path or 'the top'}: eager {str(a)[:300]!r}, coexec {str(b)[:300]!r}"
