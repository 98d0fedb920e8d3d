"""Tunes one stored graph: every pending candidate in turn, each attempt committed before the next begins."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coexec.backends.candidates.candidate import Candidate
from coexec.config import private_cache_dir
from coexec.subgraphs.entries import Outcome, SubgraphInfo
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.errors import StoreError, TrustError, UnkeyableGraphError
from coexec.subgraphs.store import Store
from coexec.tuning.attempt import EAGER, Attempt, EagerSide, run_attempt
from coexec.tuning.child import ChildError
from coexec.tuning.identity import custom_ops_of_text, environment_of
from coexec.tuning.markers import DEATHS, Markers
from coexec.tuning.report import AttemptReport, GraphReport
from coexec.tuning.roster import Roster
from coexec.tuning.settings import TuneSettings
from coexec.tuning.standing import Facts, Standing, earlier_report, known_facts, read_standing

MIN_ATTEMPT_S = 1.0
"""With less time left, no further attempt is begun."""

Tell = Callable[[str, str, Outcome | None, float | None], None]
"""(candidate, stage, outcome, speedup), for the progress bar."""


class UntunableError(Exception):
    """This graph cannot be tuned now; the message says why."""


@dataclass(frozen=True, slots=True)
class Workshop:
    """What tuning any graph needs."""

    store: Store  # strict
    markers: Markers
    roster: Roster
    settings: TuneSettings
    candidates: Sequence[Candidate]  # usable here, without eager
    only_eager: bool  # nothing else was asked for
    threads: int
    deadline_s: Callable[[], float]  # monotonic time at which the run is out of budget, or is to stop


def tune_graph(shop: Workshop, info: SubgraphInfo, tell: Tell) -> GraphReport:
    """Tune one graph. Whatever is wrong with it is in the report. Errors: StoreError."""
    with shop.markers.claimed(f"graph {info.digest}") as mine:
        if not mine:
            return GraphReport(info.digest, info.note, reason="another tuner works on it")
        try:
            program, facts = _facts(shop, info)
            return _Tuning(shop, info, program, facts, tell).run()
        except (UntunableError, UnkeyableGraphError, ChildError) as error:
            return GraphReport(info.digest, info.note, reason=str(error))


def _facts(shop: Workshop, info: SubgraphInfo) -> tuple[Path, Facts]:
    """The program's file and what its decisions are keyed by; a child reads the program where nobody has yet."""
    program = _program(shop.store, info)
    if program is None:
        raise UntunableError("its program is not stored; run the model once with mode='collect'")
    environment = environment_of(custom_ops_of_text(info.text), shop.threads)
    known = known_facts(shop.store, info.digest, info.program, environment, shop.threads)
    return program, known or _described(shop, info, program, environment)


def _program(store: Store, info: SubgraphInfo) -> Path | None:
    """The stored program. One that is damaged or not trusted concerns its graph, not the run."""
    try:
        return store.program(info.digest)
    except TrustError as error:
        raise UntunableError(str(error)) from error
    except StoreError as error:
        if not error.reason.startswith("artifact"):
            raise
        raise UntunableError(f"{error}; run the model once with mode='collect'") from error


def _described(shop: Workshop, info: SubgraphInfo, program: Path, environment: Environment) -> Facts:
    with shop.roster.child("describe") as child:
        answer = child.ask({"do": "describe", "program": str(program)}, timeout_s=shop.settings.attempt_s)
    if not answer["ok"]:
        raise UntunableError(f"its program cannot be read: {answer['reason']}")
    return Facts(
        subgraph=info.digest,
        program=info.program,
        environment=environment,
        shape_class=answer["shape_class"],
        inside=answer["inside"],
        baked=answer["baked"],
        threads=shop.threads,
    )


