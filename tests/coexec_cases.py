"""Wrappers for `compare.py --wrap coexec_cases:NAME`.

What the step did is written as JSON to the file that COEXEC_CASES_REPORT names, if it names one.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import coexec
from coexec.intercept.build import build
from coexec.intercept.native import native_if_ready

WAIT_AFTER = 12  # calls; then background compilation is waited for, and the rest must run compiled segments
WAIT_AGAIN_AFTER = 22  # for what a new path, or an error, in calls 6 to 11 delayed

build(verbose=False)  # the cases are about steps, not about the build
assert native_if_ready() is not None


def replay(step: Any) -> Any:
    """Bit-exact: the recorded ops, replayed."""
    return _reported(coexec.compile(step, backend="replay", numerics="exact"))


def lazy(step: Any) -> Any:
    """The GraphRunner starts only when Python needs a value."""
    return _reported(coexec.compile(step, backend="replay", numerics="exact", mode="lazy"))


def default(step: Any) -> Any:
    """As a user gets it, but that calls 13 and 23 wait for the compiler.

    See `compiled_runs_after_wait` of the report: all from call 13 on.
    """
    facts: dict[str, int] = {}
    compiled = _reported(coexec.compile(step), facts)
    calls = 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls in (WAIT_AFTER + 1, WAIT_AGAIN_AFTER + 1) and not compiled.wait_compiled(600):
            raise AssertionError("background compilation did not end within 600 s")
        if calls == WAIT_AFTER + 1:
            facts["compiled_runs_before_wait"] = _native_facts(compiled).get("compiled_runs", 0)
        return compiled(*args, **kwargs)

    return wrapper


def overlap(step: Any) -> Any:
    """A call may return before its graph has finished."""
    return _reported(coexec.compile(step, backend="replay", numerics="exact", overlap=True))


def _reported(step: Any, facts: dict[str, int] | None = None) -> Any:
    path = os.environ.get("COEXEC_CASES_REPORT")
    if path:
        atexit.register(_report, step, Path(path), {} if facts is None else facts)
    return step


def _native_facts(step: Any) -> dict[str, Any]:
    native = step._runner._native
    facts: dict[str, Any] = native.stats() if native is not None else {}
    return facts


def _report(step: Any, path: Path, noted: dict[str, int]) -> None:
    facts = _native_facts(step)
    runs = facts.get("compiled_runs", 0)
    report = {
        "compiled_runs": runs,
        "compiled_runs_after_wait": runs - noted.get("compiled_runs_before_wait", runs),
        "discarded_runs": facts.get("discarded_runs", 0),
        "stats": dataclasses.asdict(step.stats()),
        "explain": step.explain(),
    }
    path.write_text(json.dumps(report))
