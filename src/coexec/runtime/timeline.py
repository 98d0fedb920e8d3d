"""`step.timeline(path)`: what both runners did when, as a Chrome trace (the Trace Event Format)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coexec.config import disabled
from coexec.errors import NothingRecordedError
from coexec.graph.tracegraph import START
from coexec.runtime.history import WAITS, Chain, user_line

if TYPE_CHECKING:
    from coexec.runtime.step_runner import StepRunner

Event = dict[str, Any]
Span = tuple[str, str, int, Chain, int, int, int]
"""(kind, reason, node or -1, chain of the place, ops, start, end) as the native core has it; times in nanoseconds."""

Call = tuple[int, int, list[Span], list[Span]]
"""(start, end, the PythonRunner's spans, the GraphRunner's)."""

RUNNERS = {1: "PythonRunner", 2: "GraphRunner"}
"""Thread numbers in the trace."""


def write_timeline(runner: StepRunner, path: Path) -> None:
    """Writes the latest co-executed calls of a step to `path`; none where COEXEC_DISABLE turns coexec off.

    Raises NothingRecordedError if there are none and might be some.
    """
    runner.complete()  # a graph that still runs writes to its list
    calls = runner.recorded_calls()
    if not calls and not disabled():
        raise NothingRecordedError(runner.name, runner.phase().value)
    events = [*_names(runner), *_calls(runner, calls)]
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}))


def _names(runner: StepRunner) -> Iterator[Event]:
    yield _metadata(0, "process_name", f"coexec: {runner.name}")
    yield from (_metadata(thread, "thread_name", name) for thread, name in RUNNERS.items())


def _metadata(thread: int, what: str, name: str) -> Event:
    return {"ph": "M", "pid": os.getpid(), "tid": thread, "name": what, "args": {"name": name}}


def _calls(runner: StepRunner, calls: list[Call]) -> Iterator[Event]:
    for start, end, python, graph in calls:
        yield _event(1, runner.name, "call", start, end)
        for _, reason, _, chain, _, *when in python:
            yield _event(1, _wait_name(reason, chain), "wait", *when, reason=reason)
        for kind, _, node, _, ops, *when in graph:
            yield _event(2, _work_name(runner, kind, node, ops), kind, *when, ops=ops)


def _wait_name(reason: str, chain: Chain) -> str:
    """ "train.py:31 in step reads a value"."""
    return f"{user_line(chain)} {WAITS[reason]}" if chain else WAITS[reason]


def _work_name(runner: StepRunner, kind: str, node: int, ops: int) -> str:
    where = runner.graph.nodes[node]
    if where.id == START:
        return "waits for Python's first operation"
    place = f"{where.op} at {runner.line_of(where)}"
    names = {"wait": f"waits for Python at {place}", "op": place, "replayed": f"{ops} short ops from {place}"}
    return names.get(kind) or f"compiled segment: {ops} ops from {place}"


def _event(thread: int, name: str, category: str, start_ns: int, end_ns: int, **arguments: Any) -> Event:
    when_us = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
    return {"ph": "X", "pid": os.getpid(), "tid": thread, "name": name, "cat": category, **when_us, "args": arguments}
