"""Where the tuning of one graph stands. It lives in the decisions themselves, so that a killed tuner loses nothing.

After every attempt the best so far is decided in the store (the newest decision replaces the last), and its options say
what has been tried. A tuner that is started again goes on behind the last attempt that was committed, and a server may
use the best so far at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from coexec.subgraphs.entries import ArtifactRef, Decision, Measurement, Outcome, canonical_json
from coexec.subgraphs.environment import Environment
from coexec.subgraphs.store import Store
from coexec.tuning.attempt import Attempt
from coexec.tuning.report import AttemptReport
from coexec.tuning.timing import EAGER


class Tried(Protocol):
    """What is tried: a candidate backend on a graph, or a variant on a segment."""

    @property
    def name(self) -> str:
        """Stored in decisions."""

    @property
    def bakes_constants(self) -> bool:
        """The artifact's files hold values of static inputs."""

    def options_in_key(self) -> Mapping[str, object]:
        """Plain JSON: whatever changes the artifact."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decisions about one stored program are keyed by."""

    subgraph: str
    program: str  # digest of the stored program
    environment: Environment
    shape_class: str  # of its recorded inputs
    inside: str  # digest of the tensors in the graph, "" for none
    baked: str  # digest of those and of the static inputs; equal to `inside` if there are none
    threads: int

    def stored(self) -> dict[str, str]:
        """What a decision keeps, so that a later run need not read the program again."""
        return {"program": self.program, "inside": self.inside, "baked": self.baked}


T = TypeVar("T", bound=Tried)


@dataclass(frozen=True, slots=True)
class Best:
    """The winner so far."""

    backend: str = EAGER
    speedup: float = 1.0
    reason: str = "nothing was faster than eager"
    options: Mapping[str, Any] = field(default_factory=dict)  # {"build": options, "metadata": for loading}
    artifacts: tuple[ArtifactRef, ...] = ()


@dataclass(slots=True)
class Standing:
    """One graph's state. `plain`: the best whose artifacts hold no static inputs; `best`: the best of all."""

    facts: Facts
    best: Best = field(default_factory=Best)
    plain: Best = field(default_factory=Best)
    tried: dict[str, dict[str, Any]] = field(default_factory=dict)  # candidate -> {"options": digest, "outcome": ...}

    def pending(self, candidates: Iterable[T]) -> list[T]:
        """Those that have not been tried with their options of now."""
        return [c for c in candidates if self.tried.get(c.name, {}).get("options") != options_digest(c)]

    def commit(self, store: Store, candidate: Tried, attempt: Attempt, folder: Path) -> None:
        """Take a finished attempt in: artifacts, decisions, measurement, in this order. Errors: StoreError."""
        self.tried[candidate.name] = tried_entry(candidate, attempt)
        timing = attempt.timing
        if timing is not None and timing.faster:
            better = [w for w in self._classes(candidate) if timing.ratio > getattr(self, w).speedup]
            if better:
                winner = _winner(store, candidate, attempt, folder)
                for word in better:
                    setattr(self, word, winner)
        self.decide(store)
        store.record_measurement(self._measurement(candidate, attempt), self.facts.environment)

    def decide(self, store: Store) -> None:
        """Write the decisions. Errors: StoreError."""
        rows = {self.facts.inside: self.plain, self.facts.baked: self.best}  # one row if nothing can be baked
        for constants, best in rows.items():
            store.decide(self._decision(best, constants), self.facts.environment)

    def _classes(self, candidate: Tried) -> Sequence[str]:
        holds_weights = candidate.bakes_constants and self.facts.baked != self.facts.inside
        return ("best",) if holds_weights else ("best", "plain")

    def _decision(self, best: Best, constants: str) -> Decision:
        facts = self.facts
        return Decision(
            subgraph=facts.subgraph,
            environment=facts.environment.digest,
            backend=best.backend,
            shape_class=facts.shape_class,
            constants=constants,
            options={**best.options, "threads": facts.threads, "tried": self.tried, "facts": facts.stored()},
            artifacts=best.artifacts,
            speedup=best.speedup,
            reason=best.reason,
        )

    def _measurement(self, candidate: Tried, attempt: Attempt) -> Measurement:
        timing = attempt.timing
        return Measurement(
            subgraph=self.facts.subgraph,
            environment=self.facts.environment.digest,
            backend=candidate.name,
            outcome=attempt.outcome,
            shape_class=self.facts.shape_class,
            options=dict(candidate.options_in_key()),
            detail=attempt.detail,
            median_s=timing.candidate_s if timing else None,
            spread_s=timing.spread_s if timing else None,
            samples=timing.rounds if timing else 0,
            eager_s=timing.eager_s if timing else None,
            compile_s=attempt.build_s,
        )


