"""Tunes one stored graph: prepares every pending candidate in turn, then times all of them together.

A candidate that fails is committed before the next begins, one that is good lies on the shelf until it is timed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from coexec.subgraphs.entries import Outcome, SubgraphInfo
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.errors import StoreError, TrustError, UnkeyableGraphError
from coexec.subgraphs.store import Store
from coexec.tuning.attempt import SPENT, Attempt, Prepared, prepare
from coexec.tuning.child import ChildError
from coexec.tuning.identity import custom_ops_of_text, environment_of
from coexec.tuning.markers import DEATHS, Markers
from coexec.tuning.queue import Tools
from coexec.tuning.report import AttemptReport, GraphReport
from coexec.tuning.roster import Roster
from coexec.tuning.settings import PREPARE, TIME, TuneSettings
from coexec.tuning.shelf import Shelf
from coexec.tuning.standing import Facts, Standing, Tried, earlier_report, known_facts, options_digest, read_standing
from coexec.tuning.timing import EagerSide, Track

MIN_ATTEMPT_S = 1.0
"""With less time left, no further attempt is begun."""

Tell = Callable[[str, str, Outcome | None, float | None], None]
"""(candidate, stage, outcome, speedup), for the progress bar."""


class UntunableError(Exception):
    """This graph cannot be tuned now; the message says why. `out_of_budget`: the run's budget is spent, no more."""

    def __init__(self, reason: str, *, out_of_budget: bool = False) -> None:
        super().__init__(reason)
        self.out_of_budget = out_of_budget


@dataclass(frozen=True, slots=True)
class Workshop:
    """What tuning any graph needs."""

    store: Store  # strict
    markers: Markers
    roster: Roster
    shelf: Shelf
    settings: TuneSettings
    tools: Tools
    deadline_s: Callable[[], float]  # monotonic time at which the run is out of budget, or is to stop

    def out_of_budget(self) -> bool:
        """Whether the run has no time for another attempt, on whatever graph."""
        return self.deadline_s() - time.monotonic() < MIN_ATTEMPT_S


def tune_graph(shop: Workshop, info: SubgraphInfo, tell: Tell) -> GraphReport:
    """Tune one graph. Whatever is wrong with it is in the report. Errors: StoreError."""

    def tuning() -> GraphReport:
        program, facts = _facts(shop, info)
        return GraphTuning(shop, info, program, facts, tell, shop.tools.candidates).run()

    return claimed(shop, info, tuning)


def claimed(shop: Workshop, info: SubgraphInfo, tuning: Callable[[], GraphReport]) -> GraphReport:
    """What `tuning` reports, while no other tuner works on the same. Errors: StoreError."""
    with shop.markers.claimed(f"graph {info.digest}") as mine:
        if not mine:
            return GraphReport(info.digest, info.note, reason="another tuner works on it")
        try:
            return tuning()
        except UntunableError as error:
            return GraphReport(info.digest, info.note, reason=str(error), out_of_budget=error.out_of_budget)
        except (UnkeyableGraphError, ChildError) as error:
            return GraphReport(info.digest, info.note, reason=str(error))


def _facts(shop: Workshop, info: SubgraphInfo) -> tuple[Path, Facts]:
    """The program's file and what its decisions are keyed by; a child reads the program where nobody has yet."""
    program = stored_program(shop.store, info, "run the model once with mode='collect'")
    environment = environment_of(custom_ops_of_text(info.text), shop.tools.threads)
    known = known_facts(shop.store.decisions(info.digest), info.digest, info.program, environment, shop.tools.threads)
    return program, known or _described(shop, info, program, environment)


