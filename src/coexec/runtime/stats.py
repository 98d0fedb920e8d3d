"""What a step has done so far, counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepStats:
    """A snapshot of a step's counters. Times are in seconds, summed over all co-executed iterations."""

    phase: str  # "building", "tracing", "co-execution" or "eager": what the next call does
    iterations: int
    traced: int  # iterations that ran wholly in the tracing phase
    co_executed: int  # iterations that ran wholly in co-execution
    fallbacks: dict[str, int]  # by reason
    segments: dict[str, int]  # segments of the plan by executor, "replay" or "inductor"
    switches: int  # Switch-Cases of the plan with more than one case
    loops: int  # While nodes of the plan; loops are unrolled so far, so this is 0
    feeds: int  # values copied from outside into the graph (Input Feeding)
    fetches: int  # values read back by Python (Output Fetching)
    returned_early: int  # calls that returned while their graph still ran (`overlap=True`)
    python_exec_s: float  # PythonRunner: the Python of wholly co-executed calls, stalls excluded
    python_stall_s: float  # PythonRunner: waiting for a value or the end, also after a call that returned early
    graph_exec_s: float  # GraphRunner: executing
    graph_stall_s: float  # GraphRunner: waiting for Python


@dataclass(slots=True)
class Counters:
    """The mutable side of StepStats."""

    iterations: int = 0
    traced: int = 0
    co_executed: int = 0
    fallbacks: Counter[str] = field(default_factory=Counter)
    python_s: float = 0.0  # wall time of wholly co-executed calls, stalls excluded