def known_facts(
    decisions: Iterable[Decision], subgraph: str, program: str, environment: Environment, threads: int
) -> Facts | None:
    """The facts of a program that was tuned in this environment before; None if it was not.

    `decisions`: those of the subgraph.
    """
    for decision in decisions:
        facts = decision.options.get("facts", {})
        if decision.environment == environment.digest and facts.get("program") == program:
            shape_class = decision.shape_class
            return Facts(subgraph, program, environment, shape_class, facts["inside"], facts["baked"], threads)
    return None


def read_standing(decisions: Iterable[Decision], facts: Facts) -> Standing:
    """What is known of the graph from its decisions."""
    found = {
        decision.constants: decision
        for decision in decisions
        if (decision.environment, decision.shape_class) == (facts.environment.digest, facts.shape_class)
    }
    plain, best = found.get(facts.inside), found.get(facts.baked)
    if plain is None or best is None:
        return Standing(facts)  # a tuner was killed between its first two rows
    tried = {name: entry for name, entry in _tried(plain).items() if _tried(best).get(name) == entry}
    return Standing(facts, _best_of(best), _best_of(plain), tried)


def options_digest(candidate: Tried) -> str:
    """Short digest of what changes the candidate's artifact."""
    return hashlib.sha256(canonical_json(dict(candidate.options_in_key())).encode()).hexdigest()[:16]


def tried_entry(candidate: Tried, attempt: Attempt) -> dict[str, Any]:
    """What a decision remembers of an attempt."""
    entry: dict[str, Any] = {
        "options": options_digest(candidate), "outcome": attempt.outcome.value, "detail": attempt.detail[:300],
    }  # fmt: skip
    if attempt.timing is not None:
        entry["ratio"] = [round(value, 4) for value in (attempt.timing.ratio, attempt.timing.low, attempt.timing.high)]
    return entry


def earlier_report(name: str, entry: Mapping[str, Any]) -> AttemptReport:
    """The report of an attempt that a decision remembers."""
    ratio = entry.get("ratio") or [None, None, None]
    outcome, detail = Outcome(entry["outcome"]), str(entry.get("detail", ""))
    return AttemptReport(name, outcome, detail, speedup=ratio[0], low=ratio[1], high=ratio[2], before=True)


def _winner(store: Store, candidate: Tried, attempt: Attempt, folder: Path) -> Best:
    """Publish the files and describe the winner. Errors: StoreError; ValueError for file names that are none."""
    assert attempt.timing is not None
    return Best(
        backend=candidate.name,
        speedup=attempt.timing.ratio,
        reason=f"{candidate.name}: {attempt.detail}",
        options={"build": dict(candidate.options_in_key()), "metadata": dict(attempt.metadata)},
        artifacts=published(store, folder),
    )


def published(store: Store, folder: Path) -> tuple[ArtifactRef, ...]:
    """The files of `folder`, put into the store. Errors: StoreError; ValueError for file names that are none."""
    refs = []
    for file in sorted(folder.iterdir()):
        digest = store.put_artifact(file)
        assert digest is not None, "the tuner's store is strict"
        refs.append(ArtifactRef(file.name, digest, file.stat().st_size))
    return tuple(refs)


def _best_of(decision: Decision) -> Best:
    kept = {name: value for name, value in decision.options.items() if name in ("build", "metadata")}
    best = Best(decision.backend, decision.speedup or 1.0, decision.reason, kept, decision.artifacts)
    # Pruned files: the candidate would have to be built again, and is, since it no longer counts as tried.
    return best if best.backend == EAGER or best.artifacts or not kept.get("metadata") else replace(Best())


def _tried(decision: Decision) -> dict[str, dict[str, Any]]:
    entries = dict(decision.options.get("tried", {}))
    if decision.backend != EAGER and not decision.artifacts and decision.options.get("metadata"):
        entries.pop(decision.backend, None)
    return entries