class _Tuning:
    """The tuning of one graph."""

    def __init__(self, shop: Workshop, info: SubgraphInfo, program: Path, facts: Facts, tell: Tell) -> None:
        self.shop, self.info, self.program, self.facts, self.tell = shop, info, program, facts, tell
        self.standing: Standing = read_standing(shop.store, facts, anew=shop.settings.retune)
        self.attempts = [earlier_report(name, entry) for name, entry in self.standing.tried.items()]
        self.graph_deadline_s = time.monotonic() + shop.settings.per_graph_s

    def run(self) -> GraphReport:
        """Try what is pending."""
        pending = self.standing.pending(self.shop.candidates)
        eager = EagerSide(self.shop.roster, self.program, self.facts.threads, self.shop.settings.attempt_s)
        try:
            for candidate in pending:
                if self.left_s() >= MIN_ATTEMPT_S:
                    self.try_one(candidate, eager)
        finally:
            eager.close()
        if self.shop.only_eager:
            self.standing.decide(self.shop.store)  # nothing to try, and known to be so
        return self.report()

    def left_s(self) -> float:
        """Seconds left for this graph."""
        return min(self.graph_deadline_s, self.shop.deadline_s()) - time.monotonic()

    def try_one(self, candidate: Candidate, eager: EagerSide) -> None:
        """One attempt, marked while it is in progress, committed when it is over."""
        mark = f"{self.facts.subgraph} {self.facts.environment.digest} {self.facts.shape_class} {candidate.name}"
        short_of_time = self.left_s() < self.shop.settings.attempt_s
        deaths = self.shop.markers.begin(mark)
        with tempfile.TemporaryDirectory(prefix="attempt-", dir=private_cache_dir("tuning")) as folder:
            if deaths >= DEATHS:
                detail = f"the tuner itself died {deaths} times during this attempt"
                attempt = Attempt(candidate.name, Outcome.CRASH, detail)
            else:
                attempt = self.attempt(candidate, eager, Path(folder))
            self.shop.markers.finish(mark)
            if attempt.outcome is Outcome.TIMEOUT and short_of_time:
                return  # the budget's fault: the next run tries it with a whole one
            self.standing.commit(self.shop.store, candidate, attempt, Path(folder))
        self.attempts.append(_report_of(attempt))
        speedup = attempt.timing.ratio if attempt.timing else None
        self.tell(candidate.name, "tried", attempt.outcome, speedup)

    def attempt(self, candidate: Candidate, eager: EagerSide, folder: Path) -> Attempt:
        """Run it. Errors: UntunableError if eager itself cannot run the graph."""
        stage = partial(self._tell_stage, candidate.name)
        shop = self.shop
        try:
            return run_attempt(
                candidate.name, self.program, folder, eager, shop.roster, self.facts.threads, shop.settings,
                self.left_s, stage,
            )  # fmt: skip
        except RuntimeError as error:
            raise UntunableError(str(error)) from error

    def _tell_stage(self, candidate: str, stage: str) -> None:
        self.tell(candidate, stage, None, None)

    def report(self) -> GraphReport:
        """Where the graph stands now."""
        best, decided = self.standing.best, bool(self.standing.tried) or self.shop.only_eager
        return GraphReport(
            subgraph=self.info.digest,
            note=self.info.note,
            attempts=tuple(self.attempts),
            winner=best.backend if decided else "",
            speedup=best.speedup if decided else None,
            complete=decided and not self.standing.pending(self.shop.candidates),
            reason=best.reason if decided else self.why_nothing(),
        )

    def why_nothing(self) -> str:
        """Why no candidate was tried."""
        if self.shop.candidates:
            return "nothing was tried: no time was left"
        return "nothing was tried: no candidate can be used here (`coexec doctor` says why); nothing was decided"


def _report_of(attempt: Attempt) -> AttemptReport:
    timing = attempt.timing
    if timing is None:
        return AttemptReport(attempt.candidate, attempt.outcome, attempt.detail, build_s=attempt.build_s)
    return AttemptReport(
        attempt.candidate,
        attempt.outcome,
        attempt.detail,
        speedup=timing.ratio,
        low=timing.low,
        high=timing.high,
        median_s=timing.candidate_s,
        eager_s=timing.eager_s,
        build_s=attempt.build_s,
    )


def is_eager(candidate: Candidate) -> bool:
    """Eager is what the others are measured against."""
    return candidate.name == EAGER
