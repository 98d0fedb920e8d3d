"""A Chrome trace of a few steps: the PythonRunner's and the GraphRunner's threads, and coexec's counters per step."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "step"
TIMES = ("python_exec_s", "python_stall_s", "graph_exec_s", "graph_stall_s")


def record(step: Callable[[Any], Any], batches: Iterator[Any], steps: int, path: Path) -> dict[str, Any]:
    """Runs `steps` steps and writes their trace to `path` (chrome://tracing, ui.perfetto.dev).

    Returns what the profiler saw: operations per thread, by the thread's role.
    """
    # Without it the profiler sees the calling thread alone; the option has no public name yet.
    threads = torch.profiler._ExperimentalConfig(profile_all_threads=True)
    samples = [times_of(step)]
    with profile(activities=[ProfilerActivity.CPU], experimental_config=threads) as profiler:
        for _ in range(steps):
            batch = next(batches)
            with record_function(STEP):
                step(batch)
            samples.append(times_of(step))
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    return annotate(path, samples)


def times_of(step: Any) -> dict[str, float]:
    """Returns coexec's four times in seconds so far; nothing for another contender."""
    if not hasattr(step, "wait_compiled"):
        return {}
    stats = step.stats()
    return {name: getattr(stats, name) for name in TIMES}


def annotate(path: Path, samples: list[dict[str, float]]) -> dict[str, Any]:
    """Names the threads in a written trace and adds coexec's counters; `samples` were taken before and after each step.

    Returns operations per role.
    """
    trace = json.loads(path.read_text())
    events: list[dict[str, Any]] = trace["traceEvents"]
    ops = Counter(event["tid"] for event in events if event.get("cat") == "cpu_op")
    main = os.getpid()
    roles = {tid: "PythonRunner" if tid == main else "GraphRunner" for tid in ops}
    for tid, role in roles.items():
        events.append({"ph": "M", "name": "thread_name", "pid": main, "tid": tid, "args": {"name": role}})
    events += counters(steps_of(events), samples, main)
    path.write_text(json.dumps(trace))
    by_role: Counter[str] = Counter()
    for tid, count in ops.items():
        by_role[roles[tid]] += count
    return {"ops": dict(by_role), "steps": len(steps_of(events))}


def steps_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the events that span one step each, in order; times are microseconds."""
    spans = [e for e in events if e.get("name") == STEP and e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    return sorted(spans, key=lambda event: event["ts"])


def counters(steps: list[dict[str, Any]], samples: list[dict[str, float]], pid: int) -> list[dict[str, Any]]:
    """Returns one counter event per step: the milliseconds that each runner worked and waited in it."""
    made = []
    for step, before, after in zip(steps, samples, samples[1:], strict=False):
        spent = {name.removesuffix("_s"): (after[name] - before[name]) * 1e3 for name in after}
        if spent:
            made.append({"ph": "C", "name": "milliseconds in step", "pid": pid, "ts": step["ts"], "args": spent})
    return made
