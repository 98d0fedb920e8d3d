"""One candidate on one graph: built in a child, loaded in a fresh one and verified. timing.py times it then.

Each step that fails ends the attempt with an outcome that blames the candidate; the tuner goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coexec.subgraphs.entries import Outcome
from coexec.tuning.child import Child, ChildError
from coexec.tuning.roster import Roster
from coexec.tuning.settings import TuneSettings
from coexec.tuning.turns import Timing

SPENT = "the budget was spent"
"""Why something was left undone: the whole run's time, or that of one graph."""


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
    out_of_time: bool = False  # the budget ended it, not its own fault: it is to be tried again


@dataclass(frozen=True, slots=True)
class Prepared:
    """A candidate that is built and gives right answers: only its time is not known."""

    candidate: str
    folder: Path  # of its files, which are read-only
    metadata: Mapping[str, Any]  # what loading needs besides the files
    build_s: float
    seen: str  # what the check saw, for people


class EndedError(Exception):
    """The attempt is over early."""

    def __init__(self, outcome: Outcome, detail: str) -> None:
        super().__init__(detail)
        self.outcome, self.detail = outcome, detail


class BudgetSpentError(EndedError):
    """No time is left, for which the candidate is not to blame."""

    def __init__(self) -> None:
        super().__init__(Outcome.TIMEOUT, SPENT)


def prepare(
    candidate: str,
    program: Path,
    folder: Path,
    roster: Roster,
    threads: int,
    settings: TuneSettings,
    left_s: Callable[[], float],
    stage: Callable[[str], None],
) -> Prepared | Attempt:
    """Build `candidate` into `folder` (exists, empty) and verify it; an Attempt says how that failed.

    `left_s`: seconds that this may still take. `stage` hears what is being done. Other work may run beside it.
    """
    built: dict[str, Any] = {}
    try:
        _check_left(left_s)
        stage("build")
        with roster.child(candidate) as child:
            question = _build_question(program, candidate, folder, threads, min(settings.attempt_s, left_s()))
            built = _asked_in_time(child, question, settings, left_s)
        _make_read_only(folder)
        stage("verify")
        whole = Prepared(candidate, folder, built["metadata"], built["seconds"], "")
        return checked(whole, program, roster, threads, settings, left_s)
    except EndedError as ended:
        out_of_time = isinstance(ended, BudgetSpentError)
        return Attempt(candidate, ended.outcome, ended.detail, build_s=built.get("seconds"), out_of_time=out_of_time)


def checked(
    built: Prepared,
    program: Path,
    roster: Roster,
    threads: int,
    settings: TuneSettings,
    left_s: Callable[[], float],
) -> Prepared:
    """Load what was built in a fresh child and verify it.

    Errors: EndedError blames the candidate; BudgetSpentError if there was no time for it.
    """
    _check_left(left_s)
    with roster.child(built.candidate) as child:
        question = load_question(program, built.candidate, built.folder, built.metadata, threads)
        _asked_in_time(child, question, settings, left_s)
        return replace(built, seen=_seen(_asked_in_time(child, {"do": "verify"}, settings, left_s)))


def asked(child: Child, question: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """The child's answer. Errors: EndedError blames the candidate."""
    try:
        answer = child.ask(question, timeout_s=timeout_s)
    except ChildError as failure:
        raise EndedError(failure.outcome, f"{question['do']}: {failure.reason}") from failure
    if not answer["ok"]:
        outcome = Outcome.UNAVAILABLE if answer["refused"] else Outcome.ERROR
        raise EndedError(outcome, f"{question['do']}: {answer['reason']}")
    return answer


def _asked_in_time(
    child: Child, question: Mapping[str, Any], settings: TuneSettings, left_s: Callable[[], float]
) -> dict[str, Any]:
    """The child's answer. Errors: EndedError; BudgetSpentError if no time is left, or less than an attempt may take and
    too little."""
    limit_s = _check_left(left_s)
    try:
        return asked(child, question, min(settings.attempt_s, limit_s))
    except EndedError as ended:
        if ended.outcome is Outcome.TIMEOUT and limit_s < settings.attempt_s:
            raise BudgetSpentError from ended
        raise


def _check_left(left_s: Callable[[], float]) -> float:
    """Seconds that are left. Errors: BudgetSpentError if there are none."""
    seconds = left_s()
    if seconds <= 0:
        raise BudgetSpentError
    return seconds


def load_question(
    program: Path, candidate: str, folder: Path, metadata: Mapping[str, Any], threads: int
) -> dict[str, Any]:
    """Asks a child to load the candidate's files."""
    return {"do": "load", "metadata": dict(metadata), **_place(program, candidate, folder, threads)}


def _seen(report: Mapping[str, Any]) -> str:
    """What the check saw, for people. Errors: EndedError if the answers are wrong."""
    if not report["accepted"]:
        raise EndedError(Outcome.WRONG, "; ".join(report["problems"][:5]))
    against = "float64" if report["wide"] else "eager (no float64 run)"
    return f"error {report['worst']:.2f} of the allowed against {against}"


def _build_question(program: Path, candidate: str, folder: Path, threads: int, budget_s: float) -> dict[str, Any]:
    # Half of the time for a search: the rest of the build, and a compiler that overruns, need theirs.
    return {"do": "build", "budget_s": budget_s / 2, **_place(program, candidate, folder, threads)}


def _place(program: Path, candidate: str, folder: Path, threads: int) -> dict[str, Any]:
    return {"program": str(program), "candidate": candidate, "folder": str(folder), "threads": threads}


def _make_read_only(folder: Path) -> None:
    """As a serving process will find them: a backend that writes beside its artifact fails here, not there."""
    for file in folder.iterdir():
        if file.is_dir():
            raise EndedError(Outcome.ERROR, f"build: it made a folder ({file.name}); artifacts are flat files")
        file.chmod(0o400)
