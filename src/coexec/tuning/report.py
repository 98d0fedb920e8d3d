"""What a tuning run says: events while it works, and a report at its end. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from coexec.subgraphs.entries import Outcome


@dataclass(frozen=True, slots=True)
class Progress:
    """One event for a progress bar."""

    graph: int  # which graph of this run, from 0
    graphs: int  # how many there are
    subgraph: str  # its digest
    note: str  # where it was met
    candidate: str  # being tried; "" for events of the whole graph
    stage: str  # "start", "build", "verify", "prepared", "time", "tried", "done"
    outcome: Outcome | None = None  # for "tried"
    speedup: float | None = None  # for "tried" (of this candidate) and "done" (of the winner)


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """One candidate on one graph."""

    candidate: str
    outcome: Outcome
    detail: str = ""  # why it failed, or how sure its speed is
    speedup: float | None = None  # over eager; None unless OK
    low: float | None = None  # 95% interval of it
    high: float | None = None
    median_s: float | None = None
    eager_s: float | None = None
    build_s: float | None = None
    before: bool = False  # known from an earlier run


@dataclass(frozen=True, slots=True)
class GraphReport:
    """One graph."""

    subgraph: str
    note: str
    attempts: tuple[AttemptReport, ...] = ()
    winner: str = ""  # "" if it was not decided
    speedup: float | None = None  # of the winner over eager, 1.0 for eager
    complete: bool = False  # every candidate has been tried
    prepared: tuple[str, ...] = ()  # candidates that are built and verified, and wait to be timed
    reason: str = ""  # why this winner, or why the graph was left
    passed_over: bool = False  # on purpose: nothing is to be gained from it
    out_of_budget: bool = False  # left because the run's budget was spent, and for no other reason


@dataclass(frozen=True, slots=True)
class TuneReport:
    """The whole run."""

    graphs: tuple[GraphReport, ...]
    unavailable: Mapping[str, str]  # candidates that cannot be used here, with the reason
    elapsed_s: float
    out_of_budget: bool = False

    def outcomes(self) -> dict[str, int]:
        """How many attempts ended how."""
        return dict(Counter(attempt.outcome.value for graph in self.graphs for attempt in graph.attempts))

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "unavailable": dict(self.unavailable), "outcomes": self.outcomes()}