def stored_program(store: Store, info: SubgraphInfo, otherwise: str) -> Path:
    """The stored program. One that is damaged or not trusted concerns its graph, not the run.

    `otherwise`: what to do about a missing one. Errors: UntunableError, StoreError.
    """
    try:
        program = store.program(info.digest)
    except TrustError as error:
        raise UntunableError(str(error)) from error
    except StoreError as error:
        if not error.reason.startswith("artifact"):
            raise
        raise UntunableError(f"{error}; {otherwise}") from error
    if program is None:
        raise UntunableError(f"its program is not stored; {otherwise}")
    return program


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
        threads=shop.tools.threads,
    )


class GraphTuning:
    """The tuning of one graph: every pending candidate is prepared, then all that are prepared are timed together."""

    def __init__(
        self,
        shop: Workshop,
        info: SubgraphInfo,
        program: Path,
        facts: Facts,
        tell: Tell,
        candidates: Sequence[Tried],
    ) -> None:
        self.shop, self.info, self.program, self.facts, self.tell = shop, info, program, facts, tell
        self.candidates = candidates
        known = () if shop.settings.retune else shop.store.decisions(facts.subgraph)
        self.standing: Standing = read_standing(known, facts)
        self.attempts = [earlier_report(name, entry) for name, entry in self.standing.tried.items()]
        self.prepared: dict[str, Prepared] = {}
        self.graph_deadline_s = time.monotonic() + shop.settings.per_graph_s

    def run(self) -> GraphReport:
        """Prepare what is pending, time what is prepared; either may be left to another run."""
        only = self.shop.settings.only
        self.take_from_shelf()
        if only != TIME:
            for candidate in self.standing.pending(self.candidates):
                if candidate.name not in self.prepared and self.left_s() >= MIN_ATTEMPT_S:
                    self.prepare_one(candidate)
        if only != PREPARE and self.prepared:
            self.time_all()
        if self.shop.tools.only_eager:
            self.standing.decide(self.shop.store)  # nothing to try, and known to be so
        return self.report()

    def left_s(self) -> float:
        """Seconds left for this graph."""
        return min(self.graph_deadline_s, self.shop.deadline_s()) - time.monotonic()

    def take_from_shelf(self) -> None:
        """What an earlier run prepared and nobody has timed."""
        for candidate in self.candidates:
            found = self.shop.shelf.find(self.name_on_shelf(candidate))
            if found is not None:
                self.prepared[candidate.name] = found

    def prepare_one(self, candidate: Tried) -> None:
        """Build and verify; put away what is good, commit what is not. Marked while it is in progress."""
        with self.shop.shelf.workplace() as folder, self._marked(candidate.name) as deaths:
            if deaths >= DEATHS:
                ended: Prepared | Attempt = _blamed(candidate.name, deaths)
            else:
                ended = self.built(candidate, folder)
            if isinstance(ended, Prepared):
                self.prepared[candidate.name] = self.shop.shelf.put(self.name_on_shelf(candidate), ended)
                self.tell(candidate.name, "prepared", None, None)
            elif not ended.out_of_time:  # otherwise the next run tries it with a whole budget
                self.commit(candidate, ended, folder)

    def time_all(self) -> None:
        """Time the prepared ones together; one by one where tuners died of that often, to find out by which."""
        candidates = [c for c in self.candidates if c.name in self.prepared]
        with self._marked("all together") as deaths:
            groups = [candidates] if deaths < DEATHS else [[candidate] for candidate in candidates]
            track = self.track()
            try:
                for group in groups:
                    self.time_group(track, group, alone=len(groups) > 1)
            finally:
                track.eager.close()

    def time_group(self, track: Track, group: Sequence[Tried], *, alone: bool) -> None:
        """Time these and commit what comes out. Errors: UntunableError if eager itself cannot run the graph."""
        prepared = [self.prepared[candidate.name] for candidate in group]
        with self._marked(f"{group[0].name} alone" if alone else "") as deaths:
            for candidate in group:
                self.tell(candidate.name, "time", None, None)
            try:
                attempts = track.timed(prepared) if deaths < DEATHS else [_blamed(group[0].name, deaths)]
            except RuntimeError as error:
                raise UntunableError(str(error)) from error
        for candidate, attempt in zip(group, attempts, strict=True):
            self.commit(candidate, attempt, self.prepared.pop(candidate.name).folder)
            self.shop.shelf.drop(self.name_on_shelf(candidate))

    def commit(self, candidate: Tried, attempt: Attempt, folder: Path) -> None:
        """The attempt is over: into the store. Errors: StoreError."""
        self.standing.commit(self.shop.store, candidate, attempt, folder)
        self.attempts = [a for a in self.attempts if a.candidate != candidate.name] + [_report_of(attempt)]
        speedup = attempt.timing.ratio if attempt.timing else None
        self.tell(candidate.name, "tried", attempt.outcome, speedup)

    def report(self) -> GraphReport:
        """Where the graph stands now."""
        best, decided = self.standing.best, bool(self.standing.tried) or self.shop.tools.only_eager
        return GraphReport(
            subgraph=self.info.digest,
            note=self.info.note,
            attempts=tuple(self.attempts),
            winner=best.backend if decided else "",
            speedup=best.speedup if decided else None,
            complete=decided and not self.standing.pending(self.candidates),
            reason=self._reason(best.reason if decided else self._why_nothing()),
            prepared=tuple(self.prepared),
            out_of_budget=not decided and self._lacked_time() and self.shop.out_of_budget(),
        )

    def _reason(self, otherwise: str) -> str:
        waiting = ", ".join(self.prepared)
        return f"prepared, to be timed by `coexec tune`: {waiting}" if waiting else otherwise

    def _lacked_time(self) -> bool:
        """Whether time is why nothing was tried: a run that only times takes what is prepared, in any case."""
        return bool(self.candidates) and self.shop.settings.only != TIME

    def _why_nothing(self) -> str:
        """Why no candidate was tried."""
        if self._lacked_time():
            return f"nothing was tried: {SPENT}"
        if not self.candidates:
            return "nothing was tried: no candidate can be used here (`coexec doctor` says why); nothing was decided"
        return "nothing was tried: nothing is prepared; run `coexec tune --only prepare` first, or without --only"

    def built(self, candidate: Tried, folder: Path) -> Prepared | Attempt:
        """Built into `folder` and verified; an Attempt says how that failed."""
        shop = self.shop
        stage = partial(self._tell_stage, candidate.name)
        return prepare(
            candidate.name, self.program, folder, shop.roster, self.facts.threads, shop.settings, self.left_s, stage
        )

    def track(self) -> Track:
        """Where the prepared ones are timed, and against what."""
        shop, threads = self.shop, self.facts.threads
        eager = EagerSide(shop.roster, self.program, threads, shop.settings.attempt_s)
        return Track(self.program, eager, shop.roster, threads, shop.settings, self.left_s)

    def _tell_stage(self, candidate: str, stage: str) -> None:
        self.tell(candidate, stage, None, None)

    def name_on_shelf(self, candidate: Tried) -> str:
        """Of a prepared candidate on the shelf: everything that its files depend on."""
        facts = self.facts
        return " ".join([facts.subgraph, facts.program, facts.environment.digest, facts.shape_class, candidate.name,
                         options_digest(candidate)])  # fmt: skip

    @contextlib.contextmanager
    def _marked(self, what: str) -> Iterator[int]:
        """Marks `what` as in progress ("": nothing is); gives how many tuners died during it before."""
        if not what:
            yield 0
            return
        mark = f"{self.facts.subgraph} {self.facts.environment.digest} {self.facts.shape_class} {what}"
        deaths = self.shop.markers.begin(mark)
        try:
            yield deaths
        finally:  # an error or an interrupt is no death
            self.shop.markers.finish(mark)


def _blamed(candidate: str, deaths: int) -> Attempt:
    return Attempt(candidate, Outcome.CRASH, f"the tuner itself died {deaths} times during this attempt")


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
