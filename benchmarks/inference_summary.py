"""From times to a table: per model and backend, and the geometric means that are reported. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

EAGER = "eager"


@dataclass(frozen=True, slots=True)
class GraphTimes:
    """What the tuner measured of one graph."""

    eager_s: float
    speedups: dict[str, float]  # over eager, by backend; those that failed are absent


def geomean(values: Iterable[float]) -> float:
    """The geometric mean, nan of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


@dataclass(frozen=True, slots=True)
class Means:
    """One contender over all cases. Nothing is clipped: a slowdown counts as one."""

    failures_as_one: float  # geometric mean, a case that failed counts as 1.0x
    failures_dropped: float  # geometric mean over the others
    lowest: float
    failures: int
    cases: int


def means_of(speedups: Sequence[float | None]) -> Means:
    """The means; None is a failure."""
    known = [value for value in speedups if value is not None]
    return Means(
        failures_as_one=geomean(1.0 if value is None else value for value in speedups),
        failures_dropped=geomean(known),
        lowest=min(known, default=math.nan),
        failures=len(speedups) - len(known),
        cases=len(speedups),
    )


def graph_times(measurements: Iterable[Mapping[str, Any]]) -> GraphTimes | None:
    """Of one graph's measurements (oldest first, as the store gives them); the newest of a backend counts.

    None if eager's time is not known: nothing was timed.
    """
    timed: dict[str, tuple[float, float] | None] = {}
    for entry in measurements:
        good = entry["outcome"] == "ok" and entry["median_s"] and entry["eager_s"]
        timed[entry["backend"]] = (entry["median_s"], entry["eager_s"]) if good else None
    pairs = {name: pair for name, pair in timed.items() if pair is not None}
    if not pairs:
        return None
    eager_s = median(eager for _, eager in pairs.values())
    return GraphTimes(eager_s, {name: eager / own for name, (own, eager) in pairs.items()})


def backend_speedup(graphs: Sequence[GraphTimes | None], backend: str) -> float | None:
    """A model's speedup if `backend` alone ran each of its graphs; graphs where it failed run eagerly.

    None if it ran none of them. Graphs without a time (None) do not count.
    """
    timed = [graph for graph in graphs if graph is not None]
    if not any(backend in graph.speedups for graph in timed):
        return None
    eager_s = sum(graph.eager_s for graph in timed)
    return eager_s / sum(graph.eager_s / graph.speedups.get(backend, 1.0) for graph in timed)


def best_speedup(graphs: Sequence[GraphTimes | None]) -> float | None:
    """A model's speedup with the fastest backend for each of its graphs, eager among them; None without times."""
    timed = [graph for graph in graphs if graph is not None]
    if not timed:
        return None
    eager_s = sum(graph.eager_s for graph in timed)
    return eager_s / sum(graph.eager_s / max([1.0, *graph.speedups.values()]) for graph in timed)


def best_single(means: Mapping[str, Means]) -> str | None:
    """The backend with the highest mean, failures counted as 1.0x: what one would choose for everything."""
    return max(means, key=lambda name: means[name].failures_as_one, default=None)
