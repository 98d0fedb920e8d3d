"""One candidate on one graph: build in a child, load in a fresh one, verify, time by turns with eager.

Each step that fails ends the attempt with an outcome that blames the candidate; the tuner goes on.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coexec.subgraphs.entries import Outcome
from coexec.tuning.child import Child, ChildError
from coexec.tuning.machine_load import ForeignLoad
from coexec.tuning.roster import Roster
from coexec.tuning.settings import TuneSettings
from coexec.tuning.turns import Timing, time_by_turns

EAGER = "eager"
SERVING_S = 5e-6
"""What AOTAutograd's wrapper and the chooser take per call around a candidate (measured: 3 to 4 us)."""

SERVING_PER_STATIC_INPUT_S = 0.35e-6
"""To notice that a weight was changed or replaced."""

SETTLE_S = 0.004
"""Between turns: stopping a process takes a moment."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one candidate ended."""

    candidate: str
    outcome: Outcome
    detail: str = ""
    timing: Timing | None = None  # None unless OK
    build_s: float | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)  # what loading needs besides the files
    busy_cores: float = 0.0  # that others took while it was timed


class _EndedError(Exception):
    """The attempt is over early."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class EagerSide:
    """The child that runs eager on one graph, started when the first candidate is to be timed."""

    def __init__(self, roster: Roster, program: Path, threads: int, timeout_s: float) -> None:
        self._roster, self._program, self._threads, self._timeout_s = roster, program, threads, timeout_s
        self._stack = contextlib.ExitStack()
        self._child: Child | None = None

    def child(self) -> Child:
        """The loaded child. Errors: ChildError, RuntimeError if eager itself cannot run the graph."""
        if self._child is None:
            child = self._stack.enter_context(self._roster.child(EAGER))
            question = _load_question(self._program, EAGER, Path("."), {}, self._threads)
            answer = child.ask(question, timeout_s=self._timeout_s)
            if not answer["ok"]:
                raise RuntimeError(f"eager cannot run this graph: {answer['reason']}")
            self._child = child
        return self._child

    def lost(self) -> None:
        """The child died: the next question starts another."""
        self.close()
        self._stack, self._child = contextlib.ExitStack(), None

    def close(self) -> None:
        """End the child."""
        self._stack.close()


def run_attempt(
    candidate: str,
    program: Path,
    folder: Path,
    eager: EagerSide,
    roster: Roster,
    threads: int,
    settings: TuneSettings,
    left_s: Callable[[], float],
    stage: Callable[[str], None],
) -> Attempt:
    """Try `candidate`; its files are left in `folder` (exists, empty).

    `left_s`: seconds that this attempt may still take. `stage` hears what is being done. Errors: RuntimeError if eager
    cannot run the graph.
    """
    built: dict[str, Any] = {}
    try:
        stage("build")
        with roster.child(candidate) as child:
            question = _build_question(program, candidate, folder, threads, min(settings.attempt_s, left_s()))
            built = _asked(child, question, min(settings.attempt_s, left_s()))
        _make_read_only(folder)
        stage("verify")
        with roster.child(candidate) as child:
            question = _load_question(program, candidate, folder, built["metadata"], threads)
            loaded = _asked(child, question, min(settings.attempt_s, left_s()))
            seen = _verified(child, min(settings.attempt_s, left_s()))
            stage("time")
            overhead_s = SERVING_S + SERVING_PER_STATIC_INPUT_S * loaded["static_inputs"]
            timing, busy = _timed(child, overhead_s, eager, roster, settings, left_s)
    except _EndedError as ended:
        return Attempt(candidate, ended.outcome, ended.detail, build_s=built.get("seconds"))
    detail = f"{timing}; {seen}" + (f"; the machine was busy ({busy:.1f} cores)" if busy > settings.busy_cores else "")
    return Attempt(candidate, Outcome.OK, detail, timing, built["seconds"], built["metadata"], busy)


def _asked(child: Child, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    try:
        answer = child.ask(question, timeout_s=timeout_s)
    except ChildError as failure:
        raise _EndedError(failure.outcome, f"{question['do']}: {failure.reason}") from failure
    if not answer["ok"]:
        outcome = Outcome.UNAVAILABLE if answer["refused"] else Outcome.ERROR
        raise _EndedError(outcome, f"{question['do']}: {answer['reason']}")
    return answer


def _verified(child: Child, timeout_s: float) -> str:
    """What the check saw, for people."""
    report = _asked(child, {"do": "verify"}, timeout_s)
    if not report["accepted"]:
        raise _EndedError(Outcome.WRONG, "; ".join(report["problems"][:5]))
    against = "float64" if report["wide"] else "eager (no float64 run)"
    return f"error {report['worst']:.2f} of the allowed against {against}"


def _timed(
    child: Child,
    overhead_s: float,
    eager: EagerSide,
    roster: Roster,
    settings: TuneSettings,
    left_s: Callable[[], float],
) -> tuple[Timing, float]:
    """The timing made while others took the least of the machine, and how much they took."""
    tries: list[tuple[float, Timing]] = []
    for number in range(settings.busy_retries + 1):
        if number:
            time.sleep(0.5 * number)
        tries.append(_timed_once(child, overhead_s, eager, roster, settings, left_s))
        if tries[-1][0] <= settings.busy_cores or left_s() < settings.attempt_s / 4:
            break
    busy, timing = min(tries, key=lambda pair: pair[0])
    return timing, busy


def _timed_once(
    child: Child,
    overhead_s: float,
    eager: EagerSide,
    roster: Roster,
    settings: TuneSettings,
    left_s: Callable[[], float],
) -> tuple[float, Timing]:
    other = eager.child()
    with roster.quiet(child, other):
        load = ForeignLoad()
        mine, theirs = Turn(child, settings.attempt_s, overhead_s), Turn(other, settings.attempt_s)
        with paused(child), paused(other):
            try:
                timing = time_by_turns(theirs, mine, rounds=settings.rounds, enough=lambda: left_s() <= 0)
            except ChildError as failure:
                if theirs.failed:
                    eager.lost()
                raise _EndedError(failure.outcome, f"time: {failure.reason}") from failure
        return load.cores(), timing


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


def _build_question(program: Path, candidate: str, folder: Path, threads: int, budget_s: float) -> dict[str, Any]:
    # Half of the time for a search: the rest of the build, and a compiler that overruns, need theirs.
    return {"do": "build", "budget_s": budget_s / 2, **_place(program, candidate, folder, threads)}


def _load_question(
    program: Path, candidate: str, folder: Path, metadata: Mapping[str, Any], threads: int
) -> dict[str, Any]:
    return {"do": "load", "metadata": dict(metadata), **_place(program, candidate, folder, threads)}


def _place(program: Path, candidate: str, folder: Path, threads: int) -> dict[str, Any]:
    return {"program": str(program), "candidate": candidate, "folder": str(folder), "threads": threads}


def _make_read_only(folder: Path) -> None:
    """As a serving process will find them: a backend that writes beside its artifact fails here, not there."""
    for file in folder.iterdir():
        if file.is_dir():
            raise _EndedError(Outcome.ERROR, f"build: it made a folder ({file.name}); artifacts are flat files")
        file.chmod(0o400)
