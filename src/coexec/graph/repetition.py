"""Which ops run a number of times that varies, or on lists whose length varies: their loops are to be folded.

A loop whose trip count never varied stays unrolled, and so does one that makes no new paths for long: its branches are
then in the graph, and what follows can be compiled as one segment.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from coexec.records import OpRecord, Trace

DIVERGENCES = 2
"""Traces with a new path, and with an op whose count varies, before it is folded."""

LIST_OPS = frozenset({"aten::unbind.int", "aten::stack", "aten::cat"})
"""Ops that the native step can do element by element."""

Repeated = tuple[int, str]
"""(program location, op)"""


@dataclass(frozen=True, slots=True)
class Varying:
    """What makes new paths by its number alone."""

    loops: frozenset[int]  # locations of ops that ran several times, and not always as often
    lists: frozenset[int]  # locations of ops on lists that were not always as long

    def __bool__(self) -> bool:
        return bool(self.loops or self.lists)


NOTHING = Varying(frozenset(), frozenset())


@dataclass(slots=True)
class Counts:
    """How often an op ran in the traces that it was in, or how long its list was."""

    low: int
    high: int
    traces: int = 0

    def take(self, count: int) -> None:
        self.low, self.high, self.traces = min(self.low, count), max(self.high, count), self.traces + 1

    @property
    def vary(self) -> bool:
        return self.low < self.high


class Repetitions:
    """Counts of the ops of all whole traces."""

    def __init__(self) -> None:
        self._counts: dict[Repeated, Counts] = {}
        self._lengths: dict[Repeated, Counts] = {}  # per uid and op
        self._location_of: dict[Repeated, int] = {}  # of the keys of `_lengths`
        self._traces = 0
        self._divergences = 0

    def learn(self, trace: Trace, new_path: bool) -> Varying:
        """Takes a merged trace; returns what is to be folded, nothing as long as paths might still settle.

        Args:
            new_path: whether the trace was new to the graph.
        """
        if not trace.complete:
            return NOTHING
        self._traces += 1
        for repeated, count in Counter((op.location, op.op) for op in trace.ops if not op.folded).items():
            self._counts.setdefault(repeated, Counts(count, count)).take(count)
        for op in trace.ops:
            if op.op in LIST_OPS and op.node < 0:
                self._take_list(op)
        varying = Varying(
            frozenset(location for (location, _), counts in self._counts.items() if counts.vary),
            frozenset(self._location_of[key] for key, counts in self._lengths.items() if counts.vary),
        )
        self._divergences += new_path and bool(varying)
        return varying if self._divergences >= DIVERGENCES else NOTHING

    def constant(self) -> frozenset[int]:
        """Returns the locations of ops that ran in every trace, equally often, and more than once."""
        return frozenset(
            location
            for (location, _), counts in self._counts.items()
            if counts.traces == self._traces and counts.low == counts.high > 1
        )

    def _take_list(self, op: OpRecord) -> None:
        length = max(len(op.inputs), op.n_outputs)
        self._location_of[op.uid, op.op] = op.location
        self._lengths.setdefault((op.uid, op.op), Counts(length, length)).take(length)
