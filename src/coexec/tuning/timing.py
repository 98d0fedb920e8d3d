"""Prepared candidates of one graph, timed by turns with eager: all of them together, on a machine that is theirs alone.

The candidates' children load at the same time, which is no measurement; then one of them runs at a time and the others
stand still. What a candidate does wrong here (it dies, hangs or raises) ends it alone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from coexec.subgraphs.entries import Outcome
from coexec.tuning.attempt import Attempt, EndedError, Prepared, asked, load_question
from coexec.tuning.child import Child, ChildError
from coexec.tuning.machine_load import ForeignLoad
from coexec.tuning.roster import Roster
from coexec.tuning.settings import TuneSettings
from coexec.tuning.turns import Timing, time_together

EAGER = "eager"
SERVING_S = 5e-6
"""What AOTAutograd's wrapper and the chooser take per call around a candidate (measured: 3 to 4 us)."""

SERVING_PER_STATIC_INPUT_S = 0.35e-6
"""To notice that a weight was changed or replaced."""

SETTLE_S = 0.004
"""Between turns: stopping a process takes a moment."""


class EagerSide:
    """The child that runs eager on one graph, started when the first candidate is to be timed.

    `usual`: runs in place of eager, where that is not what the candidates are measured against.
    """

    def __init__(
        self, roster: Roster, program: Path, threads: int, timeout_s: float, usual: Prepared | None = None
    ) -> None:
        self._roster, self._program, self._threads, self._timeout_s = roster, program, threads, timeout_s
        self._usual = usual or Prepared(EAGER, Path("."), {}, 0.0, "")
        self._stack = contextlib.ExitStack()
        self._child: Child | None = None

    def child(self) -> Child:
        """The loaded child. Errors: ChildError, RuntimeError if eager itself cannot run the graph."""
        if self._child is None:
            usual = self._usual
            child = self._stack.enter_context(self._roster.child(usual.candidate))
            question = load_question(self._program, usual.candidate, usual.folder, usual.metadata, self._threads)
            answer = child.ask(question, timeout_s=self._timeout_s)
            if not answer["ok"]:
                raise RuntimeError(f"{self.name} cannot run this graph: {answer['reason']}")
            self._child = child
        return self._child

    @property
    def name(self) -> str:
        """What runs in it, for people."""
        return self._usual.candidate

    def lost(self) -> None:
        """The child died: the next question starts another."""
        self.close()
        self._stack, self._child = contextlib.ExitStack(), None

    def close(self) -> None:
        """End the child."""
        self._stack.close()


class Turn:
    """A loaded child as a contender: it runs during its turn only.

    `overhead_s` is added to every call: what serving takes around the candidate and not around eager.
    """

    def __init__(self, child: Child, timeout_s: float, overhead_s: float = 0.0) -> None:
        self._child, self._timeout_s, self._overhead_s = child, timeout_s, overhead_s
        self.failed = False

    def run_block(self, lead_in: int, calls: int, one_by_one: bool) -> float:
        """See :class:`coexec.tuning.turns.Contender`. Errors: ChildError."""
        question = {"do": "time", "lead_in": lead_in, "calls": calls, "one_by_one": one_by_one}
        self._child.resume()
        try:
            answer = self._child.ask(question, timeout_s=self._timeout_s)
        except ChildError:
            self.failed = True
            raise
        self._child.pause()
        time.sleep(SETTLE_S)
        if not answer["ok"]:
            self.failed = True
            raise ChildError(Outcome.ERROR, answer["reason"])
        return float(answer["seconds"]) + self._overhead_s


@contextlib.contextmanager
def paused(child: Child) -> Iterator[None]:
    """The child stands still inside the block, but for its turns."""
    child.pause()
    try:
        yield
    finally:
        child.resume()


