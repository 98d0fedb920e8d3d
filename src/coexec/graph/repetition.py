"""Which ops run a number of times that varies: their loops are to be folded.

A loop whose trip count never varied stays unrolled, and so does one that makes no new paths for long: its branches are
then in the graph, and what follows can be compiled as one segment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coexec.records import Trace

DIVERGENCES = 2
"""Traces with a new path, and with an op whose count varies, before it is folded."""

Repeated = tuple[int, str]
"""(program location, op)"""


@dataclass(slots=True)
class Counts:
    """How often an op ran in the traces that it was in."""

    low: int
    high: int
    traces: int

    @property
    def vary(self) -> bool:
        """True if the op really was repeated, and not always as often."""
        return self.low < self.high


class Repetitions:
    """Counts of the ops of all whole traces."""

    def __init__(self) -> None:
        self._counts: dict[Repeated, Counts] = {}
        self._traces = 0
        self._divergences = 0

    def learn(self, trace: Trace, new_path: bool) -> frozenset[int]:
        """Takes a merged trace; returns the locations to be folded, none as long as paths might still settle.

        Args:
            new_path: whether the trace was new to the graph.
        """
        if not trace.complete:
            return frozenset()
        self._traces += 1
        for repeated, count in Counter((op.location, op.op) for op in trace.ops if not op.folded).items():
            known = self._counts.setdefault(repeated, Counts(count, count, 0))
            known.low, known.high, known.traces = min(known.low, count), max(known.high, count), known.traces + 1
        varying = frozenset(location for (location, _), counts in self._counts.items() if counts.vary)
        self._divergences += new_path and bool(varying)
        return varying if self._divergences >= DIVERGENCES else frozenset()

    def constant(self) -> frozenset[int]:
        """Returns the locations of ops that ran in every trace, equally often, and more than once."""
        return frozenset(
            location
            for (location, _), counts in self._counts.items()
            if counts.traces == self._traces and counts.low == counts.high > 1
        )