@dataclass(frozen=True, slots=True)
class Track:
    """Where the candidates of one graph are timed."""

    program: Path
    eager: EagerSide
    roster: Roster
    threads: int
    settings: TuneSettings
    left_s: Callable[[], float]  # seconds that timing may still take; the fewest rounds are made in any case
    serving_s: float = SERVING_S  # per call, that serving takes around a candidate and not around the eager side

    def timed(self, prepared: Sequence[Prepared]) -> list[Attempt]:
        """Time all of `prepared`, in this order. Errors: RuntimeError if eager cannot run the graph; ChildError."""
        ended: dict[str, Attempt] = {}
        with contextlib.ExitStack() as stack:
            loaded = self._loaded(stack, prepared, ended)
            while loaded:
                try:
                    ended |= self._race(loaded)
                    break
                except _CandidateFailedError as failure:  # the others run again, without it
                    candidate = loaded.pop(failure.number).prepared
                    ended[candidate.candidate] = _failed(candidate, failure.outcome, failure.detail)
        return [ended[candidate.candidate] for candidate in prepared]

    def _loaded(
        self, stack: contextlib.ExitStack, prepared: Sequence[Prepared], ended: dict[str, Attempt]
    ) -> list[_Loaded]:
        """Those that could be loaded, each in a child of its own; `ended` gets the others."""
        children = [stack.enter_context(self.roster.child(candidate.candidate)) for candidate in prepared]
        with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
            asking = [pool.submit(self._load, *pair) for pair in zip(prepared, children, strict=True)]
            self.eager.child()  # from this thread: should the nursery have died, its next one must outlive the pool
            found = []
            for candidate, future in zip(prepared, asking, strict=True):
                try:
                    found.append(future.result())
                except EndedError as error:
                    ended[candidate.candidate] = _failed(candidate, error.outcome, error.detail)
        return found

    def _load(self, candidate: Prepared, child: Child) -> _Loaded:
        question = load_question(self.program, candidate.candidate, candidate.folder, candidate.metadata, self.threads)
        answer = asked(child, question, self.settings.attempt_s)
        return _Loaded(candidate, child, self.serving_s + SERVING_PER_STATIC_INPUT_S * answer["static_inputs"])

    def _race(self, loaded: Sequence[_Loaded]) -> dict[str, Attempt]:
        """The timing made while others took the least of the machine. Errors: _CandidateFailedError, ChildError."""
        tries: list[tuple[float, list[Timing]]] = []
        for number in range(self.settings.busy_retries + 1):
            if number:
                time.sleep(0.5 * number)
            tries.append(self._race_once(loaded))
            if tries[-1][0] <= self.settings.busy_cores or self.left_s() < self.settings.attempt_s / 4:
                break
        busy, timings = min(tries, key=lambda pair: pair[0])
        return {
            entry.prepared.candidate: self._measured(entry.prepared, timing, busy)
            for entry, timing in zip(loaded, timings, strict=True)
        }

    def _race_once(self, loaded: Sequence[_Loaded]) -> tuple[float, list[Timing]]:
        other = self.eager.child()
        children = [other, *(entry.child for entry in loaded)]
        theirs = Turn(other, self.settings.attempt_s)
        mine = [Turn(entry.child, self.settings.attempt_s, entry.overhead_s) for entry in loaded]
        with self.roster.quiet(*children), contextlib.ExitStack() as stack:
            load = ForeignLoad()
            for child in children:
                stack.enter_context(paused(child))
            try:
                timings = time_together(theirs, mine, rounds=self.settings.rounds, enough=lambda: self.left_s() <= 0)
            except ChildError as failure:
                if theirs.failed:
                    self.eager.lost()
                    raise
                number = next(i for i, turn in enumerate(mine) if turn.failed)
                raise _CandidateFailedError(number, failure.outcome, f"time: {failure.reason}") from failure
            return load.cores(), timings

    def _measured(self, candidate: Prepared, timing: Timing, busy: float) -> Attempt:
        words = f"; the machine was busy ({busy:.1f} cores)" if busy > self.settings.busy_cores else ""
        return Attempt(
            candidate.candidate, Outcome.OK, f"{timing.against(self.eager.name)}; {candidate.seen}{words}", timing,
            candidate.build_s, candidate.metadata, busy,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A candidate in its child."""

    prepared: Prepared
    child: Child
    overhead_s: float  # per call, see Turn


class _CandidateFailedError(Exception):
    """The candidate at `number` ended during its turn."""

    def __init__(self, number: int, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.number, self.outcome, self.detail = number, outcome, detail


def _failed(candidate: Prepared, outcome: Outcome, detail: str) -> Attempt:
    return Attempt(candidate.candidate, outcome, detail, build_s=candidate.build_s)
